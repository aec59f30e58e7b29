"""Groupwise advantage redistribution (MiMo report, arXiv 2610.11959): the better of a group's passing answers get more.

The passing answers of a group are those with a positive advantage. They are ranked by the quality that the ranking grader
gave them, ties at their mean rank; the worst of m has factor 1/2, the best CAP, the others evenly between:
    f = 1/2 + rank / (m - 1), rank from 0        A' = f A where A > 0, else A        A'' = A' - mean of its group
The factors' mean is 1, so where passing answers had equal advantages their sum stays and re-centring changes nothing. (The
report gives the cap and the re-centring; that factors are linear in rank is our choice.)

A group with fewer than two passing answers, or with one whose quality is missing, keeps its plain advantage to the last bit: so
a ranking grader that is down costs nothing but its effect.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CAP = 1.5
"""The best answer's factor."""
Array = npt.NDArray[np.float64]


def redistribute(advantages: Array, qualities: Array) -> tuple[Array, dict[str, float]]:
    """Advantages [G, n] and qualities [G, n] (nan: none) to advantages, with the shares of groups that were redistributed
    and that were not for want of a quality."""
    found = advantages.copy()
    done = missing = 0
    for group, (own, quality) in enumerate(zip(advantages, qualities, strict=True)):
        passing = np.flatnonzero(own > 0)
        if len(passing) < 2:
            continue
        if not np.isfinite(quality[passing]).all():
            missing += 1
            continue
        done += 1
        moved = own.copy()
        moved[passing] *= (CAP - 1) * (2 * _ranks(quality[passing]) / (len(passing) - 1) - 1) + 1
        found[group] = moved - moved.mean()
    return found, {"redistributed_frac": done / len(advantages), "ranking_missing_frac": missing / len(advantages)}


def _ranks(values: Array) -> Array:
    """From 0, ascending; equal values share their mean rank."""
    below, equal = values[:, None] > values[None, :], values[:, None] == values[None, :]
    ranks: Array = below.sum(axis=1) + (equal.sum(axis=1) - 1) / 2
    return ranks
