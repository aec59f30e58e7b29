"""Accepted records of one run, joined: what all checks look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles_core.records import (
    Batch,
    Deleted,
    Deletion,
    GroupIssued,
    Order,
    RunEnded,
    ShardSealed,
    StepDone,
    Version,
    WriterCut,
)
from miles_core.run import RunConfig, all_writers, rollout_writers
from miles_core.trajectories.schema import Trajectory
from miles_core.verify.branches import Branches
from miles_core.verify.streams import Files

SELF_CUTTING = ("supervisor-0", "orchestrator-0", "learner-0", "evaluator-0")


@dataclass
class Shard:
    """An announced shard and what it holds, if it could be read."""

    writer: str
    attempt: int
    sealed: ShardSealed
    rows: list[Trajectory] | None = None


class Joined:
    """Accepted records of one run, joined."""

    def __init__(self, files: Files, run: RunConfig) -> None:
        self.files, self.run, self.recipe = files, run, run.recipe
        self.branches = Branches(files)
        for writer in ["supervisor-0", *all_writers(run.recipe)]:
            files.read_writer(writer)
        for writer in SELF_CUTTING:
            files.apply_own_cuts(writer)
        self.orchestrator = self.accepted("orchestrator-0")
        self._cut_workers()
        self.learner = self.accepted("learner-0")
        self.groups: dict[str, GroupIssued] = {}
        self.ends: dict[str, list[str]] = defaultdict(list)
        self.batches: dict[int, Batch] = {}
        """Those of the newest branch, by step; `branches` has all."""
        self.made_in: dict[int, int] = {}
        """The branch that made each of them."""
        self.orders: dict[str, Order] = {}
        self.chosen: dict[str, Any] = {}
        self.shards: dict[str, Shard] = {}
        self.steps: dict[int, list[tuple[int, StepDone]]] = defaultdict(list)
        """Records of the newest branch, also those it took over; `known` has all."""
        self.known: dict[Version, StepDone] = {}
        self.ended: RunEnded | None = None
        self.evaluated: set[int] = set()
        self.deleted: dict[str, Deleted] = {
            item.name: item
            for _, record in self.accepted("supervisor-0")
            if isinstance(record, Deletion)
            for item in record.items
        }
        """What the supervisor recorded as deleted, by name."""

    def accepted(self, writer: str) -> list[tuple[int, Any]]:
        """(attempt, record) of all records of a writer that count, in order."""
        streams = self.files.streams[writer]
        return [(attempt, record) for attempt in sorted(streams) for record in streams[attempt].accepted]

    def was_deleted(self, name: str, digest: str) -> bool:
        """Whether exactly this is recorded as deleted; then its files need not be there."""
        return name in self.deleted and self.deleted[name].digest == digest

    def all_shards(self) -> Iterator[ShardSealed]:
        """Everything that a replica ever announced, also behind a cut."""
        for writer, _ in rollout_writers(self.recipe):
            for stream in self.files.streams[writer].values():
                yield from (record for _, record in stream.records if isinstance(record, ShardSealed))

    def _cut_workers(self) -> None:
        seen: set[tuple[str, int]] = set()
        for _, record in self.orchestrator:
            if isinstance(record, WriterCut):
                key = (record.cut.writer, record.cut.attempt)
                if key in seen:
                    self.files.fault("cuts", record.cut.writer, f"attempt {record.cut.attempt} is cut twice")
                seen.add(key)
                self.files.apply_cut(record.cut.writer, record.cut)
