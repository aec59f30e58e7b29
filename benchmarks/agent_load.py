"""An agent's load without an agent: episodes that wait for their tools most of the time, so slots stay full and CPUs idle.

An environment by name (`family: agent_load:WaitingTools`, this folder in PYTHONPATH). `options: {tool_s: [2, 6]}`: each turn
but the last is answered after a drawn time of so many seconds. Sums are asked, since a small model knows their language; the
reward is only there to be told apart.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from miles_core.environments.base import Message, Split
from miles_core.recipe import EnvironmentSpec

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


def draw(seed: int, split: Split) -> tuple[int, int]:
    """The terms of a task; the first one is even in training and odd in evaluation."""
    return 2 * (seed % 40) + 10 + (split == "eval"), seed // 40 % 80 + 10


class WaitingTools:
    """Environment and verifier."""

    source = "agent_load@1"

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._turns = spec.max_turns
        self._shortest_s, self._longest_s = spec.options["tool_s"]

    def episode(self, seed: int, split: Split) -> WaitingEpisode:
        """A fresh episode."""
        return WaitingEpisode(draw(seed, split), split, self._turns, self._shortest_s, self._longest_s)

    def verifier(self) -> WaitingTools:
        """Judges, too."""
        return self

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """1 where the last turn ends in the digit of the sum."""
        return float(facts["last"][-1:] == str(sum(draw(task_seed, facts["split"])))[-1])


@dataclass
class WaitingEpisode:
    """So many turns, whatever the model writes."""

    terms: tuple[int, int]
    split: Split
    turns_left: int
    shortest_s: float
    longest_s: float
    last: str = ""

    def opening(self) -> tuple[Message, ...]:
        """The question."""
        return (Message("user", QUESTION.format(*self.terms)),)

    async def respond(self, content: str) -> tuple[Message, ...]:
        """A tool's result after a while; nothing after the last turn."""
        self.last, self.turns_left = content.strip(), self.turns_left - 1
        if not self.turns_left:
            return ()
        await asyncio.sleep(random.uniform(self.shortest_s, self.longest_s))
        return (Message("tool", str(sum(self.terms))),)

    def facts(self) -> dict[str, Any]:
        """The last turn."""
        return {"split": self.split, "last": self.last}

    async def close(self) -> None:
        """Holds nothing."""
