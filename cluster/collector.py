"""The collector: deletes what retired, recorded in the supervisor's journal before the bytes go (I12).

What is retired follows from accepted records alone (policy/retention.py): of versions and checkpoints from the learner's, of
shards from the orchestrator's. A reader that is still on its way says so in its heartbeat, which delays a version for a while;
without that it meets ENOENT and starts again at the newest anchor. Journals stay: they are the proof, at some 200 bytes a row.

Invariants: the epoch is re-read after the record is on disk and before each object goes, so no record of a deletion lies
behind a cut; at most one record has bytes left, the last one, so a successor that folds the journal takes up that one. A tick
costs what is new and what is kept, not the age of the run. Failure: an OSError leaves the rest for the next tick; an object
that may not be deleted is named and set aside, and stands in the next record again. A group id of no known form keeps shards.
"""

from __future__ import annotations

import errno
import heapq
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from miles_core.policy.retention import OpenGroups, oldest_kept_checkpoint, retained
from miles_core.records import (
    CheckpointSaved,
    Deleted,
    Deletion,
    EvaluationPoint,
    Published,
    ShardSealed,
    Version,
    digest_record,
    number_of,
    parse_record,
)
from miles_core.run import rollout_writers
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import Delivered, poll_together
from miles_core.store.journal import AttemptTail, list_segments

log = logging.getLogger("miles")
R = TypeVar("R", Published, CheckpointSaved)

READING_CAP_S = 900.0
"""A version that is only kept because somebody says he reads it goes after this long: he may have died over it."""
MOST_A_TICK = 200
"""Objects in one record."""
MOST_REFUSED = 20
"""With so many objects that may not be deleted it is not the objects: nothing more is recorded until they go."""
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ENOTEMPTY)
"""What is wrong with this object alone; the last two: a client of NFS still holds a file of it open."""


