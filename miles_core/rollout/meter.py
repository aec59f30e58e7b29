"""An engine that is watched: where a replica's seconds and tokens go, for its metric shard, and that no step hangs.

It stands between an engine and whoever drives it, so it tells the same of every engine and every driver of episodes.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from miles_core.records import Version
from miles_core.rollout.engine import Counts, Engine, Finished, Request

if TYPE_CHECKING:
    import torch


@dataclass
class _Window:
    """What was seen since the last point."""

    since: float
    tokens: int = 0
    turns: int = 0
    mixed: int = 0
    model_s: float = 0.0
    tool_s: float = 0.0
    held_s: float = 0.0
    """Slots held, integrated over time."""


@dataclass
class MeteredEngine:
    """An Engine, and figures of it. `clock`: monotonic seconds; `step_deadline_s`: what one step may take (step_within)."""

    inner: Engine
    clock: Callable[[], float] = time.monotonic
    step_deadline_s: float | None = None
    _slots: int = 0
    _turn_since: dict[str, float] = field(default_factory=dict)
    """Sessions that hold a slot, and when the turn, or the wait behind it, began."""
    _sampling: set[str] = field(default_factory=set)
    _seen_at: float = 0.0
    _counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._slots = self.inner.free_slots
        self._seen_at = self.clock()
        self._window = _Window(self._seen_at)

    @property
    def version(self) -> Version:
        """Of the weights now loaded."""
        return self.inner.version

    @property
    def free_slots(self) -> int:
        """Sessions that may be added."""
        return self.inner.free_slots

    @property
    def running(self) -> int:
        """Turns now being sampled."""
        return self.inner.running

    @property
    def counts(self) -> Counts:
        """The engine's own."""
        return self.inner.counts

    def add(self, request: Request) -> None:
        """See Engine."""
        now = self._look()
        self.inner.add(request)
        key = request.session_key
        if key in self._turn_since:
            self._window.tool_s += now - self._turn_since[key]
        self._turn_since[key] = now
        self._sampling.add(key)

    def step(self) -> list[Finished]:
        """See Engine."""
        with step_within(self.step_deadline_s):
            finished = self.inner.step()
        now = self._look()
        for turn in finished:
            self._window.model_s += now - self._turn_since[turn.session_key]
            self._turn_since[turn.session_key] = now
            self._sampling.discard(turn.session_key)
            self._window.tokens += len(turn.tokens)
            self._window.turns += 1
            self._window.mixed += len(set(turn.versions)) > 1
        return finished

    def release(self, session_key: str) -> None:
        """See Engine."""
        now = self._look()
        self.inner.release(session_key)
        spent = now - self._turn_since.pop(session_key)
        if session_key in self._sampling:
            self._sampling.discard(session_key)
            self._window.model_s += spent
        else:
            self._window.tool_s += spent

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        """See Engine."""
        self.inner.load_weights(tensors, version)

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """See Engine."""
        return self.inner.logprobs(token_lists, temperature)

    def _look(self) -> float:
        """The time; what was held until now counts."""
        now = self.clock()
        self._window.held_s += len(self._turn_since) * (now - self._seen_at)
        self._seen_at = now
        return now

    def figures(self) -> dict[str, Any]:
        """Figures since they were asked for last; None where nothing happened that has the share."""
        now = self._look()
        seen, self._window = self._window, _Window(now)
        new, self._counts = self.inner.counts - self._counts, self.inner.counts
        seconds = now - seen.since
        return {
            "running": self.inner.running,
            "tokens_per_s": round(seen.tokens / seconds, 1) if seconds else None,
            "slots_filled": _share(seen.held_s, self._slots * seconds),
            "prefix_hit_share": _share(new.reused_tokens, new.prompt_tokens),
            "accept_rate": _share(new.accepted_tokens, new.drafted_tokens),
            "mixed_turns": _share(seen.mixed, seen.turns),
            "model_s": round(seen.model_s, 3),
            "tool_s": round(seen.tool_s, 3),
        }


@contextmanager
def step_within(deadline_s: float | None) -> Iterator[None]:
    """Ends the process with exit code 1, the stacks of its threads on stderr, when what is inside takes longer.

    Whatever it hangs in: a kernel of the GPU, a lock, code that keeps the interpreter to itself. Nothing is lost that a kill
    would not lose: the role is replaced, its samples are given to others.
    """
    if deadline_s is None:
        yield
        return
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
