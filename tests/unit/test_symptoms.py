"""Each row of the symptom table by itself, and that a healthy or a young run is in none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flows.symptoms import FLAT_STEPS, MIN_STEPS, SWING_STEPS, Signs, diagnose

LEARNING = [0.2 + 0.02 * step + 0.01 * (-1) ** step for step in range(30)]
HEALTHY = Signs(
    rewards=LEARNING, losses=[0.1 * (-1) ** step for step in range(30)], entropies=[0.6] * 30, max_staleness=2,
    spread_share=0.8, lost_share=0.0, backlog=[96.0] * 60, batch_samples=32,
    empty_share=0.1, learner_wait_share=0.1, slots_busy=0.9,
)  # fmt: skip


def rows(signs: Signs) -> list[str]:
    return [symptom.row for symptom in diagnose(signs)]


def test_a_run_that_learns_is_healthy() -> None:
    assert rows(HEALTHY) == ["healthy"]
    assert rows(Signs(rewards=LEARNING)) == ["healthy"], "what is not known is no symptom"


@pytest.mark.parametrize("steps", [0, MIN_STEPS - 1])
def test_few_steps_say_nothing_whatever_they_show(steps: int) -> None:
    (symptom,) = diagnose(replace(HEALTHY, rewards=[0.0] * steps, slots_busy=0.0))
    assert symptom.row == "unknown" and symptom.seen.startswith("UNKNOWN, too early")


def test_a_run_that_trains_nothing_because_its_groups_are_dropped_is_not_told_to_wait() -> None:
    (symptom,) = diagnose(Signs(lost_share=0.98))
    assert symptom.row == "unknown" and "98% of all groups were dropped" in symptom.seen and "--role grader" in symptom.advice


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("reward_jump", {"rewards": [0.3, 0.31] * 10 + [0.8, 0.9, 0.9]}, "changed"),
        ("backlog_growing", {"backlog": [10.0] * 20 + [30.0] * 20 + [60.0] * 20}, "more rollout replicas"),
        ("backlog_growing", {"backlog": [10.0] * 20 + [60.0] * 40, "lost_share": 0.2}, "verifier fails"),
        ("loss_oscillating", {"losses": [0.1, 0.11] * 10 + [0.9, -0.9] * 6}, "learner.lr"),
        ("outputs_repetitive", {"entropies": [0.6] * 20 + [0.01] * 10}, "temperature"),
        ("score_flat", {"rewards": [0.3, 0.31] * 15}, "exploration"),
        ("score_flat", {"rewards": [0.0] * 30, "spread_share": 0.1}, "sparse"),
        ("queue_empty", {"empty_share": 0.9, "learner_wait_share": 0.6}, "more replicas"),
        ("gpu_idle", {"slots_busy": 0.1}, "starved"),
    ],
)
def test_each_row_says_what_was_seen_and_what_to_try(row: str, changes: dict[str, object], words: str) -> None:
    symptoms = diagnose(replace(HEALTHY, **changes))  # type: ignore[arg-type]
    assert [symptom.row for symptom in symptoms] == [row]
    assert words in symptoms[0].advice and symptoms[0].seen


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": [0.95, 0.96] * 15, "entropies": [0.6] * 20 + [0.01] * 10},  # it has learned its task
        {"rewards": LEARNING[: FLAT_STEPS - 1]},
        {"losses": [0.1, 0.11] * (SWING_STEPS - 1)},
        {"losses": [0.0, 0.001] * 10 + [0.01, -0.01] * 6},  # three times as much of nothing
        {"backlog": [1.0] * 20 + [30.0] * 40},  # less than a batch
        {"backlog": [1.0, 60.0]},
        {"empty_share": 0.9},  # the learner does not wait for it
        {"slots_busy": 0.1, "learner_wait_share": 0.5, "empty_share": 0.2},  # empty slots, but not for want of a learner
    ],
)
def test_near_a_row_is_not_in_it(changes: dict[str, object]) -> None:
    assert rows(replace(HEALTHY, **changes)) == ["healthy"]  # type: ignore[arg-type]


def test_the_gravest_row_comes_first_and_the_others_are_told() -> None:
    flat = replace(HEALTHY, rewards=[0.3, 0.31] * 15, empty_share=0.9, learner_wait_share=0.6)
    assert rows(flat) == ["score_flat", "queue_empty"]