class Collector:
    """One epoch's collector. `fold` its predecessors' records first; then `tick`."""

    def __init__(
        self,
        context: RoleContext,
        record: Callable[[Deletion], None],
        *,
        remove: Callable[[Path], None] | None = None,
    ) -> None:
        """`record` puts a record on disk, or raises OSError or LeaseLost. `remove` deletes a file or a folder."""
        self._context, self._record, self._remove = context, record, remove or remove_object
        self._spec, self._paths = context.recipe.retention, context.paths
        self._learner = context.follow("learner-0")
        self._evaluator = context.follow("evaluator-0")
        self._versions: dict[Version, Published] = {}
        """Accepted ones that were not deleted; so with checkpoints."""
        self._checkpoints: dict[Version, CheckpointSaved] = {}
        self._oldest: Version | None = None
        """The oldest checkpoint that is kept."""
        self._has_saved = False
        """A checkpoint came since that was settled."""
        self._to_evaluate = {0, context.recipe.steps}
        self._read_since: dict[Version, float] = {}
        self._shards = SettledShards(context) if self._spec.trajectories == "after_two_checkpoints" else None
        self._deleted: set[str] = set()
        self._unfinished: deque[Deleted] = deque()
        self._refused: dict[str, Deleted] = {}
        """By name: what may not be deleted now."""
        self._named: set[str] = set()

    def fold(self, record: Deletion) -> None:
        """Takes a record of this or an earlier epoch; the bytes of the newest may be left."""
        self._deleted.update(item.name for item in record.items)
        self._unfinished = deque(record.items)
        self._refused.clear()

    def tick(self, reading: Iterable[Version] = ()) -> None:
        """Deletes what is due. `reading`: versions that live roles say they read. Raises OSError, JournalCorrupt, LeaseLost."""
        self._finish()
        self._poll()
        self._settle_checkpoints()
        self._delete([*self._due_versions(reading), *self._due_checkpoints()])
        if self._shards is not None and self._oldest is not None:
            self._delete(self._shards.due(self._oldest.step, self._deleted))

    def _delete(self, due: list[Deleted]) -> None:
        """One record at a time: nothing is added while bytes of the last one are left. What was refused is tried again."""
        if len(self._refused) >= MOST_REFUSED:
            self._unfinished.extend(self._refused.values())
            self._refused.clear()
        elif due and not self._unfinished:
            deletion = Deletion(items=(*due[:MOST_A_TICK], *self._refused.values()))
            self._record(deletion)
            self.fold(deletion)
            self._finish()

    def _finish(self) -> None:
        """Removes what is recorded, for a part of the lease: the rest at the next tick."""
        until_s = self._context.clock() + self._context.timing.lease_s / 8
        while self._unfinished and self._context.clock() <= until_s:
            self._context.leases.check(self._context.writer, self._context.attempt)
            item = self._unfinished[0]
            self._context.crash_point("before_delete", "collector")
            try:
                self._remove(self._paths.resolve(item.name))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._set_aside(item, error)
            else:
                log.info("deleted %s %s: %d bytes", item.what, item.name, item.size_bytes)
            self._context.crash_point("after_delete", "collector")
            self._unfinished.popleft()

    def _set_aside(self, item: Deleted, error: OSError) -> None:
        self._refused[item.name] = item
        if item.name not in self._named:
            self._named.add(item.name)
            log.warning(
                "%s %s retired but may not be deleted (%s); the others go, it is tried again with the next: give it to the "
                "user of this process, or delete it by hand", item.what, item.name, error,
            )  # fmt: skip

    def _poll(self) -> None:
        followers = [self._learner, self._evaluator, *(() if self._shards is None else (self._shards.orchestrator,))]
        learner, evaluator, *orchestrator = poll_together(self._context.reading, followers)
        for item in learner:
            self._take(item)
        for item in evaluator:
            if isinstance(item.record, EvaluationPoint) and not self._context.rollbacks.abandons(item.record.version):
                self._to_evaluate.discard(item.record.version.step)
        if self._shards is not None:
            self._shards.fold(orchestrator[0])

    def _take(self, item: Delivered) -> None:
        """A folder that is not where RunPaths puts it is nobody's to delete."""
        record = item.record
        if isinstance(record, Published) and self._is_ours(record.folder, self._paths.version(*record.version)):
            self._versions[record.version] = record
        elif isinstance(record, CheckpointSaved):
            version = Version(record.step, item.attempt)
            if self._is_ours(record.folder, self._paths.checkpoint(*version)):
                self._checkpoints[version] = record
                self._has_saved = True

    def _is_ours(self, folder: str, expected: Path) -> bool:
        return folder not in self._deleted and folder == self._paths.relative(expected)

    # --- what is due -------------------------------------------------------------------------------------------------

    def _due_versions(self, reading: Iterable[Version]) -> list[Deleted]:
        if not self._spec.versions:
            return []
        self._versions = self._without_deleted(self._versions)
        served = self._without_abandoned(self._versions)
        needed = [version for version in served if version.step in self._to_evaluate]
        keep = retained(served, needed)
        keep = retained(served, [*needed, *self._still_reading(reading, keep)])
        return [
            Deleted(what="version", name=record.folder, size_bytes=record.size_bytes, digest=record.manifest_digest)
            for version, record in self._versions.items()
            if version not in keep
        ]

    def _still_reading(self, reading: Iterable[Version], keep: set[Version]) -> list[Version]:
        """What is read and would go, for READING_CAP_S each."""
        now = self._context.clock()
        self._read_since = {
            version: self._read_since.get(version, now)
            for version in reading
            if version in self._versions and version not in keep
        }
        return [version for version, since in self._read_since.items() if now - since <= READING_CAP_S]

    def _settle_checkpoints(self) -> None:
        """Once for each checkpoint that came; a newest one that is not whole may be on its way to this node."""
        if self._has_saved:
            self._checkpoints = self._without_deleted(self._checkpoints)
            usable = self._without_abandoned(self._checkpoints)
            self._oldest = oldest_kept_checkpoint(usable, self._spec.checkpoints, self._is_whole)
            self._has_saved = bool(usable) and not self._is_whole(usable[max(usable)])

    def _due_checkpoints(self) -> list[Deleted]:
        return [
            Deleted(what="checkpoint", name=record.folder, size_bytes=size_of(record), digest=digest_record(record))
            for version, record in self._checkpoints.items()
            if record.folder not in self._deleted and self._is_retired(version)
        ]

    def _is_retired(self, checkpoint: Version) -> bool:
        return self._context.rollbacks.abandons(checkpoint) or (self._oldest is not None and checkpoint < self._oldest)

    def _is_whole(self, checkpoint: CheckpointSaved) -> bool:
        """Its files are there in their sizes. Their writer verified their digests, and whoever loads them does."""
        folder = self._paths.resolve(checkpoint.folder)
        try:
            return all((folder / file.name).stat().st_size == file.size_bytes for file in checkpoint.files)
        except FileNotFoundError:
            return False

    def _without_abandoned(self, kept: dict[Version, R]) -> dict[Version, R]:
        return {version: record for version, record in kept.items() if not self._context.rollbacks.abandons(version)}

    def _without_deleted(self, kept: dict[Version, R]) -> dict[Version, R]:
        return {version: record for version, record in kept.items() if record.folder not in self._deleted}


