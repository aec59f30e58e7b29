"""Grade and Verifier: a graded reward with an error bar (sources G2). No grade is never a zero (G9)."""

from __future__ import annotations

from typing import Any, Protocol

from miles_core.recipe import Closed


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


class Verifier(Protocol):
    """Judges the facts of one trajectory. Raising means "no grade": it is tried again elsewhere."""

    source: str

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward in [0, 1] of an episode of task `task_seed` (train split unless facts say otherwise)."""
        ...


def judged(verifier: Verifier, task_seed: int, facts: dict[str, Any]) -> float:
    """A verifier's reward. Raises ValueError for one outside [0, 1], and whatever the verifier raises."""
    value = float(verifier.value(task_seed, facts))
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{verifier.source} gave {value}, a reward is in [0, 1]")
    return value
