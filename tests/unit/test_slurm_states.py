"""The state table: every word of Slurm's, and what is not a word."""

from __future__ import annotations

import pytest

from cluster.scheduler import Cause, Phase
from cluster.slurm.states import STATES, classify

PENDING = [
    "PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD",
    "EXPEDITING",
]  # fmt: skip
RUNNING = ["RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING"]
INFRASTRUCTURE = ["NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"]
LIMIT = ["TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"]

EXPECTED = {
    **{word: (Phase.PENDING, Cause.NONE) for word in PENDING},
    **{word: (Phase.RUNNING, Cause.NONE) for word in RUNNING},
    **{word: (Phase.ENDED, Cause.INFRASTRUCTURE) for word in INFRASTRUCTURE},
    **{word: (Phase.ENDED, Cause.LIMIT) for word in LIMIT},
    "COMPLETED": (Phase.ENDED, Cause.COMPLETED),
    "FAILED": (Phase.ENDED, Cause.FAILED),
    "CANCELLED": (Phase.ENDED, Cause.CANCELLED),
}


@pytest.mark.parametrize("word", sorted(EXPECTED))
def test_every_state(word: str) -> None:
    assert classify(word) == EXPECTED[word]
    assert classify(f"{word}+") == EXPECTED[word]
    assert classify(word.lower()) == EXPECTED[word]


def test_the_table_has_no_other_word() -> None:
    assert set(STATES) == set(EXPECTED)


@pytest.mark.parametrize("text", ["CANCELLED by 1000", "CANCELLED+", "CANCELLED by 0 "])
def test_cancelled_by_somebody(text: str) -> None:
    assert classify(text) == (Phase.ENDED, Cause.CANCELLED)


@pytest.mark.parametrize("text", ["", " ", "+", "COMPLET", "R", "NODE_FAILURE", "UNKNOWN", "(null)", "OUT_OF_ME+"])
def test_other_words_are_no_information(text: str) -> None:
    assert classify(text) == (Phase.UNKNOWN, Cause.NONE)


@pytest.mark.parametrize("reason", ["launch failed requeued held", "launch_failed_requeued_held"])
def test_a_job_held_after_a_failed_launch_has_ended(reason: str) -> None:
    assert classify("PENDING", reason) == (Phase.ENDED, Cause.INFRASTRUCTURE)
    assert classify("REQUEUE_HOLD", reason) == (Phase.ENDED, Cause.INFRASTRUCTURE)
    assert classify("RUNNING", reason) == (Phase.RUNNING, Cause.NONE)


def test_other_holds_wait() -> None:
    assert classify("PENDING", "JobHeldUser") == (Phase.PENDING, Cause.NONE)
