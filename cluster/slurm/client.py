"""The Slurm side of the Scheduler protocol: sbatch, squeue, scancel and sinfo, each with a deadline.

Invariants: submission is never repeated here (an unclear answer is ambiguous, the caller searches by token first, I13); one
squeue lists all jobs; state needs no accounting database. squeue shows ended jobs for the cluster's MinJobAge (300 s by
default): a job that is not listed has no state here, not even UNKNOWN.
Failure: queries are repeated with back-off while the controller is away, then raise SchedulerError; snapshot never raises.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.profile import ClusterProfile, SlurmSite
from cluster.scheduler import Cause, JobSpec, JobView, Snapshot
from cluster.slurm.command import NO_SLURM_HINT, Answer, Run, client_env, query_env, refusal, run_slurm
from cluster.slurm.parse import (
    EXIT_CODE_FORMAT,
    SINFO_NODES_FORMAT,
    SQUEUE_FORMAT,
    START_FORMAT,
    JobLine,
    parse_exit_codes,
    parse_job_id,
    parse_nodes,
    parse_squeue,
    parse_starts,
)
from cluster.slurm.script import sbatch_text
from cluster.slurm.states import classify
from miles_core.errors import SchedulerError

log = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 60.0
QUERY_TIMEOUT_S = 20.0
HASTY_TIMEOUT_S = 5.0
RETRY_PAUSES_S = (1.0, 3.0)
"""Pauses before a query is repeated, each times 0.5 to 1.5."""
SNAPSHOTS_PER_SINFO = 4
NO_SUCH_JOB = "Invalid job id specified"
HARMLESS_FOR_SCANCEL = (
    NO_SUCH_JOB,
    "already completing or completed",
    "can not be altered now",
    "Job is pending execution",
    "Job/step already",
)
"""Answers for jobs that have ended, are unknown, or (for a signal) have not started."""


class SlurmScheduler:
    """One Slurm cluster, seen by one supervisor."""

    def __init__(
        self,
        site: SlurmSite,
        *,
        env: Mapping[str, str] | None = None,
        run: Run = run_slurm,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        patient: bool = True,
    ) -> None:
        """`env` is added to this process's scrubbed environment, for example {"SLURM_CONF": ...}.

        `patient` False is for a person who waits: each query has a short timeout and is not repeated.
        """
        self._query_timeout_s = QUERY_TIMEOUT_S if patient else HASTY_TIMEOUT_S
        self._retry_pauses_s = RETRY_PAUSES_S if patient else ()
        self._site, self._run, self._sleep, self._jitter = site, run, sleep, jitter
        self._client_env = client_env(os.environ, env or {})
        self._query_env = query_env(os.environ, env or {})
        self._exit_codes: dict[tuple[str, str], int | None] = {}
        """By job id and token, for ended jobs still listed."""
        self._infrastructure_ends: set[tuple[str, str]] = set()
        self._snapshots_to_sinfo = 0
        self._nodes: tuple[tuple[str, ...], int | None] = ((), None)

    # ---- Scheduler

    def script(self, spec: JobSpec) -> str:
        """The sbatch text. Raises RecipeError for flags that cannot be."""
        return sbatch_text(spec, self._site)

    def submit(self, spec: JobSpec) -> str:
        """One sbatch. Raises SchedulerError: `ambiguous` if the job may exist all the same."""
        text = self.script(spec)
        try:
            # Slurm does not make it: the job would fail without a word.
            spec.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SchedulerError(f"log folder of {spec.writer} cannot be made: {error}", transient=True) from error
        answer = self._run(("sbatch", "--parsable"), env=self._client_env, timeout_s=SUBMIT_TIMEOUT_S, stdin=text)
        if answer.returncode != 0:
            raise refusal(spec, answer, self._partitions)
        job_id = parse_job_id(answer.stdout)
        if job_id is None:
            raise SchedulerError(
                f"sbatch took the job of {spec.writer} but printed no id: {answer.stdout!r} {answer.words}", ambiguous=True
            )
        return job_id

    def snapshot(self, run_id: str) -> Snapshot:
        """The run's jobs from one squeue, and once in a while the nodes from one sinfo.

        `usable_nodes` is of the whole cluster, not of one partition: an upper bound.
        """
        try:
            jobs = self._jobs(run_id)
        except SchedulerError as error:
            return Snapshot(ok=False, error=str(error))
        self._refresh_nodes(jobs)
        down, usable = self._nodes
        return Snapshot(ok=True, jobs=jobs, down_nodes=down, usable_nodes=usable)

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        """One scancel for all. A named signal goes to the role (or the srun that forwards it), not to its children."""
        if not job_ids:
            return
        options = (f"--signal={signal}", "--batch") if signal else ()
        argv = ("scancel", *options, *job_ids)
        answer = self._ask(argv)
        complaints = [line for line in answer.stderr.splitlines() if line.strip()]
        serious = [line for line in complaints if not any(words in line for words in HARMLESS_FOR_SCANCEL)]
        if answer.returncode != 0 and (serious or not complaints):
            raise _failed(argv, answer)

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        """When pending jobs are expected to start, as the backfill scheduler last planned it; others are missing."""
        if not job_ids:
            return {}
        try:
            text = self._query("squeue", "--noheader", "--start", f"--jobs={','.join(job_ids)}", f"--format={START_FORMAT}")
        except SchedulerError as error:
            log.debug("starts are not known: %s", error)
            return {}
        return parse_starts(text)

    # ---- queries

    def _jobs(self, run_id: str) -> tuple[JobView, ...]:
        text = self._query("squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--format={SQUEUE_FORMAT}")
        lines = [line for line in parse_squeue(text) if line.run_id == run_id]
        self._learn_exit_codes(lines)
        return tuple(self._view(line) for line in lines)

    def _view(self, line: JobLine) -> JobView:
        phase, cause = classify(line.state, line.reason)
        return JobView(
            job_id=line.job_id, run_id=line.run_id, writer=line.writer, attempt=line.attempt, token=line.token,
            phase=phase, cause=cause, state=line.state, reason="" if line.reason == "None" else line.reason,
            exit_code=0 if cause is Cause.COMPLETED else self._exit_codes.get((line.job_id, line.token)), nodes=line.nodes,
        )  # fmt: skip

    def _learn_exit_codes(self, lines: list[JobLine]) -> None:
        """At most one more query, and only if a job has newly failed; other ends have no code that means something."""
        listed = {(line.job_id, line.token) for line in lines}
        self._exit_codes = {key: code for key, code in self._exit_codes.items() if key in listed}
        # A job without nodes was refused after all (BadConstraints) and never ran.
        failed = [line for line in lines if line.nodes and classify(line.state)[1] in (Cause.FAILED, Cause.LIMIT)]
        new = [line for line in failed if (line.job_id, line.token) not in self._exit_codes]
        if not new:
            return
        codes = self._read_exit_codes(",".join(line.job_id for line in new))
        self._exit_codes.update({(line.job_id, line.token): codes.get(line.job_id) for line in new})

    def _read_exit_codes(self, job_ids: str) -> dict[str, int]:
        argv = ("squeue", "--noheader", "--states=all", f"--jobs={job_ids}", f"--Format={EXIT_CODE_FORMAT}")
        answer = self._ask(argv)
        # Forgotten since the first query: then there is no code to be had.
        if answer.returncode != 0 and NO_SUCH_JOB not in answer.words:
            raise _failed(argv, answer)
        return parse_exit_codes(answer.stdout)

    def _refresh_nodes(self, jobs: tuple[JobView, ...]) -> None:
        """Asks for the nodes at every fourth snapshot, and when a job was newly lost to the infrastructure."""
        lost = {(job.job_id, job.token) for job in jobs if job.cause is Cause.INFRASTRUCTURE}
        due = self._snapshots_to_sinfo == 0 or bool(lost - self._infrastructure_ends)
        self._infrastructure_ends = lost
        self._snapshots_to_sinfo = SNAPSHOTS_PER_SINFO - 1 if due else self._snapshots_to_sinfo - 1
        if not due:
            return
        try:
            self._nodes = parse_nodes(self._query("sinfo", "--noheader", "--Node", f"--format={SINFO_NODES_FORMAT}"))
        except SchedulerError as error:
            log.warning("nodes are not known: %s", error)
            self._nodes = ((), None)

    def _partitions(self) -> str:
        try:
            names = dict.fromkeys(self._query("sinfo", "--noheader", "--format=%R").split())
        except SchedulerError as error:
            return f"not known ({error})"
        return ", ".join(names)

    # ---- the border

    def _query(self, *argv: str) -> str:
        answer = self._ask(argv)
        if answer.returncode != 0:
            raise _failed(argv, answer)
        return answer.stdout

    def _ask(self, argv: tuple[str, ...]) -> Answer:
        """Runs a command that may be repeated, again while the controller is away."""
        answer = self._run(argv, env=self._query_env, timeout_s=self._query_timeout_s)
        for pause_s in self._retry_pauses_s:
            if answer.returncode == 0 or not answer.transient:
                break
            self._sleep(pause_s * (0.5 + self._jitter()))
            answer = self._run(argv, env=self._query_env, timeout_s=self._query_timeout_s)
        return answer


def _failed(argv: tuple[str, ...], answer: Answer) -> SchedulerError:
    command = " ".join(argv)
    shown = command if len(command) <= 120 else f"{command[:117]}..."
    return SchedulerError(f"`{shown}` failed with {answer.returncode}: {answer.words}", transient=answer.transient)


def slurm_for(profile: ClusterProfile, *, run: Run = run_slurm, patient: bool = True) -> SlurmScheduler:
    """The scheduler of a profile of kind slurm. Raises SchedulerError if its commands or its devslurm are not there."""
    if shutil.which("sbatch") is None:
        raise SchedulerError(f"cluster {profile.name} needs Slurm, but there is no `sbatch` in PATH; {NO_SLURM_HINT}")
    if profile.slurm.devslurm is None:
        return SlurmScheduler(profile.slurm, run=run, patient=patient)
    env = {"SLURM_CONF": str(Path(profile.slurm.devslurm).expanduser() / "slurm.conf")}
    _check_devslurm(profile.slurm.devslurm, env, run, QUERY_TIMEOUT_S if patient else HASTY_TIMEOUT_S)
    return SlurmScheduler(profile.slurm, env=env, run=run, patient=patient)


def _check_devslurm(folder: str, env: dict[str, str], run: Run, timeout_s: float) -> None:
    fix = "start it with `miles devslurm up`"
    if not Path(env["SLURM_CONF"]).is_file():
        raise SchedulerError(f"the devslurm in {folder} is not up: there is no {env['SLURM_CONF']}; {fix}")
    answer = run(("scontrol", "ping"), env=query_env(os.environ, env), timeout_s=timeout_s)
    if answer.returncode != 0:
        raise SchedulerError(f"the devslurm in {folder} is not up: {_first_line(answer)}; {fix}")


def _first_line(answer: Answer) -> str:
    return (answer.stdout.strip() or answer.words).partition("\n")[0]
