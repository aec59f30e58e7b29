"""The HTTP server of one replica: OpenAI's chat completions over token-exact sessions.

    POST   /sessions                              -> id, key, base_url (with the server's own key)
    POST   /sessions/{id}/v1/chat/completions     one turn; `stream: true` gives the finished turn as one event
    GET    /sessions/{id}                         everything recorded, and the rows it would be trained as
    DELETE /sessions/{id}                         ends it; a turn that is being sampled is given up
    GET    /health

It listens on this host's loopback only, and every session has a key of its own, sent as `Authorization: Bearer KEY`, which is
what OpenAI clients do with an api_key. It runs in a thread, with the engine behind a door (door.py), so it answers while the
engine samples. Errors are JSON as OpenAI's, by kind (errors.py); a call whose client is gone is given up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from miles_core.rollout.session import Renderer
from miles_core.rollout.sessions.door import EngineDoor
from miles_core.rollout.sessions.errors import BadMessages, EngineFailed, NoKey, NoSession, SessionError
from miles_core.rollout.sessions.live import LiveSession, SessionSpec
from miles_core.rollout.sessions.messages import as_stream

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
START_S = 30.0
STOP_S = 2.0

log = logging.getLogger("miles")
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Opened(NamedTuple):
    """What a client needs to use a session."""

    session_id: str
    key: str
    base_url: str
    """Of an OpenAI client; its api_key is `key`."""


class SessionServer:
    """See module. `spec`: of sessions that are opened over HTTP; None: none are. Close it with `stop`."""

    def __init__(
        self,
        door: EngineDoor,
        renderer: Renderer,
        spec: SessionSpec | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door, self._renderer, self._spec, self._monotonic = door, renderer, spec, monotonic
        self._sessions: dict[str, LiveSession] = {}
        self._opened = 0
        self.key = secrets.token_urlsafe(24)
        """Opens sessions."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S) or self._error is not None:
            raise OSError(f"the session server does not listen on {HOST}: {self._error or f'not within {START_S} s'}")

    # --- any thread --------------------------------------------------------------------------------------------------

    def open(self, session_id: str, spec: SessionSpec) -> tuple[Opened, LiveSession]:
        """A new session. Raises ValueError for an id that is in use."""
        return self._call(lambda: (self._open(session_id, spec), self._sessions[session_id]))

    def close(self, session: LiveSession) -> None:
        """Ends a session: nothing is recorded any more. One that has ended before stays so, also when its id is used anew."""
        self._call(lambda: self._close(session))

    def mismatches(self, session: LiveSession) -> list[str]:
        """LiveSession.mismatches, in the only thread that uses the tokenizer."""
        return self._call(session.mismatches)

    def stop(self) -> None:
        """Ends all sessions and the server."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(2 * STOP_S)

    def _call(self, action: Callable[[], T]) -> T:
        """Does it in the server's thread. Raises OSError when the server has ended."""
        done: Future[T] = Future()

        def called() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001 - raised by result() in the caller's thread
                done.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(called)
        except RuntimeError as error:
            raise OSError("the session server has ended") from error
        return done.result()

    # --- the server's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[_refusals], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/sessions", self._post)
        app.router.add_get("/sessions/{id}", self._get)
        app.router.add_delete("/sessions/{id}", self._delete)
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{rest:.*}", self._elsewhere)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, 0).start()
            self.url = f"http://{HOST}:{runner.addresses[0][1]}"
            self._ready.set()
            await self._stopped.wait()
        finally:
            for session in list(self._sessions.values()):
                self._close(session)
            await runner.cleanup()

    def _open(self, session_id: str, spec: SessionSpec) -> Opened:
        if session_id in self._sessions:
            raise ValueError(f"session {session_id} is open already")
        key = secrets.token_urlsafe(24)
        self._sessions[session_id] = LiveSession(session_id, key, self._renderer, spec, monotonic=self._monotonic)
        return Opened(session_id, key, f"{self.url}/sessions/{session_id}/v1")

    def _close(self, session: LiveSession) -> None:
        if not session.is_closed:
            session.is_closed = True
            del self._sessions[session.session_id]
            self._door.release(session.session_id)

    def _find(self, request: web.Request) -> LiveSession:
        key = self._key(request)
        session = self._sessions.get(request.match_info["id"])
        if session is None:
            raise NoSession(
                f"there is no session {request.match_info['id']!r}: it never was, was deleted, or its episode has ended"
            )
        if not secrets.compare_digest(key, session.key.encode()):
            raise NoKey(f"this is not the key of session {session.session_id}. {self._how}")
        return session

    def _key(self, request: web.Request) -> bytes:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise NoKey(f"the request has no session key. {self._how}")
        return key.strip().encode()

    @property
    def _how(self) -> str:
        return (
            f"POST {self.url}/sessions gives an id, a key and a base_url (an agent of a run is handed base_url and key); send "
            f"the key as `Authorization: Bearer KEY`, an OpenAI client as its api_key"
        )

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if not secrets.compare_digest(self._key(request), self.key.encode()):
            raise NoKey("this key opens no sessions; the server's own does")
        if self._spec is None:
            raise BadMessages("sessions of this server are opened by its run, one for every sample")
        self._opened += 1
        return web.json_response(self._open(f"s{self._opened}", self._spec)._asdict(), status=201)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._find(request).dump())

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request)
        self._close(session)
        return web.json_response({"id": session.session_id, "deleted": True})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"sessions": len(self._sessions)})

    async def _elsewhere(self, request: web.Request) -> web.StreamResponse:
        self._key(request)
        raise NoSession(f"{request.method} {request.path} is not served here. {self._how}")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise BadMessages(f"the body is no JSON: {error}") from error
        understood = session.reader.read(body)
        answer = await self._turn(session, understood)
        if not understood.stream:
            return web.json_response(answer)
        return web.Response(text="".join(as_stream(answer)), content_type="text/event-stream")

    async def _turn(self, session: LiveSession, understood: Any) -> dict[str, Any]:
        ask = session.prepare(understood)
        began = session.pace.begin()
        try:
            sampled = await self._door.complete(session.session_id, ask)
        except EngineFailed as error:
            if session.is_closed:
                raise NoSession(f"session {session.session_id} ended while its turn was sampled") from error
            session.broken = str(error)
            raise
        finally:
            session.pace.end(began)
        return session.commit(ask, sampled)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SessionError as error:
        return _as_error(error.status, error.kind, str(error))
    except web.HTTPException as error:
        return _as_error(error.status, "invalid_request_error", error.reason)


def _as_error(status: int, kind: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": kind}}, status=status)
