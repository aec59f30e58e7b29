"""The engine, for callers in other threads: they wait, one thread drives it.

`complete` may be awaited in any event loop; `pump` belongs to the engine's thread, and only there the engine is touched. A
session's calls are sampled one behind another, in the slot that the session took with its first; a call that goes on from
the turn that was sampled last there feeds only what is new, any other has the conversation read anew. A session that waits
keeps its slot until another needs it. A caller that gives up leaves nothing behind: its turn is released, and the session's
next one is read anew. An engine that refuses or breaks a turn is EngineFailed; what it raises while it samples ends its own
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from miles_core.records import Version
from miles_core.rollout.engine import Engine, Finished, Request
from miles_core.rollout.sessions.errors import EngineFailed
from miles_core.rollout.sessions.history import Sampled
from miles_core.rollout.sessions.live import Ask


@dataclass(eq=False)
class _Call:
    key: str
    ask: Ask
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Sampled]
    admitted: Version


class EngineDoor:
    """See module."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._waiting: dict[str, deque[_Call]] = {}
        self._active: dict[str, _Call] = {}
        self._newest: dict[str, Sampled | None] = {}
        """Sessions that hold a slot, the one that was used longest ago first, and the turn that was sampled last in it."""
        self.prompt_tokens = 0
        """Tokens of conversations in front of the turns that were sampled ..."""
        self.read_tokens = 0
        """... and how many of them the engine had to read."""

    async def complete(self, key: str, ask: Ask) -> Sampled:
        """Samples one turn of a session. Raises EngineFailed."""
        loop = asyncio.get_running_loop()
        call = _Call(key, ask, loop, loop.create_future(), self._engine.version)
        self._post(lambda: self._waiting.setdefault(key, deque()).append(call))
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._post(lambda: self._drop(call))
            raise

    def release(self, key: str) -> None:
        """Ends a session: its slot is free, and calls that still wait fail."""
        self._post(lambda: self._release(key))

    def wake(self) -> None:
        """Ends a wait of the engine's thread."""
        self._wake.set()

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._wake.set()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Takes what was asked, and one step."""
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        for key in [key for key in self._waiting if key not in self._active]:
            self._start(key)
        if self._active:
            for turn in self._engine.step():
                self._finish(turn)

    def wait(self, timeout_s: float) -> None:
        """Until somebody asks for something, when nothing is sampled."""
        if not self._active:
            self._wake.wait(timeout_s)

    def _start(self, key: str) -> None:
        call = self._waiting[key][0]
        parent, ask = call.ask.at.parent, call.ask
        goes_on = parent is not None and self._newest.get(key) is parent.sampled
        if not goes_on and not self._make_room(key):
            return
        before = 0 if parent is None else parent.end
        tokens = ask.prompt if goes_on or parent is None else (*parent.tokens(), *ask.prompt)
        self._waiting[key].popleft()
        if not self._waiting[key]:
            del self._waiting[key]
        try:
            self._engine.add(Request(key, tokens, ask.max_new_tokens, ask.temperature, ask.seed))
        except ValueError as error:
            self._fail(call, f"the engine refused the turn: {error}")
            return
        self.prompt_tokens += before + len(ask.prompt)
        self.read_tokens += len(tokens)
        call.admitted = self._engine.version
        self._active[key] = call
        self._newest.pop(key, None)
        self._newest[key] = None

    def _make_room(self, key: str) -> bool:
        """A slot for a conversation that is read anew: its own, a free one, or that of the session which waits longest."""
        if key in self._newest:
            self._forget(key)
        if not self._engine.free_slots:
            idle = next((other for other in self._newest if other not in self._active), None)
            if idle is None:
                return False
            self._forget(idle)
        # Of several engines one may have died: who waits for a slot of the others comes first.
        return self._engine.free_slots > 0

    def _forget(self, key: str) -> None:
        del self._newest[key]
        self._engine.release(key)

    def _finish(self, turn: Finished) -> None:
        call = self._active.pop(turn.session_key)
        if turn.reason == "broken":
            self._forget(turn.session_key)
            self._fail(call, "the engine died and no other goes on with the session")
            return
        sampled = Sampled(
            tokens=tuple(turn.tokens.tolist()),
            logprobs=tuple(turn.logprobs.tolist()),
            versions=tuple(turn.versions),
            ended=turn.reason == "end",
            admitted=call.admitted,
            completed=self._engine.version,
            experts=turn.experts,
        )
        self._newest[turn.session_key] = sampled
        self._tell(call, lambda: call.answer.set_result(sampled))

    def _drop(self, call: _Call) -> None:
        """The caller gave up."""
        if self._active.get(call.key) is call:
            del self._active[call.key]
            self._forget(call.key)
        elif call in self._waiting.get(call.key, ()):
            self._waiting[call.key].remove(call)
            if not self._waiting[call.key]:
                del self._waiting[call.key]

    def _release(self, key: str) -> None:
        active = self._active.pop(key, None)
        for call in (*([active] if active else []), *self._waiting.pop(key, ())):
            self._fail(call, "the session ended")
        if key in self._newest:
            self._forget(key)

    def _fail(self, call: _Call, message: str) -> None:
        self._tell(call, lambda: call.answer.set_exception(EngineFailed(message)))

    @staticmethod
    def _tell(call: _Call, action: Callable[[], None]) -> None:
        def unless_done() -> None:
            if not call.answer.done():
                action()

        with contextlib.suppress(RuntimeError):  # its loop has closed: nobody waits
            call.loop.call_soon_threadsafe(unless_done)
