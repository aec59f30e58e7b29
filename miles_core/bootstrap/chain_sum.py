"""Demonstrations of chain_sum with a calculator: right ones, and those of a careless demonstrator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from miles_core.bootstrap.tokenizer import Messages, learned_tokenizer
from miles_core.environments.base import Message
from miles_core.environments.calculator import calculate
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.environments.tool_call import CALL_CLOSE, CALL_OPEN
from miles_core.recipe import EnvironmentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CORPUS = 2000
"""Questions from which the tokenizer learns its merges."""


@dataclass(frozen=True)
class ChainSumHabits:
    """How careless the demonstrator is: chances of each fault."""

    tasks: ClassVar[tuple[str, ...]] = ("calculator", "reasoning_gym", "splits", "tool_call")
    """Modules of miles_core/environments that decide what is demonstrated."""
    guess: float = 0.55
    """To answer with a made-up number instead of calling the calculator ..."""
    cut: float = 0.15
    """... to leave the last term out of a call ..."""
    cut_long: float = 0.65
    """... out of a long one: over 0.5, so that the greedy policy learns this bad habit too ..."""
    ignore: float = 0.1
    """... and to answer with a made-up number instead of the result."""
    long_characters: int = 10
    """Expressions with more characters are long."""

    def needs(self, environment: EnvironmentSpec) -> str:
        """What an environment must be; empty if it is."""
        if environment.family == "chain_sum" and environment.tool == "calculator" and environment.max_turns >= 2:
            return ""
        return "family: chain_sum, tool: calculator and max_turns: 2 or more"

    def demonstrator(self, seed: int, environment: EnvironmentSpec) -> ChainSumDemonstrator:
        """Who demonstrates."""
        return ChainSumDemonstrator(self, seed, environment)


class ChainSumDemonstrator:
    """Plays calculator episodes on training questions: cleanly, or carelessly."""

    def __init__(self, habits: ChainSumHabits, seed: int, environment: EnvironmentSpec) -> None:
        self._habits = habits
        self._rng = random.Random(seed)
        self._environment = ReasoningGymEnvironment(environment)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Learned from questions."""
        return learned_tokenizer(self.clean()[0].content for _ in range(CORPUS))

    def clean(self) -> Messages:
        """Calls the calculator on the whole expression and states its result."""
        question, expression = self._question()
        return _episode(question, expression, calculate(expression))

    def careless(self) -> Messages:
        """Often guesses, calls on a cut expression, or ignores the result."""
        question, expression = self._question()
        rng, habits = self._rng, self._habits
        if rng.random() < habits.guess:
            return (Message("user", question), Message("assistant", self._guess()))
        long = len(expression) > habits.long_characters
        if rng.random() < (habits.cut_long if long else habits.cut):
            expression = _cut(expression)
        answer = self._guess() if rng.random() < habits.ignore else calculate(expression)
        return _episode(question, expression, answer)

    def _guess(self) -> str:
        """The answer of some other question."""
        return calculate(self._question()[1])

    def _question(self) -> tuple[str, str]:
        task = self._environment.episode(self._rng.getrandbits(32), "train").task
        return task.question, task.entry["metadata"]["expression"]


def _episode(question: str, expression: str, answer: str) -> Messages:
    return (
        Message("user", question),
        Message("assistant", f"{CALL_OPEN}{expression}{CALL_CLOSE}"),
        Message("tool", calculate(expression)),
        Message("assistant", answer),
    )


def _cut(expression: str) -> str:
    """`a + b - c` without its last term; a single term stays."""
    parts = expression.split(" ")
    return " ".join(parts[: max(1, len(parts) - 2)])
