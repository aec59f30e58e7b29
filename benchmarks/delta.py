"""What a delta costs: sizes and MB/s of a synthetic policy of 100M bf16 parameters of which 2 % change, medians of 5 rounds.

    python benchmarks/delta.py [--parameters 100000000] [--share 0.02] [--rounds 5]

Changed elements are moved by one unit in the last place, up or down: what a small learning rate does to bf16 weights. MB/s are
of full weights. Publishing writes to a folder of the system's temporary directory, fsync included. Below the medians: the size
of both codes at other shares, which is why `gap` alone is tried below delta.SPARSE.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from miles_core.paths import RunPaths
from miles_core.policy import delta
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import Probe, tensor_entries
from miles_core.policy.publisher import Publisher
from miles_core.recipe import PolicySpec
from miles_core.records import Version
from miles_core.store.fs import FileSystem

TENSORS = 100
PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="bfloat16", tolerance=0.5)
T = TypeVar("T")


class Rates:
    """Megabytes of full weights a second, by what was done."""

    def __init__(self, full_bytes: int) -> None:
        self.full_bytes = full_bytes
        self.seen: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, action: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = action()
        self.seen[name].append(self.full_bytes / 1e6 / (time.perf_counter() - start))
        return result


def changed(weights: np.ndarray, share: float, draw: np.random.Generator) -> np.ndarray:
    """uint16 words of bf16, a share of them moved by one unit in the last place."""
    chosen = np.flatnonzero(draw.random(weights.size, dtype=np.float32) < share)
    moved = weights.copy()
    moved[chosen] += draw.choice(np.array([1, 2**16 - 1], np.uint16), chosen.size)
    return moved


def tensors_of(weights: np.ndarray) -> dict[str, torch.Tensor]:
    return {f"layer.{i:03d}.weight": torch.from_numpy(part.copy()).view(torch.bfloat16)
            for i, part in enumerate(np.array_split(weights, TENSORS))}  # fmt: skip


def measure(parameters: int, share: float, rounds: int, root: Path) -> None:
    """One anchor, then `rounds` deltas; each is published and followed."""
    draw, lineage, paths = np.random.default_rng(0), Lineage(), RunPaths(root)
    weights = (draw.standard_normal(parameters, dtype=np.float32) * 0.02).view(np.uint32)
    words = (weights >> 16).astype(np.uint16)
    spec = PolicySpec(anchor_every=rounds + 2, anchor_ratio=1e9)
    publisher = Publisher(FileSystem(), paths, spec, run_id="bench", learner_token="t")
    copy, rates, sizes = PolicyCopy(paths, "bench", lineage), Rates(2 * parameters), []
    for step in range(rounds + 1):
        kind = "anchor" if step == 0 else "delta"
        tensors = tensors_of(words)
        entries = rates.time("hash all tensors", lambda: tensor_entries(tensors))  # noqa: B023
        prepared = rates.time(f"{kind}: code", lambda: publisher.prepare(Version(step, 1), tensors, entries, PROBE))  # noqa: B023
        published = rates.time(f"{kind}: write", lambda: publisher.write(prepared))  # noqa: B023
        lineage.published[published.version] = published
        rates.time(f"{kind}: follow", lambda: copy.reach(published))  # noqa: B023
        sizes.append(published.size_bytes / (published.full_bytes or 1))
        words = changed(words, share, draw)
    print(f"{parameters / 1e6:g}M bf16 parameters in {TENSORS} tensors, {share:.1%} changed, medians of {rounds}:")
    print(f"  size of a delta / size of an anchor: {statistics.median(sizes[1:]):.4f}")
    for name, values in rates.seen.items():
        print(f"  {name:18s} {statistics.median(values):8.0f} MB/s   (n={len(values)})")


def compare_codes(parameters: int) -> None:
    """Sizes of both codes, as shares of the full tensor."""
    draw = np.random.default_rng(1)
    old = ((draw.standard_normal(parameters, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    print("changed    gap      xor     (of full, bf16)")
    for share in (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.8):
        new = changed(old, share, draw)
        gap = delta._encode_gaps(old, new, np.flatnonzero(old != new), 2)
        xor = delta._compress(delta._planes(old ^ new, 2))
        print(f"{share:7.1%}  {len(gap) / old.nbytes:.4f}   {len(xor) / old.nbytes:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        measure(options.parameters, options.share, options.rounds, Path(root))
    compare_codes(min(options.parameters, 10_000_000))


if __name__ == "__main__":
    main()
