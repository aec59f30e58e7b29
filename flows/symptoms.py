"""Which row of the symptom table a run is in, with the advice. Pure: figures in, rows out.

The rows are those a person looks for first; each threshold says what it is measured against. A row is a hint, not a proof:
it names the figures that made it, and a run of few steps is in no row but `unknown`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Row = Literal[
    "reward_jump", "backlog_growing", "loss_oscillating", "outputs_repetitive", "score_flat", "queue_empty", "gpu_idle",
    "healthy", "unknown",
]  # fmt: skip

MIN_STEPS = 10
"""Fewer steps say nothing: the first ones fill the buffer."""
FLAT_STEPS = 20
SWING_STEPS = 12
_FAILS = "the environment or its verifier fails: `miles logs RUN --role rollout`, `--role grader`"
NEAR_FULL = 0.9
"""A mean reward in [0, 1] from here on has little left to win: neither flat nor repetitive."""


@dataclass(frozen=True)
class Signs:
    """What is looked at. Sequences are oldest first; None or empty: not known."""

    rewards: Sequence[float] = ()
    """Mean reward of each step."""
    losses: Sequence[float] = ()
    entropies: Sequence[float] = ()
    """Nats per token, of each step."""
    max_staleness: int = 0
    """The largest of the recent steps."""
    spread_share: float | None = None
    """Share of recent groups whose samples differ in reward; the others teach nothing."""
    lost_share: float | None = None
    """Share of issued groups that were dropped as incomplete or ungraded."""
    backlog: Sequence[float] = ()
    """Samples in flight or without a grade, at each look of the last minutes."""
    batch_samples: int = 0
    empty_share: float | None = None
    """Share of those looks with no batch ready for the learner."""
    learner_wait_share: float | None = None
    """Share of the recent steps' time that the learner waited for a batch."""
    slots_busy: float | None = None
    """Mean share of the rollout slots that were sampling."""


@dataclass(frozen=True)
class Symptom:
    """One row: what was seen, and what to try."""

    row: Row
    seen: str
    advice: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def diagnose(signs: Signs) -> tuple[Symptom, ...]:
    """The rows that a run is in, the gravest first; never empty."""
    if len(signs.rewards) < MIN_STEPS:
        seen = f"UNKNOWN, too early: {len(signs.rewards)} steps, at least {MIN_STEPS} are needed"
        if (signs.lost_share or 0.0) >= 0.5:
            return (Symptom("unknown", f"{seen}; {_lost(signs)}", _FAILS),)
        return (Symptom("unknown", seen, "wait for more steps"),)
    rows = (_jump(signs), _backlog(signs), _swing(signs), _repetitive(signs), _flat(signs), _empty(signs), _idle(signs))
    found = tuple(row for row in rows if row is not None)
    return found or (Symptom("healthy", "no row of the symptom table fits", "nothing to do"),)


def _jump(signs: Signs) -> Symptom | None:
    """Three steps far above the ten before: more than five of their standard deviations, and more than 0.2."""
    before, last = signs.rewards[-13:-3], statistics.fmean(signs.rewards[-3:])
    rise = last - statistics.median(before)
    if rise <= max(0.2, 5 * statistics.pstdev(before)):
        return None
    return Symptom(
        "reward_jump", f"mean reward rose by {rise:.2f} within 3 steps",
        "the policy may have found a hole in the reward, or its rules changed: read sampled trajectories (`miles report`)",
    )  # fmt: skip


def _backlog(signs: Signs) -> Symptom | None:
    """The last third of the looks against the first: half as much again, and more than a batch."""
    third = len(signs.backlog) // 3
    if third < 3:
        return None
    first, last = statistics.fmean(signs.backlog[:third]), statistics.fmean(signs.backlog[-third:])
    if last < max(1.5 * first, signs.batch_samples, 1):
        return None
    seen = f"samples that wait for an answer or a grade grew from {first:.0f} to {last:.0f}"
    if (signs.lost_share or 0.0) >= 0.1:
        return Symptom("backlog_growing", f"{seen}; {_lost(signs)}", _FAILS)
    return Symptom(
        "backlog_growing", seen, "inference or grading is too slow: more rollout replicas or graders, or shorter episodes"
    )


