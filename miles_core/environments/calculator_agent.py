"""An agent as a plain client loop: sums with a calculator, over the chat completions API and nothing else of this project.

With the `openai` package it is the same loop: OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(...).
Recipe: `environment.agent.run: miles_core.environments.calculator_agent:run`, a reasoning-gym family, `model.chat`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from miles_core.environments.calculator import calculate

MAX_TURNS = 8
CALCULATOR = {
    "name": "calculator",
    "description": "The value of an expression of whole numbers with +, - and *.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}
CLIENT = httpx.Client(timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None))
"""One for all samples of the process; the episode has a deadline, a call needs none."""


def run(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
    """Asks until the model answers without a call; its last words are the answer."""
    messages = list(task.messages)
    for _ in range(MAX_TURNS):
        message = ask(base_url, api_key, {"model": task.model, "messages": messages, "tools": [as_tool(CALCULATOR)]})
        messages.append(message)
        if not message.get("tool_calls"):
            return {"final_answer": (message["content"] or "").strip(), **counted(messages)}
        for call in message["tool_calls"]:
            expression = json.loads(call["function"]["arguments"]).get("expression", "")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": calculate(str(expression))})
    return counted(messages)


def ask(base_url: str, api_key: str, request: dict[str, Any]) -> dict[str, Any]:
    """The model's message. Raises httpx.HTTPStatusError."""
    answer = CLIENT.post(f"{base_url}/chat/completions", json=request, headers={"Authorization": f"Bearer {api_key}"})
    answer.raise_for_status()
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def as_tool(function: dict[str, Any]) -> dict[str, Any]:
    """A function as the API offers it."""
    return {"type": "function", "function": function}


def counted(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the model spoke, and what the calculator said."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    return {"turns": sum(message["role"] == "assistant" for message in messages), "tool_calls": results}
