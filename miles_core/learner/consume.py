"""What the learner trains on: the orchestrator's accepted batch records, their rows, and the re-check before use (I7).

A batch names rows of shards with digests and fixes its staleness. Here both are proved again from the rows themselves, in
the same way when a batch is trained for the first time and when a successor trains it again. Three kinds of failure:
what was announced and is gone for good is NeedsRollback, with the name of the missing thing; a batch that contradicts its
own rows is a protocol fault (MilesError); a filesystem that fails otherwise is waited for, then DeadlineExceeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from miles_core.errors import DeadlineExceeded, DigestMismatch, MilesError, NeedsRollback
from miles_core.learner.episodes import Rows, make_rows
from miles_core.policy.lineage import Lineage
from miles_core.records import Batch, BatchMember, RunEnded, TrajectoryRef, Version, digest_record
from miles_core.runtime.context import RoleContext
from miles_core.runtime.waiting import Watch, gone_after_s
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import read_rows

log = logging.getLogger("miles")

ORCHESTRATOR = "orchestrator-0"


class BatchFeed:
    """Accepted batch records by step, without those that a rollback voided. Two of one step are a protocol fault."""

    def __init__(self, context: RoleContext, *, after_step: int, note: Callable[[Batch], None] = lambda batch: None) -> None:
        """`note` is told every accepted batch, also those up to `after_step`, which are not given out."""
        self._context, self._note = context, note
        self._follower = context.follow(ORCHESTRATOR)
        self._after_step = after_step
        self._batches: dict[int, Batch] = {}
        self._ids: dict[int, str] = {}
        """Of every accepted batch, by step."""
        self._ended: RunEnded | None = None

    def wait(self, step: int, trained_as: str | None) -> Batch | None:
        """The batch of a step; None when this role shall leave. There is no deadline: the orchestrator may queue for hours.

        `trained_as`: digest of the batch that an accepted step record names, if there is one. Then the batch was visible
        once, and NeedsRollback is raised when it is gone or another one is in its place.
        """
        watch = Watch(self._context, f"batch {step}", self._context.timing.poll_s)
        complete_since: float | None = None
        while not self._context.leave.is_set():
            self._poll()
            batch = self._batches.pop(step, None)
            if batch is not None:
                check_same(batch, trained_as)
                return batch
            if trained_as is not None:
                complete_since = self._check_gone(step, complete_since)
            elif self._ended is not None:
                raise MilesError(
                    f"the orchestrator ended the run after {self._ended.steps} steps without batch {step}; its journal and the "
                    f"learner's contradict each other, run `miles verify`"
                )
            watch.pause()
        return None

    def _poll(self) -> None:
        try:
            delivered = self._follower.poll()
        except OSError as error:
            log.warning("orchestrator's journal not read: %s", error)
            return
        for item in delivered:
            if self._context.rollbacks.voids(item.attempt, item.record):
                continue
            if isinstance(item.record, Batch):
                self._take(item.record)
            elif isinstance(item.record, RunEnded):
                self._ended = item.record

    def _take(self, batch: Batch) -> None:
        check_only_one(batch, self._ids)
        self._note(batch)
        if batch.step > self._after_step:
            self._batches[batch.step] = batch

    def _check_gone(self, step: int, complete_since: float | None) -> float | None:
        """Raises NeedsRollback once the newest orchestrator's journal was read for long enough without this batch."""
        now = self._context.clock()
        if self._follower.attempt == 0 or self._follower.attempt != self._context.leases.newest(ORCHESTRATOR):
            return None
        since = now if complete_since is None else complete_since
        if now - since >= gone_after_s(self._context):
            raise NeedsRollback(
                f"batch {step}: its step was accepted, but the orchestrator's journal up to attempt {self._follower.attempt} "
                f"holds no such batch"
            )
        return since


def check_only_one(batch: Batch, ids: dict[int, str]) -> None:
    """Notes an accepted batch in `ids`, by step; MilesError if it is not the first of its step."""
    if batch.step in ids:
        raise MilesError(
            f"two accepted batches of step {batch.step}: {ids[batch.step]} and {batch.batch_id}; the orchestrator's lineage is "
            f"broken, run `miles verify`"
        )
    ids[batch.step] = batch.batch_id


