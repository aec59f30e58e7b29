"""Environments of the verifiers package, over a stand-in for it: what we make of its data, its loop and its rubric.

The package itself is not among the tests' requirements; benchmarks/verifiers_package.py plays environments of the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.own_code import names_of
from miles_core.environments import verifiers_calls, verifiers_env
from miles_core.environments.registry import check_environment, make_environment
from miles_core.environments.verifiers_env import RubricVerifier, split_rows
from miles_core.errors import DeadlineExceeded, RecipeError
from miles_core.grading.base import judged
from miles_core.grading.rules import make_verifier
from miles_core.grading.worker import DeadlineCalls
from miles_core.recipe import EnvironmentSpec, Recipe
from miles_core.rollout.choice import sampler_class
from miles_core.rollout.sampler import SampleRequest
from miles_core.rollout.sessions.agents import AgentSampler
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import check_trajectory
from tests.protocol.simulation import simulated_recipe
from tests.unit.session_world import RENDERER, TalkingEngine

PACKAGE = '''
"""As much of the package's interface as is used."""
import asyncio, copy, importlib, inspect, logging, signal

__version__ = "0.0.stand-in"


class InfraError(Exception): pass
class ModelError(Exception): pass
class EmptyModelResponseError(ModelError): pass


class State(dict):
    """Fields of the row are found in `input`, and are written there."""
    def __getitem__(self, key):
        row = super().get("input", {})
        return row[key] if key in row else super().__getitem__(key)
    def __setitem__(self, key, value):
        row = super().get("input", {})
        if key in row: row[key] = value
        else: super().__setitem__(key, value)
    def get(self, key, default=None):
        try: return self[key]
        except KeyError: return default


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights
    def _is_group_func(self, func):
        return "states" in inspect.signature(func).parameters
    async def score_rollout(self, state):
        total = 0.0
        assert not any(map(self._is_group_func, self.funcs))
        for func, weight in zip(self.funcs, self.weights):
            try:
                value = func(*[state][: len(inspect.signature(func).parameters)])
                total += weight * float(await value if inspect.isawaitable(value) else value)
            except Exception as error:
                logging.getLogger("verifiers.rubrics").error("Error calling reward function %s: %s", func.__name__, error)
        state["reward"] = total


class OpenAIChatCompletionsClient:
    def __init__(self, client): self.client = client
    async def get_response(self, prompt, model):
        answer = await self.client.http.post(
            f"{self.client.base_url}/chat/completions", json={"model": model, "messages": prompt},
            headers={"Authorization": f"Bearer {self.client.api_key}"})
        if answer.status_code != 200: raise ModelError(answer.text)
        message = answer.json()["choices"][0]["message"]
        if not message["content"]: raise EmptyModelResponseError("Model returned no content")
        return message


class Environment:
    def __init__(self, rows, rubric, eval_rows=None, max_turns=2):
        self.dataset, self.eval_dataset, self.rubric, self.max_turns = rows, eval_rows, rubric, max_turns
        signal.signal(signal.SIGTERM, lambda *_: None)
    def get_dataset(self): return self.dataset
    def get_eval_dataset(self): return self.eval_dataset
    async def rollout(self, row, client, model, sampling_args):
        state = State(input=copy.deepcopy(row), client=client, completion=[], error=None, stop_condition=None)
        said = []
        try:
            if "drift" in row["info"]:
                state["answer"] = {"yes": "yes", "object": object()}[row["info"]["drift"]]
                state["info"]["goal"] = "drawn"
            for turn in range(self.max_turns if self.max_turns > 0 else 9):
                reply = await client.get_response([*row["prompt"], *said], model)
                said.append(reply)
                state["completion"] = list(said)  # what ends with a reply; a turn that broke is in nothing
                if "fail" in str(row["answer"]):
                    raise {"infra": InfraError, "tool": KeyError}[row["answer"].split()[1]]("broken")
                said.append({"role": "user", "content": "sure?"})
            state["stop_condition"], state["score"] = "done", 1
        except Exception as error:
            state["error"] = error
        return state


def load_environment(name, **args):
    return importlib.import_module(name.replace("-", "_")).load_environment(**args)
