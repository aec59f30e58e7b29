"""Advantages against float64 numpy (objective_reference.py), and inputs at the edge."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from miles_core.learner.advantages import advantages
from miles_core.presets import GROUP_ADVANTAGES, Advantage
from tests.unit.objective_reference import ADVANTAGES, random_case

KINDS: tuple[Advantage, ...] = tuple(kind for kind in get_args(Advantage) if kind != "gae")
GROUP_KINDS = GROUP_ADVANTAGES


def found_by(rewards: list[list[float]] | np.ndarray, how: Advantage, lengths: np.ndarray | None = None) -> torch.Tensor:
    values = torch.as_tensor(rewards, dtype=torch.float64)
    sizes = torch.full(values.shape, 3) if lengths is None else torch.from_numpy(lengths)
    return advantages(values, sizes.reshape(values.shape), how)


@pytest.mark.parametrize("how", KINDS)
def test_advantages_equal_the_reference(how: Advantage) -> None:
    for seed in range(5):
        case = random_case(seed, flat=())
        found = found_by(case.rewards, how, case.lengths)
        np.testing.assert_allclose(found.numpy().ravel(), ADVANTAGES[how](case), rtol=1e-10)


@pytest.mark.parametrize("how", GROUP_KINDS)
def test_a_groups_advantages_add_up_to_nothing(how: Advantage) -> None:
    assert found_by(random_case(0).rewards, how).sum(dim=1).abs().max() < 1e-12


def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens() -> None:
    case = random_case(0)
    tokens = np.repeat(found_by(case.rewards, "batch_whitened", case.lengths).numpy().ravel(), case.lengths)
    assert tokens.mean() == pytest.approx(0, abs=1e-12) and tokens.var(ddof=1) == pytest.approx(1, rel=1e-6)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1() -> None:
    rewards = random_case(2).rewards
    torch.testing.assert_close(found_by(rewards, "leave_one_out"), found_by(rewards, "group_mean") * 4 / 3)


@pytest.mark.parametrize("how", GROUP_KINDS)
def test_a_group_of_equals_has_no_advantage_also_after_rounding(how: Advantage) -> None:
    rewards = torch.tensor([[0.1] * 7, [0.0] * 7, [1e30] * 7, [0, 0, 0, 1, 0, 0, 0.0]])
    found = advantages(rewards, torch.ones(4, 7), how)
    assert torch.equal(found[:3], torch.zeros(3, 7))
    assert found[3, 3] > 0 > found[3, 0]


def test_a_batch_of_equals_has_no_advantage_also_after_rounding() -> None:
    assert not found_by([[0.1] * 7] * 3, "batch_whitened").any()


def test_noise_of_a_grader_is_not_blown_up() -> None:
    assert found_by([[0.5, 0.5 + 1e-6, 0.5, 0.5]], "group_std").abs().max() < 0.02


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(how: Advantage, bad: float) -> None:
    with pytest.raises(ValueError, match=r"groups \[1\] are not finite"):
        found_by([[0.0, 1.0], [bad, 1.0], [0.0, 1.0]], how)


@pytest.mark.parametrize("how", KINDS)
def test_no_groups_are_refused(how: Advantage) -> None:
    with pytest.raises(ValueError, match="at least one of each"):
        advantages(torch.zeros(0, 4), torch.zeros(0, 4), how)


@pytest.mark.parametrize("how", GROUP_KINDS)
def test_a_group_of_one_is_refused_where_it_would_be_compared_with_nothing(how: Advantage) -> None:
    with pytest.raises(ValueError, match=f"{how} compares .* at least 2 samples"):
        found_by([[0.0], [1.0]], how)


def test_groups_of_one_are_whitened_over_the_batch() -> None:
    np.testing.assert_allclose(found_by([[0.0], [1.0]], "batch_whitened").numpy(), [[-0.9128709], [0.9128709]], rtol=1e-6)


def test_rows_without_a_token_count_for_nothing() -> None:
    with_them = found_by([[0.0, 1.0, 9.0], [1.0, 0.0, -9.0]], "batch_whitened", np.array([2, 3, 0, 4, 1, 0]))
    without = found_by([[0.0, 1.0], [1.0, 0.0]], "batch_whitened", np.array([2, 3, 4, 1]))
    torch.testing.assert_close(with_them[:, :2], without)
    assert torch.isfinite(with_them).all()
    assert not found_by([[0.0, 1.0]], "batch_whitened", np.array([1, 0])).any()
    assert not found_by([[0.0, 1.0]], "batch_whitened", np.array([0, 0])).any()


@pytest.mark.parametrize("how", KINDS)
def test_rewards_of_any_finite_size_give_finite_advantages(how: Advantage) -> None:
    assert torch.isfinite(found_by([[1e150, -1e150, 0.0, 1e-300]], how)).all()
