"""The session server over real HTTP, against a scripted engine: what an agent sees, and what is recorded of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from miles_core.records import Version
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.sessions.messages import as_stream
from miles_core.rollout.sessions.server import SessionServer
from tests.unit.session_world import ASK, CALL, LOOK, RENDERER, TOKENIZER, World, bearer


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert error["type"] == error["code"]
    return response.status_code, error["code"], error["message"]


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def made(*arguments: Any, **settings: Any) -> World:
        worlds.append(World(*arguments, **settings))
        return worlds[-1]

    yield made
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """For requests that are refused."""
    made = World()
    yield made
    made.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


def test_an_agents_loop_is_recorded_token_for_token(make: Callable[..., World]) -> None:
    world = make(lambda seen: "done" if "tool_response" in seen else f"I look.\n{CALL}")
    client = world.open()
    messages: list[dict[str, Any]] = [*ASK]
    message = client.say(messages, tools=[LOOK])
    assert message == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "call_1_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}],
    }
    messages += [message, {"role": "tool", "tool_call_id": "call_1_0", "content": "7"}]
    response = client.post(messages, tools=[LOOK]).json()
    choice, usage = response["choices"][0], response["usage"]
    assert (choice["message"]["content"], choice["finish_reason"], response["object"]) == ("done", "stop", "chat.completion")
    found = client.dump()
    first, second = found["turns"]
    tokens = [*first["prompt_ids"], *first["token_ids"], *second["prompt_ids"], *second["token_ids"]]
    assert str(TOKENIZER.decode(tokens)).endswith(
        f"<|im_start|>assistant\nI look.\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>"
    )
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] == len(tokens)
    assert world.engine.requests[1].tokens == tuple(second["prompt_ids"])  # only what is new
    assert found["mismatches"] == [] and (second["parent"], second["admitted"], second["finish_reason"]) == (0, [0, 0], "stop")
    trained = len(first["token_ids"]) + len(second["token_ids"])
    row = {"turns": [0, 1], "trained": [0, 1], "is_cut": False, "num_tokens": len(tokens), "num_sampled": trained}
    assert found["rows"] == [row]
    assert world.door.read_tokens == len(tokens) - trained and world.door.prompt_tokens > world.door.read_tokens


def test_a_stream_is_the_finished_turn(make: Callable[..., World]) -> None:
    world = make(lambda seen: CALL)
    plain = world.open().post(ASK, tools=[LOOK]).json()
    response = world.open().post(ASK, tools=[LOOK], stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunk, end, _ = response.text.split("\n\n")
    assert end == "data: [DONE]"
    found = json.loads(chunk.removeprefix("data: "))
    delta = found["choices"][0]["delta"]
    assert (found["object"], found["choices"][0]["finish_reason"]) == ("chat.completion.chunk", "tool_calls")
    assert [call.pop("index") for call in delta["tool_calls"]] == [0]
    assert delta == plain["choices"][0]["message"] and found["usage"] == plain["usage"]
    assert len(response.headers.get_list("server")) == len(response.headers.get_list("date")) == 1
    assert len(as_stream(plain)) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([], "a list `messages`"),
        ({"messages": "go"}, "a list `messages`"),
        ({"messages": []}, "give at least one"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: give text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and sound are not taken"),
        ({"messages": [{"role": "boss", "content": "go"}]}, r"messages\[0\]: give an object with a role"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": 1}]}, *ASK]}, r"tool_calls\[0\]: give \{id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}, *ASK]},
            "'1' is no JSON object",
        ),
        ({"messages": ASK, "temperature": 0.5}, r"temperature: 0\.5 is not what the run samples with \(1\.0\)"),
        ({"messages": ASK, "n": 2}, "n: 2 is not what the run samples with"),
        ({"messages": ASK, "stop": ["x"]}, "stop: "),
        ({"messages": ASK, "best_of": 2}, "best_of: this server does not know the field"),
        ({"messages": ASK, "max_tokens": 0}, "max_tokens: 0"),
        ({"messages": ASK, "tools": [{"name": "look"}]}, r"tools\[0\]: give \{type"),
        ({"messages": ASK, "tools": "look"}, "tools: give a list"),
    ],
)  # fmt: skip
def test_a_malformed_request_is_refused_with_what_to_do(world: World, body: Any, says: str) -> None:
    client = world.open()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = world.http.post(f"{client.path}/v1/chat/completions", content=content, headers=bearer(client.opened["key"]))
    status, code, message = error_of(response)
    assert (status, code) == (400, "invalid_request_error")
    assert says.replace("\\", "") in message
    assert client.dump()["turns"] == []


def test_fields_that_change_no_token_are_read_over(world: World) -> None:
    more = {"temperature": 1, "top_p": 1.0, "user": "me", "tool_choice": "auto", "stop": None, "max_tokens": 5}
    parts = [{"role": "developer", "content": "short"}, {"role": "user", "content": [{"type": "text", "text": "go"}]}]
    assert world.open().say(parts, **more)["content"] == "yes"
    assert world.engine.requests[0].max_new_tokens == 5


def test_who_may_use_a_session(world: World) -> None:
    one, other = world.open(), world.open()
    for method, path in (
        ("POST", f"{one.path}/v1/chat/completions"),
        ("GET", one.path),
        ("DELETE", one.path),
        ("POST", "/sessions"),
    ):
        status, code, message = error_of(world.http.request(method, path))
        assert (status, code) == (401, "no_session_key") and "POST http://127.0.0.1:" in message and "Bearer KEY" in message
        assert error_of(world.http.request(method, path, headers=bearer(other.opened["key"])))[:2] == (401, "no_session_key")
    for path in ("/v1/chat/completions", "/v1/models"):
        assert error_of(world.http.post(path))[0] == 401
        assert error_of(world.http.post(path, headers=bearer(one.opened["key"])))[0] == 404
    assert error_of(world.http.get("/sessions/none", headers=bearer(one.opened["key"])))[0] == 404
    assert world.http.get("/health").json() == {"sessions": 2}
    sealed = SessionServer(world.door, RENDERER)
    answer = httpx.post(f"{sealed.url}/sessions", headers=bearer(sealed.key), trust_env=False)
    assert error_of(answer)[0] == 400
    sealed.stop()


def test_a_session_that_was_deleted_is_gone(world: World) -> None:
    client = world.open()
    client.say(ASK)
    assert client.delete() == 200 and client.delete() == 404
    assert error_of(client.post(ASK))[:2] == (404, "no_such_session")
    world.until(lambda: not world.engine.held)


def test_a_delete_in_the_middle_of_a_turn_ends_the_call(world: World) -> None:
    client = world.open()
    world.engine.hold.set()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.post, ASK)
        world.until(lambda: world.engine.turns)
        assert client.delete() == 200
        status, code, message = error_of(call.result())
    assert (status, code) == (404, "no_such_session") and "ended while its turn was sampled" in message
    world.until(lambda: not world.engine.held)


def test_of_two_calls_at_once_on_a_line_one_is_recorded(world: World) -> None:
    client = world.open()
    world.engine.hold.set()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.post, ASK) for _ in range(2)]
        world.until(lambda: world.engine.turns)
        time.sleep(0.05)
        world.engine.hold.clear()
        statuses = sorted(call.result().status_code for call in calls)
    assert statuses == [200, 409] and len(client.dump()["turns"]) == 1


def test_calls_at_once_on_a_tree_are_siblings(make: Callable[..., World]) -> None:
    client = make(kind="branching").open()
    with ThreadPoolExecutor(4) as pool:
        words = [[{"role": "user", "content": str(number)}] for number in range(4)]
        assert [response.status_code for response in pool.map(client.post, words)] == [200] * 4
    found = client.dump()
    assert [turn["parent"] for turn in found["turns"]] == [None] * 4 and len(found["rows"]) == 4


def test_a_call_whose_client_is_gone_leaves_nothing(world: World) -> None:
    client = world.open()
    world.engine.hold.set()
    with pytest.raises(httpx.ReadTimeout):
        url, headers = f"{client.opened['base_url']}/chat/completions", bearer(client.opened["key"])
        httpx.post(url, json={"messages": ASK}, headers=headers, timeout=0.2, trust_env=False)
    world.until(lambda: not world.engine.held)
    world.engine.hold.clear()
    assert client.say(ASK)["content"] == "yes" and len(client.dump()["turns"]) == 1


def test_sessions_beyond_the_slots_take_turns_and_stay_apart(make: Callable[..., World]) -> None:
    """Each reads its conversation anew when another had its slot."""
    world = make(lambda seen: seen.rpartition("user\n")[2].partition("<")[0], slots=2)
    clients = [world.open() for _ in range(6)]

    def talk(number: int) -> list[str]:
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"{number} {turn}"})
            messages.append(clients[number].say(messages))
        return [message["content"] for message in messages[1::2]]

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(talk, range(6))) == [[f"{number} {turn}" for turn in range(4)] for number in range(6)]
    assert all(client.dump()["mismatches"] == [] and len(client.dump()["rows"]) == 1 for client in clients)
    assert len(world.engine.held) <= 2


def test_a_second_try_is_another_draw_and_is_read_anew(world: World) -> None:
    client = world.open()
    client.say(ASK)
    client.say(ASK)
    first, second = world.engine.requests
    assert first.tokens == second.tokens and first.seed != second.seed
    found = client.dump()
    assert found["taken_back"] == 1 and [turn["seq"] for turn in found["turns"]] == [1]


def test_the_limits_of_a_session(make: Callable[..., World]) -> None:
    world = make(lambda seen: "yes " * 30, max_new_tokens=8, max_turns=2)
    client = world.open()
    answer = client.post(ASK).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    status, code, message = error_of(client.post([*ASK, answer["message"], *ASK]))
    assert (status, code) == (409, "conflict") and "turn 1 was cut by a limit" in message
    world.engine.answer = lambda seen: "y"
    messages: list[Any] = [*ASK]
    for _ in range(2):
        messages += [client.say(messages), *ASK]
    assert "has had its 2 turns" in error_of(client.post(messages))[2]
    status, code, message = error_of(world.open().post([{"role": "user", "content": "12 " * 4000}]))
    assert (status, code) == (400, "context_length_exceeded") and "max_tokens=4000" in message
    status, code, message = error_of(world.open().post([{"role": "user", "content": "a tool without an end " * 400_000}]))
    assert (status, code) == (400, "context_length_exceeded") and "8800000 characters of ['user']" in message


def test_other_tools_than_in_the_beginning_are_refused(world: World) -> None:
    client = world.open()
    messages = [*ASK, client.say(ASK, tools=[LOOK]), *ASK]
    other = {"type": "function", "function": {"name": "other"}}
    assert "not those of the first request" in error_of(client.post(messages, tools=[other]))[2]
    assert client.say(messages)["content"] == "yes"


@pytest.mark.parametrize("fault", ["empty", "count", "nan", "long"])
def test_an_engine_that_gives_no_turn_is_not_recorded(world: World, fault: str) -> None:
    def spoil(turn: Finished) -> Finished:
        n = {"empty": 0, "count": len(turn.tokens), "nan": len(turn.tokens), "long": 300}[fault]
        tokens, logprobs = np.full(n, 5, dtype=np.int32), np.full(n, np.nan if fault == "nan" else -1, dtype=np.float32)
        return Finished(
            turn.session_key, tokens, logprobs[: n - 1] if fault == "count" else logprobs, (Version(0, 0),) * n, "end"
        )

    world.engine.spoil = spoil
    client = world.open()
    status, code, message = error_of(client.post(ASK))
    assert (status, code) == (502, "engine_failed") and "the engine gave no turn" in message
    assert client.dump()["turns"] == []


def test_an_engine_that_refuses_a_turn(world: World) -> None:
    def refuse(request: Request) -> None:
        raise ValueError("no room in the context")

    world.engine.add = refuse  # type: ignore[method-assign]
    assert error_of(world.open().post(ASK)) == (502, "engine_failed", "the engine refused the turn: no room in the context")


def test_the_diagnosis_names_what_differs_and_is_no_error(make: Callable[..., World]) -> None:
    """A model that writes a call with other blanks than the format does."""
    world = make(lambda seen: CALL.replace(", ", " ,") if "go on" not in seen else "done")
    client = world.open()
    message = client.say(ASK, tools=[LOOK])
    client.say([*ASK, message, {"role": "user", "content": "go on"}], tools=[LOOK])
    assert client.dump()["mismatches"] == ["assistant_text"]


def test_fifty_turns_cost_what_is_new(world: World) -> None:
    """Neither what the engine reads nor what is rendered grows with the turns behind."""
    client = world.open()
    messages: list[dict[str, Any]] = []
    for number in range(50):
        messages.append({"role": "user", "content": f"turn {number:02d}"})
        messages.append(client.say(messages))
    found = client.dump()
    rendered = [len(turn["prompt_ids"]) for turn in found["turns"]]
    assert [len(request.tokens) for request in world.engine.requests] == rendered
    assert len(set(rendered[1:])) == 1 and found["mismatches"] == []
    assert found["rows"][0]["num_tokens"] == sum(rendered) + sum(len(turn["token_ids"]) for turn in found["turns"])
