"""Agents drive episodes: what becomes of a sample, whatever its agent does, and that a real engine's tokens are recorded."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from miles_core.environments import calculator_agent
from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.calculator_agent import ask
from miles_core.recipe import AgentSpec, EnvironmentSpec
from miles_core.records import Version
from miles_core.rollout.chat import FAMILIES, FamilyRenderer
from miles_core.rollout.choice import sampler_class
from miles_core.rollout.sampler import Sampler, SampleRequest, sample_many
from miles_core.rollout.sessions.agents import AgentSampler, AgentTask
from miles_core.rollout.torch_engine import TorchEngine
from miles_core.trajectories.lines import lines
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import check_trajectory
from tests.unit.session_world import RENDERER, TalkingEngine
from tests.unit.tiny_models import tiny_model, tiny_tokenizer

HERE = "tests.unit.test_agent_sampler"
Made = Callable[..., AgentSampler]


@dataclass
class Task:
    """An episode that only asks."""

    seed: int
    closed: int = 0
    may_close: threading.Event | None = None

    def opening(self) -> tuple[Message, ...]:
        return (Message("user", f"task {self.seed}"),)

    async def respond(self, content: str) -> tuple[Message, ...]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {"question": self.seed, "final_answer": None}

    async def close(self) -> None:
        if self.may_close is not None:
            self.may_close.wait(20)
        self.closed += 1


@dataclass
class Tasks:
    """An environment of them."""

    episodes: list[Task] = field(default_factory=list)

    def episode(self, seed: int, split: Split) -> Task:
        if seed == 99:
            raise EpisodeFailed("no such task", "environment")
        self.episodes.append(Task(seed))
        return self.episodes[-1]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()
LET_GO = threading.Event()
ENGINE: list[TalkingEngine] = []


def made(function: str, answer: Callable[[str], str] = lambda seen: "yes", **spec: Any) -> tuple[AgentSampler, Tasks]:
    engine, environment = TalkingEngine(answer, 4), Tasks()
    ENGINE[:] = [engine]
    settings: dict[str, Any] = {
        "family": "chain_sum",
        "max_turns": 3,
        "max_new_tokens": 20,
        "max_tokens": 200,
        "episode_deadline_s": 100.0,
    }
    chosen = EnvironmentSpec(**(settings | {"agent": {"run": f"{HERE}:{function}"}} | spec))
    sampler = AgentSampler(engine, environment, RENDERER, chosen, producer="rollout-0", attempt=2, monotonic=CLOCK)
    return sampler, environment


def request(key: str, task_seed: int = 0) -> SampleRequest:
    return SampleRequest(key, key.rpartition("/")[0], "o1", task_seed, "train", 5, 1.0, created_s=900.0)


async def ended(sampler: AgentSampler) -> dict[str, Trajectory]:
    """Ticks until nothing is in flight."""
    done: dict[str, Trajectory] = {}
    until = time.monotonic() + 30
    while sampler.in_flight or not done:
        assert time.monotonic() < until, f"{sampler.in_flight} in flight"
        for row in await sampler.tick():
            check_trajectory(row)
            done[row.sample_id] = row
    return done


def say(base_url: str, key: str, *words: str) -> list[dict[str, Any]]:
    """A conversation of these words."""
    messages: list[dict[str, Any]] = []
    for word in words:
        messages.append({"role": "user", "content": word})
        messages.append(ask(base_url, key, {"messages": messages}))
    return messages


def answers(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    return {"final_answer": say(base_url, key, task.messages[0]["content"], "sure?")[-1]["content"], "model": task.model}


async def answers_async(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    return await asyncio.to_thread(answers, base_url, key, task)


def asks_twice(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    for word in ("one", "two"):
        say(base_url, key, task.messages[0]["content"], word)
    return {"final_answer": "x"}


def is_silent(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    return {}


def returns_text(base_url: str, key: str, task: AgentTask) -> str:
    return str(say(base_url, key, "go")[-1]["content"])


def breaks(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    say(base_url, key, "go")
    raise KeyError("tool")


def is_failed_by_its_world(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    raise EpisodeFailed("sandbox gone", "infrastructure")


def goes_on_and_on(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    say(base_url, key, *["go"] * 10)
    return {"final_answer": "never"}


def ends_its_session(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    say(base_url, key, "go")
    httpx.delete(base_url.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"}, trust_env=False).raise_for_status()
    return {"final_answer": "x"}


def says_and_hangs(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    say(base_url, key, "go")
    LET_GO.wait(20)
    return {}


def loses_its_tools(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    """As a client's package does: its own error, made of that of the connection."""
    try:
        httpx.get("http://127.0.0.1:9/", trust_env=False)
    except httpx.ConnectError as error:
        raise KeyError("no answer") from error
    return {}


