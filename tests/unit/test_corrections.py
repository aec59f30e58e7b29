"""Off-policy corrections: weights at each level, masks, the veto; what they change in a loss is in test_losses.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from miles_core.learner.corrections import LOG_RATIO_BOUND, bounded_exp, correction_weights
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