'''

OPENAI = """
import httpx
def DefaultAsyncHttpxClient(**settings): return httpx.AsyncClient(**settings)
class AsyncOpenAI:
    def __init__(self, base_url, api_key, max_retries, http_client):
        self.base_url, self.api_key, self.http = base_url, api_key, http_client
    async def __aenter__(self): return self
    async def __aexit__(self, *error): await self.http.aclose()
"""

LAB = """
import asyncio, logging, time
import verifiers as vf

log = logging.getLogger("verifiers.rubrics.own")

def says(state): return state["completion"][-1]["content"] == state["answer"]
def needs_state(state): return state["score"]
def long_winded(state): return len(state["trajectory"]) > 1
def of_group(states): return [0.0]
def breaks(state): raise KeyError("nothing hangs on it")

async def moody(state):
    said = state["completion"][-1]["content"]
    if said == "blocks": time.sleep(4)
    if said == "late":
        await asyncio.sleep(0.6)
        raise RuntimeError("late")
    if said == "pool":
        try: raise OSError("a worker died")
        except OSError as error: log.warning("Math verification went wrong: %s", error)
    if said == "timeout": log.warning("hit hard timeout after 120s")
    if said == "long": log.warning("Skipping math verification: 60000 characters")
    if said == "ok": await asyncio.sleep(0.3)
    return said == "ok"

def load_environment(size=40, answer="yes", held_out=0, group=False, empty=False, funcs=None, same=False, turns=2, **info):
    rows = lambda name, n: [
        {"prompt": [{"role": "user", "content": "play" if same else f"{name} {i}"}], "answer": answer,
         "info": {**info, "number": i if same != "all" else 0}, "example_id": i} for i in range(n)]
    funcs, weights = funcs or ["says", "needs_state", "long_winded"], [1.0, 0.5, -0.5]
    if group: funcs, weights = ["of_group"], [1.0]
    if empty: funcs, weights = ["says"], [0.0]
    if "breaks" in funcs: weights = [1.0, 0.0, 0.0]
    rubric = vf.Rubric([globals()[name] for name in funcs], weights)
    return vf.Environment(rows("task", size), rubric, rows("task", held_out) or None, turns)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins for the packages, and an environment."""
    files = {"verifiers": PACKAGE, "openai": OPENAI, "my_lab": LAB}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = signal.getsignal(signal.SIGTERM)
    verifiers_env._load.cache_clear()
    yield
    verifiers_env._load.cache_clear()
    assert signal.getsignal(signal.SIGTERM) is kept  # the role's own
    for name in files:
        sys.modules.pop(name, None)


def spec(**args: Any) -> EnvironmentSpec:
    return EnvironmentSpec(
        family="verifiers", options={"environment": "my-lab", "args": args}, max_turns=4, max_new_tokens=20, max_tokens=400
    )


def facts_of(verifier: Any, *said: str) -> dict[str, Any]:
    """Of an episode of row 0 that said this last."""
    row = verifier._source.row(0, "train")
    return {
        "split": "train", "row_md5": verifiers_env.digest_of(row), "state": {},
        "completion": [{"role": "assistant", "content": text} for text in said],
    }  # fmt: skip


async def play(chosen: EnvironmentSpec, *seeds: int, answer: str | Callable[[str], str] = "yes") -> list[Trajectory]:
    """Episodes of these seeds, by the agent that the family brings."""
    make: Any = sampler_class(chosen)
    say = answer if callable(answer) else lambda seen: answer
    sampler: AgentSampler = make(
        TalkingEngine(say, 4), make_environment(chosen), RENDERER, chosen, producer="rollout-0", attempt=1
    )
    for seed in seeds:
        sampler.submit(SampleRequest(f"g/{seed}", "g", "o", seed, "train", 5, 1.0))
    done: list[Trajectory] = []
    until = time.monotonic() + 30
    while len(done) < len(seeds):
        assert time.monotonic() < until
        done += await sampler.tick()
    await sampler.cancel_all()
    for row in done:
        check_trajectory(row)
    return sorted(done, key=lambda row: row.task_seed)


async def test_an_environment_is_played_by_its_own_loop_and_graded_from_facts(lab: None) -> None:
    rows = await play(spec(), 0, 1, 2)
    assert {(row.status, row.failure_kind) for row in rows} == {("complete", "none")}
    facts = rows[0].facts
    assert (facts["environment"], facts["split"], facts["stop_condition"]) == ("my-lab", "train", "done")
    assert [message["role"] for message in facts["completion"]] == ["assistant", "user", "assistant"]
    assert facts["session"] == {"turns": 2, "taken_back": 0, "mismatches": []} and rows[0].num_sampled > 0
    assert facts["state"]["score"] == 1 and "client" not in facts["state"]
    verifier = make_verifier(spec())
    assert isinstance(verifier, RubricVerifier) and verifier.source == "verifiers/my-lab@0.0.stand-in"
    # 1 + 0.5 - 0.5 of what lies between -0.5 and 1.5.
    assert judged(verifier, 0, facts).value == pytest.approx(0.75)
    wrong = {**facts, "completion": [{"role": "assistant", "content": "no"}]}
    assert judged(verifier, 0, wrong).value == pytest.approx(0.5)


async def test_a_judge_that_breaks_is_no_grade_and_facts_of_another_row_are_refused(lab: None) -> None:
    (row,) = await play(spec(), 0)
    verifier = make_verifier(spec())
    with pytest.raises(ValueError, match="Error calling reward function needs_state: 'score'"):
        verifier.value(0, {**row.facts, "state": {}})
    with pytest.raises(ValueError, match="rollout and grader must have the same environment"):
        verifier.value(1, row.facts)


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [("fail infra", "failed", "infrastructure"), ("fail tool", "failed", "environment")],
)
async def test_whose_fault_an_error_of_the_package_is(lab: None, answer: str, status: str, kind: str) -> None:
    (row,) = await play(spec(answer=answer), 0)
    assert (row.status, row.failure_kind) == (status, kind)
    assert "broken" in row.facts["error"]


async def test_an_empty_reply_is_scored_with_what_the_environment_had_said(lab: None) -> None:
    chosen = spec(funcs=["says"])
    for first, roles in (("", ["assistant"]), ("well", ["assistant", "user", "assistant"])):
        (row,) = await play(chosen, 0, answer=partial(lambda first, seen: "" if "sure?" in seen else first, first))
        assert (row.status, row.failure_kind) == ("complete", "none") and row.num_sampled > 0
        assert [message["role"] for message in row.facts["completion"]] == roles
        assert row.facts["completion"][-1]["content"] == ""
        assert judged(make_verifier(chosen), 0, row.facts).value == 0.0


async def test_what_a_rollout_changed_of_its_row_is_judged(lab: None) -> None:
    (row,) = await play(spec(answer="?", drift="yes"), 0)
    info = {"drift": "yes", "number": row.facts["input"]["info"]["number"], "goal": "drawn"}
    assert row.facts["input"] == {"answer": "yes", "info": info}
    assert judged(make_verifier(spec(answer="?", drift="yes")), 0, row.facts).value == pytest.approx(0.75)
    (row,) = await play(spec(drift="object"), 0)
    assert (row.status, row.failure_kind) == ("failed", "environment")
    assert "changed 'answer' of its row to what is no JSON (object)" in row.facts["error"]


@pytest.mark.parametrize(
    ("limits", "args", "answer", "turns"),
    [
        ({"max_turns": 2}, {"turns": -1}, "yes", 2),
        ({"max_new_tokens": 2}, {"turns": 2}, "yes yes yes yes", 1),
        ({"max_tokens": 60}, {"turns": 4}, "yes", 2),
    ],
)
async def test_a_truncated_episode_is_judged_by_what_there_is(
    lab: None, limits: dict[str, int], args: dict[str, Any], answer: str, turns: int
) -> None:
    chosen = spec(**args, funcs=["says"]).model_copy(update=limits)
    (row,) = await play(chosen, 0, answer=answer)
    assert row.status == "truncated"
    replies = [message["content"] for message in row.facts["completion"] if message["role"] == "assistant"]
    assert len(replies) == turns == row.facts["session"]["turns"]
    assert judged(make_verifier(chosen), 0, row.facts).value == float(replies[-1] == "yes")
    with pytest.raises(ValueError, match="there is no completion to judge"):
        make_verifier(chosen).value(0, {key: value for key, value in row.facts.items() if key != "completion"})


@pytest.mark.parametrize(("said", "value"), [("ok", 1.0), ("wrong", 0.0), ("long", 0.0), ("pool", None), ("timeout", None)])
def test_a_warning_of_a_fault_is_no_grade_and_any_other_is_none_of_ours(lab: None, said: str, value: float | None) -> None:
    verifier = make_verifier(spec(funcs=["moody"]))
    if value is not None:
        assert verifier.value(0, facts_of(verifier, said)) == value
        return
    with pytest.raises(ValueError, match=r"a worker died|hard timeout"):
        verifier.value(0, facts_of(verifier, said))


def test_a_function_that_blocks_or_breaks_late_costs_its_own_call_alone(lab: None) -> None:
    verifier = make_verifier(spec(funcs=["moody"]))
    calls = DeadlineCalls(0.5)
    found: list[Any] = []
    for said in ("ok", "late", "ok", "blocks", "ok", "ok"):
        try:
            found.append(calls.call(partial(verifier.value, 0, facts_of(verifier, said))))
        except DeadlineExceeded:
            found.append(said)
    assert found == [1.0, "late", 1.0, "blocks", 1.0, 1.0]


def test_calls_that_follow_each_other_share_a_loop(lab: None) -> None:
    """A judge's client keeps its connections in one."""

    async def running() -> Any:
        return asyncio.get_running_loop()

    assert verifiers_calls.in_own_loop(running()) is verifiers_calls.in_own_loop(running())


def test_what_has_no_weight_may_break_or_be_of_a_group(lab: None) -> None:
    verifier = make_verifier(spec(funcs=["says", "breaks", "of_group"]))
    assert verifier.value(0, facts_of(verifier, "yes")) == 1.0
    assert make_verifier(spec(funcs=["says", "breaks", "of_group"])).value(0, facts_of(verifier, "no")) == 0.0


def test_a_broken_pool_of_processes_is_replaced(lab: None) -> None:
    rubric: Any = SimpleNamespace(executor=ProcessPoolExecutor(max_workers=1))
    with pytest.raises(BrokenProcessPool):
        rubric.executor.submit(os._exit, 1).result()
    verifiers_calls.renew_pools(SimpleNamespace(rubrics=[rubric]))
    assert rubric.executor.submit(abs, -3).result() == 3
    rubric.executor.shutdown()


@pytest.mark.parametrize("same", [False, True])
def test_no_task_is_in_both_splits(lab: None, same: bool) -> None:
    for held_out, (train, held) in ((0, (30, 10)), (7, (33, 7))):
        environment: Any = make_environment(spec(held_out=held_out, same=same))
        seen = {
            split: {environment.episode(seed, split).facts()["row_md5"] for seed in range(300)} for split in ("train", "eval")
        }
        assert not seen["train"] & seen["eval"] and len(seen["train"]) + len(seen["eval"]) == 40
        assert abs(len(seen["train"]) - train) <= 6 and (not held_out or len(seen["eval"]) == held)
    assert environment.episode(5, "train").facts()["row_md5"] == environment.episode(5 + 33, "train").facts()["row_md5"]
    assert split_rows([], []) == {"train": [], "eval": []}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"group": True}, "of_group scores the samples of a group together"),
        ({"empty": True}, "its rubric has no function with a weight"),
        ({"size": "x"}, r"does not load 'my-lab' with args .*TypeError: .*"),
        ({"size": 0}, "leaves no row to split train, of 0 in its dataset"),
        ({"same": "all"}, "leaves no row to split (train|eval), of 40 in its dataset and 0 in its eval_dataset"),
        ({"same": "all", "held_out": 5}, "leaves no row to split train"),
        ({"turns": 5}, "environment.max_turns=4: verifiers environment 'my-lab' takes up to 5 turns"),
    ],
)
def test_what_cannot_be_used_is_refused(lab: None, args: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_verifier(spec(**args))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    verifiers_env._load.cache_clear()
    with pytest.raises(RecipeError, match=r"needs the package of that name.*docs/agents.md has the commands"):
        make_environment(spec())


@pytest.mark.parametrize("options", [{}, {"environment": ""}, {"environment": "x", "args": 3}, {"environment": "x", "n": 1}])
def test_options_are_checked_before_anything_runs(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"give \{environment: NAME\}"):
        check_environment(EnvironmentSpec(family="verifiers", options=options))


def test_what_jobs_must_be_able_to_import() -> None:
    recipe = Recipe.model_validate(simulated_recipe().model_dump() | {"environment": spec().model_dump()})
    assert names_of(recipe) == {
        "environment.family": "verifiers:load_environment",
        "environment.options.environment": "my_lab:load_environment",
        "environment.agent.run": "miles_core.environments.verifiers_env:run",
    }
