"""How full the slots are when lengths spread tenfold: the torch engine and the sampler's refill; into benchmarks/slots.json.

    .venv/bin/python benchmarks/slots.py

Lengths are the quantiles of a lognormal (95th over 5th percentile: 10), shuffled. A finished sample frees its slot at once and
the next one takes it, as a replica does while it has orders; beside it, the same samples in batches that start together and
wait for their longest. `slots_filled` is the meter's figure (miles_core/rollout/meter.py): slot seconds held by a session over
slot seconds that passed, from the start to the moment in which the last sample got its slot: while work is there.
`slots_sampling` is the mean share of slots that a decode step sampled a token for, over the same steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from record import machine  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from miles_core.environments.base import Message  # noqa: E402
from miles_core.recipe import EnvironmentSpec  # noqa: E402
from miles_core.records import Version  # noqa: E402
from miles_core.rollout.engine import Finished, Request  # noqa: E402
from miles_core.rollout.meter import MeteredEngine  # noqa: E402
from miles_core.rollout.sampler import Sampler, sample_many  # noqa: E402
from miles_core.rollout.torch_engine import TorchEngine  # noqa: E402

SLOTS, SAMPLES, SEED = 64, 768, 0
MEDIAN, SIGMA = 48.0, float(np.log(10) / (2 * 1.6449))
"""Of the lengths in tokens; 1.6449 standard deviations lie between the median and the 95th percentile."""
MAX_TOKENS = 512
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


class Lengths(MeteredEngine):
    """A metered engine in which sample i, in the order of asking, ends after lengths[i] tokens; counts who samples."""

    lengths: list[int]
    sampling: list[float]

    def add(self, request: Request) -> None:
        """See Engine."""
        super().add(Request(request.session_key, request.tokens, self.lengths.pop(0), request.temperature, request.seed))

    def step(self) -> list[Finished]:
        """See Engine."""
        if self.running:
            self.sampling.append(self.running / SLOTS)
        return super().step()


class Tokens:
    """A Renderer of a conversation that is its tokens."""

    end_id = -1
    special_ids: frozenset[int] = frozenset()

    def opening(self, messages: Any, tools: Any = ()) -> tuple[int, ...]:
        return (1, 2, 3, 4)

    def text(self, token_ids: Any) -> str:
        return ""


class OneTurn:
    """An environment, and its episodes, of one turn of the model; `last` is called when the last task is given out."""

    def __init__(self, last: Any) -> None:
        self._last = last

    def episode(self, seed: int, split: str) -> OneTurn:
        if seed == SAMPLES - 1:
            self._last()
        return self

    def opening(self) -> tuple[Message, ...]:
        return (Message("user", ""),)

    def facts(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        pass


class Batches(Sampler):
    """A sampler that takes samples only when none is left."""

    _starts = True

    @property
    def free_slots(self) -> int:
        """Samples that may be submitted now."""
        self._starts = not self.in_flight or (self._starts and super().free_slots > 0)
        return super().free_slots if self._starts else 0


def measure(lengths: list[int], make: type[Sampler]) -> dict[str, Any]:
    """Figures while work is there."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    engine = Lengths(TorchEngine(model, end_id=-1, slots=SLOTS, max_tokens=MAX_TOKENS, version=Version(0, 1)))
    engine.lengths, engine.sampling = list(lengths), []
    found: dict[str, Any] = {}

    def last() -> None:
        figures = engine.figures()
        found.update(
            slots_filled=figures["slots_filled"], slots_sampling=round(float(np.mean(engine.sampling)), 4),
            steps=len(engine.sampling), tokens_per_s=figures["tokens_per_s"],
        )  # fmt: skip

    spec = EnvironmentSpec(family="none", max_tokens=MAX_TOKENS, max_new_tokens=MAX_TOKENS - 8, episode_deadline_s=3600)
    rows = sample_many(
        engine, OneTurn(last), Tokens(), spec, range(SAMPLES), split="train", temperature=1.0, make=make  # type: ignore[arg-type]
    )  # fmt: skip
    assert sorted(row.num_sampled for row in rows) == sorted(lengths), "every sample has its length"
    return found


def main() -> None:
    """Measures both and writes the file."""
    torch.set_num_threads(1)
    normal = [NormalDist().inv_cdf((number + 0.5) / SAMPLES) for number in range(SAMPLES)]
    drawn = np.random.default_rng(SEED).permutation(MEDIAN * np.exp(SIGMA * np.array(normal)))
    lengths = np.clip(np.rint(drawn), 1, MAX_TOKENS - 8).astype(int).tolist()
    low, high = np.percentile(lengths, [5, 95])
    result = {
        "machine": machine() | {"load": round(os.getloadavg()[0], 1)}, "torch": torch.__version__, "seed": SEED,
        "slots": SLOTS, "samples": SAMPLES,
        "lengths": {"p5": low, "p50": float(np.median(lengths)), "p95": high, "p95_over_p5": round(high / low, 1)},
        "refill": measure(lengths, Sampler), "in_batches": measure(lengths, Batches),
    }  # fmt: skip
    (HERE / "slots.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
