"""Every objective through the real trainer with rows at the edge: all that comes out is finite, what is left out is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.learner.advantages import advantages
from miles_core.learner.trainer import Trainer
from miles_core.presets import PRESETS, Objective
from miles_core.recipe import LearnerSpec
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_trainer import GROUPS, SAMPLES, make_batch
from tests.unit.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base")


def with_logprob(row: Trajectory, value: float) -> Trajectory:
    """The first sampled token got this logprob in rollout."""
    logprobs = row.logprobs.copy()
    logprobs[np.flatnonzero(row.loss_mask)[0]] = value
    return replace(row, logprobs=logprobs)


def masked(row: Trajectory, keep: int) -> Trajectory:
    """Only the first `keep` sampled tokens are."""
    mask = row.loss_mask.copy()
    mask[np.flatnonzero(mask)[keep:]] = 0
    return replace(row, loss_mask=mask)


def edge_rows() -> list[Trajectory]:
    """Of 4 groups: logprobs of +-1000, nan and +-inf; rows of one token and of none; the last group has no sampled token."""
    rows = make_batch(1)[0]
    values = (1000.0, -1000.0, math.nan, math.inf, -math.inf)
    rows[: len(values)] = [with_logprob(row, value) for row, value in zip(rows, values, strict=False)]
    rows[6], rows[7] = masked(rows[6], 1), masked(rows[7], 0)
    return [*rows[: 3 * SAMPLES], *(masked(row, 0) for row in rows[3 * SAMPLES :])]


@pytest.mark.parametrize("objective", PRESETS)
def test_rows_at_the_edge_are_trained_or_left_out_and_everything_stays_finite(folder: Path, objective: Objective) -> None:
    divisor = 8 if PRESETS[objective].aggregation == "constant" else None
    spec = LearnerSpec.model_validate(
        {"objective": objective, "loss_divisor_tokens": divisor, "ramp_steps": 0, "kl_coef": 0.01, "veto": 1e-4}
    )
    trainer = Trainer(folder, spec, "float32")
    rows = edge_rows()
    rewards = torch.from_numpy(np.random.default_rng(0).random((GROUPS, SAMPLES)))
    num_sampled = torch.tensor([row.num_sampled for row in rows]).reshape(rewards.shape)
    found = advantages(rewards, num_sampled, spec.advantage).flatten().numpy()
    metrics = trainer.train(rows, found, 1)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["nonfinite_tokens"] == 3, "nan and two infinite ones"
    assert metrics["tokens"] == num_sampled.sum() and metrics["updates"] == 2
    nothing = trainer.train([], np.zeros(0), 2)
    masked_out = trainer.train([masked(row, 0) for row in rows], found, 3)
    for empty in (nothing, masked_out):
        assert empty["tokens"] == empty["updates"] == empty["loss"] == 0 and empty.keys() == metrics.keys()
        assert all(math.isfinite(value) for value in empty.values()), empty
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state_tensors().values())