def _swing(signs: Signs) -> Symptom | None:
    """Mean change between neighbouring steps against that of as many steps before: three times as much."""
    if len(signs.losses) < 2 * SWING_STEPS:
        return None
    before, recent = _change(signs.losses[-2 * SWING_STEPS : -SWING_STEPS]), _change(signs.losses[-SWING_STEPS:])
    if recent < max(3 * before, 0.05):
        return None
    return Symptom(
        "loss_oscillating", f"loss changes by {recent:.3g} a step, {before:.3g} before; staleness up to {signs.max_staleness}",
        "lower orchestrator.max_staleness or learner.lr",
    )  # fmt: skip


def _change(values: Sequence[float]) -> float:
    return statistics.fmean(abs(second - first) for first, second in itertools.pairwise(values))


def _repetitive(signs: Signs) -> Symptom | None:
    """Entropy under a tenth of what it was, while there is reward left to win."""
    if len(signs.entropies) < MIN_STEPS or _recent_reward(signs) >= NEAR_FULL:
        return None
    first, last = statistics.fmean(signs.entropies[:5]), statistics.fmean(signs.entropies[-5:])
    if last >= 0.1 * first:
        return None
    return Symptom(
        "outputs_repetitive", f"entropy fell from {first:.3g} to {last:.3g} nats per token",
        "too little diversity: raise rollout.temperature, lower learner.lr, or draw from more varied tasks",
    )  # fmt: skip


def _flat(signs: Signs) -> Symptom | None:
    """Two halves of the last steps that differ by no more than their own noise, or 0.02."""
    if len(signs.rewards) < FLAT_STEPS or _recent_reward(signs) >= NEAR_FULL:
        return None
    recent, half = signs.rewards[-FLAT_STEPS:], FLAT_STEPS // 2
    first, second = recent[:half], recent[half:]
    change = statistics.fmean(second) - statistics.fmean(first)
    noise = statistics.pstdev(recent) / half**0.5
    if change > max(0.02, noise):
        return None
    seen = f"mean reward changed by {change:+.3f} between the halves of the last {FLAT_STEPS} steps"
    if signs.spread_share is not None and signs.spread_share < 0.5:
        return Symptom(
            "score_flat", f"{seen}; only {signs.spread_share:.0%} of the groups teach anything",
            "the reward is sparse: easier tasks, partial credit, or more samples per group",
        )  # fmt: skip
    return Symptom("score_flat", seen, "too little exploration, or too small steps: raise rollout.temperature or learner.lr")


def _empty(signs: Signs) -> Symptom | None:
    if signs.empty_share is None or signs.learner_wait_share is None:
        return None
    if signs.empty_share < 0.5 or signs.learner_wait_share < 0.3:
        return None
    return Symptom(
        "queue_empty",
        f"no batch was ready at {signs.empty_share:.0%} of the looks; the learner waited {signs.learner_wait_share:.0%} of it",
        "rollout is too short for the learner: more replicas or slots, or a larger orchestrator.capacity_batches",
    )  # fmt: skip


def _idle(signs: Signs) -> Symptom | None:
    """Rollout slots that are mostly empty although the learner does not wait for them."""
    if signs.slots_busy is None or signs.slots_busy >= 0.3 or (signs.learner_wait_share or 0.0) >= 0.3:
        return None
    return Symptom(
        "gpu_idle", f"{signs.slots_busy:.0%} of the rollout slots are in use, and the learner does not wait",
        "the rollout pool is starved of work: fewer replicas, a larger orchestrator.capacity_batches, or a faster learner",
    )  # fmt: skip


def _lost(signs: Signs) -> str:
    return f"{signs.lost_share:.0%} of all groups were dropped as incomplete or ungraded"


def _recent_reward(signs: Signs) -> float:
    return statistics.fmean(signs.rewards[-5:])