def check_same(batch: Batch, trained_as: str | None) -> None:
    """NeedsRollback if an accepted step record names another batch of this step, by its digest."""
    found = digest_record(batch)
    if trained_as is not None and found != trained_as:
        raise NeedsRollback(
            f"batch {batch.step}: the orchestrator's journal holds {batch.batch_id} with digest {found}, the step record "
            f"names {trained_as}"
        )


def read_batch(context: RoleContext, batch: Batch, lineage: Lineage) -> Rows:
    """The rows of a batch, proved against the batch's own record; of a branching episode one for each conversation.

    Raises NeedsRollback, MilesError, DeadlineExceeded.
    """
    by_id: dict[str, Trajectory] = {}
    for refs in _by_shard(batch):
        by_id.update(zip([ref.trajectory_id for ref in refs], _read_patiently(context, batch, refs), strict=True))
    rows = [by_id[member.ref.trajectory_id] for member in _members(batch)]
    check_batch(batch, rows, lineage, context.recipe.orchestrator.max_staleness)
    return make_rows(batch, rows).as_lines()


def _members(batch: Batch) -> Iterator[BatchMember]:
    return (member for group in batch.groups for member in group.members)


def _by_shard(batch: Batch) -> list[list[TrajectoryRef]]:
    shards: dict[tuple[str, str], list[TrajectoryRef]] = {}
    for member in _members(batch):
        shards.setdefault((member.ref.shard, member.ref.shard_digest), []).append(member.ref)
    return list(shards.values())


def _read_patiently(context: RoleContext, batch: Batch, refs: list[TrajectoryRef]) -> list[Trajectory]:
    """Rows of one shard. What is not visible or not whole is tried again until it counts as gone."""
    path, digest = context.paths.resolve(refs[0].shard), refs[0].shard_digest
    started = context.clock()
    while True:
        waited_s = context.clock() - started
        try:
            return read_rows(path, [ref.row for ref in refs], digest=digest)
        except (FileNotFoundError, DigestMismatch) as error:
            if waited_s >= gone_after_s(context):
                raise NeedsRollback(
                    f"batch {batch.step} ({batch.batch_id}) needs rows {[ref.row for ref in refs]} of {refs[0].shard}: {error}"
                ) from error
        except OSError as error:
            if waited_s >= context.timing.stall_s:
                raise DeadlineExceeded(f"batch {batch.step}: {path} was not readable for {waited_s:.0f} s: {error}") from error
            log.warning("batch %d: %s not read: %s", batch.step, path, error)
        context.pause()


def check_batch(batch: Batch, rows: list[Trajectory], lineage: Lineage, bound: int) -> None:
    """Re-checks at consumption: identities, versions and staleness, from the rows. Raises MilesError with all faults."""
    pairs = [(group.group_id, member) for group in batch.groups for member in group.members]
    faults: list[str] = []
    for (group_id, member), row in zip(pairs, rows, strict=True):
        faults += _row_faults(group_id, member, row, lineage)
    staleness = batch.step - 1 - min(member.oldest_step for _, member in pairs)
    if staleness != batch.staleness or not 0 <= staleness <= bound:
        faults.append(f"staleness {staleness} by the rows, {batch.staleness} by the batch, bound {bound}")
    if faults:
        raise MilesError(
            f"batch {batch.step} ({batch.batch_id}) contradicts what it names ({len(faults)} faults): " + "; ".join(faults[:8])
        )


def _row_faults(group_id: str, member: BatchMember, row: Trajectory, lineage: Lineage) -> Iterator[str]:
    ref = member.ref
    if (row.trajectory_id, row.group_id) != (ref.trajectory_id, group_id):
        yield f"{ref.shard} row {ref.row} is {row.trajectory_id} of {row.group_id}, not {ref.trajectory_id} of {group_id}"
    for version in sorted({Version(run.step, run.attempt) for run in row.versions}):
        if not lineage.knows(version):
            yield f"{row.trajectory_id}: no accepted step made version {tuple(version)}"
    oldest = min((lineage.rollbacks.counted_step(Version(run.step, run.attempt)) for run in row.versions), default=None)
    if oldest != member.oldest_step:
        yield f"{row.trajectory_id}: its oldest version is of step {oldest}, the batch says {member.oldest_step}"
