"""OpenAI's chat completions, in and out: what of them a session understands, and a sentence for what it does not.

What decides the distribution that is sampled (temperature, top_p, penalties and the like) is the run's, for the learner has to
know it: a request may leave it out or say the same. Other fields that change nothing of the tokens are read over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from miles_core.rollout.chat import ChatMessage, ToolCall, Tools, clean_text
from miles_core.rollout.sessions.errors import BadMessages

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ_OVER = frozenset({"model", "user", "metadata", "store", "stream_options", "parallel_tool_calls", "safety_identifier"})
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "seed": (None,),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "tool_choice": (None, "auto"),
    "response_format": (None, {"type": "text"}),
}
"""Fields that may only say what holds anyway."""
MODEL = "policy"


@dataclass(frozen=True)
class ChatRequest:
    """One request, understood."""

    messages: tuple[ChatMessage, ...]
    tools: Tools
    max_new_tokens: int | None
    stream: bool


class RequestReader:
    """Reads the requests of one session. Each repeats the whole conversation, so what it begins with like the one before, and
    the answer to that one, is compared and not read again."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._sent: list[Any] = []
        self._understood: tuple[ChatMessage, ...] = ()

    def read(self, body: Any) -> ChatRequest:
        """`body`: decoded JSON that nobody changes afterwards. Raises BadMessages with the field and what to do."""
        limit = _check_fields(body, self._temperature)
        sent = body["messages"]
        same = len(self._sent)
        if sent[:same] != self._sent:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._sent, sent, strict=False)))
        behind = tuple(_message(number, found) for number, found in enumerate(sent[same:], same))
        request = ChatRequest((*self._understood[:same], *behind), _tools(body.get("tools")), limit, bool(body.get("stream")))
        self._sent, self._understood = [*self._sent[:same], *sent[same:]], request.messages
        return request

    def expect(self, reply: ChatMessage) -> None:
        """The answer to the last request: most agents send it back as it came, and then it is this very message."""
        self._sent, self._understood = [*self._sent, as_json(reply)], (*self._understood, reply)


def _check_fields(body: Any, temperature: float) -> int | None:
    """The request's limit of new tokens."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise BadMessages("the body is a JSON object with a list `messages`, as for OpenAI's chat completions")
    for name, value in body.items():
        if name in ("messages", "tools", "stream", "max_tokens", "max_completion_tokens") or name in READ_OVER:
            continue
        allowed = (None, temperature) if name == "temperature" else FIXED.get(name)
        if allowed is None:
            raise BadMessages(f"{name}: this server does not know the field; leave it out")
        if value not in allowed:
            raise BadMessages(f"{name}: {value!r} is not what the run samples with ({allowed[-1]!r}); leave it out")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise BadMessages(f"max_tokens: {limit!r} is not a number of tokens; give 1 or more, or leave it out")
    return limit


def _message(number: int, found: Any) -> ChatMessage:
    where = f"messages[{number}]"
    if not isinstance(found, dict) or found.get("role") not in ROLES:
        raise BadMessages(f"{where}: give an object with a role, one of {', '.join(ROLES)}")
    role = ROLES[found["role"]]
    calls = found.get("tool_calls") or []
    if calls and role != "assistant":
        raise BadMessages(f"{where}: only the assistant calls tools")
    if not isinstance(calls, list):
        raise BadMessages(f"{where}.tool_calls: give a list")
    call_id = found.get("tool_call_id") if role == "tool" else None
    return ChatMessage(
        role=role,
        content=_content(where, found.get("content"), is_needed=role != "assistant"),
        tool_calls=tuple(_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)),
        tool_call_id=str(call_id or ""),
    )


def _content(where: str, content: Any, *, is_needed: bool) -> str:
    """Text, or text parts one behind another."""
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    if content is None and not is_needed:
        content = ""
    if not isinstance(content, str):
        raise BadMessages(f"{where}.content: give text (a string, or parts of type text); images and sound are not taken")
    return clean_text(content)


def _call(where: str, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not all(isinstance(function.get(name), str) for name in ("name", "arguments")):
        raise BadMessages(f"{where}: give {{id, type: function, function: {{name, arguments}}}}, arguments as JSON text")
    try:
        is_object = isinstance(json.loads(function["arguments"]), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise BadMessages(f"{where}.function.arguments: {function['arguments'][:80]!r} is no JSON object")
    return ToolCall(str(call.get("id") or ""), function["name"], clean_text(function["arguments"]))


def _tools(found: Any) -> Tools:
    if not found:
        return ()
    if not isinstance(found, list):
        raise BadMessages("tools: give a list")
    tools = []
    for number, tool in enumerate(found):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadMessages(f"tools[{number}]: give {{type: function, function: {{name, description, parameters}}}}")
        if not isinstance(function.get("parameters", {}), dict):
            raise BadMessages(f"tools[{number}].function.parameters: give a JSON schema, or leave it out")
        tools.append(clean_text(json.dumps(function, ensure_ascii=False)))
    return tuple(tools)


def as_json(message: ChatMessage) -> dict[str, Any]:
    """A message as OpenAI writes it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def completion(response_id: str, reply: ChatMessage, *, ended: bool, num_prompt: int, num_sampled: int) -> dict[str, Any]:
    """The answer to a request."""
    reason = ("tool_calls" if reply.tool_calls else "stop") if ended else "length"
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}
    choice = {"index": 0, "message": as_json(reply), "logprobs": None, "finish_reason": reason}
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }


def as_stream(answer: dict[str, Any]) -> Sequence[str]:
    """The events of a finished turn, as if it had been streamed: one chunk that holds it, one that ends it."""
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls")
    delta = dict(choice["message"])
    if calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    chunk = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunk |= {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": choice["finish_reason"]}]}
    chunk["usage"] = answer["usage"]
    return f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"
