"""Environments of the verifiers package, over a stand-in for it: what we make of its data, its loop and its rubric.

The package itself is not among the tests' requirements; benchmarks/verifiers_package.py plays environments of the real one.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.own_code import names_of
from miles_core.environments import verifiers_env
from miles_core.environments.base import EpisodeFailed
from miles_core.environments.registry import check_environment, make_environment
from miles_core.environments.verifiers_env import RubricVerifier, split_rows
from miles_core.errors import RecipeError
from miles_core.grading.base import judged
from miles_core.grading.rules import make_verifier
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
import importlib, logging, signal

__version__ = "0.0.stand-in"


class InfraError(Exception): pass
class EmptyModelResponseError(Exception): pass


class State(dict):
    """Fields of the row are found in `input`."""
    def __getitem__(self, key):
        row = super().get("input", {})
        return row[key] if key in row else super().__getitem__(key)
    def get(self, key, default=None):
        try: return self[key]
        except KeyError: return default


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights
    def _is_group_func(self, func):
        return "states" in func.__code__.co_varnames
    async def score_rollout(self, state):
        total = 0.0
        for func, weight in zip(self.funcs, self.weights):
            try: total += weight * float(func(state))
            except Exception as error:
                logging.getLogger("verifiers.rubrics").error("Error calling reward function %s: %s", func.__name__, error)
        state["reward"] = total


class OpenAIChatCompletionsClient:
    def __init__(self, client): self.client = client
    async def ask(self, messages):
        answer = await self.client.http.post(
            f"{self.client.base_url}/chat/completions", json={"model": "policy", "messages": messages},
            headers={"Authorization": f"Bearer {self.client.api_key}"})
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]


class Environment:
    def __init__(self, rows, rubric, eval_rows=None):
        self.dataset, self.eval_dataset, self.rubric = rows, eval_rows, rubric
        signal.signal(signal.SIGTERM, lambda *_: None)
    def get_dataset(self): return self.dataset
    def get_eval_dataset(self): return self.eval_dataset
    async def rollout(self, row, client, model, sampling_args):
        state = State(input=row, client=client, completion=[], error=None, stop_condition=None)
        try:
            for turn in range(row.get("turns", 2)):
                reply = await client.ask([*row["prompt"], *state["completion"]])
                state["completion"].append(reply)
                if "fail" in row["answer"]: raise {"infra": InfraError, "empty": EmptyModelResponseError}.get(
                    row["answer"].split()[1], KeyError)("broken")
                if turn == 0: state["completion"].append({"role": "user", "content": "sure?"})
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
import verifiers as vf

def says(state): return state["completion"][-1]["content"] == state["answer"]
def needs_state(state): return state["score"]
def long_winded(state): return len(state["trajectory"]) > 1
def of_group(states): return [0.0]

def load_environment(size=40, answer="yes", held_out=0, group=False, empty=False):
    rows = lambda name, n: [
        {"prompt": [{"role": "user", "content": f"{name} {i}"}], "answer": answer, "example_id": i} for i in range(n)]
    funcs, weights = [says, needs_state, long_winded], [1.0, 0.5, -0.5]
    if group: funcs, weights = [of_group], [1.0]
    if empty: funcs, weights = [says], [0.0]
    return vf.Environment(rows("task", size), vf.Rubric(funcs, weights), rows("task", held_out) or None)
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


async def play(chosen: EnvironmentSpec, *seeds: int, answer: str = "yes") -> list[Trajectory]:
    """Episodes of these seeds, by the agent that the family brings."""
    make: Any = sampler_class(chosen)
    sampler: AgentSampler = make(
        TalkingEngine(lambda seen: answer, 4), make_environment(chosen), RENDERER, chosen, producer="rollout-0", attempt=1
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
    [("fail infra", "failed", "infrastructure"), ("fail tool", "failed", "environment"), ("fail empty", "complete", "none")],
)
async def test_whose_fault_an_error_of_the_package_is(lab: None, answer: str, status: str, kind: str) -> None:
    (row,) = await play(spec(answer=answer), 0)
    assert (row.status, row.failure_kind) == (status, kind)
    assert ("broken" in row.facts.get("error", "")) == (status == "failed")


def test_no_prompt_is_in_both_splits(lab: None) -> None:
    for held_out, (train, held) in ((0, (30, 10)), (7, (33, 7))):
        environment: Any = make_environment(spec(held_out=held_out))
        seen = {
            split: {environment.episode(seed, split).opening()[0].content for seed in range(300)} for split in ("train", "eval")
        }
        assert not seen["train"] & seen["eval"] and len(seen["train"]) + len(seen["eval"]) == 40
        assert abs(len(seen["train"]) - train) <= 6 and (not held_out or len(seen["eval"]) == held)
    assert environment.episode(5, "train").facts()["row_md5"] == environment.episode(5 + 33, "train").facts()["row_md5"]
    assert split_rows([], []) == {"train": [], "eval": []}
    with pytest.raises(EpisodeFailed, match="no rows for split eval"):
        make_environment(spec(size=0)).episode(1, "eval")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"group": True}, "of_group scores the samples of a group together"),
        ({"empty": True}, "its rubric has no function with a weight"),
        ({"sizes": 3}, r"does not load 'my-lab' with args .*TypeError: .*sizes"),
    ],
)
def test_what_cannot_be_used_is_refused(lab: None, args: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_verifier(spec(**args))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    verifiers_env._load.cache_clear()
    with pytest.raises(RecipeError, match=r"needs the package of that name.*pip install verifiers=="):
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
