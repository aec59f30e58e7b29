"""What an evaluation says: means with 95 % intervals, pass@k. Pure; the same values give the same figures.

An interval is over problems: the samples of one problem are no independent draws. Of values that are all 0 or 1 it is
Wilson's; of others, and of means over samples, the percentile bootstrap over problems (RESAMPLES draws, a fixed seed).
A problem is solved by a sample whose value is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from miles_core.recipe import Closed

Z = 1.959964
RESAMPLES = 2000


class Figure(Closed):
    """A mean over problems, with its 95 % interval."""

    mean: float
    low: float
    high: float
    interval: Literal["wilson", "bootstrap"]


class Figures(Closed):
    """All of one evaluation."""

    greedy: Figure
    sampled: Figure | None = None
    """Mean value of the samples; None without samples."""
    pass_at: dict[int, Figure] = Field(default_factory=dict)
    """By k: the chance that one of k samples solves a problem, estimated without bias from all of them (arXiv 2107.03374)."""


def figures_of(greedy: Sequence[float], samples: Sequence[Sequence[float]]) -> Figures:
    """From one greedy value per problem, and the values of its samples, as many for each problem; none: no such figures."""
    count = len(samples[0]) if samples else 0
    if count == 0:
        return Figures(greedy=figure_of(greedy))
    solved = [sum(value == 1.0 for value in values) for values in samples]
    ks = [k for k in (2**power for power in range(count.bit_length())) if k <= count]
    return Figures(
        greedy=figure_of(greedy),
        sampled=figure_of([sum(values) / count for values in samples], is_mean=count > 1),
        pass_at={k: figure_of([pass_at(k, count, number) for number in solved], is_mean=count > 1) for k in ks},
    )


def figure_of(values: Sequence[float], *, is_mean: bool = False) -> Figure:
    """The mean of one value per problem. `is_mean`: the values are means themselves, so Wilson's interval is not theirs."""
    mean = sum(values) / len(values)
    if not is_mean and all(value in (0.0, 1.0) for value in values):
        low, high = wilson(round(sum(values)), len(values))
        return Figure(mean=mean, low=low, high=high, interval="wilson")
    low, high = bootstrap(values)
    return Figure(mean=mean, low=low, high=high, interval="bootstrap")


def wilson(successes: int, number: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z2 = successes / number, Z * Z / number
    centre = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / number + z2 / (4 * number)) / (1 + z2)
    # At 0 and at 1 an end is the share itself, but for rounding.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 2.5 and 97.5 percentiles of the means of resampled problems."""
    draw, exact, number = np.random.default_rng(0), np.asarray(values, dtype=np.float64), len(values)
    means = [exact[draw.integers(0, number, number)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def gain_of(before: Sequence[float], after: Sequence[float]) -> Figure:
    """Mean gain of the same problems, in the same order, by the paired bootstrap: how hard they are is no part of its spread.
    Raises ValueError where there are not as many values after as before."""
    return figure_of([new - old for old, new in zip(before, after, strict=True)], is_mean=True)


def pass_at(k: int, number: int, solved: int) -> float:
    """Chance that k of `number` samples, `solved` of which solve the problem, hold one that does."""
    return 1.0 - math.comb(number - solved, k) / math.comb(number, k)
