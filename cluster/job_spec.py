"""The job of one attempt, what identifies it, which live, and the end of its log."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.engines import python_of
from cluster.profile import ClusterProfile, Role
from cluster.scheduler import JobSpec, JobView, Phase, Scheduler, attempt_token
from miles_core.errors import SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import split_writer
from miles_core.run import RunConfig, all_writers, rollout_writers

ROLE_ENV = {
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore::SyntaxWarning,ignore::FutureWarning:torch.distributed.c10d_logger",
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Libraries' progress bars and warnings about their own source or calls say nothing in a log; compiled modules are kept, else
every role compiles torch anew at its start."""
_TAIL_BYTES = 64 << 10


def token_of(run: RunConfig, writer: str, attempt: int) -> str:
    """The token of one attempt of this very run: a run that had the same id before, or has it elsewhere, has other tokens."""
    return attempt_token(f"{run.run_id}@{run.created_s!r}", writer, attempt)


def live_jobs(run: RunConfig, scheduler: Scheduler) -> tuple[JobView, ...]:
    """All jobs of this very run that have not ended. Raises SchedulerError if the scheduler does not say."""
    snapshot = scheduler.snapshot(run.run_id)
    if not snapshot.ok:
        raise SchedulerError(f"the jobs of {run.run_id} are not known: {snapshot.error}", transient=True)
    writers = set(all_writers(run.recipe))
    return tuple(
        job for job in snapshot.jobs
        if job.phase is not Phase.ENDED and job.writer in writers and job.token == token_of(run, job.writer, job.attempt)
    )  # fmt: skip


def make_job_spec(
    run: RunConfig, paths: RunPaths, profile: ClusterProfile, writer: str, attempt: int, exclude: tuple[str, ...] = ()
) -> JobSpec:
    """The job of one attempt: a role's main from the code snapshot with plain arguments, nothing pickled (I17)."""
    role, replica = split_writer(writer)
    pool = dict(rollout_writers(run.recipe)).get(writer)
    token = token_of(run, writer, attempt)
    role_name: Role = role  # type: ignore[assignment]
    root = paths.root.resolve()
    return JobSpec(
        run_id=run.run_id, run_dir=root, writer=writer, attempt=attempt, token=token,
        command=(
            python_of(run.recipe, profile, pool), "-u", "-m", f"miles_core.roles.{role}",
            "--run-dir", str(root), "--replica", str(replica), "--attempt", str(attempt),
        ),
        resources=profile.resources_for(role_name, pool),
        log_dir=RunPaths(root).logs(writer, attempt),
        env={"PYTHONPATH": str(RunPaths(root).code), "MILES_TOKEN": token, **ROLE_ENV, **_inherited()},
        exclude=exclude,
    )  # fmt: skip


def _inherited() -> dict[str, str]:
    """Test hooks that roles read from their environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("MILES_CRASH_")}


def log_tail(paths: RunPaths, writer: str, attempt: int, lines: int = 20) -> str:
    """The end of an attempt's newest log, for an error message; raises nothing that would hide that error.

    Of several ranks the first one's log: it says which rank was lost, in the words of rank 0 or of srun.
    """
    return tail_of_log(paths.logs(writer, attempt), lines)


def tail_of_log(folder: Path, lines: int = 20) -> str:
    """The same of a folder with logs."""
    try:
        files = sorted(folder.glob("*_0.out"), key=lambda path: path.stat().st_mtime)
        return _tail_of(files[-1], lines) if files else f"(no log in {folder})"
    except OSError as error:
        return f"(log in {folder} not readable: {error})"


def _tail_of(path: Path, lines: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace").splitlines()[-lines:]
    return f"last lines of {path}:\n" + "\n".join(f"  {line}" for line in text)
