"""Whether the learner can save within the warning that it gets ahead of a limit or a preemption: from its measured saves.

For people only: a metric that is lost costs a word, nothing is decided by it. OSError of a look: look again.
"""

from __future__ import annotations

from pathlib import Path

from miles_core.tracking.tracker_feed import JsonTail


class SaveWatch:
    """The saves of one learner, all attempts; a look costs what is new."""

    def __init__(self, folder: Path, lead_s: float) -> None:
        """`folder`: the learner's metric shards; `lead_s`: how long ahead it is told to leave."""
        self._points, self._lead_s = JsonTail(folder), lead_s
        self._is_told = False

    def newly_slow(self) -> str:
        """How slow and what to do, once when a save took longer than the lead."""
        if self._is_told:
            return ""
        found = [point.get("checkpoint_s") for point in self._points.read()]
        slowest_s = max((seconds for seconds in found if isinstance(seconds, int | float)), default=0.0)
        if slowest_s <= self._lead_s:
            return ""
        self._is_told = True
        return (
            f"a checkpoint took {slowest_s:.1f} s, but a job is told to leave only slurm.signal_lead_s={self._lead_s:g} s "
            f"ahead, so steps since the last whole checkpoint would be trained again: raise signal_lead_s, or save more often "
            f"(learner.checkpoint_every)"
        )
