"""The reward scaler against plain windows in float64 numpy, and its state after a restart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_core.grading.scaler import BatchScaler, RewardScaler, Window
from miles_core.recipe import RewardScalerSpec
from miles_core.records import Batch, BatchGroup, BatchMember, TrajectoryRef

SPEC = RewardScalerSpec(short=16, long=100)


def grades(count: int, seed: int = 0) -> np.ndarray:
    """Mostly 0 or 1, their share drifting, with noise."""
    rng = np.random.default_rng(seed)
    return (rng.random(count) < np.linspace(0.2, 0.8, count)) + rng.normal(0, 0.05, count)


def reference(values: np.ndarray, short: int, long: int) -> tuple[float, float]:
    """mu and sigma by sources G5, from the plain last values."""
    newest, older = values[-short:], values[-long:]
    mu = 0.7 * newest.mean() + 0.3 * older.mean()
    return mu, max(math.sqrt(0.7 * newest.var() + 0.3 * older.var()), 0.1)


def filled(values: np.ndarray, spec: RewardScalerSpec = SPEC) -> RewardScaler:
    scaler = RewardScaler(spec)
    for value in values.tolist():
        scaler.add(value)
    return scaler


def make_batch(step: int, rewards: np.ndarray) -> Batch:
    members = [
        BatchMember(
            ref=TrajectoryRef(trajectory_id=f"t{index}", shard="s", row=index, shard_digest=""), oldest_step=0, reward=value
        )
        for index, value in enumerate(rewards.tolist())
    ]
    groups = (BatchGroup(group_id="g", members=tuple(members)),)
    return Batch(step=step, batch_id=f"b{step}.o1", groups=groups, staleness=0)


def test_mu_and_sigma_equal_the_reference_while_windows_fill_and_after() -> None:
    values = grades(350)
    scaler = RewardScaler(SPEC)
    for count, value in enumerate(values.tolist(), start=1):
        scaler.add(value)
        assert (scaler.mu, scaler.sigma) == pytest.approx(reference(values[:count], 16, 100), rel=1e-12)


def test_the_documented_windows_equal_the_reference() -> None:
    values = grades(103_000)
    scaler = filled(values, RewardScalerSpec())
    assert (scaler.mu, scaler.sigma) == pytest.approx(reference(values, 1000, 100_000), rel=1e-10)


def test_running_sums_do_not_drift_far_from_zero() -> None:
    window = Window(50)
    values = 1e6 + grades(20_000)
    for value in values.tolist():
        window.add(value)
    assert window.mean == pytest.approx(values[-50:].mean(), rel=1e-14)
    assert window.variance == pytest.approx(values[-50:].var(), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("none", lambda z: 1.0),
        ("damped", lambda z: 1 / (1 + 0.5 * abs(z))),
        ("boosted", lambda z: 1 + 0.5 * (1 / (1 + math.exp(-z)))),
    ],
)
def test_rewards_and_gradient_weights_equal_the_reference(kind: Any, weight: Any) -> None:
    values = grades(200)
    mu, sigma = reference(values, 16, 100)
    rewards = values[-8:].reshape(2, 4)
    found = filled(values, SPEC.model_copy(update={"gradient_weight": kind})).scale(rewards)
    expected = [[(reward - mu) / sigma for reward in row] for row in rewards]
    np.testing.assert_allclose(found.rewards, expected, rtol=1e-12)
    np.testing.assert_allclose(found.gradient_weights, [[weight(z) for z in row] for row in expected], rtol=1e-12)
    assert found.metrics["reward_var_before"] == pytest.approx(rewards.var())
    assert found.metrics["reward_var_after"] == pytest.approx(rewards.var() / sigma**2)
    assert (found.metrics["scaler_mu"], found.metrics["scaler_sigma"]) == pytest.approx((mu, sigma))


def test_equal_rewards_are_not_blown_up() -> None:
    found = filled(np.full(500, 0.7)).scale(np.array([[0.7, 0.71]]))
    np.testing.assert_allclose(found.rewards, [[0.0, 0.1]], atol=1e-12)


@pytest.mark.parametrize("kind", ["damped", "boosted"])
def test_far_rewards_have_finite_weights(kind: Any) -> None:
    weights = (
        filled(np.zeros(50), SPEC.model_copy(update={"gradient_weight": kind}))
        .scale(np.array([1e100, -1e100]))
        .gradient_weights
    )
    assert np.isfinite(weights).all() and (weights >= 0).all() and (weights <= 1.5).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_grade_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        filled(np.array([0.5, bad]))


# --- batch by batch


def test_a_batch_is_scaled_with_its_own_grades_taken_in() -> None:
    rewards = grades(3 * 20).reshape(3, 20)
    scaler = BatchScaler(SPEC)
    for step in (1, 2, 3):
        scaler.note(make_batch(step, rewards[step - 1]))
        mu, sigma = reference(rewards[:step].ravel(), 16, 100)
        np.testing.assert_allclose(scaler.scale(step, rewards[step - 1]).rewards, (rewards[step - 1] - mu) / sigma, rtol=1e-12)


@pytest.mark.parametrize("first", [1, 2, 9, 30])
def test_a_successor_comes_to_the_same_bits_from_whatever_step_it_goes_on(first: int) -> None:
    rewards = grades(30 * 20).reshape(30, 20)
    straight, successor = BatchScaler(SPEC), BatchScaler(SPEC)
    for step in range(1, 31):
        straight.note(make_batch(step, rewards[step - 1]))
        found = straight.scale(step, rewards[step - 1])
    for step in reversed(range(1, 31)):
        successor.note(make_batch(step, rewards[step - 1]))
    for step in range(first, 31):
        again = successor.scale(step, rewards[step - 1])
    assert again.rewards.tobytes() == found.rewards.tobytes() and again.metrics == found.metrics


def test_a_batch_told_twice_counts_once_and_one_never_told_is_named() -> None:
    scaler = BatchScaler(SPEC)
    for step in (1, 1, 3):
        scaler.note(make_batch(step, np.array([0.0, 1.0])))
    first = scaler.scale(1, np.array([0.0, 1.0]))
    scaler.note(make_batch(1, np.array([0.0, 1.0])))
    assert scaler.scale(1, np.array([0.0, 1.0])).metrics == first.metrics
    with pytest.raises(MilesError, match="scale batch 3, but batch 2 was never read"):
        scaler.scale(3, np.array([0.0, 1.0]))
