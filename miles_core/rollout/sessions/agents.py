"""Drives agents: a sample is a session and one run of the recipe's agent, in a thread of its own, against it.

The agent is a function (`environment.agent.run: package.module:function`), plain or async:

    def run(base_url: str, api_key: str, task: AgentTask) -> dict

It talks to the policy as any OpenAI client does (base_url and api_key are those of its session), brings its own tools, and
returns facts; they join those of the environment's episode and are what the verifier sees. It does not judge.

Invariants: as for Sampler, whose place this takes (a finished trajectory frees its slot at once, an episode ends by its
deadline, an episode is closed exactly once, when its agent has let go). Failure kinds: an agent that raises, or ends without
a turn of the model, gives `failed` (environment), unless the session had reached a limit before: then the episode is
`truncated`, with the turns that it has. A deadline, a broken engine and what the machine refused the agent (a connection,
memory, room on a disk) give `failed` (infrastructure). A thread cannot be ended: an agent that hangs loses its session, and
with it whatever it asks for next.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from miles_core.environments.base import Environment, Episode, EpisodeFailed, Split
from miles_core.environments.sandbox import SandboxBroken
from miles_core.named import load_named
from miles_core.recipe import EnvironmentSpec
from miles_core.records import trajectory_id
from miles_core.rollout.engine import Engine
from miles_core.rollout.sampler import IDLE_WAIT_S, SampleRequest
from miles_core.rollout.session import Renderer, empty_columns
from miles_core.rollout.sessions.assembly import Row, episode_columns
from miles_core.rollout.sessions.door import EngineDoor
from miles_core.rollout.sessions.errors import SessionError
from miles_core.rollout.sessions.live import LiveSession, SessionSpec
from miles_core.rollout.sessions.messages import MODEL
from miles_core.rollout.sessions.server import Opened, SessionServer
from miles_core.trajectories.schema import FailureKind, Status, Trajectory

MACHINE_FAULTS = (ConnectionError, TimeoutError, MemoryError, SandboxBroken, httpx.TransportError)
MACHINE_ERRNOS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO, errno.ESTALE,
})  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentTask:
    """What an agent is to do."""

    messages: list[dict[str, Any]]
    """The task, as messages of a chat completion; an agent may put its own before and behind them."""
    seed: int
    split: Split
    options: dict[str, Any] = field(default_factory=dict)
    """`environment.options` of the recipe."""
    model: str = MODEL
    """What an OpenAI client wants as `model`."""


Agent = Callable[[str, str, AgentTask], Any]


@dataclass(eq=False)
class _Live:
    """A sample that holds a slot."""

    request: SampleRequest
    episode: Episode
    opened: Opened
    session: LiveSession
    began: float
    """Monotonic seconds."""
    started_s: float
    thread: threading.Thread | None = None


@dataclass(frozen=True)
class _Outcome:
    """What came of an agent's run."""

    live: _Live
    facts: dict[str, Any]
    error: Exception | None


