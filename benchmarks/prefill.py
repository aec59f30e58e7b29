"""What it saves to read a shared beginning once: CPU time of sampling one batch of smollm2; into benchmarks/prefill.json.

    make models && .venv/bin/python benchmarks/prefill.py [--groups 16]

The torch engine as it is, and the same with nothing held: groups of 8 samples, 4 solved examples in front of every question,
one thread, float32. Both sample the same tokens. CPU seconds, because neighbours on the machine change the wall's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from record import machine
from transformers import AutoTokenizer

from miles_core.environments.registry import make_environment
from miles_core.recipe import load_recipe
from miles_core.records import Version
from miles_core.rollout.engine import Request
from miles_core.rollout.session import ChatRenderer
from miles_core.rollout.torch_engine import TorchEngine
from tasks.prepare import ensure_base_model

HERE = Path(__file__).resolve().parent
SAMPLES = 8


class Lonely:
    """HeldPrefixes of an engine in which no slot lends."""

    def keep(self, slot: int, tokens: Any) -> int:
        return 0

    def find(self, slot: int, totals: Any, reading: Any) -> tuple[int, int, int]:
        return slot, 0, 0

    def read(self, slots: Any, positions: Any) -> None:
        pass


def play(engine: TorchEngine, openings: list[tuple[int, ...]], max_new_tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples all groups; the figures, and the tokens by session."""
    fed: list[int] = []
    hook = engine._model.base_model.register_forward_pre_hook(
        lambda module, arguments, named: fed.append(named["input_ids"].numel()), with_kwargs=True
    )
    for group, opening in enumerate(openings):
        for sample in range(SAMPLES):
            engine.add(Request(f"{group}/{sample}", opening, max_new_tokens, 1.0, group * SAMPLES + sample))
    sampled: dict[str, Any] = {}
    cpu, decode_s, decode_rows = time.process_time(), 0.0, 0
    while engine.running:
        began, reads = time.process_time(), (engine._total - engine._cached)[engine._running].max() > 1
        finished = engine.step()
        if not reads:
            decode_s, decode_rows = decode_s + time.process_time() - began, decode_rows + fed[-1]
        for turn in finished:
            sampled[turn.session_key] = turn.tokens.tolist()
            engine.release(turn.session_key)
    hook.remove()
    seconds = time.process_time() - cpu
    figures = {
        "cpu_s": round(seconds, 2), "steps": len(fed), "tokens_fed": sum(fed),
        "tokens_sampled": sum(map(len, sampled.values())),
        "decode_cpu_ms_a_row": round(1e3 * decode_s / max(1, decode_rows), 2),
    }  # fmt: skip
    return figures, sampled


def main() -> None:
    """Measures both and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=16)
    groups = parser.parse_args().groups
    torch.set_num_threads(1)
    recipe = load_recipe("smollm2")
    folder = ensure_base_model(recipe)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(folder))
    environment = make_environment(recipe.environment)
    openings = [renderer.opening(environment.episode(seed, "train").opening()) for seed in range(groups)]
    results, tokens = {}, []
    for name in ("shared", "each_alone"):
        engine = TorchEngine.from_folder(
            folder, dtype="float32", end_id=renderer.end_id, slots=SAMPLES * groups, max_tokens=recipe.environment.max_tokens,
            version=Version(0, 0),
        )  # fmt: skip
        if name == "each_alone":
            engine._held = Lonely()  # type: ignore[assignment]
        results[name], sampled = play(engine, openings, recipe.environment.max_new_tokens)
        tokens.append(sampled)
    same = sum(tokens[0][key] == tokens[1][key] for key in tokens[0])
    result = {
        "machine": machine(), "model": recipe.model.package, "groups": groups, "samples": SAMPLES,
        "prompt_tokens": sum(map(len, openings)) / groups, **results, "same_samples": f"{same} of {len(tokens[0])}",
    }  # fmt: skip
    (HERE / "prefill.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
