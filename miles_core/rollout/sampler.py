"""Drives many episodes at once: one decode step of the engine, then whatever the environment has answered, per tick.

Invariants: a finished trajectory frees its slot at once (sources R1); the samples of a group need not run together; every
environment call and every episode ends by its deadline; an episode that was made is closed exactly once. Failure kinds are
told apart: an environment that broke or was too slow gives status `failed`; a turn or a history that had to be cut gives
`truncated`; everything else is `complete`, whatever the model wrote. An exception that is not EpisodeFailed is a bug of the
environment and is raised out of tick().
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from miles_core.environments.base import Environment, Episode, EpisodeFailed, Message, Split
from miles_core.recipe import EnvironmentSpec
from miles_core.rollout.engine import Engine, Finished, Request
from miles_core.rollout.session import ContextOverflow, Renderer, Session, empty_columns
from miles_core.trajectories.schema import FailureKind, Status, Trajectory

IDLE_WAIT_S = 0.02
"""Longest pause of a tick when every episode waits for its environment."""

log = logging.getLogger(__name__)
Answer = tuple[Message, ...]


@dataclass(frozen=True)
class SampleRequest:
    """One sample of a work order."""

    sample_id: str
    group_id: str
    order_id: str
    task_seed: int
    split: Split
    seed: int
    """Of the sampling; differs between the samples of a group."""
    temperature: float
    created_s: float = 0.0
    """Unix seconds: order read."""


@dataclass
class _Live:
    """An episode that holds a slot."""

    request: SampleRequest
    episode: Episode
    session: Session
    began: float
    """Monotonic seconds."""
    started_s: float
    asked: float = 0.0
    """Monotonic seconds at which the model's newest turn was asked for."""
    answer: asyncio.Task[Answer] | None = None
    answer_due: float = 0.0
    """Monotonic seconds by which `answer` must be there."""