class AgentSampler:
    """See module; used like Sampler. `producer` and `attempt` name the writer of the trajectories; the clocks are seconds."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        renderer: Renderer,
        spec: EnvironmentSpec,
        *,
        producer: str,
        attempt: int,
        monotonic: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        if spec.agent is None:
            raise ValueError("environment.agent is not set")
        self._environment, self._spec, self._agent_spec = environment, spec, spec.agent
        self._agent: Agent = load_named("environment.agent.run", spec.agent.run)
        self._producer, self._attempt = producer, attempt
        self._monotonic, self._unix_time = monotonic, unix_time
        self._slots = engine.free_slots
        self._door = EngineDoor(engine)
        self._server = SessionServer(self._door, renderer, monotonic=monotonic)
        self._live: dict[str, _Live] = {}
        self._threads: set[threading.Thread] = set()
        self._ended: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._done: list[Trajectory] = []

    @property
    def in_flight(self) -> int:
        """Samples that hold a slot."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        """Samples that may be submitted now."""
        return self._slots - len(self._live)

    def submit(self, request: SampleRequest) -> None:
        """Starts a sample. Raises ValueError if its id runs already or no slot is free."""
        if request.sample_id in self._live or not self.free_slots:
            raise ValueError(f"cannot start {request.sample_id}: {self.free_slots} slots free, {self.in_flight} in flight")
        now_s = self._unix_time()
        try:
            episode = self._environment.episode(request.task_seed, request.split)
            messages = [{"role": message.role, "content": message.content} for message in episode.opening()]
        except EpisodeFailed as error:
            self._emit(request, empty_columns(), now_s, "failed", error.kind, {"error": str(error)})
            return
        spec, agent = self._spec, self._agent_spec
        session_spec = SessionSpec(
            spec.max_tokens, spec.max_new_tokens, spec.max_turns, request.temperature, request.seed, agent.history, agent.replay
        )
        opened, session = self._server.open(request.sample_id.replace("/", "."), session_spec)
        live = _Live(request, episode, opened, session, self._monotonic(), now_s)
        task = AgentTask(messages, request.task_seed, request.split, spec.options)
        live.thread = threading.Thread(target=self._run, args=(live, task), name=f"agent {request.sample_id}", daemon=True)
        self._live[request.sample_id] = live
        self._threads.add(live.thread)
        live.thread.start()

    def _run(self, live: _Live, task: AgentTask) -> None:
        """An agent's thread."""
        facts: dict[str, Any] = {}
        error: Exception | None = None
        try:
            facts = self._facts(self._agent(live.opened.base_url, live.opened.key, task))
        except Exception as caught:  # noqa: BLE001 - an agent is foreign code; any failure of it is the sample's
            error = caught
            facts = caught.facts if isinstance(caught, EpisodeFailed) else {}
        live.session.pace.stop()
        try:
            self._server.close(live.session)
            facts = {**live.episode.facts(), **facts, "session": self._figures(live.session)}
        except OSError as gone:
            log.warning("agent let go too late sample=%s: %s", live.request.sample_id, gone)
        try:
            asyncio.run(live.episode.close())
        except EpisodeFailed as caught:
            error = error or caught
        self._ended.put(_Outcome(live, facts, error))
        self._door.wake()

    def _facts(self, returned: Any) -> dict[str, Any]:
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        if not isinstance(returned, dict):
            raise TypeError(f"{self._agent_spec.run} returned {type(returned).__name__}; an agent returns a dict of facts")
        return returned

    def _figures(self, session: LiveSession) -> dict[str, Any]:
        """What the history of a session looks like."""
        history = session.history
        mismatches = self._server.mismatches(session)
        return {"turns": len(history.checkpoints), "taken_back": history.taken_back, "mismatches": mismatches}

    async def tick(self) -> list[Trajectory]:
        """One decode step; returns the trajectories that finished. Pauses at most IDLE_WAIT_S when nothing decodes."""
        self._door.pump()
        if not self._done and self._ended.empty():
            self._door.wait(IDLE_WAIT_S)
        while not self._ended.empty():
            self._end(self._ended.get())
        self._enforce_deadlines()
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        done, self._done = self._done, []
        return done

    async def cancel_all(self) -> None:
        """Gives up every sample without a trajectory, waits within a deadline for the agents, and ends the server."""
        for live in self._live.values():
            self._server.close(live.session)
        self._live.clear()
        until = time.monotonic() + self._spec.tool_deadline_s
        while any(thread.is_alive() for thread in self._threads):
            if time.monotonic() > until:
                log.warning("agents did not let go within tool_deadline_s=%s", self._spec.tool_deadline_s)
                break
            self._door.pump()
            self._door.wait(IDLE_WAIT_S)
        self._server.stop()
        self._door.pump()

    def _enforce_deadlines(self) -> None:
        for live in list(self._live.values()):
            error = self._passed(live)
            if error:
                del self._live[live.request.sample_id]
                self._server.close(live.session)
                facts = live.episode.facts() | {"error": error}
                self._emit(live.request, empty_columns(), live.started_s, "failed", "infrastructure", facts)

    def _passed(self, live: _Live) -> str:
        """The deadline that an episode has passed, in words; empty if none."""
        spec, pace, age_s = self._spec, live.session.pace, self._monotonic() - live.began
        if age_s > spec.episode_deadline_s:
            return f"the episode took {age_s:.3f} s, more than episode_deadline_s={spec.episode_deadline_s}"
        if pace.idle_s > spec.tool_deadline_s:
            return f"the agent neither asked for a turn nor ended within tool_deadline_s={spec.tool_deadline_s}"
        if spec.turn_deadline_s is not None and pace.turn_s > spec.turn_deadline_s:
            return f"a turn of the model was not sampled within turn_deadline_s={spec.turn_deadline_s}"
        return ""

    def _end(self, outcome: _Outcome) -> None:
        """An agent let go: its trajectory, unless a deadline gave one before."""
        live = outcome.live
        if self._live.get(live.request.sample_id) is not live:
            return
        del self._live[live.request.sample_id]
        try:
            rows = live.session.rows()
            columns = episode_columns(live.session.history, self._spec.max_tokens)
            status, kind, error = _judged(outcome, rows)
        except SessionError as broken:
            columns, status, kind, error = empty_columns(), "failed", "infrastructure", str(broken)
        facts = outcome.facts if not error else outcome.facts | {"error": error}
        self._emit(live.request, columns, live.started_s, status, kind, facts)

    def _emit(
        self,
        request: SampleRequest,
        columns: dict[str, Any],
        started_s: float,
        status: Status,
        kind: FailureKind,
        facts: dict[str, Any],
    ) -> None:
        self._done.append(
            Trajectory(
                trajectory_id=trajectory_id(request.sample_id, self._producer, self._attempt),
                sample_id=request.sample_id,
                group_id=request.group_id,
                order_id=request.order_id,
                producer=self._producer,
                producer_attempt=self._attempt,
                task_seed=request.task_seed,
                temperature=request.temperature,
                status=status,
                failure_kind=kind,
                facts=facts,
                created_s=request.created_s or started_s,
                started_s=started_s,
                finished_s=self._unix_time(),
                **columns,
            )
        )


async def _awaited(returned: Any) -> Any:
    return await returned


def _judged(outcome: _Outcome, rows: list[Row]) -> tuple[Status, FailureKind, str]:
    """Status, failure kind and the words for it."""
    session, error = outcome.live.session, outcome.error
    if session.broken:
        return "failed", "infrastructure", session.broken
    if rows and (session.limit or any(row.is_cut for row in rows)):
        return "truncated", "none", session.limit
    if error is not None:
        return "failed", _fault_of(error), f"{type(error).__name__}: {error}"
    if not rows:
        return "failed", "environment", session.limit or "the agent ended without a turn of the model"
    return "complete", "none", ""


def _fault_of(error: BaseException) -> FailureKind:
    """Whose fault it is that an agent raised, by the error or by what led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EpisodeFailed):
            return cause.kind
        if isinstance(cause, MACHINE_FAULTS) or (isinstance(cause, OSError) and cause.errno in MACHINE_ERRNOS):
            return "infrastructure"
        cause = cause.__cause__
    return "environment"
