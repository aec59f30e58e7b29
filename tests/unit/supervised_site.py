"""A run directory, a fake Slurm and roles that only take leases and beat: what a supervisor sees, in one process and no time.

The supervisor's own sleep moves the clock and everybody else; so a test runs `Supervisor.run` itself, as `miles run` does.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

from cluster.epoch import WRITER, supervisor_context, take_epoch
from cluster.profile import ClusterProfile
from cluster.scheduler import Scheduler
from cluster.slurm.client import SlurmScheduler
from cluster.supervise import Progress, Supervisor
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe
from miles_core.records import Cuts, Done, LivenessEntry, LivenessTable, RunClosed, StepDone, Version
from miles_core.run import RunConfig, all_writers
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import Heartbeat, LeaseFolder, write_heartbeat
from miles_core.store.publish import Durability, publish_bytes
from miles_core.tracking.ledger import read_all
from tests.protocol.simulation import TIMING, simulated_recipe
from tests.unit.fake_slurm import FakeJob, FakeSlurm, ManualClock

TICKS = 600
NODES = tuple(f"n{number}" for number in range(1, 11))


class Killed(BaseException):
    """kill -9 of the supervisor."""


class FlakyFS(FileSystem):
    """Paths that hold one of `failing` answer ESTALE, those of `full` take no more data; `dead`: the process is killed.

    Nothing is synced: no test here loses a page cache.
    """

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.full: set[str] = set()
        self.dead = False

    def _check(self, path: Path, *, writes: bool = False) -> None:
        if self.dead and threading.current_thread() is threading.main_thread():
            raise Killed
        if any(part in str(path) for part in self.failing):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        if writes and any(part in str(path) for part in self.full):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def append(self, path: Path, data: bytes) -> None:
        self._check(path, writes=True)
        super().append(path, data)

    def overwrite(self, path: Path, data: bytes) -> None:
        self._check(path, writes=True)
        super().overwrite(path, data)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        self._check(path)
        return super().read(path, offset, limit)

    def listdir(self, path: Path) -> list[str]:
        self._check(path)
        return super().listdir(path)

    def sync(self, path: Path) -> None:
        self._check(path)

    def link(self, source: Path, target: Path) -> None:
        self._check(target)
        super().link(source, target)


def recipe_of(replicas: int) -> Recipe:
    """A small recipe with so many rollout replicas."""
    return simulated_recipe(rollout__pools=({"name": "main", "replicas": replicas, "slots": 4},))


class Site:
    """Everything but the supervisor."""

    def __init__(self, folder: Path, *, nodes: tuple[str, ...] = NODES, replicas: int = 2, **profile: object) -> None:
        self.clock = ManualClock()
        self.fake = FakeSlurm(self.clock, nodes=nodes)
        self.profile = ClusterProfile.model_validate(
            {"name": "fake", "kind": "slurm", "timing": TIMING, "scheduler_poll_s": 1.0, "drain_s": 10.0, **profile}
        )
        self.run = RunConfig(
            run_id="supervised", recipe=recipe_of(replicas), timing=TIMING, cluster={}, code_digest="", base_model_digest="",
            created_s=1.0,
        )  # fmt: skip
        self.paths = RunPaths(folder)
        for path in (self.paths.leases, self.paths.heartbeats, self.paths.done("x").parent, self.paths.cancel_request.parent):
            path.mkdir(parents=True)
        self.paths.run_file.write_text(self.run.model_dump_json())
        self.writers = all_writers(self.run.recipe)
        self.silent: set[tuple[str, int]] = set()
        """Attempts without a heartbeat."""
        self.reading: dict[str, Version] = {}
        """What replicas say they read."""
        self.states: dict[str, str] = {}
        """What a writer says of itself, if not that it serves."""
        self.on_sleep: Callable[[], None] = lambda: None
        self.fs = FlakyFS()
        """The newest supervisor's filesystem."""
        self.ticks: list[Progress] = []
        self._counter = 0
        self._leases = LeaseFolder(FlakyFS(), self.paths.leases, self.run.run_id)
        self._learner: JournalWriter | None = None

    # --- supervisors -------------------------------------------------------------------------------------------------

    def context(self, epoch: int) -> RoleContext:
        made = supervisor_context(self.run, self.paths, epoch)
        return RoleContext(
            self.run, self.paths, WRITER, epoch, token=made.token, fs=self.fs, clock=self.clock, sleep=self.sleep
        )  # fmt: skip

    def supervisor(self, *, takeover: bool = False, scheduler: Scheduler | None = None, **options: float) -> Supervisor:
        """A new process that takes the next epoch."""
        self.fs = FlakyFS()
        context = take_epoch(self.context, takeover=takeover)
        scheduler = scheduler or SlurmScheduler(self.profile.slurm, run=self.fake.run, sleep=self.clock.sleep, jitter=lambda: 0)
        self.ticks = []
        return Supervisor(context, self.profile, scheduler, on_progress=self.ticks.append, **options)  # type: ignore[arg-type]

    def run_until(self, supervisor: Supervisor, condition: Callable[[], object]) -> RunClosed | None:
        """The supervisor's `run`, asked to leave once the condition holds."""

        def leave_if_done() -> None:
            assert len(self.ticks) < TICKS, f"waited {TICKS} ticks; {self.ticks[-1].roles}"
            if condition():
                supervisor.context.leave.set()

        self.on_sleep = leave_if_done
        return supervisor.run()

    def run_for(self, supervisor: Supervisor, seconds: float) -> RunClosed | None:
        until = self.clock() + seconds
        return self.run_until(supervisor, lambda: self.clock() >= until)

    def start_all(self) -> None:
        """A run whose roles all work, and whose supervisor left."""
        assert self.run_until(self.supervisor(), lambda: len(self.running()) == len(self.writers)) is None

    # --- the others --------------------------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        self.move()
        self.on_sleep()

    def move(self) -> None:
        """Slurm and the roles go on."""
        self.fake.advance()
        self._counter += 1
        running = [attempt_of(job) for job in self.fake.jobs if job.state == "RUNNING"]
        self._leases.refresh()
        for writer, attempt in running:
            if self._leases.newest(writer) < attempt:
                self._leases.acquire(writer, attempt, "token")
            if (writer, attempt) not in self.silent:
                state = self.states.get(writer, "serving")
                beat = Heartbeat(writer=writer, attempt=attempt, counter=self._counter, state=state, progress=0)
                write_heartbeat(FileSystem(), self.paths.heartbeats, beat)
        if "orchestrator-0" in {writer for writer, attempt in running if (writer, attempt) not in self.silent}:
            self._publish_table(running)

    def _publish_table(self, running: list[tuple[str, int]]) -> None:
        entries = tuple(
            LivenessEntry(
                writer=writer, attempt=self._leases.newest(writer),
                verdict="alive" if (writer, self._leases.newest(writer)) in set(running) - self.silent else "dead",
                state=self.states.get(writer, "serving"), reading=self.reading.get(writer),
            )
            for writer in self.writers if self._leases.newest(writer)
        )  # fmt: skip
        table = LivenessTable(attempt=1, counter=self._counter, entries=entries)
        publish_bytes(FileSystem(), self.paths.liveness_table, table.model_dump_json().encode(), Durability.RENAMED)

    def train(self, step: int) -> None:
        """The learner's first attempt records a step."""
        if self._learner is None:
            self._learner = JournalWriter(
                FileSystem(),
                self.paths.journal("learner-0"),
                run_id=self.run.run_id,
                writer="learner-0",
                attempt=1,
                token="token",
            )
            self._learner.write(Cuts())
        self._learner.write(
            StepDone(step=step, batch_id="b", manifest_digest="", weights_digest="", staleness=0, mean_reward=0.5)
        )

    def finish(self, *writers: str, outcome: str = "completed", detail: str = "") -> None:
        """Completion records; their jobs end well."""
        for writer in writers:
            done = Done.model_validate(
                {"writer": writer, "attempt": 1, "outcome": outcome, "detail": detail, "journal_bytes": 0, "journal_hash": ""}
            )
            publish_bytes(FileSystem(), self.paths.done(writer), done.model_dump_json().encode())
            for job in self.jobs(writer):
                if job.state == "RUNNING":
                    self.fake.finish(job.job_id, 0)

    # --- looking -----------------------------------------------------------------------------------------------------

    def jobs(self, writer: str = "") -> list[FakeJob]:
        """All jobs Slurm knows, of one writer."""
        return [job for job in self.fake.jobs if writer in ("", attempt_of(job)[0])]

    def running(self) -> set[tuple[str, int]]:
        """(writer, attempt) of running jobs."""
        return {attempt_of(job) for job in self.fake.jobs if job.state == "RUNNING"}

    def records(self, kind: str, writer: str = "") -> list[object]:
        """Records of all epochs."""
        found = read_all(supervisor_context(self.run, self.paths, 0).reading, self.paths.journal(WRITER))
        return [item for item in found if item.kind == kind and writer in ("", getattr(item, "writer", ""))]

    def incidents(self, what: str) -> list[str]:
        """Details of incidents of one kind."""
        return [item.detail for item in self.records("incident") if item.what == what]  # type: ignore[attr-defined]

    def submissions(self) -> int:
        """sbatch calls so far."""
        return sum(command[0] == "sbatch" for command in self.fake.commands)


def attempt_of(job: FakeJob) -> tuple[str, int]:
    """Writer and attempt, from a job's comment."""
    _, _, writer, attempt, _ = job.comment.split(":")
    return writer, int(attempt[1:])
