"""What a session's reader keeps of the request before (miles_core/rollout/sessions/messages.py)."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from miles_core.rollout.chat import ChatMessage, ToolCall
from miles_core.rollout.sessions.errors import BadMessages
from miles_core.rollout.sessions.messages import RequestReader


def talk(turns: int) -> list[Any]:
    """A conversation with a call in every turn."""
    found: list[Any] = [{"role": "user", "content": "look"}]
    for number in range(turns):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": f'{{"page": {number}}}'}}
        found += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        found += [{"role": "tool", "tool_call_id": f"c{number}", "content": f"page {number}"}]
    return found


def test_what_was_there_is_not_read_again_and_what_differs_is() -> None:
    reader = RequestReader(1.0)
    first = reader.read({"messages": talk(9)}).messages
    longer = reader.read({"messages": talk(10)}).messages
    assert len(longer) == len(first) + 2 and all(map(lambda one, other: one is other, first, longer))
    changed = talk(10)
    changed[4]["content"] = "page 1, again"
    found = reader.read({"messages": changed}).messages
    assert found[4].content == "page 1, again" and found[3] is longer[3] and found[5:] == longer[5:]


def answer(number: int) -> ChatMessage:
    """What the model says in a turn of `talk`."""
    return ChatMessage("assistant", "", (ToolCall(f"c{number}", "look", f'{{"page": {number}}}'),))


def test_an_answer_that_comes_back_is_the_one_that_was_given() -> None:
    reader, given = RequestReader(1.0), answer(2)
    reader.read({"messages": talk(2)})
    reader.expect(given)
    assert reader.read({"messages": talk(3)}).messages[5] is given


def test_any_order_of_requests_is_understood_as_if_each_were_the_first() -> None:
    """Retries, branches, shorter and refused requests between them, some answered, 500 of them."""
    rng = random.Random(0)
    reader, refused = RequestReader(1.0), 0
    for _ in range(500):
        sent = talk(rng.randrange(1, 8))
        for _ in range(rng.randrange(3)):
            sent[rng.randrange(len(sent))]["content"] = rng.choice(["", "other", 7, None, [{"type": "text", "text": "other"}]])
        outcomes = []
        for one in (reader, RequestReader(1.0)):
            try:
                outcomes.append(repr(one.read({"messages": copy.deepcopy(sent)})))
            except BadMessages as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        if rng.random() < 0.5:
            reader.expect(rng.choice([answer(len(sent) // 2), answer(7), ChatMessage("assistant", "other")]))
        refused += outcomes[0].startswith("messages[")
    assert 50 < refused < 450


def test_a_refused_message_is_named_by_its_place_in_the_request() -> None:
    reader = RequestReader(1.0)
    reader.read({"messages": talk(2)})
    with pytest.raises(BadMessages, match=r"messages\[5\]"):
        reader.read({"messages": [*talk(2), {"role": "nobody"}]})
