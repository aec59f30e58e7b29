"""An environment of the verifiers package, as people write one: sums, two tries, a rubric of two functions."""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


class TwoTries(vf.MultiTurnEnv):  # type: ignore[misc, unused-ignore]
    """A wrong first answer is told so; then the model answers once more."""

    async def env_response(self, messages: Any, state: Any, **more: Any) -> list[dict[str, str]]:
        """What stands behind an answer."""
        return [{"role": "user", "content": state["prompt"][-1]["content"]}]

    @vf.stop  # type: ignore[untyped-decorator, unused-ignore]
    async def is_right(self, state: Any) -> bool:
        """The end of an episode."""
        steps = state["trajectory"]
        return bool(steps) and said(steps[-1]["completion"]) == state["answer"]


def said(completion: Any) -> str:
    """The model's last words."""
    return str(completion[-1]["content"] or "").strip() if completion else ""


def is_correct(completion: Any, answer: str) -> float:
    """The last answer is the sum."""
    return float(said(completion) == answer)


def is_quick(state: Any) -> float:
    """One try was enough."""
    return float(len(state["trajectory"]) == 1)


def load_environment(rows: int = 400, seed: int = 0) -> vf.Environment:
    """What the package asks of a module."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 99), draw.randint(1, 9)) for _ in range(rows)]
    data = Dataset.from_list([
        {"prompt": [{"role": "user", "content": QUESTION.format(a, b)}], "answer": str(a + b)} for a, b in dict.fromkeys(pairs)
    ])  # fmt: skip
    rubric = vf.Rubric(funcs=[is_correct, is_quick], weights=[1.0, 0.25])
    return TwoTries(dataset=data, rubric=rubric, max_turns=2)
