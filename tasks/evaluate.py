"""The ensure steps of an evaluation: its folder, its job, its result. Each is cheap when already done.

There is no supervisor that must live: whoever asks the same question again finds the folder, adopts the job that runs or
starts the next one behind the parts that are done. An attempt is a file made before its job is submitted; a job that nobody
can find LOST_S later is given up. Failure: attempts that end without a new part count against the profile's `role_failures`,
unless the infrastructure ended them; then NodesLost with the end of the log.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.job_spec import ROLE_ENV, tail_of_log
from cluster.profile import ClusterProfile
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Scheduler, attempt_token
from cluster.schedulers import make_scheduler
from miles_core.base_model import WEIGHT_SUFFIXES, model_files, weights_digest
from miles_core.environments.registry import make_environment
from miles_core.errors import MilesError, NodesLost, RecipeError, RunDirectoryError, SchedulerError
from miles_core.evaluation.folder import PARENT, Attempt, EvaluationFolder, ModelSource, Question, Result
from miles_core.export import export_version, find_version
from miles_core.paths import RunPaths, check_trusted
from miles_core.recipe import EnvironmentSpec
from miles_core.run import read_run
from miles_core.tracking.ledger import read_ledger
from tasks.prepare import code_digest, run_root, snapshot_code

log = logging.getLogger("miles")

WRITER = "evaluator-0"
LOST_S = 60.0
Say = Callable[[str], None]


class EvaluationCancelled(MilesError):
    """Somebody cancelled it."""

    exit_code = 10


def read_model(path: Path, step: int | None) -> ModelSource:
    """The model in a folder, or a version of the run in it (None: the newest). RunDirectoryError, RecipeError, OSError."""
    if (path / "run.json").exists():
        run, paths = read_run(path)
        published = find_version(read_ledger(run, paths), paths, step)
        return ModelSource(
            path=str(path), digest=published.weights_digest, run_id=run.run_id, step=published.version.step,
            learner_attempt=published.version.attempt,
        )  # fmt: skip
    if step is not None:
        raise RunDirectoryError(f"{path} is no run directory, so it has no version {step}; leave @{step} out")
    if not (path / "config.json").exists():
        raise RecipeError(f"{path} has no config.json: give a model folder in Hugging Face layout (`miles export` makes one)")
    return ModelSource(path=str(path), digest=weights_digest(model_files(path, WEIGHT_SUFFIXES)))


def folder_of(question: Question, profile: ClusterProfile) -> EvaluationFolder:
    """Where an evaluation is on a cluster."""
    return EvaluationFolder(run_root(profile, "x").parent / PARENT / question.evaluation_id)


def ensure_folder(question: Question, folder: EvaluationFolder) -> None:
    """Code snapshot, model and question, the question last. A version is exported, so that no collector takes it meanwhile.

    Raises RunDirectoryError, DigestMismatch, RecipeError.
    """
    try:
        os.umask(os.umask(0o022) | 0o022)
        folder.root.mkdir(parents=True, exist_ok=True)
        os.chmod(folder.root, 0o755)
        if folder.read_question() is not None:
            return
        _check_tasks(question.environment)
        snapshot_code(RunPaths(folder.root))
        if not folder.model.exists():
            _place_model(question.model, folder.model)
        folder.publish_question(question.model_copy(update={"code_digest": code_digest(folder.code)}))
    except OSError as error:
        raise RunDirectoryError(f"the folder {folder.root} cannot be made: {error}; set runs_root in the profile") from error


def _check_tasks(spec: EnvironmentSpec) -> None:
    """Refuses a family or options that no job could draw tasks of; a class of one's own may be importable there alone."""
    if not spec.is_own and spec.tool != "shell":
        make_environment(spec)


def _place_model(model: ModelSource, target: Path) -> None:
    try:
        if model.step is None:
            target.symlink_to(Path(model.path).resolve())
        else:
            run, paths = read_run(Path(model.path))
            export_version(run, paths, target, model.step)
    except (OSError, RunDirectoryError):
        if not target.exists():  # else somebody who asked the same was first
            raise


