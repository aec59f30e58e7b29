"""How held-out tasks are answered and judged, by the evaluator role and by an evaluation job alike.

No grade is never a zero: a task whose episode broke, or that the verifier does not judge, is tried again; if it never gets a
grade, that is an error which names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.environments.base import Environment
from miles_core.errors import MilesError
from miles_core.grading.base import Verifier, judged
from miles_core.recipe import EnvironmentSpec
from miles_core.rollout.engine import Engine
from miles_core.rollout.sampler import Sampler, sample_many
from miles_core.rollout.session import Renderer

log = logging.getLogger("miles")

SLOTS = 64
"""Tasks sampled at once; between two such parts a job looks whether it shall leave."""
TRIES = 3

Score = Callable[[Sequence[int]], Sequence[float | None]]
"""The values in [0, 1] of tasks of the eval split by their seeds; None without a grade."""


def score_tasks(
    engine: Engine,
    environment: Environment,
    renderer: Renderer,
    spec: EnvironmentSpec,
    verifier: Verifier,
    seeds: Sequence[int],
    *,
    temperature: float = 0.0,
    draw: int = 0,
    make: Callable[..., Any] = Sampler,
) -> list[float | None]:
    """One answer to each task of the eval split, judged; `draw` and `make`: see sample_many."""
    rows = sample_many(engine, environment, renderer, spec, seeds, split="eval", temperature=temperature, draw=draw, make=make)
    return [None if row.status == "failed" else value_or_none(verifier, row.task_seed, row.facts) for row in rows]


def value_or_none(verifier: Verifier, task_seed: int, facts: dict[str, Any]) -> float | None:
    """What a grader would give; None, and a line in the log, where it would give no grade."""
    try:
        return judged(verifier, task_seed, facts).value
    except Exception as error:  # noqa: BLE001 - a verifier is foreign code; any failure of it is "no grade"
        log.warning("evaluation task %d: no grade: %s: %s", task_seed, type(error).__name__, error)
        return None


def score_all(
    score: Score, seeds: Sequence[int], should_leave: Callable[[], bool], on_part: Callable[[int], None] = lambda number: None
) -> list[float] | None:
    """One value a seed, part by part; tasks without a grade are tried again. None when asked to leave. Raises MilesError.

    `on_part` is told how many tasks were asked.
    """
    values: dict[int, float] = {}
    for _ in range(TRIES):
        missing = [seed for seed in seeds if seed not in values]
        for start in range(0, len(missing), SLOTS):
            if should_leave():
                return None
            part = missing[start : start + SLOTS]
            answers = zip(part, score(part), strict=True)
            values |= {seed: value for seed, value in answers if value is not None}
            on_part(len(part))
    missing = [seed for seed in seeds if seed not in values]
    if missing:
        raise MilesError(
            f"{len(missing)} of {len(seeds)} evaluation tasks broke {TRIES} times, first seeds {missing[:5]}: no grade is "
            f"never a zero; look for `episode` and `no grade` in this role's log, or raise environment.tool_deadline_s"
        )
    return [values[seed] for seed in seeds]
