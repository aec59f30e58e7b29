"""How large a step is: ramp, decay, and what a batch's staleness does to it (sources O17): the staler, the smaller the step and
the stronger the pull to the base model. Functions of what the batch's record fixes, so a replay takes the same step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from miles_core.recipe import LearnerSpec

Array = npt.NDArray[np.float64]
LAST_RATE = 0.1
"""Of the learning rate, where a decay ends."""


def rate_factor(spec: LearnerSpec, step: int, staleness: int) -> float:
    """Of the learning rate at a step from 1: linear up over `ramp_steps`, linear down to LAST_RATE over the next `decay_steps`
    and then that, or 1 without a decay; for a batch of staleness s divided by 1 + a s with a = `staleness_slowdown`
    (staleness-aware async SGD, arXiv 1511.05950, has a = 1 and counts from 1)."""
    ramp = min(1.0, step / max(1, spec.ramp_steps))
    gone = min(1.0, max(0, step - spec.ramp_steps) / spec.decay_steps) if spec.decay_steps else 0.0
    return ramp * (1 - (1 - LAST_RATE) * gone) / (1 + spec.staleness_slowdown * staleness)


def pull_factor(spec: LearnerSpec, staleness: int) -> float:
    """Of `kl_coef`: 1 + b s with b = `staleness_pull`. The form is ours."""
    return 1 + spec.staleness_pull * staleness


def pull_weights(spec: LearnerSpec, staleness: int, weights: Array | None, num_rows: int) -> Array | None:
    """[N] what multiplies each row's pull: its gradient weight (None: 1) times the factor. None where all are 1."""
    factor = pull_factor(spec, staleness)
    if factor == 1:
        return weights
    return np.full(num_rows, factor) if weights is None else weights * factor
