"""The reward scaler: rewards against the mean and spread of the grades before them, in two windows (sources G5).

mu = 0.7 mean_short + 0.3 mean_long; sigma = sqrt(0.7 var_short + 0.3 var_long), at least 0.1; scaled = (value - mu) / sigma.
All rewards of one batch are scaled alike, by the windows as they are after its last grade: equal rewards stay equal, and the
first batch has something to be compared with. The gradient weight of a sample multiplies its pull towards the base model
(learner.kl_coef): `damped` 1 / (1 + 0.5 |scaled|), `boosted` 1 + 0.5 sigmoid(scaled).

The state is a function of the accepted batches 1..k alone, in order of step. It is in no checkpoint: a successor reads those
batches again in the orchestrator's journal and comes to the same bits. A grade costs O(1), and O(window) once in a window's
length.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from miles_core.errors import MilesError
from miles_core.recipe import RewardScalerSpec
from miles_core.records import Batch

SHORT_SHARE = 0.7
LEAST_SIGMA = 0.1
WEIGHT_SLOPE = 0.5
Array = npt.NDArray[np.float64]


class Window:
    """Mean and variance (divided by n) of the newest `size` values.

    Running sums about a pivot near the mean; both are computed anew once in `size` values, so rounding does not pile up.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._pivot = self._sum = self._squares = 0.0
        self._until_exact = 1

    def add(self, value: float) -> None:
        """Takes one value in, and the oldest out when full. Raises ValueError for a value that is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"a reward of {value} cannot be scaled; a sample without a grade must not reach the learner")
        if len(self._values) == self._size:
            oldest = self._values.popleft() - self._pivot
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._values.append(value)
        self._sum += value - self._pivot
        self._squares += (value - self._pivot) ** 2
        self._until_exact -= 1
        if self._until_exact == 0:
            self._compute_anew()

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self._pivot + self._sum / max(1, len(self._values))

    @property
    def variance(self) -> float:
        """0 of nothing."""
        count = max(1, len(self._values))
        return max(0.0, self._squares / count - (self._sum / count) ** 2)

    def _compute_anew(self) -> None:
        self._pivot = math.fsum(self._values) / len(self._values)
        self._sum = math.fsum(value - self._pivot for value in self._values)
        self._squares = math.fsum((value - self._pivot) ** 2 for value in self._values)
        # While it fills: at doubled length, which is as cheap.
        self._until_exact = min(len(self._values), self._size)


@dataclass(frozen=True)
class Scaled:
    """A batch's rewards, scaled; both arrays have their shape."""

    rewards: Array
    gradient_weights: Array
    metrics: dict[str, float]


class RewardScaler:
    """The two windows, grade by grade."""

    def __init__(self, spec: RewardScalerSpec) -> None:
        self._spec = spec
        self._short, self._long = Window(spec.short), Window(spec.long)

    def add(self, value: float) -> None:
        """Takes one grade in."""
        self._short.add(value)
        self._long.add(value)

    @property
    def mu(self) -> float:
        """The mean that a reward is compared with."""
        return SHORT_SHARE * self._short.mean + (1 - SHORT_SHARE) * self._long.mean

    @property
    def sigma(self) -> float:
        """The spread it is divided by."""
        return max(math.sqrt(SHORT_SHARE * self._short.variance + (1 - SHORT_SHARE) * self._long.variance), LEAST_SIGMA)

    def scale(self, rewards: Array) -> Scaled:
        """Of any shape; the windows stay as they are."""
        scaled = (rewards - self.mu) / self.sigma
        metrics = {
            "scaler_mu": self.mu,
            "scaler_sigma": self.sigma,
            "reward_var_before": float(rewards.var()),
            "reward_var_after": float(scaled.var()),
        }
        return Scaled(scaled, self._gradient_weights(scaled), metrics)

    def _gradient_weights(self, scaled: Array) -> Array:
        if self._spec.gradient_weight == "damped":
            return 1 / (1 + WEIGHT_SLOPE * np.abs(scaled))
        if self._spec.gradient_weight == "boosted":
            return 1 + WEIGHT_SLOPE / (1 + np.exp(-np.clip(scaled, -700, 700)))
        return np.ones_like(scaled)


class BatchScaler:
    """The scaler as it is after each accepted batch, whatever step a learner begins at."""

    def __init__(self, spec: RewardScalerSpec) -> None:
        self._scaler = RewardScaler(spec)
        self._noted: dict[int, list[float]] = {}
        self._step = 0

    def note(self, batch: Batch) -> None:
        """An accepted batch; they may come in any order."""
        self._noted[batch.step] = [reward for group in batch.groups for reward in group.rewards]

    def scale(self, step: int, rewards: Array) -> Scaled:
        """Rewards of batch `step`, with the grades of all batches up to it taken in. Raises MilesError if one is missing."""
        for due in range(self._step + 1, step + 1):
            if due not in self._noted:
                raise MilesError(
                    f"the reward scaler is to scale batch {step}, but batch {due} was never read: the orchestrator's journal "
                    f"has a hole, run `miles verify`"
                )
            for value in self._noted.pop(due):
                self._scaler.add(value)
            self._step = due
        return self._scaler.scale(rewards)
