"""How long a role has lived without getting on, as the supervisor saw it: the watchdog that acts (I15).

A sign is all that an attempt says of itself in its heartbeat; any change of it is progress. Who says why it waits (`waiting`
in its state), and a worker that has nothing to do, makes none and is not stalled. Seconds are the observer's own, over its own
good looks: after a pause of it the count starts again (I4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from miles_core.records import split_writer

STALL_LIMIT = 3
"""A role that was named after stall_s without progress is replaced after this many times stall_s."""
_LONG_GAP = 1 / 3
"""Of stall_s: a longer pause of the observer starts the count again."""


class Sign(NamedTuple):
    """What an attempt last said of itself."""

    attempt: int
    state: str
    progress: int
    load: int
    version: tuple[int, int] | None = None

    def describe(self) -> str:
        """For people."""
        return f"it says {self.state!r}, progress {self.progress}" + (f", {self.load} samples in work" if self.load else "")


def should_move(writer: str, sign: Sign) -> bool:
    """False for one that says why it waits, and for a worker without work."""
    is_idle = split_writer(writer)[0] in ("rollout", "grader") and sign.load == 0 and sign.state.startswith("serving")
    return "waiting" not in sign.state and not is_idle


@dataclass
class StallWatch:
    """All roles of a run. `allowances_s`, by role: how much longer one piece of its work may take."""

    stall_s: float
    allowances_s: Mapping[str, float] = field(default_factory=dict)
    _signs: dict[str, tuple[Sign, float]] = field(default_factory=dict)
    """By writer, and since when."""
    _looked_at: dict[str, float] = field(default_factory=dict)

    def observe(self, writer: str, sign: Sign | None, now_s: float) -> None:
        """One look at a role; without a sign nothing is known of it, and its count starts again."""
        gap_s = now_s - self._looked_at.get(writer, now_s)
        self._looked_at[writer] = now_s
        known = self._signs.get(writer)
        if sign is None:
            self._signs.pop(writer, None)
        elif known is None or known[0] != sign or gap_s > self.stall_s * _LONG_GAP or not should_move(writer, sign):
            self._signs[writer] = (sign, now_s)

    def seconds(self, writer: str) -> float:
        """Without progress, beyond what one piece of its work may take."""
        known = self._signs.get(writer)
        if known is None:
            return 0.0
        allowance_s = self.allowances_s.get(split_writer(writer)[0], 0.0)
        return max(0.0, self._looked_at[writer] - known[1] - allowance_s)

    def describe(self, writer: str) -> str:
        """Its last progress."""
        known = self._signs.get(writer)
        return "nothing is known of it" if known is None else known[0].describe()
