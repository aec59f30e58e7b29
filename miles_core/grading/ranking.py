"""A ranking grader: which of a group's passing answers is better, as a number by which the learner ranks them.

It comes beside the reward and never changes it: the learner moves advantage among answers that already have a positive one
(learner/redistribution.py). `grader.ranking` names it: `brevity`, fewer sampled tokens are better, or a function of your own,
`package.module:function`, from a Trajectory to a finite number, higher is better.

Failure: one that raises, hangs or gives no finite number is "no quality", and the group keeps its plain advantage; a function
that cannot be imported is a RecipeError.
"""

from __future__ import annotations

from collections.abc import Callable

from miles_core.named import load_named
from miles_core.trajectories.schema import Trajectory

Ranker = Callable[[Trajectory], float]


def brevity(row: Trajectory) -> float:
    """Fewer sampled tokens are better."""
    return -float(row.num_sampled)


def make_ranker(name: str) -> Ranker:
    """The ranking grader that `grader.ranking` means. Raises RecipeError."""
    if name == "brevity":
        return brevity
    ranker: Ranker = load_named("grader.ranking", name)
    return ranker
