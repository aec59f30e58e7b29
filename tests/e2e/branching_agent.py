"""An agent with a sub-agent: it solves the task, and has a second conversation about it in the same session."""

from __future__ import annotations

import dataclasses
from typing import Any

from miles_core.environments import calculator_agent


def run(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
    """The facts of the first conversation, and the answer of the second."""
    facts = calculator_agent.run(base_url, api_key, task)
    twice = dataclasses.replace(task, messages=[*task.messages, *task.messages])
    return facts | {"second_answer": calculator_agent.run(base_url, api_key, twice).get("final_answer")}
