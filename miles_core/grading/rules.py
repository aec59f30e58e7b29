"""Tier L1: rules. An answer is judged by who knows the truth: the library that asked, the maker of the puzzle, or a rubric.

A missing final answer is the model's failure and scores 0. Whatever keeps the judge from judging (another family, another
question, a verifier that breaks) raises, and so becomes "no grade", never a zero (G9). Partial credit is the library's:
most families score an answer that merely contains the right one by the share of its length, wrong numbers included.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from miles_core.environments.reasoning_gym import TaskSource
from miles_core.environments.registry import make_own
from miles_core.environments.shell_puzzle import FAMILY, PuzzleSource, texts_digest
from miles_core.environments.terminal_task import FAMILY as TERMINAL
from miles_core.environments.verifiers_env import FAMILY as VERIFIERS
from miles_core.environments.verifiers_env import RubricVerifier
from miles_core.errors import RecipeError
from miles_core.grading.base import Verifier
from miles_core.grading.terminal import TerminalVerifier
from miles_core.recipe import EnvironmentSpec


class ReasoningGymVerifier:
    """Makes the entry again from the facts' seed and split, and calls its own score_answer. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.source = f"reasoning_gym/{spec.family}@{version('reasoning-gym')}"
        self._tasks = TaskSource(spec.family, spec.options, spec.prompt)

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


class ShellPuzzleVerifier:
    """Makes the puzzle again from the facts' seed and split: 1 for the right answer and, where asked for, the right folder."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._source = PuzzleSource(spec.options)
        self.source = f"{FAMILY}/level{self._source.level}"

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward, 0 or 1. Raises ValueError when the facts are of another puzzle."""
        answer = facts.get("final_answer")
        if answer is None:
            return 0.0
        puzzle = self._source.puzzle(task_seed, facts.get("split", "train"))
        if facts.get("puzzle_md5") != puzzle.digest:
            raise ValueError(
                f"task seed {task_seed}: the facts say puzzle_md5={facts.get('puzzle_md5')!r} but this grader makes "
                f"{puzzle.digest!r}; rollout and grader must run the same recipe and code ({self.source})"
            )
        if puzzle.files_after != puzzle.files and facts.get("files_md5") != texts_digest(puzzle.files_after):
            return 0.0
        return float(answer.removeprefix("./") == puzzle.answer)


def make_verifier(spec: EnvironmentSpec) -> Verifier:
    """The exact verifier of a recipe's environment. Raises RecipeError."""
    if spec.is_own:
        return _own_verifier(spec)
    if spec.family == TERMINAL:
        return TerminalVerifier(spec)
    if spec.family == VERIFIERS:
        return RubricVerifier(spec)
    return ShellPuzzleVerifier(spec) if spec.family == FAMILY else ReasoningGymVerifier(spec)


def _own_verifier(spec: EnvironmentSpec) -> Verifier:
    verifier: Verifier = make_own(spec, "verifier").verifier()
    missing = [name for name in ("source", "value") if not hasattr(verifier, name)]
    if missing:
        raise RecipeError(
            f"environment.family: {spec.family!r}.verifier() gave a {type(verifier).__name__} without {' and '.join(missing)}; "
            f"see Verifier in miles_core/grading/base.py"
        )
    return verifier
