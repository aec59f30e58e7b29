"""Environments of the `verifiers` package: their data, their loop and their rubric, over our sessions and our grader.

    environment:
      family: verifiers
      options: {environment: my-env, args: {...}}      # verifiers.load_environment("my-env", **args)
      max_turns: 8                                     # at least what the environment itself allows

The package is not among ours: docs/agents.md installs it, where the jobs run (tried: verifiers 0.1.14).

- *Tasks.* A seed is a row of the training dataset, or of the evaluation dataset where there is one; else a row's own hash
  decides its split. No task (prompt, answer and info) is in both; a split without any is refused.
- *Rollout.* The environment's own `rollout` is the agent of the episode (`run`), with an OpenAI client of the replica's session
  server: what it sends is tokenised once, what is sampled is recorded as it was. All rollouts of a process share one event
  loop, as in the package itself, so a tool that blocks makes the others wait.
- *Reward.* The grader makes the row again by its seed, puts completion, state and what the rollout changed of the row back,
  and lets the rubric score it. Functions in [0, 1] give a reward in [0, 1]: it is moved and scaled by the sum of the negative
  and of the positive weights. Only what is JSON of the state gets there; a function that misses something, or breaks
  otherwise, is "no grade" (the package itself makes it a 0; verifiers_calls.py), unless its weight is 0. Functions that score
  a group together are refused.

Failure: without the package, without the environment, for one that takes more turns than the recipe gives, and for a rubric
that cannot be used, RecipeError. What the package calls an infrastructure error fails the episode as that; a reply of the model
that is empty or no valid call is the model's, and is scored (the package drops an empty one from the completion; here it is
in); anything else that stops a rollout is the environment's, unless the episode had met a limit, when the rubric scores what
there is. A field of the row that was changed to what is no JSON fails the episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.splits import in_eval_split, question_digest
from miles_core.environments.verifiers_calls import (
    faults_of,
    in_own_loop,
    is_of_group,
    leave_out_measures,
    new_loop,
    parts_of,
    renew_pools,
)
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

FAMILY = "verifiers"
TRIED = "0.1.14"
MODEL_FAULTS = frozenset({"EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError"})
"""Errors of the package that a model brings about, by name: their classes moved between versions."""
NO_REPLY = frozenset({"EmptyModelResponseError", "InvalidModelResponseError"})
"""Those of them that leave the turn out of the completion."""
MACHINE_FAULTS = frozenset({"InfraError", "SandboxError", "TunnelError"})
NOT_STATE = frozenset(
    {"client", "model", "sampling_args", "prompt", "completion", "trajectory", "input", "tool_defs", "timing", "usage"}
)
"""Of a rollout's state: what is no fact, or is one of its own."""

T = TypeVar("T")
Row = dict[str, Any]


# --- tasks