class Sampler:
    """See module. `producer` and `attempt` name the writer of the trajectories; the clocks are seconds."""

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
        self._engine = engine
        self._environment = environment
        self._renderer = renderer
        self._spec = spec
        self._producer = producer
        self._attempt = attempt
        self._monotonic = monotonic
        self._unix_time = unix_time
        self._live: dict[str, _Live] = {}
        self._closing: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._done: list[Trajectory] = []

    @property
    def in_flight(self) -> int:
        """Episodes that hold a slot."""
        return len(self._live)

    @property
    def free_slots(self) -> int:
        """Samples that may be submitted now."""
        return self._engine.free_slots

    def submit(self, request: SampleRequest) -> None:
        """Starts a sample. Call inside the event loop. Raises ValueError if its id runs already or no slot is free."""
        if request.sample_id in self._live or not self.free_slots:
            raise ValueError(f"cannot start {request.sample_id}: {self.free_slots} slots free, {self.in_flight} in flight")
        now_s = self._unix_time()
        try:
            episode = self._environment.episode(request.task_seed, request.split)
        except EpisodeFailed as error:
            self._refuse(request, now_s, error.kind, {"error": str(error)})
            return
        try:
            session = Session(self._renderer, episode.opening(), self._spec.max_tokens)
        except (ContextOverflow, EpisodeFailed) as error:
            kind = error.kind if isinstance(error, EpisodeFailed) else "environment"
            self._refuse(request, now_s, kind, {**episode.facts(), "error": str(error)})
            self._close(request.sample_id, episode, None)
            return
        live = _Live(request, episode, session, self._monotonic(), now_s)
        self._live[request.sample_id] = live
        self._ask(live, tuple(session.tokens))

    async def tick(self) -> list[Trajectory]:
        """One decode step and what the environment answered; returns the trajectories that finished.

        Pauses at most IDLE_WAIT_S when nothing decodes.
        """
        for turn in self._engine.step():
            self._sampled(self._live[turn.session_key], turn)
        await self._let_environment_run()
        for live in [live for live in self._live.values() if live.answer and live.answer.done()]:
            self._answered(live)
        self._enforce_deadlines()
        self._reap()
        done, self._done = self._done, []
        return done

    async def cancel_all(self) -> None:
        """Gives up every episode without a trajectory and waits, within a deadline, until they are closed."""
        for live in list(self._live.values()):
            self._leave(live)
        if self._closing:
            await asyncio.wait(list(self._closing), timeout=self._spec.tool_deadline_s)
        self._reap(give_up=True)

    def _ask(self, live: _Live, tokens: tuple[int, ...]) -> None:
        request = live.request
        limit = min(self._spec.max_new_tokens, live.session.room)
        live.asked = self._monotonic()
        self._engine.add(Request(request.sample_id, tokens, limit, request.temperature, request.seed))

    def _sampled(self, live: _Live, turn: Finished) -> None:
        """A model turn ended: it was cut, or the environment answers it; or its engine died."""
        if turn.reason == "broken":
            self._finish(live, "failed", "infrastructure", "the engine died and no other goes on with the session")
            return
        text = live.session.record(turn.tokens.tolist(), turn.logprobs.tolist(), turn.versions, turn.experts)
        if not live.session.ended:
            self._finish(live, "truncated")
            return
        live.answer = asyncio.create_task(live.episode.respond(text))
        live.answer_due = self._monotonic() + self._spec.tool_deadline_s

    async def _let_environment_run(self) -> None:
        """Gives the answers one turn of the event loop; waits for one only when there is nothing to decode."""
        answers = [live.answer for live in self._live.values() if live.answer]
        if self._engine.running or not answers:
            await asyncio.sleep(0)
        else:
            await asyncio.wait(answers, timeout=IDLE_WAIT_S, return_when=asyncio.FIRST_COMPLETED)

    def _answered(self, live: _Live) -> None:
        """The environment ended the episode, broke, or wants another turn."""
        answer, live.answer = live.answer, None
        assert answer is not None
        try:
            messages = answer.result()
            if not messages:
                self._finish(live, "complete")
                return
            appended = live.session.append(messages)
        except EpisodeFailed as error:
            self._finish(live, "failed", error.kind, str(error))
        except ContextOverflow as error:
            self._finish(live, "truncated", "none", str(error))
        else:
            self._ask(live, appended)

    def _enforce_deadlines(self) -> None:
        now, spec = self._monotonic(), self._spec
        for live in list(self._live.values()):
            age_s = now - live.began
            error = None
            if age_s > spec.episode_deadline_s:
                error = f"the episode took {age_s:.3f} s, more than episode_deadline_s={spec.episode_deadline_s}"
            elif live.answer and now > live.answer_due:
                error = f"the environment did not answer a turn within tool_deadline_s={spec.tool_deadline_s}"
            elif not live.answer and spec.turn_deadline_s is not None and now - live.asked > spec.turn_deadline_s:
                error = f"a turn of the model was not sampled within turn_deadline_s={spec.turn_deadline_s}"
            if error is not None:
                self._finish(live, "failed", "infrastructure", error)

    def _finish(self, live: _Live, status: Status, kind: FailureKind = "none", error: str | None = None) -> None:
        facts = live.episode.facts() | ({} if error is None else {"error": error})
        columns = live.session.columns()
        self._emit(live.request, columns, started_s=live.started_s, status=status, kind=kind, facts=facts)
        self._leave(live)

    def _refuse(self, request: SampleRequest, started_s: float, kind: FailureKind, facts: dict[str, Any]) -> None:
        """An episode that never began: a trajectory without tokens says so."""
        self._emit(request, empty_columns(), started_s=started_s, status="failed", kind=kind, facts=facts)

    def _leave(self, live: _Live) -> None:
        """Frees the slot at once; the episode is closed in the background."""
        sample_id = live.request.sample_id
        del self._live[sample_id]
        self._engine.release(sample_id)
        self._close(sample_id, live.episode, live.answer)

    def _close(self, sample_id: str, episode: Episode, answer: asyncio.Task[Answer] | None) -> None:
        task = asyncio.create_task(_close_episode(episode, answer))
        self._closing[task] = (sample_id, self._monotonic() + self._spec.tool_deadline_s)

    def _reap(self, *, give_up: bool = False) -> None:
        """Forgets closed episodes. One that does not close may leak, but its trajectory is good: a warning."""
        now = self._monotonic()
        for task, (sample_id, due) in list(self._closing.items()):
            if not task.done() and now <= due and not give_up:
                continue
            del self._closing[task]
            if not task.done():
                task.cancel()
                log.warning("episode not closed within tool_deadline_s=%s sample=%s", self._spec.tool_deadline_s, sample_id)
            elif isinstance(error := task.exception(), EpisodeFailed):
                log.warning("episode failed to close sample=%s error=%s", sample_id, error)
            elif error is not None:
                raise error

    def _emit(
        self,
        request: SampleRequest,
        columns: dict[str, Any],
        *,
        started_s: float,
        status: Status,
        kind: FailureKind,
        facts: dict[str, Any],
    ) -> None:
        self._done.append(
            Trajectory(
                trajectory_id=f"{request.sample_id}@{self._producer}.a{self._attempt}",
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


async def _close_episode(episode: Episode, answer: asyncio.Task[Answer] | None) -> None:
    """Ends an open answer first, so that close() never meets a call still at work."""
    if answer is not None:
        answer.cancel()
        await asyncio.wait([answer])
        if not answer.cancelled():
            answer.exception()  # seen; it came too late to count
    await episode.close()


def sample_many(
    engine: Engine,
    environment: Environment,
    renderer: Renderer,
    spec: EnvironmentSpec,
    seeds: Iterable[int],
    *,
    split: Split,
    temperature: float = 0.0,
    draw: int = 0,
    producer: str = "evaluator",
    attempt: int = 0,
    make: Callable[..., Any] = Sampler,
) -> list[Trajectory]:
    """One trajectory per task seed, in the order of the seeds; greedy by default. Runs its own event loop to the end.

    `draw`: another one gives other samples of the same tasks. `make`: Sampler, or what is used like it.
    """
    sampler = make(engine, environment, renderer, spec, producer=producer, attempt=attempt)
    requests = [
        SampleRequest(
            f"{split}-{number}-{seed}/0", f"{split}-{number}-{seed}", split, seed, split, (draw << 32) + seed, temperature
        )
        for number, seed in enumerate(seeds)
    ]
    return asyncio.run(_drain(sampler, requests))


async def _drain(sampler: Any, requests: list[SampleRequest]) -> list[Trajectory]:
    waiting = iter(requests)
    done: dict[str, Trajectory] = {}
    while len(done) < len(requests):
        while sampler.free_slots and (request := next(waiting, None)):
            sampler.submit(request)
        done |= {trajectory.sample_id: trajectory for trajectory in await sampler.tick()}
    await sampler.cancel_all()
    return [done[request.sample_id] for request in requests]
