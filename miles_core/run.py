"""run.json: one run, resolved, written once. Roles know nothing else about what they are part of."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths, check_trusted
from miles_core.recipe import Closed, Recipe, Timing


class RunConfig(Closed):
    """Content of run.json."""

    schema_version: int = 1
    run_id: str
    recipe: Recipe
    timing: Timing
    cluster: dict[str, object]
    """The resolved cluster profile, as JSON; roles do not read it, the supervisor does."""
    code_digest: str
    base_model_digest: str
    """Digest of the base model's weights file."""
    created_s: float
    """Unix seconds."""


def read_run(root: Path) -> tuple[RunConfig, RunPaths]:
    """The run of a run directory, after the trust check. Raises RunDirectoryError."""
    check_trusted(root)
    paths = RunPaths(root)
    try:
        return RunConfig.model_validate_json(paths.run_file.read_bytes()), paths
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{root} has no run.json: it is not a run directory, or its creation was cut short") from error
    except OSError as error:
        reason = "readable by you" if isinstance(error, PermissionError) else f"to be read: {error.strerror}"
        raise RunDirectoryError(f"{paths.run_file} is not {reason}") from error
    except ValidationError as error:
        raise RunDirectoryError(f"{paths.run_file} is not a run description of this version: {error}") from error


def rollout_writers(recipe: Recipe) -> list[tuple[str, str]]:
    """(writer, pool name) of every rollout replica, numbered through over the pools."""
    names = [pool.name for pool in recipe.rollout.pools for _ in range(pool.replicas)]
    return [(f"rollout-{index}", name) for index, name in enumerate(names)]


def grader_writers(recipe: Recipe) -> list[str]:
    """Writers of the grader tier."""
    return [f"grader-{index}" for index in range(recipe.grader.replicas)]


def all_writers(recipe: Recipe) -> list[str]:
    """Every role of a run, in the order in which they are submitted: the learner first (design section 6)."""
    rollouts = [writer for writer, _ in rollout_writers(recipe)]
    return ["learner-0", "orchestrator-0", *grader_writers(recipe), *rollouts, "evaluator-0"]