def ensure_result(
    folder: EvaluationFolder,
    profile: ClusterProfile,
    say: Say,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """The answer, by a job of the cluster that is waited for. Raises EvaluationCancelled, NodesLost, SchedulerError."""
    folder.cancel_request.unlink(missing_ok=True)
    check_trusted(folder.root)
    watch = _Watch(folder, profile, say, clock)
    told = -1
    while (result := folder.read_result()) is None:
        if folder.cancel_request.exists():
            raise EvaluationCancelled(f"evaluation {folder.root.name} was cancelled; the same command goes on with it")
        watch.look()
        if (parts := folder.count_parts()) != told:
            told = parts
            say(f"{parts} parts are done")
        sleep(min(profile.scheduler_poll_s, 5.0) if folder.result_file.exists() else profile.scheduler_poll_s)
    if result.question.model.step is not None:
        shutil.rmtree(folder.model, ignore_errors=True)
    return result


def cancel(folder: EvaluationFolder, profile: ClusterProfile) -> tuple[str, ...]:
    """Ends its jobs, for whoever waits for them, too; the ids. What is done stays. Raises SchedulerError."""
    if not folder.root.is_dir():
        raise RunDirectoryError(f"{folder.root} is not there: this was never asked on {profile.name}")
    folder.cancel_request.touch()
    scheduler = make_scheduler(profile, folder.root)
    jobs = tuple(job.job_id for job in _jobs(folder, scheduler) if job.phase is not Phase.ENDED)
    scheduler.cancel(jobs)
    return jobs


def _jobs(folder: EvaluationFolder, scheduler: Scheduler) -> tuple[JobView, ...]:
    snapshot = scheduler.snapshot(folder.root.name)
    if not snapshot.ok:
        raise SchedulerError(f"the jobs of {folder.root.name} are not known: {snapshot.error}", transient=True)
    tokens = {attempt.token for attempt in folder.attempts().values()}
    return tuple(job for job in snapshot.jobs if job.token in tokens)


class _Watch:
    """Keeps one job at work while somebody waits for the answer."""

    def __init__(self, folder: EvaluationFolder, profile: ClusterProfile, say: Say, clock: Callable[[], float]) -> None:
        self._folder, self._profile, self._say, self._clock = folder, profile, say, clock
        self._scheduler = make_scheduler(profile, folder.root)
        self._first = max(folder.attempts(), default=0) + 1
        """Earlier attempts are forgiven: whoever asks again may have mended what ended them."""
        self._missing_since: float | None = None
        self._excused: set[int] = set()
        """Attempts that the infrastructure ended."""

    def look(self) -> None:
        """Starts an attempt where none lives. Raises NodesLost, SchedulerError (not one that may pass)."""
        attempts = self._folder.attempts()
        newest = max(attempts, default=0)
        try:
            jobs = _jobs(self._folder, self._scheduler)
        except SchedulerError as error:
            self._may_pass(error)
            return
        if any(job.phase is not Phase.ENDED for job in jobs):
            self._missing_since = None
            return
        if newest and not any(job.attempt == newest for job in jobs):
            now = self._clock()
            self._missing_since = now if self._missing_since is None else self._missing_since
            if now - self._missing_since < LOST_S:
                return
            self._excused.add(newest)
        # A job that ended well left the result behind before it did.
        if self._folder.result_file.exists():
            return
        self._excused |= {job.attempt for job in jobs if job.cause is Cause.INFRASTRUCTURE}
        self._check_budget(attempts, newest)
        self._start(newest + 1)

    def _check_budget(self, attempts: dict[int, Attempt], newest: int) -> None:
        done, failed = self._folder.count_parts(), 0
        for number in reversed(attempts):
            if number < self._first or attempts[number].parts != done:
                break
            failed += number not in self._excused
        if failed > self._profile.role_failures:
            tail = tail_of_log(self._folder.logs(newest))
            raise NodesLost(f"{failed} attempts of evaluation {self._folder.root.name} ended without a new part. {tail}")

    def _start(self, number: int) -> None:
        token = attempt_token(str(self._folder.root.resolve()), WRITER, number)
        if not self._folder.claim_attempt(number, Attempt(token=token, parts=self._folder.count_parts())):
            return  # Somebody else waits for the same answer.
        self._missing_since = None
        try:
            job_id = self._scheduler.submit(self._spec(number, token))
        except SchedulerError as error:
            self._may_pass(error)
        else:
            self._say(f"attempt {number} is job {job_id}, logs in {self._folder.logs(number)}")

    def _spec(self, number: int, token: str) -> JobSpec:
        root = self._folder.root.resolve()
        command = ("-u", "-m", "miles_core.evaluation.job", "--folder", str(root), "--attempt", str(number))
        return JobSpec(
            run_id=root.name, run_dir=root, writer=WRITER, attempt=number, token=token, command=(sys.executable, *command),
            resources=self._profile.resources_for("evaluator"), log_dir=EvaluationFolder(root).logs(number),
            env={"PYTHONPATH": str(EvaluationFolder(root).code), **ROLE_ENV},
        )  # fmt: skip

    def _may_pass(self, error: SchedulerError) -> None:
        if not (error.transient or error.ambiguous):
            raise error
        log.warning("%s", error)


def as_json(result: Result, folder: EvaluationFolder) -> dict[str, object]:
    """What a script reads: the figures, what they are of, where the values are."""
    question = result.question
    return {
        "evaluation_id": result.evaluation_id, "result": str(folder.result_file), "model": question.model.model_dump(),
        "recipe": question.recipe, "recipe_digest": result.recipe_digest, "code_digest": question.code_digest,
        "seeds": [0, question.problems - 1], "samples": question.samples, "sampling_seed": question.seed,
        **json.loads(result.figures.model_dump_json()),
    }  # fmt: skip
