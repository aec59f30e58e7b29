"""The checks of verify: exactly once, digests, lineage, staleness, closed reasons, cuts, ends (I5, I7, I9, I17)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import (
    Batch,
    BatchMember,
    Drop,
    Graded,
    GradesChosen,
    GroupIssued,
    Intent,
    Order,
    Published,
    Rollback,
    RunClosed,
    RunEnded,
    ShardEntry,
    ShardSealed,
    StepDone,
    Version,
    digest_record,
    sample_id,
)
from miles_core.run import RunConfig, all_writers, grader_writers, rollout_writers
from miles_core.store.publish import check_file
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import read_shard
from miles_core.verify.graded import check_replaced, check_weights
from miles_core.verify.joined import SELF_CUTTING, Joined, Shard
from miles_core.verify.retention import check_deletions
from miles_core.verify.rollbacks import check_rollbacks
from miles_core.verify.streams import Fault, Files
from miles_core.verify.weights import check_checkpoints, check_evaluations, check_versions


@dataclass
class Verification:
    """What was proved, or what is wrong."""

    run_id: str
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "run_id": self.run_id, "state": self.state, "ok": not self.faults, **self.facts,
            "faults": [asdict(fault) for fault in self.faults],
        }  # fmt: skip

    def as_text(self) -> str:
        """For people."""
        lines = [f"run {self.run_id}: {self.state}", *(f"  {key}: {value}" for key, value in self.facts.items())]
        if not self.faults:
            return "\n".join([*lines, "verified: every trained group is in exactly one accepted step; all digests hold"])
        return "\n".join([*lines, f"{len(self.faults)} faults:", *(f"  {f.kind}  {f.where}: {f.detail}" for f in self.faults)])


def verify_run(root: Path) -> Verification:
    """Checks everything that a run directory's files say. Raises RunDirectoryError only without a run.json.

    A live run moves while it is read (a batch may name a shard whose record was not there a moment before), so there only
    what two readings find is a fault.
    """
    result = _read_once(root)
    if result.faults and result.state == "RUNNING":
        again = _read_once(root)
        again.faults = [fault for fault in again.faults if fault in result.faults]
        return again
    return result


def _read_once(root: Path) -> Verification:
    paths = RunPaths(root)
    try:
        run = RunConfig.model_validate_json(paths.run_file.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunDirectoryError(f"{paths.run_file} is not readable as a run description: {error}") from error
    files = Files(paths, run.run_id)
    joined = Joined(files, run)
    _check_supervisor(joined)
    _check_orchestrator(joined)
    _check_shards(joined)
    _check_grades(joined)
    _check_steps(joined)
    _check_batches(joined)
    check_replaced(joined)
    check_weights(joined)
    check_versions(joined)
    check_checkpoints(joined)
    check_evaluations(joined)
    check_deletions(joined)
    check_rollbacks(joined)
    state = _check_end(joined)
    return Verification(run.run_id, state, _facts(joined), files.faults)


def _check_supervisor(joined: Joined) -> None:
    """An attempt's lease carries the token of the intent that made it.

    Also of an intent behind a cut: a supervisor that was stopped in the middle may have submitted it all the same.
    """
    tokens = {
        (record.writer, record.attempt): record.token
        for stream in joined.files.streams["supervisor-0"].values()
        for _, record in stream.records
        if isinstance(record, Intent)
    }
    for writer in all_writers(joined.recipe):
        for attempt, lease in joined.files.leases.get(writer, {}).items():
            if lease.get("kind") != "lease":
                continue
            where, token = f"leases/{writer}.a{attempt}", tokens.get((writer, attempt))
            if token is None:
                joined.files.fault("lease", where, "no supervisor's intent made this attempt")
            elif lease.get("token") != token:
                joined.files.fault("lease", where, "its token is not that of the supervisor's intent")


def _check_orchestrator(joined: Joined) -> None:
    for attempt, record in joined.orchestrator:
        _fold_orchestrator(joined, joined.branches.of("orchestrator-0", attempt), record)
    _check_groups(joined)


def _fold_orchestrator(joined: Joined, branch: int, record: Any) -> None:
    fault = joined.files.fault
    if isinstance(record, GroupIssued):
        if record.group_id in joined.groups:
            fault("group_twice", record.group_id, "issued twice")
        joined.groups[record.group_id] = record
    elif isinstance(record, Order):
        joined.orders[record.order_id] = record
    elif isinstance(record, GradesChosen):
        joined.chosen.update({grade.trajectory_id: grade for grade in record.grades})
    elif isinstance(record, Drop):
        joined.ends[record.group_id].append(f"dropped as {record.reason}")
    elif isinstance(record, Batch):
        _fold_batch(joined, branch, record)
    elif isinstance(record, RunEnded) and branch == len(joined.branches.rollbacks):
        joined.ended = record


def _fold_batch(joined: Joined, branch: int, batch: Batch) -> None:
    if joined.branches.batch_of(branch, batch.step) is not None:
        joined.files.fault("batch_twice", batch.batch_id, f"a second batch for step {batch.step}")
    joined.branches.batches.setdefault((branch, batch.step), batch)
    if joined.branches.lives(branch, batch.step):
        joined.batches.setdefault(batch.step, batch)
        joined.made_in.setdefault(batch.step, branch)
        for group in batch.groups:
            joined.ends[group.group_id].append(f"in batch {batch.step}")


def _check_groups(joined: Joined) -> None:
    fault = joined.files.fault
    for group_id, ends in joined.ends.items():
        if group_id not in joined.groups:
            fault("group_unknown", group_id, f"{ends[0]} but never issued")
        if len(ends) > 1:
            fault("group_twice", group_id, " and ".join(ends))
    expected = list(range(1, len(joined.batches) + 1))
    if sorted(joined.batches) != expected:
        fault(
            "batch_missing", "orchestrator", f"batches {sorted(set(expected) ^ set(joined.batches))} are missing or out of line"
        )


def _check_shards(joined: Joined) -> None:
    fault, paths = joined.files.fault, joined.files.paths
    for writer, _ in rollout_writers(joined.recipe):
        for attempt, record in joined.accepted(writer):
            if not isinstance(record, ShardSealed):
                continue
            shard = joined.shards[record.path] = Shard(writer, attempt, record)
            if record.path in joined.branches.lost_shards:
                continue
            path = paths.root / record.path
            try:
                check_file(path, record.size_bytes, record.digest)
                shard.rows = read_shard(path)
            except FileNotFoundError:
                if not joined.was_deleted(record.path, record.digest):
                    fault("shard_missing", record.path, f"announced by {writer} attempt {attempt}, but not there")
            except (DigestMismatch, RunDirectoryError) as error:
                fault("shard_digest", record.path, str(error))
            else:
                _check_rows(joined, shard)


def _check_rows(joined: Joined, shard: Shard) -> None:
    rows = shard.rows or []
    if len(rows) != len(shard.sealed.rows):
        joined.files.fault("shard_rows", shard.sealed.path, f"{len(rows)} rows, announced {len(shard.sealed.rows)}")
        return
    for position, (row, entry) in enumerate(zip(rows, shard.sealed.rows, strict=True)):
        if entry.row != position:
            joined.files.fault("shard_row", f"{shard.sealed.path} row {position}", f"announced as row {entry.row}")
        for problem in _row_problems(shard, row, entry):
            joined.files.fault("shard_row", f"{shard.sealed.path} row {entry.row}", problem)


def _row_problems(shard: Shard, row: Trajectory, entry: ShardEntry) -> list[str]:
    versions = {Version(run.step, run.attempt) for run in row.versions}
    pairs = (
        ("trajectory", row.trajectory_id, entry.trajectory_id),
        ("sample", row.sample_id, entry.sample_id),
        ("producer", (row.producer, row.producer_attempt), (shard.writer, shard.attempt)),
        ("versions", sorted(versions), sorted(entry.versions)),
        ("tokens", len(row.tokens), entry.num_tokens),
        ("sampled tokens", row.num_sampled, entry.num_sampled_tokens),
        ("status", row.status, entry.status),
    )
    return [f"{name} {seen!r}, its manifest record says {said!r}" for name, seen, said in pairs if seen != said]


def _check_grades(joined: Joined) -> None:
    """Every grade that counts stands, unchanged, in the journal of the grader attempt it names."""
    given: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for writer in grader_writers(joined.recipe):
        for attempt, record in joined.accepted(writer):
            if isinstance(record, Graded):
                for entry in record.entries:
                    given[entry.trajectory_id, writer, attempt].append(entry.grade)
    for trajectory, ref in joined.chosen.items():
        grades = given.get((trajectory, ref.grader, ref.grader_attempt), [])
        if ref.grade not in grades:
            joined.files.fault(
                "grade", trajectory, f"value {ref.grade.value} counts, but {ref.grader} attempt {ref.grader_attempt} gave "
                f"{[grade.value for grade in grades if grade is not None] or 'none'}",
            )  # fmt: skip


def _check_steps(joined: Joined) -> None:
    fault = joined.files.fault
    last: dict[int, int] = {}
    for attempt, record in joined.learner:
        if not isinstance(record, StepDone):
            continue
        if attempt in last and record.step != last[attempt] + 1:
            fault("step_order", f"learner attempt {attempt}", f"step {record.step} follows step {last[attempt]}")
        last[attempt] = record.step
        version = Version(record.step, attempt)
        joined.known[version] = record
        if not joined.branches.has_abandoned(version):
            joined.steps[record.step].append((attempt, record))
        _check_step(joined, attempt, record)
    for step in range(max(joined.steps, default=-1) + 1):
        if step not in joined.steps:
            fault("step_missing", f"step {step}", "no accepted step record, though later steps are there")


def _check_step(joined: Joined, attempt: int, record: StepDone) -> None:
    """All accepted records of one step name one batch, in each branch that of its own lineage."""
    fault, step = joined.files.fault, record.step
    if step == 0:
        return
    batch = joined.branches.batch_of(joined.branches.of("learner-0", attempt), step)
    if batch is None:
        fault("batch_missing", f"step {step}", "trained, but no accepted batch says what it was")
        return
    if (record.batch_id, record.manifest_digest) != (batch.batch_id, digest_record(batch)):
        detail = f"attempt {attempt} trained {record.batch_id}, not the accepted {batch.batch_id}"
        fault("manifest_digest", f"step {step}", detail)
    if record.staleness != batch.staleness:
        fault("staleness", f"step {step}", f"record says {record.staleness}, batch says {batch.staleness}")


def _check_batches(joined: Joined) -> None:
    for batch in joined.batches.values():
        oldest = batch.step - 1
        for group in batch.groups:
            issued = joined.groups.get(group.group_id)
            wanted = Counter(sample_id(group.group_id, index) for index in range(issued.num_samples)) if issued else Counter()
            rows = [_check_member(joined, batch, group.group_id, member) for member in group.members]
            oldest = min([oldest, *(member.oldest_step for member in group.members)])
            got = Counter(row.sample_id for row in rows if row is not None)
            if None not in rows and got != wanted:
                joined.files.fault(
                    "group_samples", group.group_id, f"batch {batch.step} trains {dict(got)} instead of each once"
                )
        _check_staleness(joined, batch, oldest)
        _check_reward(joined, batch)
        wanted_groups = joined.recipe.orchestrator.prompts
        if len(batch.groups) != wanted_groups:
            joined.files.fault("batch_size", batch.batch_id, f"{len(batch.groups)} groups, the recipe says {wanted_groups}")


def _check_reward(joined: Joined, batch: Batch) -> None:
    """The reward curve that people see is that of the batches."""
    rewards = [reward for group in batch.groups for reward in group.rewards]
    mean = sum(rewards) / max(len(rewards), 1)
    for attempt, record in joined.steps.get(batch.step, []):
        if abs(record.mean_reward - mean) > 1e-6:
            joined.files.fault(
                "reward", f"step {batch.step}", f"attempt {attempt} recorded {record.mean_reward}, its batch's mean is {mean}"
            )


def _check_staleness(joined: Joined, batch: Batch, oldest: int) -> None:
    bound = joined.recipe.orchestrator.max_staleness
    if batch.staleness != batch.step - 1 - oldest:
        joined.files.fault(
            "staleness",
            batch.batch_id,
            f"says {batch.staleness}, its rows say {batch.step - 1 - oldest} (oldest step {oldest})",
        )
    if batch.staleness > bound:
        joined.files.fault("staleness", batch.batch_id, f"{batch.staleness} is over the recipe's bound {bound}")


def _check_member(joined: Joined, batch: Batch, group_id: str, member: BatchMember) -> Trajectory | None:
    fault, ref = joined.files.fault, member.ref
    where = f"batch {batch.step}, {ref.trajectory_id}"
    shard = joined.shards.get(ref.shard)
    if shard is None:
        fault("batch_shard", where, f"names shard {ref.shard}, which no accepted manifest announces")
        return None
    if shard.sealed.digest != ref.shard_digest:
        fault("batch_shard", where, f"names {ref.shard} with digest {ref.shard_digest}, announced {shard.sealed.digest}")
    if shard.rows is None or ref.row >= len(shard.rows):
        return None
    row = shard.rows[ref.row]
    if (row.trajectory_id, row.group_id) != (ref.trajectory_id, group_id):
        fault("batch_row", where, f"row {ref.row} of {ref.shard} holds {row.trajectory_id} of group {row.group_id}")
    versions, branch = [Version(run.step, run.attempt) for run in row.versions], joined.made_in[batch.step]
    oldest = min((joined.branches.counted_step(version, branch) for version in versions), default=None)
    if oldest != member.oldest_step:
        fault("staleness", where, f"oldest step {member.oldest_step} in the batch, {oldest} in the row")
    unknown = [run for run in row.versions if Version(run.step, run.attempt) not in joined.known]
    if unknown:
        fault("version_unknown", where, f"sampled by {unknown[0]}, which no accepted step record made")
    order = joined.orders.get(row.order_id)
    if order is None or (order.receiver, order.receiver_attempt) != (row.producer, row.producer_attempt):
        fault("order", where, f"order {row.order_id} was not given to {row.producer} attempt {row.producer_attempt}")
    elif row.sample_id not in {sample_id(order.group_id, index) for index in order.samples}:
        fault("order", where, f"order {row.order_id} did not ask for sample {row.sample_id}")
    chosen = joined.chosen.get(ref.trajectory_id)
    if chosen is None or chosen.grade.value != member.reward:
        fault(
            "grade",
            where,
            f"reward {member.reward} in the batch, the grade that counts is {chosen.grade.value if chosen else 'none'}",
        )
    return row


def _check_end(joined: Joined) -> str:
    """The state, from the supervisor's last word, or once all whose end is the run's are done; then no group is open."""
    closed = [record for _, record in joined.accepted("supervisor-0") if isinstance(record, RunClosed | Rollback)]
    last = closed[-1] if closed else None
    missing = [writer for writer in SELF_CUTTING[1:] if not _is_done(joined, writer)]
    state = last.state if isinstance(last, RunClosed) else ("RUNNING" if missing else "COMPLETED")
    if state != "COMPLETED":
        return state
    fault, wanted = joined.files.fault, joined.recipe.steps
    for group_id in joined.groups:
        if group_id not in joined.ends:
            fault("group_open", group_id, "neither trained nor dropped with a reason, though the run is COMPLETED")
    trained = max(joined.steps, default=0)
    if joined.ended is None or trained != wanted:
        fault("step_missing", f"step {wanted}", f"the run is COMPLETED, but accepted step records end at {trained}")
    for step in joined.batches:
        if step > trained:
            fault("step_missing", f"step {step}", "batch never trained, though the run is COMPLETED")
    for step in sorted({0, wanted} - joined.evaluated):
        fault("evaluation_missing", f"step {step}", "not evaluated, though the run is COMPLETED")
    for writer in missing:
        fault("completion_record", f"done/{writer}.json", "not there, though the run is COMPLETED")
    for streams in joined.files.streams.values():
        stream = streams[max(streams)] if streams else None
        if stream is not None and stream.torn and stream.accepted_bytes < 0:
            fault("journal_torn", stream.where, f"attempt {stream.attempt} ends inside a frame, though the run is COMPLETED")
    return state


def _is_done(joined: Joined, writer: str) -> bool:
    """It says that it completed, and no rollback came after that."""
    done = joined.files.done.get(writer)
    return (
        done is not None
        and done.outcome == "completed"
        and joined.branches.of(writer, done.attempt) == len(joined.branches.rollbacks)
    )


def _facts(joined: Joined) -> dict[str, Any]:
    open_groups = [group for group in joined.groups if group not in joined.ends]
    dropped = Counter(end for ends in joined.ends.values() for end in ends if end.startswith("dropped"))
    return {
        "steps": max(joined.steps, default=0),
        "groups_issued": len(joined.groups),
        "groups_trained": sum(len(batch.groups) for step, batch in joined.batches.items() if step in joined.steps),
        "groups_dropped": {key.removeprefix("dropped as "): count for key, count in sorted(dropped.items())},
        "groups_open": len(open_groups),
        "open_with": _owners(joined, open_groups),
        "attempts": {writer: len(streams) for writer, streams in joined.files.streams.items() if streams},
        "shards": len(joined.shards),
        "versions": len([1 for _, record in joined.learner if isinstance(record, Published)]),
        "rows_lost": _rows_lost(joined),
        "rollbacks": [f"to step {rollback.step} of {rollback.last_step}" for rollback in joined.branches.rollbacks],
        "deleted": dict(Counter(item.what for item in joined.deleted.values())),
    }


def _rows_lost(joined: Joined) -> int:
    """Trained rows in shards that a rollback named as lost: their digests stand in the journals, nothing else can be proved."""
    members = (member for batch in joined.batches.values() for group in batch.groups for member in group.members)
    return sum(member.ref.shard in joined.branches.lost_shards for member in members)


def _owners(joined: Joined, open_groups: list[str]) -> dict[str, int]:
    """Live owners of open groups: the receivers of their newest orders."""
    owner = {order.group_id: order.receiver for order in joined.orders.values()}
    return dict(Counter(owner.get(group, "orchestrator-0") for group in open_groups))
