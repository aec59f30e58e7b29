"""`miles evaluate`: from names to a question, and what a person reads of its answer."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.profile import load_cluster
from flows.output import print_json, print_text
from flows.places import find_run
from miles_core.environments.registry import check_environment
from miles_core.errors import RecipeError
from miles_core.evaluation.figures import Figure
from miles_core.evaluation.folder import EvaluationFolder, Question, Result
from miles_core.recipe import EnvironmentSpec, Recipe, apply_overrides, explain, load_recipe
from miles_core.run import read_run
from tasks import evaluate as steps

LEFT_EXIT_CODE = 130


@dataclass(frozen=True)
class Asked:
    """What a person asks, in words."""

    model: str
    """A model folder, a run, or RUN@STEP."""
    recipe: str | None = None
    family: str | None = None
    settings: tuple[str, ...] = ()
    problems: int = 256
    samples: int = 0
    temperature: float = 1.0
    seed: int = 0
    dtype: str | None = None


def question_of(asked: Asked) -> Question:
    """The question, resolved. Raises RecipeError, RunDirectoryError."""
    path, step = _split(asked.model)
    model = steps.read_model(path, step)
    run = read_run(path)[0] if model.step is not None else None
    known = None if run is None else run.recipe
    if asked.recipe is not None:
        known = load_recipe(asked.recipe)
    if known is None and asked.family is None:
        raise RecipeError(f"{asked.model} is a model folder, which names no tasks: give --recipe NAME or --family FAMILY")
    environment = _environment(asked, known)
    check_environment(environment)
    dtype = asked.dtype or (known.rollout_dtype if known is not None else _dtype_of(path))
    try:
        return Question.model_validate({
            "model": model, "environment": environment, "recipe": None if asked.family or known is None else known.name,
            "chat": None if known is None else known.model.chat, "dtype": dtype, "problems": asked.problems,
            "samples": asked.samples, "temperature": asked.temperature, "seed": asked.seed,
        })  # fmt: skip
    except ValidationError as error:
        raise explain(error, "the question", keys_in="miles_core/evaluation/folder.py") from error


def _split(text: str) -> tuple[Path, int | None]:
    """RUN@STEP, RUN, or a folder; a name that is there with its @ is taken as it is."""
    name, at, number = text.rpartition("@")
    if at and number.isdecimal() and not Path(text).expanduser().exists():
        return find_run(name), int(number)
    return find_run(text), None


def _environment(asked: Asked, known: Recipe | None) -> EnvironmentSpec:
    """The recipe's, or one of the family alone; then the settings."""
    section: dict[str, Any] = {"family": asked.family}
    if asked.family is None and known is not None:
        section = json.loads(known.environment.model_dump_json())
    strange = [text for text in asked.settings if not text.startswith("environment.")]
    if strange:
        raise RecipeError(f"--set {strange[0]!r}: an evaluation takes environment.* alone; the rest has options of its own")
    changed = apply_overrides({"environment": section}, asked.settings)["environment"]
    try:
        return EnvironmentSpec.model_validate(changed)
    except ValidationError as error:
        raise explain(error, "environment") from error


def _dtype_of(folder: Path) -> str:
    """What a model folder says of itself; float32 where it says nothing that can be had."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{folder / 'config.json'} is not readable: {error}") from error
    said = str(config.get("dtype") or config.get("torch_dtype"))
    return said if said in ("float32", "bfloat16") else "float32"


def evaluate(asked: Asked, cluster: str, *, as_json: bool) -> int:
    """Asks, waits and prints the answer; the exit code. Ctrl-C leaves the job at work. Raises MilesError."""
    profile, question = load_cluster(cluster), question_of(asked)
    folder = steps.folder_of(question, profile)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if folder.read_result() is None:
        say(f"evaluation {question.evaluation_id} on {profile.name}\n  directory {folder.root}")
        steps.ensure_folder(question, folder)
    try:
        result = steps.ensure_result(folder, profile, say)
    except KeyboardInterrupt:
        # A run's newest version may be another one by then.
        pinned = asked.model if question.model.step is None else f"{question.model.path}@{question.model.step}"
        again = shlex.join(["miles", *(pinned if word == asked.model else word for word in sys.argv[1:])])
        say(f"left; the job goes on. Continue: {again}\nEnd: {again} --cancel")
        return LEFT_EXIT_CODE
    if as_json:
        print_json(steps.as_json(result, folder))
    else:
        print_text(result_text(result, folder))
    return 0


def cancel(asked: Asked, cluster: str) -> int:
    """Ends the job of a question; the exit code. Raises MilesError."""
    profile, question = load_cluster(cluster), question_of(asked)
    folder = steps.folder_of(question, profile)
    jobs = steps.cancel(folder, profile)
    print_text(f"{folder.root.name}: {'no job was left' if not jobs else 'cancelled job ' + ', '.join(jobs)}")
    return 0


def result_text(result: Result, folder: EvaluationFolder) -> str:
    """The figures in a few lines."""
    question, figures = result.question, result.figures
    environment = question.environment
    version = "" if question.model.step is None else f"version {question.model.step} of {question.model.run_id}, "
    lines = [
        f"{result.evaluation_id}",
        f"  model     {version}{question.model.path}, weights {question.model.digest}, in {question.dtype}",
        f"  tasks     {environment.family} {json.dumps(environment.options)}, tool {environment.tool}; "
        f"{question.problems} held-out (seeds 0 to {question.problems - 1}), recipe digest {result.recipe_digest}",
        f"  greedy    {_show(figures.greedy)}",
    ]
    if figures.sampled is not None:
        of = f"{question.samples} samples each at temperature {question.temperature:g}"
        lines.append(f"  sampled   {_show(figures.sampled)}, mean of {of}")
        lines += [f"  pass@{k:<4} {_show(figure)}" for k, figure in figures.pass_at.items()]
    return "\n".join([*lines, f"  result    {folder.result_file}"])


def _show(figure: Figure) -> str:
    kind = {"wilson": "Wilson", "bootstrap": "bootstrap over problems"}[figure.interval]
    return f"{figure.mean:.4f} [{figure.low:.4f}, {figure.high:.4f}] (95 %, {kind})"