def check_options(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the environment. Raises RecipeError."""
    name, arguments = options.get("environment"), options.get("args", {})
    unknown = sorted(options.keys() - {"environment", "args"})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or unknown:
        raise RecipeError(
            f"environment.options: {options} is not what family verifiers takes: give {{environment: NAME}}, and args: {{...}} "
            f"for its load_environment"
        )
    return name, arguments


def module_of(name: str) -> str:
    """The Python module of an environment, as the package finds it."""
    return name.replace("-", "_").split("/")[-1]


@dataclass(frozen=True)
class Source:
    """One environment and its rows."""

    name: str
    env: Any
    """verifiers.Environment."""
    rows: dict[Split, list[Row]]
    version: str

    def row(self, seed: int, split: Split) -> Row:
        """The task of a seed."""
        rows = self.rows[split]
        return rows[seed % len(rows)]


def load_source(spec: EnvironmentSpec) -> Source:
    """The environment of a recipe, loaded once per process, in its main thread. Raises RecipeError."""
    name, arguments = check_options(spec.options)
    source = _load(name, json.dumps(arguments, sort_keys=True))
    turns = most_turns(source.env)
    if turns > spec.max_turns:
        raise RecipeError(
            f"environment.max_turns={spec.max_turns}: verifiers environment {name!r} takes up to {turns} turns; set "
            f"environment.max_turns: {turns}, or let its args allow fewer"
        )
    return source


def most_turns(env: Any) -> int:
    """Turns that an environment, or any of its group, allows itself; 0 if it sets no limit."""
    return max([0, int(getattr(env, "max_turns", 0) or 0), *map(most_turns, getattr(env, "envs", ()))])


@functools.lru_cache(maxsize=4)
def _load(name: str, arguments: str) -> Source:
    try:
        import verifiers
    except ImportError as error:
        raise RecipeError(
            f"environment.family: 'verifiers' needs the package of that name, which cannot be imported here ({error}); "
            f"docs/agents.md has the commands that install verifiers=={TRIED} where the jobs run"
        ) from error
    try:
        with _signals_kept():
            env = verifiers.load_environment(name, **json.loads(arguments))
            train, evaluation = _dataset(env, "get_dataset"), _dataset(env, "get_eval_dataset")
    except Exception as error:  # whatever the environment's code raises
        raise RecipeError(
            f"environment.options: verifiers does not load {name!r} with args {arguments} ({type(error).__name__}: {error}); "
            f"install its package where the jobs run, and give what its load_environment takes"
        ) from error
    rows = split_rows(train, evaluation)
    for split in rows:
        if not rows[split]:
            raise RecipeError(
                f"environment.options: verifiers environment {name!r} with args {arguments} leaves no row to split {split}, of "
                f"{len(train)} in its dataset and {len(evaluation)} in its eval_dataset; rows that differ in prompt, answer or "
                f"info are needed in both splits (a quarter is held out where there is no eval_dataset)"
            )
    return Source(name, env, rows, str(getattr(verifiers, "__version__", "?")))


def _dataset(env: Any, getter: str) -> list[Row]:
    """Rows of a dataset; none where the environment has not got it."""
    source = "eval_dataset" if getter == "get_eval_dataset" else "dataset"
    if getattr(env, source, None) is None and getattr(env, f"{source}_source", None) is None:
        return []
    return [dict(row) for row in getattr(env, getter)()]


def split_rows(train: list[Row], evaluation: list[Row]) -> dict[Split, list[Row]]:
    """No task in both: those of the evaluation dataset are held out, or those that their hash says where there is none."""
    if not evaluation:
        held = [in_eval_split(digest_of(row)) for row in train]
        return {
            "train": [row for row, out in zip(train, held, strict=True) if not out],
            "eval": [row for row, out in zip(train, held, strict=True) if out],
        }
    seen = set(map(digest_of, evaluation))
    return {"train": [row for row in train if digest_of(row) not in seen], "eval": evaluation}


def digest_of(row: Row) -> str:
    """Of what is asked, and what is right: many environments open every task with the same prompt."""
    asked = [as_json(message) for message in messages_of(row)]
    return question_digest(json.dumps([asked, row.get("answer"), row.get("info")], sort_keys=True, default=str))


def messages_of(row: Row) -> list[Any]:
    """The prompt of a row as messages."""
    prompt = row.get("prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The package takes TERM and INT for itself; they are the role's."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


# --- the episode, and its agent


@dataclass
class VerifiersEpisode:
    """A row. The agent plays it; without one there is nobody to answer."""

    source: Source
    seed: int
    split: Split
    row: Row

    def opening(self) -> tuple[Message, ...]:
        """The prompt."""
        return tuple(Message(str(message["role"]), str(message["content"])) for message in map(as_json, messages_of(self.row)))

    async def respond(self, content: str) -> tuple[Message, ...]:
        """Not called: the environment's own loop is the agent."""
        raise NotImplementedError("family verifiers is driven by its agent")

    def facts(self) -> dict[str, Any]:
        """Which row it is."""
        return {"family": FAMILY, "environment": self.source.name, "split": self.split, "row_md5": digest_of(self.row)}

    async def close(self) -> None:
        """Nothing is held."""


class VerifiersEnvironment:
    """See module."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._source = load_source(spec)

    def episode(self, seed: int, split: Split) -> VerifiersEpisode:
        """A fresh episode of row `seed`."""
        return VerifiersEpisode(self._source, seed, split, self._source.row(seed, split))


def run(base_url: str, api_key: str, task: Any) -> dict[str, Any]:
    """The agent: one rollout of the environment. Raises EpisodeFailed."""
    name, arguments = check_options(task.options)
    source = _load(name, json.dumps(arguments, sort_keys=True))
    return in_loop(_rollout(source, source.row(task.seed, task.split), base_url, api_key, task.model))


async def _rollout(source: Source, row: Row, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    import verifiers
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # A call that is sent again is another try of the turn, so nobody may; the episode has deadlines.
    http = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http) as client:
        talk = verifiers.OpenAIChatCompletionsClient(client)
        asked = _note_asked(talk)
        state = await source.env.rollout(deepcopy(row), talk, model, {})
    error = state.get("error")
    facts = {
        "completion": _completion(state, asked),
        "stop_condition": state.get("stop_condition"),
        "input": _changes(state, row),
        "state": {
            key: value
            for key, value in state.items()
            if key not in NOT_STATE and value is not state.get("input") and is_json(value)
        },
    }
    if error is not None:
        _judge(error, facts)
    return facts


def _note_asked(talk: Any) -> list[Any]:
    """The messages that a client of the package was asked to answer last."""
    asked: list[Any] = []
    ask = talk.get_response

    async def noting(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        asked[:] = prompt
        return await ask(prompt, *args, **kwargs)

    talk.get_response = noting
    return asked


def _completion(state: Any, asked: list[Any]) -> list[dict[str, Any]]:
    """What followed the prompt, with the empty reply that ended it and the environment's words before that."""
    completion = list(map(as_json, state.get("completion") or ()))
    if not names_of(state.get("error")) & NO_REPLY:
        return completion
    prompt, last = list(map(as_json, state["prompt"])), list(map(as_json, asked))
    so_far = prompt + completion
    if last[: len(so_far)] == so_far:
        completion = last[len(prompt) :]
    return [*completion, {"role": "assistant", "content": ""}]


def _changes(state: Any, row: Row) -> Row:
    """Fields of the row that the rollout has put or changed: the package keeps state["answer"] and the like there."""
    began, changed = input_of(row), {}
    for key, value in dict(state.get("input") or {}).items():
        before, after = began.get(key), value
        if key == "prompt":
            before, after = ([as_json(message) for message in _as_messages(prompt)] for prompt in (before or [], value or []))
        if key in began and _is_same(before, after):
            continue
        if not is_json(after):
            raise EpisodeFailed(
                f"the rollout changed {key!r} of its row to what is no JSON ({type(value).__name__}), so its rubric would "
                f"judge another task",
                "environment",
            )
        changed[key] = after
    return changed


def input_of(row: Row) -> Row:
    """A row as the package begins a rollout's state with it."""
    given = deepcopy(row)
    if isinstance(given.get("info"), str):
        given["info"] = json.loads(given["info"])
    try:
        from verifiers.types import flatten_task_input
    except ImportError:
        return given
    return dict(flatten_task_input(given))


def _is_same(before: Any, after: Any) -> bool:
    try:
        return before is after or bool(before == after)
    except ValueError:  # of arrays
        return repr(before) == repr(after)


def names_of(error: BaseException | None) -> set[str]:
    """Of an error's class and those that it is one of."""
    return {kind.__name__ for kind in type(error).__mro__}


def _judge(error: BaseException, facts: dict[str, Any]) -> None:
    """Raises EpisodeFailed for an error that is not the model's."""
    names = names_of(error)
    if names & MODEL_FAULTS:
        return
    kind: Any = "infrastructure" if names & MACHINE_FAULTS else "environment"
    raise EpisodeFailed(f"{type(error).__name__}: {error or error.__cause__}", kind, facts) from error


@functools.lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    return new_loop()


def in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs it in the one loop of the process, from any other thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


# --- the reward


class RubricVerifier:
    """A Verifier (grading/base.py) by an environment's rubric. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._source = load_source(spec)
        self._rubric = self._source.env.rubric
        self.source = f"verifiers/{self._source.name}@{self._source.version}"
        weights = list(_weights(self._rubric))
        self._least, self._most = sum(min(w, 0.0) for w in weights), sum(max(w, 0.0) for w in weights)
        if self._most <= self._least:
            raise RecipeError(f"verifiers environment {self._source.name!r}: its rubric has no function with a weight")
        leave_out_measures(self._rubric)

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward in [0, 1]. Raises ValueError for facts of another row or of no rollout, and when the rubric's own
        functions broke."""
        row = self._source.row(task_seed, facts.get("split", "train"))
        said, expected = facts.get("row_md5"), digest_of(row)
        if said != expected:
            raise ValueError(
                f"task seed {task_seed}: the facts say row_md5={said!r} but this grader has {expected!r}; rollout and grader "
                f"must have the same environment and data ({self.source})"
            )
        if facts.get("completion") is None:
            raise ValueError(f"{self.source}, task seed {task_seed}: the rollout broke, so there is no completion to judge")
        state = self._state(row, facts)
        faults = in_own_loop(faults_of(self._rubric.score_rollout(state)))
        if faults:
            renew_pools(self._rubric)
            raise ValueError(f"{self.source}, task seed {task_seed}: {'; '.join(faults)[:500]}")
        return (float(state["reward"]) - self._least) / (self._most - self._least)

    def _state(self, row: Row, facts: dict[str, Any]) -> Any:
        """A rollout's state as the rubric expects it, of what was recorded."""
        import verifiers

        given = {**input_of(row), **facts.get("input", {})}
        given["prompt"] = prompt = _as_messages(messages_of(given))
        completion = _as_messages(facts["completion"])
        state = verifiers.State(input=given)
        step: Row = {"response": None, "tokens": None, "reward": None, "advantage": None, "is_truncated": False, "extras": {}}
        turns = [number for number, message in enumerate(completion) if message["role"] == "assistant"]
        state.update({
            "task": given, **facts.get("state", {}),
            "completion": completion, "stop_condition": facts.get("stop_condition"), "error": None,
            "trajectory": [{**step, "prompt": prompt + completion[:at], "completion": completion[at : at + 1]} for at in turns],
            "timing": {"start_time": 0.0, "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        })  # fmt: skip
        return state


def _weights(rubric: Any) -> Iterator[float]:
    """Of all functions, those of groups of rubrics too. Raises RecipeError for one that scores a group together."""
    for part in parts_of(rubric):
        for func, weight in zip(getattr(part, "funcs", ()), getattr(part, "weights", ()), strict=False):
            if weight and is_of_group(part, func):
                raise RecipeError(
                    f"verifiers: the rubric's function {func.__name__} scores the samples of a group together, and grades are "
                    f"given one by one here; take an environment without it"
                )
            yield float(weight)


# --- messages


def as_json(message: Any) -> dict[str, Any]:
    """A message as plain JSON, whatever class it has."""
    dumped = message.model_dump() if hasattr(message, "model_dump") else dict(message)
    return {key: value for key, value in dumped.items() if value is not None}


def is_json(value: Any) -> bool:
    """Whether it is the same after a journey."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _as_messages(messages: list[Any]) -> list[Any]:
    """As this version of the package gives them to its functions."""
    try:
        from verifiers.utils.message_utils import normalize_messages
    except ImportError:
        return list(messages)
    return list(normalize_messages(messages, field_name="messages"))
