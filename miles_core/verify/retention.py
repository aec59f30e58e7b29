"""The checks of deletions: only what retired was deleted, and each was recorded with its digest (I12)."""

from __future__ import annotations

from miles_core.records import CheckpointSaved, Deleted, Published, Version, digest_record
from miles_core.verify.joined import Joined

ANCHORS = 2


def check_deletions(joined: Joined) -> None:
    """Every deletion names something announced, with its size and digest, that nobody can need any more.

    What retired stays so, so what is needed now was needed whenever it was deleted. Needs batches and groups joined.
    """
    announced = _announced(joined)
    needed = _needed_versions(joined) | _needed_checkpoints(joined) | _needed_shards(joined)
    for name, item in joined.deleted.items():
        if announced.get(name) != (item.what, item.size_bytes, item.digest):
            joined.files.fault("deletion", name, f"recorded as a {item.what} of digest {item.digest}; that was never announced")
        elif name in needed or not _may_go(joined, item):
            joined.files.fault("deletion", name, f"this {item.what} was deleted, but it had not retired")


def _may_go(joined: Joined, item: Deleted) -> bool:
    spec = joined.recipe.retention
    return {"version": spec.versions, "shard": spec.trajectories != "keep"}.get(item.what, True)


def _announced(joined: Joined) -> dict[str, tuple[str, int, str]]:
    """(what, size, digest) by name; of shards also what lies behind a cut, which nobody needs."""
    found: dict[str, tuple[str, int, str]] = {}
    for _, record in joined.learner:
        if isinstance(record, Published):
            found[record.folder] = ("version", record.size_bytes, record.manifest_digest)
        elif isinstance(record, CheckpointSaved):
            size_bytes = sum(file.size_bytes for file in record.files)
            found[record.folder] = ("checkpoint", size_bytes, digest_record(record))
    for sealed in joined.all_shards():
        found[sealed.path] = ("shard", sealed.size_bytes, sealed.digest)
    return found


def _needed_versions(joined: Joined) -> set[str]:
    """Folders of the two newest anchors and of all that was published after the older one.

    After a rollback those of attempts before it may have gone while newer ones were there, which are abandoned now.
    """
    branches = joined.branches
    published = [
        record
        for attempt, record in joined.learner
        if isinstance(record, Published) and branches.of("learner-0", attempt) == len(branches.rollbacks)
    ]
    published.sort(key=lambda record: (record.version.attempt, record.version.step))
    anchors = [index for index, record in enumerate(published) if record.base is None]
    return {record.folder for record in published[anchors[-ANCHORS:][0] :]} if anchors else set()


def _checkpoints(joined: Joined) -> dict[int, str]:
    """Folder of the newest attempt's checkpoint of each step, from the last rollback's on."""
    least = joined.branches.rollbacks[-1].step if joined.branches.rollbacks else 0
    return {
        record.step: record.folder
        for attempt, record in joined.learner
        if isinstance(record, CheckpointSaved)
        and record.step >= least
        and not joined.branches.has_abandoned(Version(record.step, attempt))
    }


def _needed_checkpoints(joined: Joined) -> set[str]:
    """Folders of the newest checkpoints."""
    saved = _checkpoints(joined)
    return {saved[step] for step in sorted(saved)[-joined.recipe.retention.checkpoints :]}


def _needed_shards(joined: Joined) -> set[str]:
    """Shards with a group that is open, or in a batch behind the oldest checkpoint that stays (or behind a rollback).

    A group of a batch that was taken back is never trained again, also before an orchestrator came to drop it.
    """
    steps, count = sorted(_checkpoints(joined)), joined.recipe.retention.checkpoints
    oldest = steps[-count] if len(steps) >= count else -1
    if joined.branches.rollbacks:
        oldest = max(oldest, joined.branches.rollbacks[-1].step)
    groups = joined.groups.keys() - joined.ends.keys() - joined.branches.voided_groups()
    for step, batch in joined.batches.items():
        if step > oldest:
            groups.update(group.group_id for group in batch.groups)
    return {sealed.path for sealed in joined.all_shards() if groups & {row.group_id for row in sealed.rows}}
