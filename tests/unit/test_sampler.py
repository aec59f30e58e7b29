"""Episodes run side by side, end by themselves or by a deadline, and free their slot at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.grading.rules import make_verifier
from miles_core.recipe import EnvironmentSpec
from miles_core.records import Version
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.sampler import Sampler, SampleRequest, sample_many
from miles_core.rollout.session import ChatRenderer
from miles_core.rollout.torch_engine import TorchEngine
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import check_trajectory
from tests.unit.tiny_models import tiny_model, tiny_tokenizer

V0 = Version(0, 0)
RENDERER = ChatRenderer(tiny_tokenizer())
SPEC = EnvironmentSpec(
    family="chain_sum", tool="calculator", max_turns=3, max_tokens=60, tool_deadline_s=5.0, episode_deadline_s=100.0
)
CALL = "<tool_call>1 + 1</tool_call>"


class ScriptedEngine:
    """An Engine whose sessions say what the script tells: per session key, the texts of its turns."""

    def __init__(self, script: dict[str, list[str]], slots: int = 4) -> None:
        self.version = V0
        self._script = {key: list(texts) for key, texts in script.items()}
        self._slots = slots
        self._held: set[str] = set()
        self._turns: dict[str, list[int]] = {}
        self._said: dict[str, int] = {}
        self.requests: list[Request] = []

    @property
    def free_slots(self) -> int:
        return self._slots - len(self._held)

    @property
    def running(self) -> int:
        return len(self._turns)

    def add(self, request: Request) -> None:
        text = self._script[request.session_key].pop(0) + "<|end|>"
        ids = tiny_tokenizer()(text, add_special_tokens=False).input_ids[: request.max_new_tokens]
        self._held.add(request.session_key)
        self._turns[request.session_key] = list(ids)
        self._said[request.session_key] = 0
        self.requests.append(request)

    def step(self) -> list[Finished]:
        finished = []
        for key, ids in list(self._turns.items()):
            self._said[key] += 1
            if self._said[key] == len(ids):
                del self._turns[key]
                logprobs = np.full(len(ids), -1, dtype=np.float32)
                reason: Any = "end" if ids[-1] == RENDERER.end_id else "length"
                finished.append(Finished(key, np.array(ids, dtype=np.int32), logprobs, (V0,) * len(ids), reason))
        return finished

    def release(self, session_key: str) -> None:
        self._held.remove(session_key)
        self._turns.pop(session_key, None)

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        raise NotImplementedError

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[Any]:
        raise NotImplementedError


async def answer_twice(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
    return (Message("tool", "2"),) if content == CALL else ()


@dataclass
class FakeEpisode:
    respond_with: Callable[[FakeEpisode, str], Awaitable[tuple[Message, ...]]]
    question: str = "1 + 1 ="
    contents: list[str] = field(default_factory=list)
    closed: int = 0
    on_close: Exception | None = None

    def opening(self) -> tuple[Message, ...]:
        return (Message("user", self.question),)

    async def respond(self, content: str) -> tuple[Message, ...]:
        assert not self.closed
        self.contents.append(content)
        return await self.respond_with(self, content)

    def facts(self) -> dict[str, Any]:
        return {"contents": list(self.contents)}

    async def close(self) -> None:
        self.closed += 1
        if self.on_close:
            raise self.on_close


class FakeEnvironment:
    """Hands out prepared episodes by task seed; the others answer calls and end on anything else."""

    def __init__(self, prepared: dict[int, FakeEpisode | Exception] | None = None) -> None:
        self._prepared = prepared or {}
        self.episodes: list[FakeEpisode] = []

    def episode(self, seed: int, split: Split) -> FakeEpisode:
        made = self._prepared.get(seed) or FakeEpisode(answer_twice)
        if isinstance(made, Exception):
            raise made
        self.episodes.append(made)
        return made


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def sampler_of(engine: Any, environment: Any, clock: Clock | None = None, spec: EnvironmentSpec = SPEC) -> Sampler:
    clock = clock or Clock()
    return Sampler(
        engine, environment, RENDERER, spec, producer="rollout-0", attempt=2, monotonic=clock, unix_time=lambda: clock.now + 0.5
    )


def request(key: str, task_seed: int = 0) -> SampleRequest:
    return SampleRequest(key, key.rpartition("/")[0], "o1", task_seed, "train", 5, 1.0, created_s=900.0)


async def run(sampler: Sampler, ticks: int = 200) -> dict[str, Trajectory]:
    """Ticks until nothing is in flight."""
    done: dict[str, Trajectory] = {}
    for _ in range(ticks):
        finished = await sampler.tick()
        for trajectory in finished:
            check_trajectory(trajectory)
        done |= {trajectory.sample_id: trajectory for trajectory in finished}
        if not sampler.in_flight and not finished:
            return done
    raise AssertionError(f"{sampler.in_flight} episodes still in flight after {ticks} ticks")


async def test_an_episode_runs_through_its_turns_into_a_trajectory() -> None:
    engine, environment = ScriptedEngine({"g/0": [CALL, "2"]}), FakeEnvironment()
    sampler = sampler_of(engine, environment)
    sampler.submit(request("g/0", task_seed=11))
    row = (await run(sampler))["g/0"]
    assert (row.trajectory_id, row.sample_id, row.group_id, row.order_id) == ("g/0@rollout-0.a2", "g/0", "g", "o1")
    assert (row.producer, row.producer_attempt, row.task_seed, row.temperature) == ("rollout-0", 2, 11, 1.0)
    assert (row.status, row.failure_kind, row.facts) == ("complete", "none", {"contents": [CALL, "2"]})
    assert (row.created_s, row.started_s, row.finished_s) == (900.0, 1000.5, 1000.5)
    assert (
        tiny_tokenizer().decode(row.tokens)
        == f"<|user|>1 + 1 =<|end|><|assistant|>{CALL}<|end|><|tool|>2<|end|><|assistant|>2<|end|>"
    )
    assert [turn.role for turn in row.turns] == ["user", "assistant", "tool", "assistant"]
    assert environment.episodes[0].closed == 1 and sampler.free_slots == 4


async def test_a_later_turn_hands_the_engine_only_what_was_appended() -> None:
    engine = ScriptedEngine({"g/0": [CALL, "2"]})
    sampler = sampler_of(engine, FakeEnvironment())
    sampler.submit(request("g/0"))
    await run(sampler)
    first, second = engine.requests
    assert first.tokens == RENDERER.opening((Message("user", "1 + 1 ="),))
    assert second.tokens == RENDERER.continuation((Message("tool", "2"),))
    assert {(ask.seed, ask.temperature, ask.max_new_tokens) for ask in engine.requests} == {(5, 1.0, 24)}


async def test_a_finished_trajectory_frees_its_slot_while_others_go_on() -> None:
    script = {"long/0": ["1 " * 11], **{f"short/{i}": ["1"] for i in range(6)}}
    sampler = sampler_of(ScriptedEngine(script, slots=2), FakeEnvironment())
    waiting = list(script)
    order: list[str] = []
    while len(order) < len(script):
        while waiting and sampler.free_slots:
            sampler.submit(request(waiting.pop(0)))
        order += [row.sample_id for row in await sampler.tick()]
    assert order[-1] == "long/0" and len(order) == 7


async def test_a_full_sampler_and_a_running_id_are_refused() -> None:
    sampler = sampler_of(ScriptedEngine({"a/0": ["1"], "b/0": ["1"]}, slots=1), FakeEnvironment())
    sampler.submit(request("a/0"))
    for key in ("a/0", "b/0"):
        with pytest.raises(ValueError, match=f"cannot start {key}: 0 slots free, 1 in flight"):
            sampler.submit(request(key))
    await sampler.cancel_all()


def failing(kind: Any) -> FakeEpisode:
    async def respond(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
        raise EpisodeFailed("sandbox gone", kind)

    return FakeEpisode(respond)


async def test_what_ended_an_episode_is_told_apart() -> None:
    async def flood(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
        return (Message("tool", "1" * 60),)

    environment = FakeEnvironment(
        {
            1: failing("infrastructure"),
            2: failing("environment"),
            3: FakeEpisode(flood),
            4: FakeEpisode(answer_twice, question="1" * 60),
            5: EpisodeFailed("no such task", "environment"),
            7: FakeEpisode(answer_twice, question="1" * 50),
        }
    )
    rambling = "1 " * 5 + "<|user|><tool_call>"
    script = {
        "0/0": [rambling],
        "1/0": ["1"],
        "2/0": ["1"],
        "3/0": ["1"],
        "4/0": [],
        "5/0": [],
        "6/0": ["1" * 30],
        "7/0": ["1" * 30],
    }
    sampler = sampler_of(ScriptedEngine(script, slots=8), environment)
    for key in script:
        sampler.submit(request(key, task_seed=int(key[0])))
    rows = await run(sampler)
    assert {key[0]: (row.status, row.failure_kind) for key, row in rows.items()} == {
        "0": ("complete", "none"),
        "1": ("failed", "infrastructure"),
        "2": ("failed", "environment"),
        "3": ("truncated", "none"),
        "4": ("failed", "environment"),
        "5": ("failed", "environment"),
        "6": ("truncated", "none"),
        "7": ("truncated", "none"),
    }
    assert rows["0/0"].facts["contents"] == [rambling]
    assert rows["1/0"].facts["error"] == "sandbox gone" and rows["5/0"].facts["error"] == "no such task"
    assert "max_tokens=60" in rows["3/0"].facts["error"] and "max_tokens=60" in rows["4/0"].facts["error"]
    assert len(rows["5/0"].tokens) == len(rows["4/0"].tokens) == 0
    assert rows["6/0"].num_sampled == SPEC.max_new_tokens and rows["6/0"].facts["contents"] == []
    assert len(rows["7/0"].tokens) == SPEC.max_tokens
    assert [episode.closed for episode in environment.episodes] == [1] * 7 and sampler.free_slots == 8


@dataclass
class Stuck:
    """An answer that comes only when the test says so."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    async def __call__(self, episode: FakeEpisode, content: str) -> tuple[Message, ...]:
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled = not episode.closed
            raise
        return ()


