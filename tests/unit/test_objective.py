"""The objective against a second implementation: plain loops over float64 numpy, written from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from miles_core.learner.objective import (
    LOG_RATIO_BOUND,
    group_advantages,
    importance_weights,
    mismatch_metrics,
    ppo_clip_loss,
)

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


Array = npt.NDArray[Any]


def reference_loss(
    logp: Array, old: Array, rollout: Array, advantages: Array, mask: Array, cap: float | None, num_tokens: float
) -> tuple[float, Array]:
    """(loss, d loss / d logp), token by token."""
    loss, gradient = 0.0, np.zeros_like(logp)
    for i in np.flatnonzero(mask):
        ratio = math.exp(logp[i] - old[i])
        weight = 1.0 if cap is None else min(math.exp(old[i] - rollout[i]), cap)
        plain = ratio * advantages[i]
        clipped = min(max(ratio, 0.8), 1.28) * advantages[i]
        loss -= weight * min(plain, clipped) / num_tokens
        if plain <= clipped:
            gradient[i] = -weight * ratio * advantages[i] / num_tokens
    return loss, gradient


def random_case(seed: int, count: int = 200) -> tuple[Array, Array, Array, Array, Array]:
    """logp, logp_old, logp_rollout, advantages, mask."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(1.5, count)
    logp = old + rng.normal(0, 0.3, count)
    rollout = old + rng.normal(0, 0.8, count)
    return logp, old, rollout, rng.normal(0, 1, count), rng.random(count) < 0.7


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cap", [None, 1.0, 2.0])
def test_loss_and_gradient_equal_the_reference(seed: int, cap: float | None) -> None:
    arrays = random_case(seed)
    expected, gradient = reference_loss(*arrays, cap, 150.0)
    logp, old, rollout, advantages, mask = (torch.from_numpy(array) for array in arrays)
    logp.requires_grad_()
    found = ppo_clip_loss(logp, old, rollout, advantages, mask, **CLIPS, tis_cap=cap, num_tokens=150.0)
    found.loss.backward()
    assert found.loss.dtype == torch.float64
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), gradient, rtol=1e-11, atol=1e-14)
    assert found.clipped == int(((gradient == 0) & mask.numpy()).sum()) > 0
    assert found.ratio_deviation == pytest.approx(np.abs(np.exp(arrays[0] - arrays[1]) - 1)[arrays[4]].max())


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected", "flows"),
    [
        (math.log(1.27), 1.0, 1.27, True),
        (math.log(1.29), 1.0, 1.28, False),
        (math.log(0.5), 1.0, 0.5, True),
        (math.log(0.81), -1.0, -0.81, True),
        (math.log(0.79), -1.0, -0.8, False),
        (math.log(3.0), -1.0, -3.0, True),
    ],
)
def test_each_side_of_the_clip(log_ratio: float, advantage: float, expected: float, flows: bool) -> None:
    logp = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    minus_one = torch.tensor([-1.0], dtype=torch.float64)
    found = ppo_clip_loss(
        logp, minus_one, minus_one, torch.tensor([advantage]), torch.tensor([True]), **CLIPS, tis_cap=2.0, num_tokens=1.0
    )
    found.loss.backward()
    assert -float(found.loss.detach()) == pytest.approx(expected)
    assert bool(logp.grad[0] != 0) is flows
    assert found.clipped == (0 if flows else 1)


