"""What every Scheduler keeps, as functions over a harness: run on LocalScheduler, on FakeSlurm and on a real slurmctld.

A harness makes scheduler objects on one cluster, knows how to lose a machine, and waits. A check that fails on one
scheduler and passes on another shows where the fake lies.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cluster.profile import Resources
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Scheduler, attempt_token

DEADLINE_S = 60.0
FOREVER_S = 600
DRAINED = 75

ROLE = """
import signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""
"""A role that drains on USR2; arguments: seconds, exit code."""

T = TypeVar("T")


@dataclass
class Harness:
    """One cluster and how to wait on it. The run is called like its folder."""

    run_dir: Path
    make: Callable[[], Scheduler]
    """A new object on the same cluster, as a new supervisor makes it."""
    unreachable: Callable[[], Scheduler]
    """A scheduler whose cluster does not answer."""
    lose: Callable[[JobView], None]
    """The machine of a running job dies."""
    is_ready: Callable[[JobSpec, str], bool]
    """The role has come to its `ready`."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def run_id(self) -> str:
        return self.run_dir.name

    def spec(self, writer: str = "rollout-0", *, seconds: float = 0.0, code: int = 0, run_id: str | None = None) -> JobSpec:
        """A job that sleeps and exits."""
        (self.run_dir / "code").mkdir(parents=True, exist_ok=True)
        run = run_id or self.run_id
        return JobSpec(
            run_id=run, run_dir=self.run_dir, writer=writer, attempt=1, token=attempt_token(run, writer, 1),
            command=(sys.executable, "-S", "-c", ROLE, str(seconds), str(code)),
            resources=Resources(time_min=5), log_dir=self.run_dir / "logs" / writer / "attempt_1",
        )  # fmt: skip

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """The first true thing `look` gives."""
        deadline = self.clock() + DEADLINE_S
        while self.clock() < deadline:
            if found := look():
                return found
            self.sleep(0.1)
        raise AssertionError(f"waited {DEADLINE_S:.0f} s for {what}")

    def jobs(self, scheduler: Scheduler) -> tuple[JobView, ...]:
        """The jobs of the run; a query that fails is an error here."""
        snapshot = scheduler.snapshot(self.run_id)
        assert snapshot.ok, snapshot.error
        return snapshot.jobs

    def view(self, scheduler: Scheduler, job_id: str) -> JobView | None:
        """One job, if listed."""
        return next((job for job in self.jobs(scheduler) if job.job_id == job_id), None)

    def until_phase(self, scheduler: Scheduler, job_id: str, phase: Phase) -> JobView:
        """The job when it is in that phase."""

        def look() -> JobView | None:
            job = self.view(scheduler, job_id)
            return job if job and job.phase is phase else None

        return self.until(f"job {job_id} to be {phase.value}", look)

    def start(self, scheduler: Scheduler, spec: JobSpec) -> JobView:
        """Submits and waits until the role itself runs."""
        job_id = scheduler.submit(spec)
        job = self.until_phase(scheduler, job_id, Phase.RUNNING)
        self.until(f"`ready` of job {job_id} in {spec.log_dir}", lambda: self.is_ready(spec, job_id))
        return job


def a_submitted_job_appears_with_its_token(h: Harness) -> None:
    scheduler, spec = h.make(), h.spec("learner-0", seconds=FOREVER_S)
    job_id = scheduler.submit(spec)
    job = h.until("the job to be listed", lambda: h.view(scheduler, job_id))
    assert (job.run_id, job.writer, job.attempt, job.token) == (h.run_id, "learner-0", 1, spec.token)
    assert job.phase in (Phase.PENDING, Phase.RUNNING)
    running = h.until_phase(scheduler, job_id, Phase.RUNNING)
    assert len(running.nodes) == 1 and running.cause is Cause.NONE and running.exit_code is None


def exit_codes_are_told_apart(h: Harness) -> None:
    scheduler = h.make()
    good, bad = scheduler.submit(h.spec("grader-0")), scheduler.submit(h.spec("grader-1", code=7))
    ended = h.until_phase(scheduler, good, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.COMPLETED, 0)
    ended = h.until_phase(scheduler, bad, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, 7)


def cancel_ends_jobs_in_one_call(h: Harness) -> None:
    scheduler = h.make()
    first = h.start(scheduler, h.spec("rollout-0", seconds=FOREVER_S)).job_id
    second = scheduler.submit(h.spec("rollout-1", seconds=FOREVER_S))
    scheduler.cancel((first, second, "999999"))
    for job_id in (first, second):
        assert h.until_phase(scheduler, job_id, Phase.ENDED).cause is Cause.CANCELLED
    scheduler.cancel((first, second))
    scheduler.cancel(())
    assert h.until_phase(h.make(), first, Phase.ENDED).cause is Cause.CANCELLED


def a_twin_submission_is_a_second_job(h: Harness) -> None:
    scheduler, spec = h.make(), h.spec(seconds=FOREVER_S)
    ids = [scheduler.submit(spec), scheduler.submit(spec)]
    h.until("both twins", lambda: len(h.jobs(scheduler)) == 2)
    assert [job.job_id for job in h.jobs(scheduler)] == ids, "oldest first"
    assert {job.token for job in h.jobs(scheduler)} == {spec.token}


def jobs_survive_their_scheduler(h: Harness) -> None:
    spec = h.spec(seconds=2.0, code=7)
    job_id = h.make().submit(spec)
    successor = h.make()
    assert h.until_phase(successor, job_id, Phase.RUNNING).token == spec.token
    h.until_phase(successor, job_id, Phase.ENDED)
    ended = h.view(h.make(), job_id)
    assert ended is not None and (ended.cause, ended.exit_code) == (Cause.FAILED, 7)


def a_named_signal_reaches_the_role(h: Harness) -> None:
    scheduler = h.make()
    job = h.start(scheduler, h.spec(seconds=FOREVER_S))
    scheduler.cancel((job.job_id,), signal="USR2")
    ended = h.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, DRAINED)
    scheduler.cancel((job.job_id, "999999"), signal="USR2")


def a_lost_machine_is_nobodys_fault(h: Harness) -> None:
    scheduler = h.make()
    job = h.start(scheduler, h.spec(seconds=FOREVER_S))
    h.lose(job)
    ended = h.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code, ended.nodes) == (Cause.INFRASTRUCTURE, None, job.nodes)


def other_runs_are_not_listed(h: Harness) -> None:
    scheduler = h.make()
    mine = scheduler.submit(h.spec())
    scheduler.submit(h.spec(run_id=f"{h.run_id}-2"))
    h.until_phase(scheduler, mine, Phase.ENDED)
    assert [job.job_id for job in h.jobs(scheduler)] == [mine]


def an_unreachable_scheduler_says_so(h: Harness) -> None:
    snapshot = h.unreachable().snapshot(h.run_id)
    assert not snapshot.ok and snapshot.error and snapshot.jobs == ()


def the_script_holds_the_command(h: Harness) -> None:
    text = h.make().script(h.spec("evaluator-0"))
    assert "exec " in text and str(h.run_dir / "code") in text and "OMP_NUM_THREADS=1" in text


CONTRACT: tuple[Callable[[Harness], None], ...] = (
    a_submitted_job_appears_with_its_token,
    exit_codes_are_told_apart,
    cancel_ends_jobs_in_one_call,
    a_twin_submission_is_a_second_job,
    jobs_survive_their_scheduler,
    a_named_signal_reaches_the_role,
    a_lost_machine_is_nobodys_fault,
    other_runs_are_not_listed,
    an_unreachable_scheduler_says_so,
    the_script_holds_the_command,
)
