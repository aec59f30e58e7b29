"""Tier L1: exact rules. An answer is judged by the verifier of the library that asked the question.

A missing final answer is the model's failure and scores 0. Whatever keeps the judge from judging (another family, another
question, a verifier that breaks) raises, and so becomes "no grade", never a zero (G9). Partial credit is the library's:
most families score an answer that merely contains the right one by the share of its length, wrong numbers included.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from miles_core.environments.reasoning_gym import TaskSource
from miles_core.grading.base import Verifier
from miles_core.recipe import EnvironmentSpec


class ReasoningGymVerifier:
    """Makes the entry again from the facts' seed and split, and calls its own score_answer. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.source = f"reasoning_gym/{spec.family}@{version('reasoning-gym')}"
        self._tasks = TaskSource(spec.family, spec.options)

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward in [0, 1]. Raises ValueError when the facts are of another task or the library's score is no reward."""
        answer = facts.get("final_answer")
        if answer is None:
            return 0.0
        task = self._tasks.task(task_seed, facts.get("split", "train"))
        for key, expected in (("family", self._tasks.family), ("question_md5", task.digest)):
            if facts.get(key, expected) != expected:
                raise ValueError(
                    f"task seed {task_seed}: the facts say {key}={facts[key]!r} but this grader makes {expected!r}; "
                    f"rollout and grader must run the same recipe and reasoning-gym version ({self.source})"
                )
        score = float(task.dataset.score_answer(answer, task.entry))
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"{self.source} scored {score} for task seed {task_seed}: a reward is in [0, 1]")
        return score


def make_verifier(spec: EnvironmentSpec) -> Verifier:
    """The exact verifier of an environment. Raises RecipeError."""
    return ReasoningGymVerifier(spec)
