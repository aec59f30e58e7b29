"""Grade and Verifier: a graded reward with an error bar (sources G2). No grade is never a zero (G9)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from miles_core.recipe.closed import Closed, is_none


class Grade(Closed):
    """A reward with its uncertainty and its source."""

    value: float
    """The reward."""
    std: float
    """One standard deviation of `value`; 0 for exact rules."""
    source: str
    """Name and version of the judge, for example `reasoning_gym/chain_sum`."""
    timestamp: float
    """Unix seconds at which it was graded."""
    quality: float | None = Field(default=None, exclude_if=is_none)
    """By which passing answers of a group are ranked, higher is better (ranking.py); none: there is no ranking grader, or it
    gave none."""


class Estimate(NamedTuple):
    """A reward that its verifier is not sure of."""

    value: float
    std: float
    """One standard deviation."""


class Verifier(Protocol):
    """Judges the facts of one trajectory. Raising means "no grade": it is tried again elsewhere."""

    source: str

    def value(self, task_seed: int, facts: dict[str, Any]) -> float | Estimate:
        """The reward in [0, 1] of an episode of task `task_seed` (train split unless facts say otherwise); exact unless it is
        an Estimate."""
        ...


def judged(verifier: Verifier, task_seed: int, facts: dict[str, Any]) -> Estimate:
    """A verifier's reward, with std 0 if it is exact. Raises ValueError for one outside [0, 1], and what that raises."""
    answer = verifier.value(task_seed, facts)
    found = Estimate(*map(float, answer)) if isinstance(answer, Estimate) else Estimate(float(answer), 0.0)
    if not 0.0 <= found.value <= 1.0:
        raise ValueError(f"{verifier.source} gave {found.value}, a reward is in [0, 1]")
    if not 0.0 <= found.std < math.inf:
        raise ValueError(f"{verifier.source} gave {found.value} with std {found.std}, which must be finite and not negative")
    return found