def has_no_room(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    raise OSError(errno.ENOSPC, "No space left on device")


def finds_no_file(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    raise FileNotFoundError("what the model named")


def hangs(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    LET_GO.wait(20)
    say(base_url, key, "go")
    return {"final_answer": "late"}


@pytest.mark.parametrize("agent", ["answers", "answers_async"])
async def test_an_agents_run_becomes_a_trajectory(agent: str) -> None:
    sampler, environment = made(agent)
    sampler.submit(request("g.o1/0", task_seed=11))
    with pytest.raises(ValueError, match=r"cannot start g\.o1/0: 3 slots free, 1 in flight"):
        sampler.submit(request("g.o1/0"))
    row = (await ended(sampler))["g.o1/0"]
    assert (row.trajectory_id, row.group_id, row.order_id) == ("g.o1/0@rollout-0.a2", "g.o1", "o1")
    assert (row.status, row.failure_kind, row.task_seed, row.created_s) == ("complete", "none", 11, 900.0)
    session = {"turns": 2, "taken_back": 0, "mismatches": []}
    assert row.facts == {"question": 11, "final_answer": "yes", "model": "policy", "session": session}
    assert [turn.role for turn in row.turns] == ["user", "assistant", "user", "assistant"]
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert RENDERER.text(row.tokens.tolist()) + "<|im_end|>" == f"{text.format('task 11')}\n{text.format('sure?')}"
    assert environment.episodes[0].closed == 1 and sampler.free_slots == 4
    await sampler.cancel_all()
    assert ENGINE[0].held == {}


@pytest.mark.parametrize(
    ("agent", "spec", "status", "kind", "says", "sampled"),
    [
        ("is_silent", {}, "failed", "environment", "ended without a turn of the model", False),
        ("returns_text", {}, "failed", "environment", "returned str; an agent returns a dict of facts", True),
        ("breaks", {}, "failed", "environment", "KeyError: 'tool'", True),
        ("is_failed_by_its_world", {}, "failed", "infrastructure", "sandbox gone", False),
        ("loses_its_tools", {}, "failed", "infrastructure", "KeyError: 'no answer'", False),
        ("has_no_room", {}, "failed", "infrastructure", "No space left on device", False),
        ("finds_no_file", {}, "failed", "environment", "FileNotFoundError: what the model named", False),
        ("goes_on_and_on", {}, "truncated", "none", "environment.max_turns=3", True),
        ("goes_on_and_on", {"max_tokens": 40}, "truncated", "none", "environment.max_tokens=40", True),
        ("goes_on_and_on", {"max_new_tokens": 1}, "truncated", "none", "", True),
        ("answers", {"max_tokens": 12}, "failed", "environment", "Client error '400", False),
        ("ends_its_session", {}, "complete", "none", "", True),
    ],
)
async def test_what_ended_an_episode_is_told_apart(
    agent: str, spec: dict[str, Any], status: str, kind: str, says: str, sampled: bool
) -> None:
    sampler, environment = made(agent, **spec)
    sampler.submit(request("g/0"))
    row = (await ended(sampler))["g/0"]
    assert (row.status, row.failure_kind) == (status, kind)
    assert says in row.facts.get("error", "") and bool(says) == ("error" in row.facts)
    assert (row.num_sampled > 0) == sampled and environment.episodes[0].closed == 1
    await sampler.cancel_all()


async def test_a_branching_agent_gives_one_row_with_all_its_conversations() -> None:
    seen = iter(range(100))
    sampler, _ = made(
        "asks_twice", lambda text: f"yes {next(seen)}", agent={"run": f"{HERE}:asks_twice", "history": "branching"}
    )
    sampler.submit(request("g/0"))
    row = (await ended(sampler))["g/0"]
    # The second conversation asked the first question anew: another try at it, and another line.
    assert row.facts["session"]["turns"] == 4 and row.status == "complete"
    assert [segment.parent for segment in row.segments] == [-1, 0, -1, 2]
    first, second = lines(row)
    assert "yes 0" in RENDERER.text(first.tokens.tolist()) and "yes 3" in RENDERER.text(second.tokens.tolist())
    assert first.num_sampled + second.num_sampled == row.num_sampled
    await sampler.cancel_all()
    linear, _ = made("asks_twice")
    linear.submit(request("g/0"))
    row = (await ended(linear))["g/0"]
    assert (row.status, row.failure_kind) == ("failed", "environment") and "400 Bad Request" in row.facts["error"]
    await linear.cancel_all()


async def test_a_task_that_cannot_be_made_and_an_engine_that_breaks() -> None:
    sampler, _ = made("answers")
    sampler.submit(request("g/0", task_seed=99))
    row = (await ended(sampler))["g/0"]
    assert (row.status, row.failure_kind, row.facts) == ("failed", "environment", {"error": "no such task"})
    ENGINE[0].answer = lambda seen: ""
    ENGINE[0].spoil = lambda turn: type(turn)(turn.session_key, turn.tokens[:0], turn.logprobs[:0], (), "end")
    sampler.submit(request("g/1"))
    row = (await ended(sampler))["g/1"]
    assert (row.status, row.failure_kind, row.num_sampled) == ("failed", "infrastructure", 0)
    await sampler.cancel_all()


async def test_a_deadline_ends_an_episode_and_what_its_agent_does_later_counts_no_more() -> None:
    LET_GO.clear()
    sampler, environment = made("hangs")
    sampler.submit(request("g/0"))
    assert await sampler.tick() == []
    CLOCK.now += 101
    (row,) = await sampler.tick()
    assert (row.status, row.failure_kind, row.num_sampled) == ("failed", "infrastructure", 0)
    assert "episode_deadline_s=100.0" in row.facts["error"] and sampler.free_slots == 4
    sampler.submit(request("g/0"))  # given out again
    LET_GO.set()
    row = (await ended(sampler))["g/0"]
    assert (row.status, row.facts["final_answer"], row.facts["session"]["turns"]) == ("complete", "late", 1)
    await sampler.cancel_all()
    assert [episode.closed for episode in environment.episodes] == [1, 1]


async def test_an_agent_has_a_deadline_between_two_turns_but_none_before_the_first() -> None:
    LET_GO.clear()
    sampler, environment = made("says_and_hangs", tool_deadline_s=5.0)
    late, _ = made("hangs", tool_deadline_s=5.0)
    for one in (sampler, late):
        one.submit(request("g/0"))
    live = sampler._live["g/0"].session
    while not live.history.checkpoints or live.pace.turn_s or live.pace._turns:
        assert await sampler.tick() == []
    CLOCK.now += 5.1
    (row,) = await sampler.tick()
    assert (row.status, row.failure_kind) == ("failed", "infrastructure") and await late.tick() == []
    assert row.facts["error"] == "the agent neither asked for a turn nor ended within tool_deadline_s=5.0"
    LET_GO.set()
    assert (await ended(late))["g/0"].status == "complete"
    for one in (sampler, late):
        await one.cancel_all()
    assert environment.episodes[0].closed == 1


async def test_what_an_episode_takes_to_close_is_not_the_agents() -> None:
    sampler, environment = made("answers", tool_deadline_s=5.0)
    sampler.submit(request("g/0"))
    may_close = environment.episodes[0].may_close = threading.Event()
    pace = sampler._live["g/0"].session.pace
    while not pace._is_stopped:
        assert await sampler.tick() == []
    CLOCK.now += 60
    assert await sampler.tick() == [] and sampler.in_flight == 1
    may_close.set()
    row = (await ended(sampler))["g/0"]
    assert (row.status, row.failure_kind, row.facts["final_answer"]) == ("complete", "none", "yes")
    await sampler.cancel_all()
    assert environment.episodes[0].closed == 1


async def test_a_turn_has_a_deadline_also_while_it_waits_for_the_engine() -> None:
    sampler, _ = made("answers", turn_deadline_s=3.0)
    ENGINE[0].hold.set()
    sampler.submit(request("g/0"))
    while not ENGINE[0].turns:
        assert await sampler.tick() == []
    CLOCK.now += 3.1
    (row,) = await sampler.tick()
    assert (row.status, row.failure_kind) == ("failed", "infrastructure")
    assert row.facts["error"] == "a turn of the model was not sampled within turn_deadline_s=3.0"
    await sampler.cancel_all()
    assert ENGINE[0].held == {}


async def test_giving_up_ends_sessions_agents_and_the_server() -> None:
    sampler, environment = made("goes_on_and_on", max_turns=100)
    ENGINE[0].hold.set()
    for number in range(4):
        sampler.submit(request(f"g/{number}"))
    while len(ENGINE[0].turns) < 4:
        await sampler.tick()
    url = sampler._server.url
    await sampler.cancel_all()
    assert sampler.in_flight == 0 and ENGINE[0].held == {} and [episode.closed for episode in environment.episodes] == [1] * 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def talks(base_url: str, key: str, task: AgentTask) -> dict[str, Any]:
    """Tries every turn again: a cut one until it is whole, any other once more when the next was heard."""
    messages = list(task.messages)
    for _ in range(4):
        try:
            reply = ask(base_url, key, {"messages": messages})
            longer = [*messages, reply, {"role": "user", "content": "1 + 1 ="}]
            ask(base_url, key, {"messages": longer})
        except httpx.HTTPStatusError:
            continue
        messages = longer
    return {}


def test_what_a_real_engine_samples_is_recorded_with_its_logprobs() -> None:
    """Several turns, second tries and conversations that are read anew: each token's logprob is that of a full pass."""
    renderer = FamilyRenderer(tiny_tokenizer(), FAMILIES["plain"])
    engine = TorchEngine(tiny_model("qwen3"), end_id=renderer.end_id, slots=16, max_tokens=240, version=Version(3, 1))
    spec = EnvironmentSpec(
        family="chain_sum", agent=AgentSpec(run=f"{HERE}:talks"), max_turns=4, max_new_tokens=60, max_tokens=240
    )
    environment: Any = Tasks()
    make = sampler_class(spec)
    rows = sample_many(engine, environment, renderer, spec, range(24), split="train", temperature=1.0, make=make)
    assert [row.task_seed for row in rows] == list(range(24)) and {row.status for row in rows} <= {"complete", "truncated"}
    for row in rows:
        check_trajectory(row)
        mask = row.loss_mask[1:] == 1
        expected = engine.logprobs([row.tokens.tolist()])[0]
        assert np.abs(expected - row.logprobs[1:])[mask].max() < 1e-4
        assert {run[1:] for run in row.versions} == {(3, 1)}
    assert max(row.facts["session"]["turns"] for row in rows) > 1 and any(row.facts["session"]["taken_back"] for row in rows)


def test_the_example_agent_calculates_until_it_is_told_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def reply(base_url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        call = {"id": "c", "function": {"name": "calculator", "arguments": '{"expression": "12 + 7"}'}}
        return {"role": "assistant", "content": "19", "tool_calls": [call] if len(asked) < 3 else []}

    monkeypatch.setattr(calculator_agent, "ask", reply)
    task = AgentTask([{"role": "user", "content": "12 + 7 ="}], 1, "train")
    assert calculator_agent.run("", "", task) == {"final_answer": "19", "turns": 3, "tool_calls": ["19", "19"]}
    assert task.messages == [{"role": "user", "content": "12 + 7 ="}]


def test_who_drives_is_the_recipes_choice() -> None:
    assert sampler_class(EnvironmentSpec(family="chain_sum")) is Sampler
    with pytest.raises(ValueError, match="cannot reach the shell"):
        EnvironmentSpec(family="shell_puzzle", tool="shell", agent=AgentSpec(run="a:b"))
    with pytest.raises(ValueError, match="needs a tool or an agent"):
        EnvironmentSpec(family="chain_sum", max_turns=2)
