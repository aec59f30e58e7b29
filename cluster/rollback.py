"""Rollback: a run that cannot go on from its last step goes on from its newest usable checkpoint (I8).

Only a run that its supervisor closed as NEEDS_ROLLBACK is rolled back: all its jobs have ended. Order: every writer is
retired, so that no job of before can start; the learner's and the orchestrator's journals are read to their ends; the record
is published exclusively, which is the moment of the rollback; its copy goes into this epoch's journal, which opens the run
again. Everything else follows from the record (miles_core/rollbacks.py): the learner's next attempt goes on from the
checkpoint, the orchestrator's drops the groups of the voided batches.

Failure: before the record is published nothing has happened; afterwards a second request only adds the copy. Asked again
before anybody went on, it answers the same.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cluster.epoch import WRITER, supervisor_context, take_epoch
from cluster.job_spec import token_of
from miles_core.errors import DeadlineExceeded, HeldElsewhere, LeaseLost, RunDirectoryError
from miles_core.learner.checkpoints import newest_valid
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.records import Batch, CheckpointSaved, Deletion, Drained, Incident, Intent, Rollback, RunClosed
from miles_core.run import all_writers, read_run
from miles_core.runtime.context import RoleContext
from miles_core.runtime.waiting import gone_after_s
from miles_core.store.follow import Delivered, cut_predecessors, read_cut
from miles_core.store.journal import JournalWriter
from miles_core.store.publish import digest_file, publish_exclusive

log = logging.getLogger("miles")


def request_rollback(paths: RunPaths, *, takeover: bool = False) -> Rollback:
    """Rolls a run back and opens it again; supervise it afterwards. Returns what was rolled back.

    Raises RunDirectoryError (it needs none), HeldElsewhere (a supervisor lives), JournalCorrupt, DeadlineExceeded, OSError:
    then ask again.
    """
    run, paths = read_run(paths.root)
    context = take_epoch(lambda epoch: supervisor_context(run, paths, epoch), takeover=takeover)
    try:
        return roll_back(context)
    except LeaseLost as lost:
        raise HeldElsewhere(f"run {run.run_id} was taken over by another supervisor: {lost}") from lost
    finally:
        context.stop()
        _leave_tombstone(context)


def roll_back(context: RoleContext) -> Rollback:
    """The rollback itself, in an epoch that `context` holds. Raises as request_rollback, and LeaseLost."""
    journal, records = _open_journal(context)
    done = context.rollbacks.records
    journaled = [record for record in records if isinstance(record, Intent | RunClosed | Drained | Rollback)]
    if done and journaled[-1:] == [done[-1]]:
        rollback = done[-1]  # Nobody has gone on from it yet.
    else:
        rollback = done[-1] if done and done[-1] not in journaled else _new(context, records)
        journal.append(Incident(what="rolled_back", detail=describe(rollback), unix_s=rollback.unix_s))
        journal.write(rollback)
    log.warning("run %s: %s", context.run.run_id, describe(rollback))
    # A job that starts now must see the record, on whatever node.
    context.sleep(2 * context.timing.visibility_s)
    return rollback


def describe(rollback: Rollback) -> str:
    """What was rolled back, for people."""
    steps = f"steps {rollback.step + 1} to {rollback.last_step} are" if rollback.last_step > rollback.step else "no step is"
    base = f"the checkpoint of step {rollback.step}" if rollback.step else "the base model"
    return f"back to {base}: {steps} abandoned, {rollback.groups} groups are dropped; missing was {rollback.missing}"


def _open_journal(context: RoleContext) -> tuple[JournalWriter, list[Any]]:
    """This epoch's journal, and what the epochs before it recorded."""
    cuts = context.cut_predecessors()
    journal = context.journal()
    journal.write(cuts)
    folder = context.paths.journal(WRITER)
    return journal, [item.record for cut in cuts.cuts for item in read_cut(context.reading, folder, cut)]


def _new(context: RoleContext, records: list[Any]) -> Rollback:
    missing = _why(context, records)
    gone = {item.name for record in records if isinstance(record, Deletion) for item in record.items}
    rollback = _make(context, missing, gone, _retire_all(context, records))
    _publish(context, rollback)
    return rollback


def _why(context: RoleContext, records: list[Any]) -> str:
    """What is missing, if that is how the run was closed."""
    ends = [record for record in records if isinstance(record, RunClosed | Drained | Rollback)]
    last = ends[-1] if ends else None
    if isinstance(last, RunClosed) and last.state == "NEEDS_ROLLBACK":
        return last.detail
    state = last.state if isinstance(last, RunClosed) else "not closed"
    raise RunDirectoryError(
        f"run {context.run.run_id} is {state}: only a run that ended as NEEDS_ROLLBACK is rolled back. One that is not closed "
        f"goes on with `miles resume {context.paths.root}`, and says by itself if it needs a rollback"
    )