@pytest.mark.parametrize(
    ("passes_s", "says"),
    [(5.1, "did not answer a turn within tool_deadline_s=5.0"), (100.1, "more than episode_deadline_s=100.0")],
)
async def test_a_deadline_ends_a_stuck_episode_and_no_other(passes_s: float, says: str) -> None:
    clock, stuck, late = Clock(), Stuck(), Stuck()
    environment = FakeEnvironment({1: FakeEpisode(stuck), 2: FakeEpisode(late)})
    sampler = sampler_of(ScriptedEngine({"1/0": ["1"], "2/0": ["1 " * 8]}), environment, clock)
    sampler.submit(request("1/0", task_seed=1))
    for _ in range(4):
        assert await sampler.tick() == []
    clock.now += passes_s
    sampler.submit(request("2/0", task_seed=2))
    (row,) = await sampler.tick()
    assert (row.sample_id, row.status, row.failure_kind) == ("1/0", "failed", "infrastructure")
    assert says in row.facts["error"] and row.num_sampled == 2
    late.ready.set()
    assert (await run(sampler))["2/0"].status == "complete"
    await sampler.cancel_all()
    assert stuck.cancelled and not late.cancelled and [episode.closed for episode in environment.episodes] == [1, 1]


async def test_a_turn_of_the_model_has_a_deadline_and_the_environment_does_not_use_it_up() -> None:
    clock, stuck = Clock(), Stuck()
    spec = SPEC.model_copy(update={"turn_deadline_s": 3.0})
    sampler = sampler_of(
        ScriptedEngine({"1/0": ["1"], "2/0": ["1 " * 8]}), FakeEnvironment({1: FakeEpisode(stuck)}), clock, spec
    )
    sampler.submit(request("1/0", task_seed=1))
    for _ in range(4):
        assert await sampler.tick() == []
    sampler.submit(request("2/0"))
    clock.now += 3.1
    (row,) = await sampler.tick()
    assert (row.sample_id, row.status, row.failure_kind) == ("2/0", "failed", "infrastructure")
    assert row.facts["error"] == "a turn of the model was not sampled within turn_deadline_s=3.0" and sampler.free_slots == 3
    stuck.ready.set()
    assert (await run(sampler))["1/0"].status == "complete"
    await sampler.cancel_all()


