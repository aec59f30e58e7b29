"""The orchestrator's decisions, each a small pure function: how much, who, how stale, which batch.

Nothing here knows records' order, files or time; planner.py says when a decision is asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

import xxhash

from miles_core.recipe import Recipe
from miles_core.records import ShardEntry, Version
from miles_core.rollbacks import Rollbacks


def num_to_issue(
    *, open_groups: int, last_batch: int, trained_step: int, prompts: int, capacity_batches: float, steps: int
) -> int:
    """Groups to issue now: up to capacity (open, and batched but untrained), never more than the remaining steps need."""
    untrained = (last_batch - max(trained_step, 0)) * prompts
    room = int(capacity_batches * prompts) - open_groups - untrained
    needed = (steps - last_batch) * prompts - open_groups
    return max(0, min(room, needed))


def min_step(*, last_batch: int, groups_ahead: int, prompts: int, max_staleness: int) -> int:
    """Oldest version that may sample a group; in issue order its batch will be last_batch + 1 + groups_ahead // prompts."""
    target = last_batch + 1 + groups_ahead // prompts
    return max(0, target - 1 - max_staleness)


def oldest_step(versions: Iterable[Version], rollbacks: Rollbacks) -> int:
    """Oldest step that any version that sampled a token counts as; there is at least one."""
    return min(map(rollbacks.counted_step, versions))


def staleness(step: int, oldest_steps: Iterable[int]) -> int:
    """Staleness of batch `step` (I7): the distance from the version before it to the oldest one that sampled for it."""
    return step - 1 - min(oldest_steps)


def unusable(entry: ShardEntry) -> str:
    """Why a listed trajectory cannot be trained, empty if it can. One without a sampled token has no version and no loss."""
    if entry.status == "failed":
        return f"failed ({entry.failure_kind})"
    return "" if entry.versions and entry.num_sampled_tokens > 0 else "holds no sampled token"


def most_replaced(recipe: Recipe) -> int:
    """Groups without spread that may be replaced between two batches."""
    return (recipe.orchestrator.replace_flat or 0) * recipe.orchestrator.prompts


def derive_seed(run_seed: int, purpose: str, number: int) -> int:
    """A seed of 63 bits for group `number`: the same in every attempt, for tasks and for sampling apart."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{purpose}/{number}".encode()) >> 1


class _Named(Hashable, Protocol):
    @property
    def writer(self) -> str: ...


R = TypeVar("R", bound=_Named)


class Balancer(Generic[R]):
    """Gives work to the receiver with the least of it; made once per round, one pick costs the logarithm of their number."""

    def __init__(self, loads: Iterable[tuple[R, int]], *, limits: dict[str, int] | None = None) -> None:
        """`loads`: live receivers and their unfinished work. `limits`, by writer: who reached it gets no more."""
        self._limits = limits
        self._heap: list[tuple[int, int, R]] = []
        for index, (receiver, load) in enumerate(loads):
            self._push(load, index, receiver)
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def pick(self, amount: int, avoid: Collection[str] = ()) -> R | None:
        """The receiver of `amount` more; None if nobody has room. Writers in `avoid` only if there is no other."""
        skipped: list[tuple[int, int, R]] = []
        while self._heap and self._heap[0][2].writer in avoid:
            skipped.append(heapq.heappop(self._heap))
        chosen = heapq.heappop(self._heap) if self._heap else (skipped.pop(0) if skipped else None)
        for item in skipped:
            heapq.heappush(self._heap, item)
        if chosen is None:
            return None
        load, index, receiver = chosen
        self._push(load + amount, index, receiver)
        return receiver

    def _push(self, load: int, index: int, receiver: R) -> None:
        if self._limits is None or load < self._limits[receiver.writer]:
            heapq.heappush(self._heap, (load, index, receiver))
