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
    """Folders of the two newest anchors and of all that was published after the older one."""
    published = [record for _, record in joined.learner if isinstance(record, Published)]
    published.sort(key=lambda record: (record.version.attempt, record.version.step))
    anchors = [index for index, record in enumerate(published) if record.base is None]
    return {record.folder for record in published[anchors[-ANCHORS:][0] :]} if anchors else set()


def _needed_checkpoints(joined: Joined) -> set[str]:
    """Folders of the newest checkpoints, of each step the newest attempt's."""
    newest: dict[int, str] = {}
    for attempt, record in joined.learner:
        if isinstance(record, CheckpointSaved) and Version(record.step, attempt) in joined.known:
            newest[record.step] = record.folder
    return {newest[step] for step in sorted(newest)[-joined.recipe.retention.checkpoints :]}


def _needed_shards(joined: Joined) -> set[str]:
    """Shards with a group that is open, or in a batch behind the oldest checkpoint that stays."""
    steps = sorted({record.step for _, record in joined.learner if isinstance(record, CheckpointSaved)})
    oldest = steps[-joined.recipe.retention.checkpoints] if len(steps) >= joined.recipe.retention.checkpoints else -1
    groups = {group for group in joined.groups if group not in joined.ends}
    for step, batch in joined.batches.items():
        if step > oldest:
            groups.update(group.group_id for group in batch.groups)
    return {sealed.path for sealed in joined.all_shards() if groups & {row.group_id for row in sealed.rows}}
