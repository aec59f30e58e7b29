"""What a drill reads of a live run, all from its files: losses that were noticed, progress of attempts, samples lost.

Failure: an OSError of one look is for the caller to wait out; nothing that was read is lost by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.epoch import WRITER, read_closed
from miles_core.paths import RunPaths
from miles_core.policy.lineage import StepLog
from miles_core.records import (
    Batch,
    Cuts,
    Graded,
    GradeOrder,
    Incident,
    Intent,
    Order,
    Returned,
    RunClosed,
    ShardSealed,
    StepDone,
    Submitted,
    WriterCut,
    parse_record,
    sample_id,
    split_writer,
)
from miles_core.run import RunConfig, all_writers
from miles_core.store.follow import Follower, Reading
from miles_core.store.fs import FileSystem
from miles_core.store.journal import list_segments
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import read_all
from miles_core.verify.joined import Joined
from miles_core.verify.streams import Files

Attempt = tuple[str, int]
"""Writer and attempt."""


class Watch:
    """One run, as a drill sees it."""

    def __init__(self, run: RunConfig, paths: RunPaths) -> None:
        self._run, self._paths = run, paths
        self.writers = all_writers(run.recipe)
        self._leases = LeaseFolder(FileSystem(), paths.leases, run.run_id)
        self._reading = Reading(FileSystem(), self._leases, run.timing.visibility_s)
        self._steps = StepLog(Follower(self._reading, paths.journal("learner-0"), "learner-0"))

    def step(self) -> int:
        """Newest accepted step; -1 before the first."""
        self._leases.refresh()
        self._steps.poll()
        return self._steps.newest_step

    def closed(self) -> RunClosed | None:
        """The last word on the run."""
        return read_closed(self._run, self._paths)

    def is_done(self, writer: str) -> bool:
        """Its completion record is there."""
        return self._paths.done(writer).exists()

    def supervisor_records(self) -> list[Any]:
        """Records of all epochs, also of those that a later one cut."""
        return read_all(self._reading, self._paths.journal(WRITER))

    def attempts(self) -> dict[str, int]:
        """Newest intended attempt of each writer."""
        return {record.writer: record.attempt for record in self.supervisor_records() if isinstance(record, Intent)}

    def job_ids(self) -> dict[str, str]:
        """Newest job of each writer."""
        return {record.writer: record.job_id for record in self.supervisor_records() if isinstance(record, Submitted)}

    def incident_s(self, what: str, writer: str, since_s: float) -> float | None:
        """Unix time of the first such incident since then."""
        found = (
            record.unix_s for record in self.supervisor_records()
            if isinstance(record, Incident) and (record.what, record.writer) == (what, writer) and record.unix_s >= since_s
        )  # fmt: skip
        return next(found, None)

    def works(self, writer: str, attempt: int) -> bool:
        """True once that attempt, or a later one, has recorded work of its own; of an evaluator or a supervisor: has begun.

        Work of a rollout replica is a shard, of a grader grades, of the orchestrator a batch, of the learner a new step.
        """
        return any(_is_work(writer, record) for record in self._records_since(writer, attempt))

    def newest_attempt(self, writer: str) -> int:
        """Highest attempt with a journal; 0 if none."""
        return max(list_segments(self._reading.fs, self._paths.journal(writer)), default=0)

    def _records_since(self, writer: str, attempt: int) -> Iterator[Any]:
        folder = self._paths.journal(writer)
        for number in list_segments(self._reading.fs, folder):
            tail = self._reading.tail(folder, number) if number >= attempt else None
            while tail is not None and (frames := tail.read(list_now=True)):
                yield from (parse_record(frame.payload) for frame in frames)

    def lost_samples(self) -> dict[Attempt, int]:
        """For each attempt of a replica or grader that was cut: how many samples (trajectories to grade) it had in hand."""
        joined = Joined(Files(self._paths, self._run.run_id), self._run)
        cuts = [record.cut for _, record in joined.orchestrator if isinstance(record, WriterCut)]
        return {(cut.writer, cut.attempt): len(_in_hand(joined, cut.writer, cut.attempt)) for cut in cuts}


def _is_work(writer: str, record: Any) -> bool:
    role, _ = split_writer(writer)
    if role == "learner":
        return isinstance(record, StepDone) and not record.replay
    kind = {"rollout": ShardSealed, "grader": Graded, "orchestrator": Batch}.get(role, Cuts)
    return isinstance(record, kind)


def _in_hand(joined: Joined, writer: str, attempt: int) -> set[str]:
    """What an attempt was asked for and had neither announced nor given back when it was cut."""
    asked: dict[str, set[str]] = {}
    for _, record in joined.orchestrator:
        if isinstance(record, (Order, GradeOrder)) and (record.receiver, record.receiver_attempt) == (writer, attempt):
            asked[record.order_id] = _items(record)
    left = set().union(*asked.values())
    for number, record in joined.accepted(writer):
        if number == attempt:
            left -= _answered(record, asked)
    return left


def _items(order: Order | GradeOrder) -> set[str]:
    if isinstance(order, GradeOrder):
        return {item.trajectory_id for item in order.items}
    return {sample_id(order.group_id, index) for index in order.samples}


def _answered(record: Any, asked: dict[str, set[str]]) -> set[str]:
    if isinstance(record, ShardSealed):
        return {row.sample_id for row in record.rows}
    if isinstance(record, Graded):
        return {entry.trajectory_id for entry in record.entries}
    if isinstance(record, Returned):
        group = {item.rpartition("/")[0] for item in asked.get(record.order_id, set())}
        return {sample_id(name, index) for name in group for index in record.samples}
    return set()