class SettledShards:
    """Shards all of whose groups were trained or dropped, and that lie behind the kept checkpoints.

    Reads the replicas' manifests when the oldest kept checkpoint moves, each from where it stopped. It need not know their
    cuts: whether a shard may go depends on its groups alone, and nobody ever needs what lies behind a cut.
    """

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self.orchestrator = context.follow("orchestrator-0")
        self._groups = OpenGroups()
        self._tails: dict[str, AttemptTail] = {}
        self._announced: list[tuple[int, int, Deleted]] = []
        """A heap by the highest group number; the second number only tells equal ones apart."""
        self._count = 0
        self._settled: list[Deleted] = []
        self._step = -1

    def fold(self, delivered: Iterable[Delivered]) -> None:
        """Takes what the orchestrator decided."""
        for item in delivered:
            if not self._context.rollbacks.voids(item.attempt, item.record):
                self._groups.fold(item.record)

    def due(self, step: int, deleted: set[str]) -> list[Deleted]:
        """Shards to delete; looks for more when the oldest kept checkpoint is of another step. OSError: ask again."""
        if step != self._step:
            for writer, _ in rollout_writers(self._context.recipe):
                self._read(writer)
            watermark = self._groups.watermark(step)
            while self._announced and self._announced[0][0] < watermark:
                self._settled.append(heapq.heappop(self._announced)[2])
            self._step = step
        self._settled = [shard for shard in self._settled if shard.name not in deleted]
        return self._settled

    def _read(self, writer: str) -> None:
        """What a replica announced since the last time, over its attempts."""
        folder = self._context.paths.journal(writer)
        for attempt in list_segments(self._context.fs, folder):
            tail = self._tails.get(writer)
            if tail is None or tail.attempt < attempt:
                tail = self._tails[writer] = self._context.reading.tail(folder, attempt)
            while tail.attempt == attempt and (frames := tail.read(list_now=True)):
                for frame in frames:
                    self._announce(writer, parse_record(frame.payload))

    def _announce(self, writer: str, record: object) -> None:
        """A file that is not among this writer's shards is nobody's to delete, nor is one with a row of no known group."""
        if not isinstance(record, ShardSealed) or not record.rows:
            return
        try:
            highest = max(number_of(row.group_id) for row in record.rows)
        except ValueError as error:
            log.warning("%s stays: one of its rows names no group (%s)", record.path, error)
            return
        path, folder = self._context.paths.resolve(record.path), self._context.paths.journal(writer).parent
        if path.suffix == ".arrow" and path.parent.parent == folder:
            shard = Deleted(what="shard", name=record.path, size_bytes=record.size_bytes, digest=record.digest)
            self._count += 1
            heapq.heappush(self._announced, (highest, self._count, shard))


def size_of(checkpoint: CheckpointSaved) -> int:
    """Bytes of its files."""
    return sum(file.size_bytes for file in checkpoint.files)


def remove_object(path: Path) -> None:
    """Deletes a file or a folder with what is in it; what is gone already is fine. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_unless_gone)
    else:
        path.unlink(missing_ok=True)


def _unless_gone(function: object, path: str, failure: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
