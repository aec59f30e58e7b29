"""A session server, an engine that says what a function tells, and clients; for the tests of sessions."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

from miles_core.records import Version
from miles_core.rollout.chat import FAMILIES, FamilyRenderer
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.sessions.door import EngineDoor
from miles_core.rollout.sessions.live import SessionSpec
from miles_core.rollout.sessions.server import SessionServer
from tests.unit.tiny_models import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
MODELS_TOKENIZER = copy.deepcopy(TOKENIZER)
"""The engine's own: a tokenizer keeps settings between calls, and the server's thread uses the other one."""
RENDERER = FamilyRenderer(TOKENIZER, FAMILIES["qwen3"])
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
SPEC = SessionSpec(max_tokens=4000, max_new_tokens=200, max_turns=100, temperature=1.0, seed=3)
ASK = [{"role": "user", "content": "go"}]


class TalkingEngine:
    """An Engine whose turns say what `answer` makes of the conversation, in one step once `hold` is not set."""

    def __init__(self, answer: Callable[[str], str], slots: int) -> None:
        self.version = Version(0, 0)
        self.answer, self._slots = answer, slots
        self.held: dict[str, list[int]] = {}
        self.turns: dict[str, Request] = {}
        self.requests: list[Request] = []
        self.hold = threading.Event()
        self.spoil: Callable[[Finished], Finished] = lambda turn: turn

    @property
    def free_slots(self) -> int:
        return self._slots - len(self.held)

    @property
    def running(self) -> int:
        return len(self.turns)

    def add(self, request: Request) -> None:
        if request.session_key not in self.held and not self.free_slots:
            raise ValueError("no slot")
        if request.session_key in self.turns:
            raise ValueError("still sampled")
        self.requests.append(request)
        self.turns[request.session_key] = request
        self.held.setdefault(request.session_key, []).extend(request.tokens)

    def step(self) -> list[Finished]:
        if self.hold.is_set():
            time.sleep(0.002)
            return []
        done = [self._finish(request) for request in self.turns.values()]
        self.turns.clear()
        return done

    def _finish(self, request: Request) -> Finished:
        text = self.answer(str(MODELS_TOKENIZER.decode(self.held[request.session_key]))) + "<|im_end|>"
        ids = MODELS_TOKENIZER(text, add_special_tokens=False).input_ids[: request.max_new_tokens]
        self.held[request.session_key].extend(ids)
        reason: Any = "end" if ids[-1] == RENDERER.end_id else "length"
        logprobs = np.full(len(ids), -1, dtype=np.float32)
        return self.spoil(
            Finished(request.session_key, np.array(ids, dtype=np.int32), logprobs, (self.version,) * len(ids), reason)
        )

    def release(self, session_key: str) -> None:
        del self.held[session_key]
        self.turns.pop(session_key, None)

    def load_weights(self, tensors: Any, version: Version) -> None:
        raise NotImplementedError

    def logprobs(self, token_lists: Any, temperature: float = 1.0) -> Any:
        raise NotImplementedError


class World:
    """A server with its engine, driven by a thread."""

    def __init__(self, answer: Callable[[str], str] = lambda seen: "yes", *, slots: int = 4, **spec: Any) -> None:
        self.engine = TalkingEngine(answer, slots)
        self.door = EngineDoor(self.engine)
        self.server = SessionServer(self.door, RENDERER, SessionSpec(**(vars(SPEC) | spec)))
        self._over = threading.Event()
        self._driver = threading.Thread(target=self._drive, daemon=True)
        self._driver.start()
        self.http = httpx.Client(base_url=self.server.url, timeout=20, trust_env=False)

    def _drive(self) -> None:
        while not self._over.is_set():
            self.door.pump()
            self.door.wait(0.01)

    def close(self) -> None:
        self.http.close()
        self.server.stop()
        self._over.set()
        self._driver.join()

    def open(self) -> Client:
        return Client(self, self.http.post("/sessions", headers=bearer(self.server.key)).json())

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)


class Client:
    """An OpenAI client of one session."""

    def __init__(self, world: World, opened: dict[str, str]) -> None:
        self._http, self.opened = world.http, opened
        self.path = f"/sessions/{opened['session_id']}"

    def post(self, messages: Any, **more: Any) -> httpx.Response:
        body = {"model": "policy", "messages": messages, **more}
        return self._http.post(f"{self.opened['base_url']}/chat/completions", json=body, headers=bearer(self.opened["key"]))

    def say(self, messages: Any, **more: Any) -> dict[str, Any]:
        response = self.post(messages, **more)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    def dump(self) -> dict[str, Any]:
        response = self._http.get(self.path, headers=bearer(self.opened["key"]))
        found: dict[str, Any] = response.json()
        assert response.status_code == 200, found
        return found

    def delete(self) -> int:
        return self._http.delete(self.path, headers=bearer(self.opened["key"])).status_code


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
