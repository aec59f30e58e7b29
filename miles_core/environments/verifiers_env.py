"""Environments of the `verifiers` package: their data, their loop and their rubric, over our sessions and our grader.

    environment:
      family: verifiers
      options: {environment: my-env, args: {...}}      # verifiers.load_environment("my-env", **args)
      max_turns: 8                                     # at least what the environment itself allows

The package is not among ours: install it, and the environment's own package, where the jobs run (tried: verifiers 0.1.14).

- *Tasks.* A seed is a row of the training dataset, or of the evaluation dataset where there is one; else a row's own hash
  decides its split. No prompt is in both.
- *Rollout.* The environment's own `rollout` is the agent of the episode (`run`), with an OpenAI client of the replica's session
  server: what it sends is tokenised once, what is sampled is recorded as it was. All rollouts of a process share one event
  loop, as in the package itself, so a tool that blocks makes the others wait.
- *Reward.* The grader makes the row again by its seed, puts completion and state back and lets the rubric score it. Functions
  in [0, 1] give a reward in [0, 1]: it is moved and scaled by the sum of the negative and of the positive weights. Only what is
  JSON of the state gets there; a function that misses something, or breaks otherwise, is "no grade" (the package itself makes
  it a 0). Functions that score a group together are refused.

Failure: without the package, without the environment, and for a rubric that cannot be used, RecipeError. What the package calls
an infrastructure error fails the episode as that; a reply of the model that is empty or no valid call is the model's, and is
scored; anything else that stops a rollout is the environment's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.splits import in_eval_split, question_digest
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

FAMILY = "verifiers"
TRIED = "0.1.14"
MODEL_FAULTS = frozenset({"EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError"})
"""Errors of the package that a model brings about, by name: their classes moved between versions."""
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
        """The task of a seed. Raises EpisodeFailed where the split has none."""
        rows = self.rows[split]
        if not rows:
            raise EpisodeFailed(f"verifiers environment {self.name!r} has no rows for split {split}", "environment")
        return rows[seed % len(rows)]


def load_source(spec: EnvironmentSpec) -> Source:
    """The environment of a recipe, loaded once per process, in its main thread. Raises RecipeError."""
    name, arguments = check_options(spec.options)
    return _load(name, json.dumps(arguments, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _load(name: str, arguments: str) -> Source:
    try:
        import verifiers
    except ImportError as error:
        raise RecipeError(
            f"environment.family: 'verifiers' needs the package of that name, which cannot be imported here ({error}); "
            f"`pip install verifiers=={TRIED}` where the jobs run"
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
    return Source(name, env, split_rows(train, evaluation), str(getattr(verifiers, "__version__", "?")))


def _dataset(env: Any, getter: str) -> list[Row]:
    """Rows of a dataset; none where the environment has not got it."""
    source = "eval_dataset" if getter == "get_eval_dataset" else "dataset"
    if getattr(env, source, None) is None and getattr(env, f"{source}_source", None) is None:
        return []
    return [dict(row) for row in getattr(env, getter)()]


def split_rows(train: list[Row], evaluation: list[Row]) -> dict[Split, list[Row]]:
    """No prompt in both: those of the evaluation dataset are held out, or those that their hash says where there is none."""
    if not evaluation:
        held = [in_eval_split(digest_of(row)) for row in train]
        return {
            "train": [row for row, out in zip(train, held, strict=True) if not out],
            "eval": [row for row, out in zip(train, held, strict=True) if out],
        }
    seen = set(map(digest_of, evaluation))
    return {"train": [row for row in train if digest_of(row) not in seen], "eval": evaluation}


def digest_of(row: Row) -> str:
    """Of what is asked."""
    return question_digest(json.dumps([as_json(message) for message in messages_of(row)], sort_keys=True))


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
        state = await source.env.rollout(deepcopy(row), verifiers.OpenAIChatCompletionsClient(client), model, {})
    error = state.get("error")
    if error is not None:
        _judge(error)
    return {
        "completion": [as_json(message) for message in state.get("completion") or ()],
        "stop_condition": state.get("stop_condition"),
        "state": {key: value for key, value in state.items() if key not in NOT_STATE and is_json(value)},
    }


def _judge(error: BaseException) -> None:
    """Raises EpisodeFailed for an error that is not the model's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & MODEL_FAULTS:
        return
    kind: Any = "infrastructure" if names & MACHINE_FAULTS else "environment"
    raise EpisodeFailed(f"{type(error).__name__}: {error or error.__cause__}", kind) from error


@functools.lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


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

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward in [0, 1]. Raises ValueError for facts of another row, and when the rubric's own functions broke."""
        row = self._source.row(task_seed, facts.get("split", "train"))
        said, expected = facts.get("row_md5"), digest_of(row)
        if said != expected:
            raise ValueError(
                f"task seed {task_seed}: the facts say row_md5={said!r} but this grader has {expected!r}; rollout and grader "
                f"must have the same environment and data ({self.source})"
            )
        state = self._state(row, facts)
        with _errors_of_package() as errors:
            in_loop(self._rubric.score_rollout(state))
        if errors:
            raise ValueError(f"{self.source}, task seed {task_seed}: {'; '.join(errors)[:500]}")
        return (float(state["reward"]) - self._least) / (self._most - self._least)

    def _state(self, row: Row, facts: dict[str, Any]) -> Any:
        """A rollout's state as the rubric expects it, of what was recorded."""
        import verifiers

        given = deepcopy(row)
        if isinstance(given.get("info"), str):
            given["info"] = json.loads(given["info"])
        completion = _as_messages(facts.get("completion") or [])
        state = verifiers.State(input={**given, "prompt": _as_messages(messages_of(row))})
        step: Row = {"response": None, "tokens": None, "reward": None, "advantage": None, "is_truncated": False, "extras": {}}
        replies = [number for number, message in enumerate(completion) if message["role"] == "assistant"]
        state.update({
            **facts.get("state", {}), "completion": completion, "stop_condition": facts.get("stop_condition"), "error": None,
            "trajectory": [{**step, "prompt": completion[:at], "completion": completion[at : at + 1]} for at in replies],
            "timing": {"start_time": 0.0, "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        })  # fmt: skip
        return state


def _weights(rubric: Any) -> Iterator[float]:
    """Of all functions, those of groups of rubrics too. Raises RecipeError for one that scores a group together."""
    for part in getattr(rubric, "rubrics", ()):
        yield from _weights(part)
    is_group = getattr(rubric, "_is_group_func", lambda func: False)
    for func, weight in zip(getattr(rubric, "funcs", ()), getattr(rubric, "weights", ()), strict=False):
        if weight and is_group(func):
            raise RecipeError(
                f"verifiers: the rubric's function {func.__name__} scores the samples of a group together, and grades are "
                f"given one by one here; take an environment without it"
            )
        yield float(weight)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _errors_of_package() -> Iterator[list[str]]:
    """What the package logs as an error meanwhile: it gives 0 for a function that broke, and says so nowhere else."""
    collector, logger = _Collector(), logging.getLogger("verifiers")
    logger.addHandler(collector)
    try:
        yield collector.texts
    finally:
        logger.removeHandler(collector)


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
