"""The one table of Slurm's job states.

UNKNOWN is no information: a word that is not in the table (a newer Slurm's, a torn line) is neither an end nor a life.
"""

from __future__ import annotations

from cluster.scheduler import Cause, Phase

STATES: dict[str, tuple[Phase, Cause]] = {
    **dict.fromkeys(
        (
            "PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
            "RESV_DEL_HOLD", "EXPEDITING",
        ),
        (Phase.PENDING, Cause.NONE),
    ),
    # COMPLETING holds its nodes and may still run its epilogue: not an end yet.
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING"),
        (Phase.RUNNING, Cause.NONE),
    ),
    "COMPLETED": (Phase.ENDED, Cause.COMPLETED),
    "FAILED": (Phase.ENDED, Cause.FAILED),
    **dict.fromkeys(("TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"), (Phase.ENDED, Cause.LIMIT)),
    **dict.fromkeys(
        ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
        (Phase.ENDED, Cause.INFRASTRUCTURE),
    ),
    "CANCELLED": (Phase.ENDED, Cause.CANCELLED),
}  # fmt: skip

HELD_AFTER_LAUNCH_FAILURE = "launch failed requeued held"


def classify(state: str, reason: str = "") -> tuple[Phase, Cause]:
    """Phase and cause of a state as squeue, sacct or scontrol print it: `CANCELLED by 1000`, `COMPLETED+`, ...

    A job that waits because its launch failed is held until an administrator releases it: for us it has ended.
    """
    words = state.split()
    word = words[0].rstrip("+").upper() if words else ""
    phase, cause = STATES.get(word, (Phase.UNKNOWN, Cause.NONE))
    if phase is Phase.PENDING and reason.replace("_", " ").lower().startswith(HELD_AFTER_LAUNCH_FAILURE):
        return Phase.ENDED, Cause.INFRASTRUCTURE
    return phase, cause
