"""The checks of rollbacks (I8): each is what the supervisor recorded, its figures are right, and it was obeyed."""

from __future__ import annotations

from miles_core.records import Batch, CheckpointSaved, Rollback, StepDone
from miles_core.verify.joined import Joined


def check_rollbacks(joined: Joined) -> None:
    """Each rollback is what the supervisor recorded, goes back to a checkpoint, and was obeyed by whoever came after it."""
    _check_copies(joined)
    for number, rollback in enumerate(joined.branches.rollbacks, start=1):
        where = f"rollback {number}"
        _check_extent(joined, where, number, rollback)
        _check_obeyed(joined, where, number, rollback)
    _check_groups(joined)


def _check_copies(joined: Joined) -> None:
    """Also a copy behind a cut: the file is what counts, and the supervisor that wrote both may have been replaced between."""
    streams = joined.files.streams["supervisor-0"].values()
    copies = [record for stream in streams for _, record in stream.records if isinstance(record, Rollback)]
    for rollback in joined.branches.rollbacks:
        if rollback not in copies:
            joined.files.fault("rollback", f"rollback {rollback.number}", "differs from what the supervisor's journal says")
    for copy in copies:
        if copy not in joined.branches.rollbacks:
            joined.files.fault("rollback", f"rollback {copy.number}", "in the supervisor's journal, but its file is not there")


def _check_extent(joined: Joined, where: str, number: int, rollback: Rollback) -> None:
    """Its step is a checkpoint's or 0, and its figures are those of the records before it."""
    branches, fault = joined.branches, joined.files.fault
    before = [
        (attempt, record)
        for attempt, record in joined.learner
        if isinstance(record, StepDone | CheckpointSaved)
        and attempt <= rollback.attempts.get("learner-0", 0)
        and all(record.step <= earlier.step for earlier in branches.rollbacks[branches.of("learner-0", attempt) : number - 1])
    ]
    if rollback.step and rollback.step not in {record.step for _, record in before if isinstance(record, CheckpointSaved)}:
        fault("rollback", where, f"goes back to step {rollback.step}, of which there is no checkpoint")
    last = max((record.step for _, record in before if isinstance(record, StepDone)), default=0)
    if last != rollback.last_step:
        fault("rollback", where, f"names {rollback.last_step} as the last step before it, which was {last}")
    voided = [group for batch in _voided_by(joined, number) for group in batch.groups]
    if len(voided) != rollback.groups:
        fault("rollback", where, f"names {rollback.groups} groups, its batches have {len(voided)}")
    shards = {member.ref.shard for group in voided for member in group.members}
    for shard in sorted(set(rollback.lost) - shards):
        fault("rollback", where, f"names {shard} as lost, which is in none of its batches")


def _voided_by(joined: Joined, number: int) -> list[Batch]:
    """Batches that rollback `number` took back, and none before it."""
    rollbacks, step = joined.branches.rollbacks, joined.branches.rollbacks[number - 1].step
    return [
        batch
        for (branch, k), batch in joined.branches.batches.items()
        if branch < number and k > step and all(k <= earlier.step for earlier in rollbacks[branch : number - 1])
    ]


def _check_obeyed(joined: Joined, where: str, number: int, rollback: Rollback) -> None:
    fault, branches = joined.files.fault, joined.branches
    steps = [(attempt, record.step) for attempt, record in joined.learner if isinstance(record, StepDone)]
    first = next((step for attempt, step in steps if branches.of("learner-0", attempt) >= number), 0)
    if first > rollback.step:
        fault("rollback", where, f"goes back to step {rollback.step}, but the learner after it began at step {first}")
    for shard in joined.shards.values():
        if branches.of(shard.writer, shard.attempt) < number:
            continue
        served = {version for row in shard.sealed.rows for version in row.versions}
        for version in sorted(version for version in served if not branches.lived_on(version, number)):
            fault("abandoned_version", shard.sealed.path, f"version {tuple(version)} sampled after {where} abandoned it")


def _check_groups(joined: Joined) -> None:
    """The groups of a voided batch are dropped as rolled back, at the latest at the end; others only if rows are lost."""
    voided = joined.branches.voided_groups()
    for group_id in voided:
        ends = joined.ends.get(group_id, [])
        if set(ends) - {"dropped as rolled_back"} or (joined.ended is not None and not ends):
            joined.files.fault("rolled_back", group_id, f"of a batch that was taken back, but {' and '.join(ends) or 'open'}")
    lost = {
        row.group_id for name in joined.branches.lost_shards & joined.shards.keys() for row in joined.shards[name].sealed.rows
    }
    for group_id, ends in joined.ends.items():
        if "dropped as rolled_back" in ends and group_id not in voided | lost:
            joined.files.fault("rolled_back", group_id, "dropped as rolled back, but no batch of it was taken back")
