"""Twenty exchanges of weights while sessions are sampled: what each costs, and that nothing is lost; into weight_swaps.json.

    .venv/bin/python benchmarks/weight_swaps.py torch
    .venv-vllm/bin/python benchmarks/weight_swaps.py vllm

The pause of an exchange is (first token after it) - (last token before it) - (duration of the load): one decode step and the
probe of the version, which runs before anything may be sampled with it. Every sampled token of some sessions is recomputed by
Hugging Face's forward pass, each stretch of tokens fed to the version that read it; a request is lost if it was asked and did
not end with all its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from miles_core.records import Version  # noqa: E402
from miles_core.rollout.engine import Finished, Request  # noqa: E402
from miles_core.runtime.machine import read_machine  # noqa: E402

SLOTS, MAX_TOKENS, SWAPS, STEPS_BETWEEN, SEED = 32, 256, 20, 12, 0
RECOMPUTED = 4
SHAPE = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.06,
}  # fmt: skip


class Sessions:
    """Keeps every slot of an engine taken; remembers what was asked and what came."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked, self.ended = engine, dict[str, Request](), dict[str, Finished]()
        self._rng = np.random.default_rng(SEED)

    def fill(self) -> None:
        while self.engine.free_slots:
            key = f"s{len(self.asked)}"
            tokens = tuple(self._rng.integers(1, SHAPE["vocab_size"], int(self._rng.integers(20, 80))).tolist())
            self.asked[key] = Request(key, tokens, int(self._rng.integers(20, 150)), 1.0, len(self.asked))
            self.engine.add(self.asked[key])

    def step(self) -> None:
        for turn in self.engine.step():
            self.ended[turn.session_key] = turn
            self.engine.release(turn.session_key)

    def worst_gap(self, models: dict[int, Any]) -> float:
        """Of the sessions that saw most versions, in nats."""
        several = sorted(self.ended, key=lambda key: -len(set(self.ended[key].versions)))[:RECOMPUTED]
        return max(self._gap(self.asked[key], self.ended[key], models) for key in several)

    @torch.no_grad()
    def _gap(self, asked: Request, turn: Finished, models: dict[int, Any]) -> float:
        tokens, cache, read, worst = torch.tensor([[*asked.tokens, *turn.tokens.tolist()]]), DynamicCache(), 0, 0.0
        for number, version in enumerate(turn.versions):
            at = len(asked.tokens) + number
            logits = models[version.step % 2](tokens[:, read:at], past_key_values=cache).logits[0, -1]
            expected = float(torch.log_softmax(logits.float(), dim=-1)[tokens[0, at]])
            worst, read = max(worst, abs(expected - float(turn.logprobs[number]))), at
        return worst


def exchange(sessions: Sessions, model: Any, version: Version, probe: list[list[int]]) -> dict[str, float]:
    """One exchange between two steps: milliseconds."""
    before = time.perf_counter()
    sessions.engine.load_weights(model.state_dict(), version)
    loaded = time.perf_counter()
    sessions.engine.logprobs(probe)
    probed = time.perf_counter()
    sessions.step()
    after = time.perf_counter()
    return {"load": loaded - before, "probe": probed - loaded, "step": after - probed, "pause": after - loaded}


def make_engine(name: str, folder: Path) -> Any:
    settings = {"dtype": "float32", "weights_dtype": "float32", "end_id": 0, "slots": SLOTS, "max_tokens": MAX_TOKENS}
    if name == "vllm":
        from miles_core.rollout.vllm_engine import VllmEngine

        return VllmEngine(folder, version=Version(0, 1), **settings)
    from miles_core.rollout.torch_engine import TorchEngine

    return TorchEngine.from_folder(folder, version=Version(0, 1), **settings)


def measure(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            torch.manual_seed(number)
            LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(f"{folder}/{number}")
        models = {number: AutoModelForCausalLM.from_pretrained(f"{folder}/{number}").eval() for number in range(2)}
        engine = make_engine(name, Path(folder) / "0")
    sessions, probe = Sessions(engine), [list(range(3, 19)), list(range(30, 46))]
    found: list[dict[str, float]] = []
    steps: list[float] = []
    for number in range(1, SWAPS + 1):
        for _ in range(STEPS_BETWEEN):
            sessions.fill()
            begun = time.perf_counter()
            sessions.step()
            steps.append(time.perf_counter() - begun)
        found.append(exchange(sessions, models[number % 2], Version(number, 1), probe))
    while engine.running:
        sessions.step()
    cut = [
        key for key, asked in sessions.asked.items()
        if key not in sessions.ended
        or (sessions.ended[key].reason == "length" and len(sessions.ended[key].tokens) != asked.max_new_tokens)
    ]  # fmt: skip
    several = sum(len(set(turn.versions)) > 1 for turn in sessions.ended.values())
    return {
        "parameters": models[0].num_parameters(), "requests": len(sessions.asked), "lost": len(cut),
        "requests_over_several_versions": several,
        "worst_gap_nats": sessions.worst_gap(models), "step_ms_median": round(1e3 * float(np.median(steps)), 1),
        **{f"{part}_ms": {
            "p50": round(1e3 * float(np.percentile([one[part] for one in found], 50)), 1),
            "p95": round(1e3 * float(np.percentile([one[part] for one in found], 95)), 1),
        } for part in ("pause", "load", "probe")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("torch", "vllm"))
    name = parser.parse_args().engine
    path = HERE / "weight_swaps.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    machine = read_machine()
    result[name] = {
        "machine": {"cpu": machine.cpu, "cpus": machine.cpus, "gpus": list(machine.gpus), "load": round(os.getloadavg()[0], 1)},
        "slots": SLOTS, "swaps": SWAPS, "seed": SEED, "threads": 1, **measure(name),
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result[name], indent=2))


if __name__ == "__main__":
    main()
