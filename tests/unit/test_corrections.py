"""Off-policy corrections: weights at each level, masks, the veto, the mismatch. What they change in a loss: test_losses.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from miles_core.learner.corrections import LOG_RATIO_BOUND, bounded_exp, correction_weights, cut_tokens, mismatch_metrics
from miles_core.learner.segments import Segments
from miles_core.recipe import LearnerSpec
from tests.unit.objective_reference import CORRECTIONS

Rows = list[list[float]]
"""w of each row's tokens."""


def weights_of(rows: Rows, counted: list[bool] | None = None, **spec: object) -> list[float]:
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
    inside = torch.ones_like(index, dtype=torch.bool) if counted is None else torch.tensor(counted)
    segments = Segments(index, len(rows), inside)
    return [float(value) for value in correction_weights(flat.log(), segments, LearnerSpec.model_validate(spec))]


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_weights_equal_the_reference(kind: str) -> None:
    rng = np.random.default_rng(0)
    spread = 0.02 if kind == "mis_geometric" else 0.4
    rows = [rng.normal(0, spread, int(size)) for size in rng.integers(1, 9, 60)]
    found = weights_of([np.exp(row).tolist() for row in rows], correction=kind)
    expected = np.concatenate([CORRECTIONS[kind](row) for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert kind in ("none", "tis") or 0 < (expected == 0).sum() < expected.size


def test_truncation_is_from_above_only() -> None:
    assert weights_of([[1e-3, 0.5, 1.9, 2.1, 1e9]]) == pytest.approx([1e-3, 0.5, 1.9, 2, 2])


def test_masks_take_the_recipes_bounds() -> None:
    bounds = {"mis_low": 0.9, "mis_high": 1.2}
    rows = [[0.8, 1.1], [2.0, 0.5, 1.0], [2.0, 0.55]]
    assert weights_of(rows, correction="mis_token", **bounds) == pytest.approx([0, 1.1, 0, 0, 1, 0, 0])
    assert weights_of(rows, correction="mis_sequence", **bounds) == pytest.approx([0, 0, 1, 1, 1, 1.1, 1.1])
    assert weights_of(rows, correction="mis_geometric", **bounds) == pytest.approx([0.88**0.5] * 2 + [1] * 3 + [1.1**0.5] * 2)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_catastrophic_token_vetoes_its_whole_row_and_no_other(kind: str) -> None:
    rows = [[1.0, 1.0], [1.0, 0.9e-4, 1.0], [1.0, 1.0]]
    found = weights_of(rows, correction=kind, veto=1e-4)
    assert found[2:5] == [0, 0, 0] and found[:2] == found[5:] == [1, 1]
    assert weights_of([[1.0, 1.1e-4, 1.0]], correction="tis", veto=1e-4) == pytest.approx([1, 1.1e-4, 1])


def test_what_does_not_count_enters_no_row_and_no_veto() -> None:
    rows = [[1.5, 1e-9, 1.0], [1e-9, 1.0, 1.0]]
    counted = [True, False, True, True, True, True]
    found = weights_of(rows, counted, correction="mis_sequence", veto=1e-4)
    assert [found[0], found[2]] == pytest.approx([1.5, 1.5]) and found[3:] == [0, 0, 0]


def test_a_rows_product_stays_finite() -> None:
    rows = [[math.exp(15.0)] * 40, [math.exp(-15.0)] * 40]
    found = weights_of(rows, correction="mis_sequence", mis_low=0.0, mis_high=1e30)
    assert found[0] == pytest.approx(math.exp(LOG_RATIO_BOUND)) and found[-1] == pytest.approx(math.exp(-LOG_RATIO_BOUND))


def test_the_bound_is_far_outside_any_clip() -> None:
    assert math.exp(LOG_RATIO_BOUND) > 1e8
    assert torch.isfinite(bounded_exp(torch.tensor([1e30, math.inf, -math.inf], dtype=torch.float32)) ** 2).all()


# --- how far rollout and learner are apart


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_cut_tokens_are_those_over_the_cap_or_set_to_0(kind: str) -> None:
    log_weight = torch.tensor([1.5, 1e-5, 2.5, 1.0, 1.0, math.nan], dtype=torch.float64).log()
    segments = Segments(torch.tensor([0, 1, 1, 2, 3, 3]), 4, torch.isfinite(log_weight))
    spec = LearnerSpec.model_validate({"correction": kind})
    expected = {
        "none": [0, 0, 0, 0, 0, 0],
        "tis": [0, 0, 1, 0, 0, 0],
        "mis_token": [0, 1, 0, 0, 0, 0],
        "mis_sequence": [0, 1, 1, 0, 0, 0],
        "mis_geometric": [1, 1, 1, 0, 0, 0],
    }[kind]
    assert cut_tokens(log_weight, segments, spec).int().tolist() == expected
    vetoed = cut_tokens(log_weight, segments, spec.model_copy(update={"veto": 1e-4}))
    assert vetoed.int().tolist() == [expected[0], 1, 1, *expected[3:]]


def test_mismatch_metrics_equal_the_reference() -> None:
    rng = np.random.default_rng(2)
    gap = rng.normal(0, 0.8, 200)
    old = -rng.exponential(1.5, 200)
    found = mismatch_metrics(
        torch.from_numpy(old), torch.from_numpy(old - gap), torch.from_numpy((np.exp(gap) > 2).astype(float))
    )
    weights = np.exp(gap)
    assert found["logprob_gap_mean"] == pytest.approx(np.abs(gap).mean())
    assert found["logprob_gap_max"] == pytest.approx(np.abs(gap).max())
    assert found["k3"] == pytest.approx((weights - 1 - gap).mean())
    assert found["tis_clip_frac"] == pytest.approx((weights > 2).mean())
    assert found["ess"] == pytest.approx(weights.sum() ** 2 / (200 * (weights**2).sum()))


def test_mismatch_of_equal_policies_and_of_nothing() -> None:
    same = torch.tensor([-1.0, -2.0])
    found = mismatch_metrics(same, same, torch.zeros(2))
    assert found == {"logprob_gap_mean": 0, "logprob_gap_max": 0, "k3": 0, "tis_clip_frac": 0, "ess": 1}
    assert set(mismatch_metrics(torch.zeros(0), torch.zeros(0)).values()) == {0.0}


@pytest.mark.parametrize("extreme", [1000.0, -1000.0, math.inf, -math.inf, math.nan])
def test_mismatch_of_extreme_values_is_finite_and_skips_what_is_no_number(extreme: float) -> None:
    for where in (0, 1):
        columns = [torch.tensor([-1.0, -2.0, -1.5]) for _ in range(2)]
        columns[where][1] = extreme
        found = mismatch_metrics(*columns, torch.tensor([0.0, 1.0, 0.0]))
        assert all(math.isfinite(value) for value in found.values())
        assert found["tis_clip_frac"] == (pytest.approx(1 / 3) if math.isfinite(extreme) else 0)


def test_k3_estimates_the_kl_divergence() -> None:
    """Tokens drawn from the rollout policy: the mean of k3 tends to KL(rollout || learner)."""
    rng = np.random.default_rng(0)
    rollout, learner = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.2, 0.3])
    drawn = rng.choice(3, size=200_000, p=rollout)
    found = mismatch_metrics(torch.from_numpy(np.log(learner)[drawn]), torch.from_numpy(np.log(rollout)[drawn]))
    assert found["k3"] == pytest.approx((rollout * np.log(rollout / learner)).sum(), rel=0.02)