def test_microbatch_losses_add_up_to_the_token_mean() -> None:
    arrays = [torch.from_numpy(array) for array in random_case(7)]
    whole = ppo_clip_loss(*arrays, **CLIPS, tis_cap=2.0, num_tokens=90.0).loss
    parts = [
        ppo_clip_loss(*(array[piece] for array in arrays), **CLIPS, tis_cap=2.0, num_tokens=90.0).loss
        for piece in (slice(0, 13), slice(13, 150), slice(150, 200))
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.parametrize("extreme", [1000.0, -1000.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_values_stay_finite_and_are_counted(extreme: float, where: int, dtype: torch.dtype) -> None:
    arrays = [torch.full((4,), value, dtype=dtype) for value in (-1.1, -1.0, -1.2, 0.5)]
    arrays[where][2] = extreme
    logp = arrays[0].requires_grad_()
    found = ppo_clip_loss(logp, *arrays[1:], torch.ones(4), **CLIPS, tis_cap=2.0, num_tokens=4.0)
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert torch.isfinite(logp.grad).all()
    assert math.isfinite(found.ratio_deviation)
    assert found.nonfinite == (0 if math.isfinite(extreme) else 1)
    assert all(math.isfinite(value) for value in mismatch_metrics(arrays[1], arrays[2], 2.0).values())


def test_a_left_out_token_changes_nothing_else() -> None:
    logp, old, rollout, advantages, mask = (torch.from_numpy(array) for array in random_case(3))
    mask[5] = False
    without = ppo_clip_loss(logp, old, rollout, advantages, mask, **CLIPS, tis_cap=2.0, num_tokens=90.0)
    mask[5], rollout[5] = True, math.nan
    broken = ppo_clip_loss(logp, old, rollout, advantages, mask, **CLIPS, tis_cap=2.0, num_tokens=90.0)
    assert torch.equal(without.loss, broken.loss)
    assert (without.nonfinite, broken.nonfinite) == (0, 1)


def test_no_gradient_reaches_the_old_policy() -> None:
    tensors = [torch.from_numpy(array) for array in random_case(1)[:4]]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    ppo_clip_loss(*tensors, torch.ones(200), **CLIPS, tis_cap=2.0, num_tokens=200.0).loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None and tensors[2].grad is None


def test_weights_are_cut_at_the_cap() -> None:
    old, rollout = torch.tensor([0.0, -1.0, 5.0]), torch.tensor([-0.5, 0.0, -5.0])
    torch.testing.assert_close(importance_weights(old, rollout, 2.0), torch.tensor([math.exp(0.5), math.exp(-1.0), 2.0]))
    assert torch.equal(importance_weights(old, rollout, None), torch.ones(3))


def test_group_advantages_equal_the_reference() -> None:
    rewards = np.random.default_rng(0).random((6, 8))
    expected = [[(value - row.mean()) / (row.std(ddof=1) + 1e-4) for value in row] for row in rewards]
    found = group_advantages(torch.from_numpy(rewards))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(found.sum(dim=1).numpy(), 0, atol=1e-12)


def test_a_group_of_equals_has_no_advantage_also_after_rounding() -> None:
    rewards = torch.tensor([[0.1] * 7, [0.0] * 7, [1e30] * 7, [0, 0, 0, 1, 0, 0, 0.0]])
    found = group_advantages(rewards)
    assert torch.equal(found[:3], torch.zeros(3, 7))
    assert found[3, 3] > 0 > found[3, 0]


def test_noise_of_a_grader_is_not_blown_up() -> None:
    assert group_advantages(torch.tensor([[0.5, 0.5 + 1e-6, 0.5, 0.5]], dtype=torch.float64)).abs().max() < 0.02


@pytest.mark.parametrize("rewards", [[[0.0, math.nan], [0.0, 1.0]], [[0.0, 1.0], [math.inf, 1.0]]])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(rewards: list[list[float]]) -> None:
    bad = 0 if math.isnan(rewards[0][1]) else 1
    with pytest.raises(ValueError, match=rf"groups \[{bad}\]"):
        group_advantages(torch.tensor(rewards))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 samples"):
        group_advantages(torch.zeros(3, 1))


def test_mismatch_metrics_equal_the_reference() -> None:
    _, old, rollout, _, _ = random_case(2)
    gap = old - rollout
    found = mismatch_metrics(torch.from_numpy(old), torch.from_numpy(rollout), 2.0)
    weights = np.exp(gap)
    assert found["logprob_gap_mean"] == pytest.approx(np.abs(gap).mean())
    assert found["logprob_gap_max"] == pytest.approx(np.abs(gap).max())
    assert found["k3"] == pytest.approx((weights - 1 - gap).mean())
    assert found["tis_clip_frac"] == pytest.approx((weights > 2).mean())
    assert found["ess"] == pytest.approx(weights.sum() ** 2 / (200 * (weights**2).sum()))


def test_mismatch_of_equal_policies_and_of_nothing() -> None:
    same = torch.tensor([-1.0, -2.0])
    found = mismatch_metrics(same, same, None)
    assert found == {"logprob_gap_mean": 0, "logprob_gap_max": 0, "k3": 0, "tis_clip_frac": 0, "ess": 1}
    assert set(mismatch_metrics(torch.zeros(0), torch.zeros(0), 2.0).values()) == {0.0}


def test_k3_estimates_the_kl_divergence() -> None:
    """Tokens drawn from the rollout policy: the mean of k3 tends to KL(rollout || learner)."""
    rng = np.random.default_rng(0)
    rollout, learner = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.2, 0.3])
    drawn = rng.choice(3, size=200_000, p=rollout)
    found = mismatch_metrics(torch.from_numpy(np.log(learner)[drawn]), torch.from_numpy(np.log(rollout)[drawn]), None)
    assert found["k3"] == pytest.approx((rollout * np.log(rollout / learner)).sum(), rel=0.02)


def test_the_bound_is_far_outside_any_clip() -> None:
    assert math.exp(LOG_RATIO_BOUND) > 1e8
    assert torch.isfinite(torch.tensor(LOG_RATIO_BOUND, dtype=torch.float32).exp() ** 2)
