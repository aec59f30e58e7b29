"""What a batch's staleness does to its step (sources O17): the staler the batch, the smaller the step and the stronger the pull
to the base model. Functions of the staleness that the batch's record fixes, so a replay takes the same step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_core.recipe import LearnerSpec

Array = npt.NDArray[np.float64]


def rate_factor(spec: LearnerSpec, step: int, staleness: int) -> float:
    """Of the learning rate: linear over the first `ramp_steps` steps (from 1), then 1; for a batch of staleness s divided by
    1 + a s with a = `staleness_slowdown` (staleness-aware async SGD, arXiv 1511.05950, has a = 1 and counts from 1)."""
    return min(1.0, step / max(1, spec.ramp_steps)) / (1 + spec.staleness_slowdown * staleness)


def pull_factor(spec: LearnerSpec, staleness: int) -> float:
    """Of `kl_coef`: 1 + b s with b = `staleness_pull`. The form is ours."""
    return 1 + spec.staleness_pull * staleness


def pull_weights(spec: LearnerSpec, staleness: int, weights: Array | None, num_rows: int) -> Array | None:
    """[N] what multiplies each row's pull: its gradient weight (None: 1) times the factor. None where all are 1."""
    factor = pull_factor(spec, staleness)
    if factor == 1:
        return weights
    return np.full(num_rows, factor) if weights is None else weights * factor