def _retire_all(context: RoleContext, records: list[Any]) -> dict[str, int]:
    """A tombstone above every lease and every intent; its number by writer."""
    intents = Counter[str]()
    for record in records:
        if isinstance(record, Intent):
            intents[record.writer] = max(intents[record.writer], record.attempt)
    context.leases.refresh()
    attempts = {writer: _retire(context, writer, intents[writer]) for writer in all_writers(context.recipe)}
    return attempts | {WRITER: context.attempt}


def _retire(context: RoleContext, writer: str, intended: int) -> int:
    until = context.clock() + gone_after_s(context)
    while True:
        newest = context.leases.newest(writer)
        if newest >= intended and newest > 0 and _is_tombstone(context, writer, newest):
            return newest
        context.leases.check(WRITER, context.attempt)
        attempt = max(newest, intended) + 1
        context.crash_point("before_retire", "rollback")
        if not context.leases.tombstone(writer, attempt, token_of(context.run, writer, attempt)):
            if context.clock() > until:
                raise DeadlineExceeded(
                    f"{context.paths.leases} holds a lease of {writer} attempt {attempt}, but no listing shows it for "
                    f"{gone_after_s(context):g} s; is the folder readable from here? Ask for the rollback again"
                )
            context.pause()  # Somebody's lease, which is not listed here yet.
        context.crash_point("after_retire", "rollback")
        context.leases.refresh()


def _is_tombstone(context: RoleContext, writer: str, attempt: int) -> bool:
    """Whatever a lease is that cannot be read, and perhaps never can, one above it retires it."""
    try:
        return context.leases.read(writer, attempt).kind == "tombstone"
    except OSError as error:
        log.warning("retired by a tombstone above it: %s", error)
        return False


def _make(context: RoleContext, missing: str, gone: set[str], attempts: dict[str, int]) -> Rollback:
    """`gone`: what is recorded as deleted; of the last of it the next supervisor may have bytes to remove (I12)."""
    lineage = Lineage(context.rollbacks)
    for item in _read_retired(context, "learner-0", attempts):
        if not (isinstance(item.record, CheckpointSaved) and item.record.folder in gone):
            lineage.fold(item)
    found = newest_valid(context.paths, lineage)
    step = 0 if found is None else found[0].step
    voided = [
        item.record
        for item in _read_retired(context, "orchestrator-0", attempts)
        if isinstance(item.record, Batch) and item.record.step > step and not context.rollbacks.voids(item.attempt, item.record)
    ]
    return Rollback(
        number=len(context.rollbacks.records) + 1, step=step, last_step=max(lineage.newest_step, 0),
        groups=sum(len(batch.groups) for batch in voided), missing=missing, lost=_lost_shards(context.paths, voided),
        attempts=attempts, unix_s=time.time(),
    )  # fmt: skip


def _lost_shards(paths: RunPaths, batches: list[Batch]) -> tuple[str, ...]:
    """Shards of these batches that are gone or do not have their digest."""
    refs = [member.ref for batch in batches for group in batch.groups for member in group.members]
    digests = {ref.shard: ref.shard_digest for ref in refs}
    return tuple(sorted(name for name, digest in digests.items() if not _has_digest(paths.resolve(name), digest)))


def _has_digest(path: Path, digest: str) -> bool:
    try:
        return digest_file(path) == digest
    except FileNotFoundError:
        return False


def _read_retired(context: RoleContext, writer: str, attempts: dict[str, int]) -> list[Delivered]:
    """All accepted records of a writer that was retired: read as a successor would cut it, late enough to see everything."""
    folder = context.paths.journal(writer)
    cuts = cut_predecessors(context.reading, folder, writer, attempts[writer], sleep=context.sleep)
    return [item for cut in cuts.cuts for item in read_cut(context.reading, folder, cut)]


def _publish(context: RoleContext, rollback: Rollback) -> None:
    context.leases.check(WRITER, context.attempt)
    path = context.paths.rollback(rollback.number)
    context.crash_point("before_rollback", "rollback")
    if not publish_exclusive(context.fs, path, rollback.model_dump_json().encode()):
        context.leases.check(WRITER, context.attempt)
        raise HeldElsewhere(f"{path} was published by somebody else in the meantime; ask again")
    context.crash_point("after_rollback", "rollback")


def _leave_tombstone(context: RoleContext) -> None:
    """The next supervisor need not wait for this epoch's lease to run out."""
    try:
        context.leases.check(WRITER, context.attempt)
        context.leases.tombstone(WRITER, context.attempt + 1, token_of(context.run, WRITER, context.attempt + 1))
    except (OSError, LeaseLost) as error:
        log.warning("left without a tombstone: %s", error)