async def test_an_answer_that_takes_many_turns_of_the_loop_is_waited_for() -> None:
    async def slow(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
        for _ in range(5):
            await asyncio.sleep(0.001)
        return ()

    sampler = sampler_of(ScriptedEngine({"1/0": ["1"]}), FakeEnvironment({1: FakeEpisode(slow)}))
    sampler.submit(request("1/0", task_seed=1))
    assert (await run(sampler))["1/0"].status == "complete"


async def test_cancelling_closes_every_episode_once_and_frees_the_slots() -> None:
    stuck = Stuck()
    environment = FakeEnvironment({1: FakeEpisode(stuck)})
    sampler = sampler_of(ScriptedEngine({"1/0": ["1"], "2/0": ["1 " * 8]}), environment)
    sampler.submit(request("1/0", task_seed=1))
    sampler.submit(request("2/0"))
    for _ in range(4):
        await sampler.tick()
    await sampler.cancel_all()
    assert stuck.cancelled and [episode.closed for episode in environment.episodes] == [1, 1]
    assert (sampler.in_flight, sampler.free_slots) == (0, 4) and await sampler.tick() == []


async def test_an_episode_that_does_not_close_is_a_warning_and_keeps_its_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    broken = FakeEpisode(answer_twice, on_close=EpisodeFailed("container stays", "infrastructure"))
    sampler = sampler_of(ScriptedEngine({"1/0": ["1"]}), FakeEnvironment({1: broken}))
    sampler.submit(request("1/0", task_seed=1))
    with caplog.at_level(logging.WARNING):
        assert (await run(sampler))["1/0"].status == "complete"
        await sampler.cancel_all()
    assert "sample=1/0 error=container stays" in caplog.text


async def test_a_bug_of_the_environment_is_not_taken_for_a_failure() -> None:
    async def buggy(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
        raise KeyError("typo")

    sampler = sampler_of(ScriptedEngine({"1/0": ["1"]}), FakeEnvironment({1: FakeEpisode(buggy)}))
    sampler.submit(request("1/0", task_seed=1))
    with pytest.raises(KeyError, match="typo"):
        await run(sampler)


def taught(environment: ReasoningGymEnvironment, seeds: list[int]) -> Any:
    """A tiny model that has learnt by heart to call the calculator and to repeat its result on the given eval tasks."""
    rows = []
    for seed in seeds:
        episode = environment.episode(seed, "eval")
        expression, answer = episode.task.entry["metadata"]["expression"], episode.task.entry["answer"]
        call = f"<tool_call>{expression}</tool_call><|end|><|tool|>{answer}<|end|><|assistant|>{answer}<|end|>"
        rows.append([*RENDERER.opening(episode.opening()), *tiny_tokenizer()(call, add_special_tokens=False).input_ids])
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.where(ids == 0, -100, ids)
    model = tiny_model(initializer_range=0.15)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    return model.eval()


def test_a_model_that_knows_the_tool_is_sampled_and_graded_in_the_order_of_the_seeds() -> None:
    spec = EnvironmentSpec(family="chain_sum", options={"max_terms": 2, "max_digits": 2}, tool="calculator", max_turns=3)
    environment, seeds = ReasoningGymEnvironment(spec), [3, 1, 4, 15, 9]
    model = taught(environment, seeds)
    runs = []
    for slots in (2, 8):
        engine = TorchEngine(model, end_id=RENDERER.end_id, slots=slots, max_tokens=spec.max_tokens, version=V0)
        runs.append(sample_many(engine, environment, RENDERER, spec, seeds, split="eval"))
        assert engine.free_slots == slots
    verifier = make_verifier(spec)
    for row, other in zip(*runs, strict=True):
        check_trajectory(row)
        assert np.array_equal(row.tokens, other.tokens) and row.status == "complete" and row.temperature == 0.0
        assert verifier.value(row.task_seed, row.facts) == 1.0 and row.facts["turns"] == 2
        full = engine.logprobs([row.tokens.tolist()])[0]
        assert np.abs((full - row.logprobs[1:])[row.loss_mask[1:] == 1]).max() < 1e-5
    assert [row.task_seed for row in runs[0]] == seeds
