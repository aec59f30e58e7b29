"""A run directory whose roles only sleep: real supervisor, real local jobs, no model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cluster.epoch import WRITER, supervisor_context
from cluster.job_spec import make_job_spec
from cluster.local.scheduler import FOLDER, LocalScheduler
from cluster.profile import ClusterProfile
from cluster.scheduler import Phase
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe, Timing
from miles_core.records import Cuts, RunClosed
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import Heartbeat, LeaseFolder, write_heartbeat

ROLES = ("orchestrator", "rollout", "grader", "learner", "evaluator")


class SleepingRun:
    """Run `run_id` below `runs_root`, made for local processes."""

    def __init__(self, runs_root: Path, run_id: str, *, recipe: str = "sleepy", lease_s: float = 0.4) -> None:
        timing = Timing(visibility_s=0.0, lease_s=lease_s)
        self.profile = ClusterProfile(name="local", kind="local", runs_root=str(runs_root), scheduler_poll_s=0.2, timing=timing)
        made = Recipe.model_validate(
            {"name": recipe, "steps": 3, "model": {"path": "none"}, "environment": {"family": "chain_sum"}}
        )
        self.paths = RunPaths(runs_root / run_id)
        self.paths.root.mkdir(mode=0o755, parents=True)
        self.run = RunConfig(
            run_id=run_id, recipe=made, timing=timing, cluster=json.loads(self.profile.model_dump_json()),
            code_digest="c0de", base_model_digest="ba5e", created_s=time.time(),
        )  # fmt: skip
        for folder in (self.paths.leases, self.paths.heartbeats, self.paths.code / "miles_core" / "roles"):
            folder.mkdir(parents=True)
        for package in (self.paths.code / "miles_core", self.paths.code / "miles_core" / "roles"):
            # Without it, a whole package further down the path would be taken before this one.
            (package / "__init__.py").touch()
        for role in ROLES:
            (self.paths.code / "miles_core" / "roles" / f"{role}.py").write_text("import time\n\ntime.sleep(600)\n")
        self.paths.run_file.write_text(self.run.model_dump_json())
        self._leases = LeaseFolder(FileSystem(), self.paths.leases, run_id)

    def start_job(self, writer: str = "learner-0", attempt: int = 1) -> str:
        """A job of one attempt, with nobody who supervises it; its id."""
        return LocalScheduler(self.paths.root).submit(make_job_spec(self.run, self.paths, self.profile, writer, attempt))

    def live_jobs(self) -> set[tuple[str, int]]:
        """(writer, attempt) of jobs that have not ended."""
        jobs = LocalScheduler(self.paths.root).snapshot(self.run.run_id).jobs
        return {(job.writer, job.attempt) for job in jobs if job.phase is not Phase.ENDED}

    def running_jobs(self) -> set[tuple[str, int]]:
        """(writer, attempt) of jobs that have a process."""
        jobs = LocalScheduler(self.paths.root).snapshot(self.run.run_id).jobs
        return {(job.writer, job.attempt) for job in jobs if job.phase is Phase.RUNNING}

    def kill(self, writer: str) -> None:
        """kill -9 of a role with its process group, in all attempts that run."""
        for job in LocalScheduler(self.paths.root).snapshot(self.run.run_id).jobs:
            if job.writer == writer and job.phase is Phase.RUNNING:
                pid = (self.paths.root / FOLDER / f"{job.job_id}.pid").read_text().split()[0]
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(pid), signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves no process behind."""
        for writer, _ in self.running_jobs():
            self.kill(writer)

    def take(self, writer: str = WRITER, attempt: int = 1) -> None:
        """A lease, whose holder never renews anything."""
        self._leases.acquire(writer, attempt, "token")

    def beat(self, counter: int, writer: str = WRITER, attempt: int = 1) -> None:
        """One renewal."""
        heartbeat = Heartbeat(writer=writer, attempt=attempt, counter=counter, state="serving")
        write_heartbeat(FileSystem(), self.paths.heartbeats, heartbeat)

    @contextlib.contextmanager
    def beating(self, writer: str = WRITER, attempt: int = 1) -> Iterator[None]:
        """A holder that lives."""
        self.take(writer, attempt)
        stop = threading.Event()

        def beat_on() -> None:
            counter = 0
            while not stop.wait(0.02):
                counter += 1
                self.beat(counter, writer, attempt)

        thread = threading.Thread(target=beat_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=5)

    def close(self, state: str = "COMPLETED") -> None:
        """A supervisor closes the run and leaves."""
        context = supervisor_context(self.run, self.paths, 1)
        self.take()
        journal = context.journal()
        journal.write(Cuts())
        journal.write(RunClosed.model_validate({"state": state}))
        journal.flush()
        self._leases.tombstone(WRITER, 2, "token")
