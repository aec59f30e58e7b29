"""Named crash points, for tests: MILES_CRASH_AT=<role>:<name>:<number>[:<attempt>] ends that process there, as SIGKILL would.

Nothing is flushed and nothing is cleaned up. Without the variable a point costs one lookup and does nothing. POINTS is all of
them, each beside a write: before it, behind it, or between two writes that belong together. A test compares it with the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable

VARIABLE = "MILES_CRASH_AT"
EXIT_CODE = 9

OF_EVERY_ROLE = ("before_lease", "after_lease", "before_flush", "after_flush", "before_done", "after_done")
"""Around the lease, every write of the own journal, the completion record (a supervisor writes none). Numbered as passed by the
attempt."""

POINTS: dict[str, tuple[str, ...]] = {
    "orchestrator": (
        "after_journal_order", "after_copy_order", "after_cut", "after_batch_journal", "before_table", "after_table",
        "before_run_ended",
    ),
    "rollout": ("before_shard", "after_shard", "after_manifest"),
    "grader": ("after_grade",),
    "learner": (
        "before_train", "after_train", "after_step_record", "before_publish", "after_publish_data", "after_publish",
        "before_checkpoint", "after_checkpoint_files", "after_checkpoint",
    ),
    "rank": ("before_start", "before_load", "before_train", "before_state_tensors", "before_logprobs", "before_save"),
    "evaluator": ("after_point",),
    "supervisor": (
        "before_submit", "after_submit", "before_cancel", "after_cancel", "before_tombstone", "after_tombstone",
    ),
    "collector": ("before_delete", "after_delete"),
    "rollback": ("before_retire", "after_retire", "before_rollback", "after_rollback"),
}  # fmt: skip
"""By role; `rank` is rank1, rank2 ... of the learner. Collector and rollback are parts of the supervisor: their attempt is its
epoch. The number is the step, the order ... at hand, or how often this attempt passed the point."""


def crash_point(role: str, name: str, number: int, attempt: int = 1) -> None:
    """Ends the process if the variable names this point; `number` is the step, order ... at hand.

    The variable names attempt 1 unless it says otherwise, so that a successor with the same environment survives.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    spec = wanted if wanted.count(":") >= 3 else f"{wanted}:1"
    if spec == f"{role}:{name}:{number}:{attempt}":
        end_process()


end_process: Callable[[], object] = lambda: os._exit(EXIT_CODE)  # noqa: E731 - a simulation ends one of its roles instead
