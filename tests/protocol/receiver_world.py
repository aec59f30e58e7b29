"""A run directory in which a test plays supervisor, orchestrator and learner for one rollout replica or grader."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from miles_core.paths import RunPaths
from miles_core.recipe import EnvironmentSpec, GraderSpec, ModelSpec, Recipe, RolloutSpec, Timing
from miles_core.records import Cuts, Done, GradeOrder, Order, Published, Stop, Version, parse_record
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import Reading
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder

TIMING = Timing(visibility_s=0.0, lease_s=8.0, poll_s=0.05, sync_s=0.1, orphan_s=3600, stall_s=60)
RECIPE = Recipe(
    name="test", steps=3, model=ModelSpec(path="none"), grader=GraderSpec(deadline_s=0.5),
    environment=EnvironmentSpec(family="none", episode_deadline_s=20.0), rollout=RolloutSpec(shard_rows=3, shard_age_s=0.5),
)  # fmt: skip


class Clock:
    """Monotonic seconds that pass only when someone sleeps or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FaultyFS(FileSystem):
    """Refuses appends to paths that contain `refuse`, after writing half; reads of paths that contain `hide` go stale."""

    refuse = ""
    hide = ""

    def append(self, path: Path, data: bytes) -> None:
        if self.refuse and self.refuse in str(path):
            super().append(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().append(path, data)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        if self.hide and self.hide in str(path):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return super().read(path, offset, limit)


class World:
    """The run directory and everybody but the role under test."""

    def __init__(
        self, root: Path, writer: str, *, recipe: Recipe = RECIPE, timing: Timing = TIMING, orchestrator: int = 1
    ) -> None:
        self.paths, self.writer, self.clock, self.fs = RunPaths(root), writer, Clock(), FaultyFS()
        self.run = RunConfig(
            run_id="r1", recipe=recipe, timing=timing, cluster={}, code_digest="c", base_model_digest="b", created_s=0.0
        )
        self._plain = FileSystem()
        self._leases = LeaseFolder(self._plain, self.paths.leases, "r1", self.clock)
        self._orchestrator = orchestrator - 1
        self._learner: JournalWriter | None = None
        self._learner_attempt = 0
        self.new_orchestrator()

    def context(self, attempt: int = 1) -> RoleContext:
        """The context of an attempt that holds its lease; its heartbeat is not renewed."""
        context = RoleContext(
            self.run,
            self.paths,
            self.writer,
            attempt,
            token=f"t{attempt}",
            fs=self.fs,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.lease(self.writer, attempt)
        return context

    def lease(self, writer: str, attempt: int) -> None:
        """Takes a lease in somebody's name."""
        self._leases.acquire(writer, attempt, f"t{attempt}")

    def new_orchestrator(self) -> None:
        """The next attempt of the orchestrator, with its own segment of copies."""
        self._orchestrator += 1
        self.lease("orchestrator-0", self._orchestrator)
        self._copies = self._journal(self.paths.orders(self.writer), "orchestrator-0", self._orchestrator)

    def send(self, *records: Order | GradeOrder | Stop) -> None:
        """Copies orders to the role under test."""
        for record in records:
            self._copies.write(record)

    def order(self, number: int, group: str = "g1.o1", samples: tuple[int, ...] = (0, 1), **changes: Any) -> Order:
        """An order for attempt 1 unless `changes` says otherwise."""
        values: dict[str, Any] = {
            "order_id": f"w{number}.o1", "receiver": self.writer, "receiver_attempt": 1, "group_id": group, "task_seed": 5,
            "samples": samples, "seed": 9, "temperature": 1.0,
        }  # fmt: skip
        return Order(**(values | changes))

    def publish(self, step: int, attempt: int = 1) -> Published:
        """The learner announces a version; nothing is written but its journal."""
        if self._learner_attempt != attempt:
            self.lease("learner-0", attempt)
            self._learner_attempt = attempt
            self._learner = self._journal(self.paths.journal("learner-0"), "learner-0", attempt)
            self._learner.write(Cuts())
        published = Published(
            version=Version(step, attempt),
            weights_digest=f"w{step}",
            folder=f"policy/{step}",
            manifest_digest="m",
            size_bytes=1,
        )
        assert self._learner is not None
        self._learner.write(published)
        return published

    def records(self, attempt: int = 1) -> list[Any]:
        """Everything the role's attempt announced, as a fresh reader sees it."""
        tail = Reading(self._plain, self._leases, 0.0, self.clock).tail(self.paths.journal(self.writer), attempt)
        found = []
        while frames := tail.read(list_now=True):
            found += [parse_record(frame.payload) for frame in frames]
        self.stream = (tail.bytes, tail.hash)
        return found

    def done(self) -> Done | None:
        """The role's completion record."""
        path = self.paths.done(self.writer)
        return Done.model_validate_json(path.read_bytes()) if path.exists() else None

    def _journal(self, folder: Path, writer: str, attempt: int) -> JournalWriter:
        return JournalWriter(self._plain, folder, run_id="r1", writer=writer, attempt=attempt, token=f"t{attempt}")
