"""The checks of verify: exactly once, digests, lineage, staleness, closed reasons, cuts, ends (I5, I7, I9, I17)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.errors import DigestMismatch, MilesError, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import MANIFEST_NAME, PolicyManifest, digest_entries
from miles_core.records import (
    Batch,
    BatchMember,
    CheckpointSaved,
    Drop,
    EvaluationPoint,
    Graded,
    GradesChosen,
    GroupIssued,
    Order,
    Published,
    RunClosed,
    RunEnded,
    ShardEntry,
    ShardSealed,
    StepDone,
    Version,
    WriterCut,
    digest_record,
    sample_id,
)
from miles_core.run import RunConfig, all_writers, grader_writers, rollout_writers
from miles_core.store.publish import check_file, digest_file
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import read_shard
from miles_core.verify.streams import Fault, Files

SELF_CUTTING = ("supervisor-0", "orchestrator-0", "learner-0", "evaluator-0")


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


@dataclass
class _Shard:
    writer: str
    attempt: int
    sealed: ShardSealed
    rows: list[Trajectory] | None = None


class _Run:
    """Accepted records of one run, joined."""

    def __init__(self, files: Files, run: RunConfig) -> None:
        self.files, self.run, self.recipe = files, run, run.recipe
        for writer in ["supervisor-0", *all_writers(run.recipe)]:
            files.read_writer(writer)
        for writer in SELF_CUTTING:
            files.apply_own_cuts(writer)
        self.orchestrator = self._accepted("orchestrator-0")
        self._cut_workers()
        self.learner = self._accepted("learner-0")
        self.groups: dict[str, GroupIssued] = {}
        self.ends: dict[str, list[str]] = defaultdict(list)
        self.batches: dict[int, Batch] = {}
        self.orders: dict[str, Order] = {}
        self.chosen: dict[str, Any] = {}
        self.shards: dict[str, _Shard] = {}
        self.steps: dict[int, list[tuple[int, StepDone]]] = defaultdict(list)
        self.known: dict[Version, StepDone] = {}
        self.ended: RunEnded | None = None

    def _accepted(self, writer: str) -> list[tuple[int, Any]]:
        streams = self.files.streams[writer]
        return [(attempt, record) for attempt in sorted(streams) for record in streams[attempt].accepted]

    def _cut_workers(self) -> None:
        seen: set[tuple[str, int]] = set()
        for _, record in self.orchestrator:
            if isinstance(record, WriterCut):
                key = (record.cut.writer, record.cut.attempt)
                if key in seen:
                    self.files.fault("cuts", record.cut.writer, f"attempt {record.cut.attempt} is cut twice")
                seen.add(key)
                self.files.apply_cut(record.cut.writer, record.cut)


def verify_run(root: Path) -> Verification:
    """Checks everything that a run directory's files say. Raises RunDirectoryError only without a run.json."""
    paths = RunPaths(root)
    try:
        run = RunConfig.model_validate_json(paths.run_file.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunDirectoryError(f"{paths.run_file} is not readable as a run description: {error}") from error
    files = Files(paths, run.run_id)
    joined = _Run(files, run)
    _check_supervisor(joined)
    _check_orchestrator(joined)
    _check_shards(joined)
    _check_grades(joined)
    _check_steps(joined)
    _check_batches(joined)
    _check_versions(joined)
    _check_checkpoints(joined)
    _check_evaluations(joined)
    state = _check_end(joined)
    return Verification(run.run_id, state, _facts(joined), files.faults)


def _check_supervisor(joined: _Run) -> None:
    """An attempt's lease carries the token of the intent that made it."""
    tokens = {
        (record.writer, record.attempt): record.token
        for _, record in joined._accepted("supervisor-0")
        if record.kind == "intent"
    }
    for writer, leases in joined.files.leases.items():
        for attempt, lease in leases.items():
            token = tokens.get((writer, attempt))
            if lease.get("kind") == "lease" and token is not None and lease.get("token") != token:
                joined.files.fault("lease", f"leases/{writer}.a{attempt}", "its token is not that of the supervisor's intent")


def _check_orchestrator(joined: _Run) -> None:
    for _, record in joined.orchestrator:
        _fold_orchestrator(joined, record)
    _check_groups(joined)


def _fold_orchestrator(joined: _Run, record: Any) -> None:
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
        if record.step in joined.batches:
            fault("batch_twice", record.batch_id, f"a second batch for step {record.step}")
        joined.batches.setdefault(record.step, record)
        for group in record.groups:
            joined.ends[group.group_id].append(f"in batch {record.step}")
    elif isinstance(record, RunEnded):
        joined.ended = record


def _check_groups(joined: _Run) -> None:
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


def _check_shards(joined: _Run) -> None:
    fault, paths = joined.files.fault, joined.files.paths
    for writer, _ in rollout_writers(joined.recipe):
        for attempt, record in joined._accepted(writer):
            if not isinstance(record, ShardSealed):
                continue
            shard = joined.shards[record.path] = _Shard(writer, attempt, record)
            path = paths.root / record.path
            try:
                check_file(path, record.size_bytes, record.digest)
                shard.rows = read_shard(path)
            except FileNotFoundError:
                fault("shard_missing", record.path, f"announced by {writer} attempt {attempt}, but not there")
            except (DigestMismatch, RunDirectoryError) as error:
                fault("shard_digest", record.path, str(error))
            else:
                _check_rows(joined, shard)


def _check_rows(joined: _Run, shard: _Shard) -> None:
    rows = shard.rows or []
    if len(rows) != len(shard.sealed.rows):
        joined.files.fault("shard_rows", shard.sealed.path, f"{len(rows)} rows, announced {len(shard.sealed.rows)}")
        return
    for row, entry in zip(rows, shard.sealed.rows, strict=True):
        for problem in _row_problems(shard, row, entry):
            joined.files.fault("shard_row", f"{shard.sealed.path} row {entry.row}", problem)


def _row_problems(shard: _Shard, row: Trajectory, entry: ShardEntry) -> list[str]:
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


def _check_grades(joined: _Run) -> None:
    """Every grade that counts stands, unchanged, in the journal of the grader attempt it names."""
    given: dict[tuple[str, str, int], list[Any]] = defaultdict(list)
    for writer in grader_writers(joined.recipe):
        for attempt, record in joined._accepted(writer):
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


def _check_steps(joined: _Run) -> None:
    fault = joined.files.fault
    last: dict[int, int] = {}
    for attempt, record in joined.learner:
        if not isinstance(record, StepDone):
            continue
        if attempt in last and record.step != last[attempt] + 1:
            fault("step_order", f"learner attempt {attempt}", f"step {record.step} follows step {last[attempt]}")
        last[attempt] = record.step
        joined.steps[record.step].append((attempt, record))
        joined.known[Version(record.step, attempt)] = record
    for step in range(max(joined.steps, default=-1) + 1):
        if step not in joined.steps:
            fault("step_missing", f"step {step}", "no accepted step record, though later steps are there")
    for step, records in joined.steps.items():
        batch = joined.batches.get(step)
        if step == 0:
            continue
        if batch is None:
            fault("batch_missing", f"step {step}", "trained, but no accepted batch says what it was")
            continue
        digest = digest_record(batch)
        for attempt, record in records:
            if (record.batch_id, record.manifest_digest) != (batch.batch_id, digest):
                fault(
                    "manifest_digest",
                    f"step {step}",
                    f"attempt {attempt} trained {record.batch_id}, not the accepted {batch.batch_id}",
                )
            if record.staleness != batch.staleness:
                fault("staleness", f"step {step}", f"record says {record.staleness}, batch says {batch.staleness}")


def _check_batches(joined: _Run) -> None:
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


def _check_staleness(joined: _Run, batch: Batch, oldest: int) -> None:
    bound = joined.recipe.orchestrator.max_staleness
    if batch.staleness != batch.step - 1 - oldest:
        joined.files.fault(
            "staleness",
            batch.batch_id,
            f"says {batch.staleness}, its rows say {batch.step - 1 - oldest} (oldest step {oldest})",
        )
    if batch.staleness > bound:
        joined.files.fault("staleness", batch.batch_id, f"{batch.staleness} is over the recipe's bound {bound}")


def _check_member(joined: _Run, batch: Batch, group_id: str, member: BatchMember) -> Trajectory | None:
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
    if row.oldest_step != member.oldest_step:
        fault("staleness", where, f"oldest step {member.oldest_step} in the batch, {row.oldest_step} in the row")
    unknown = [run for run in row.versions if Version(run.step, run.attempt) not in joined.known]
    if unknown:
        fault("version_unknown", where, f"sampled by {unknown[0]}, which no accepted step record made")
    order = joined.orders.get(row.order_id)
    if order is None or (order.receiver, order.receiver_attempt) != (row.producer, row.producer_attempt):
        fault("order", where, f"order {row.order_id} was not given to {row.producer} attempt {row.producer_attempt}")
    chosen = joined.chosen.get(ref.trajectory_id)
    if chosen is None or chosen.grade.value != member.reward:
        fault(
            "grade",
            where,
            f"reward {member.reward} in the batch, the grade that counts is {chosen.grade.value if chosen else 'none'}",
        )
    return row


def _check_versions(joined: _Run) -> None:
    fault, paths = joined.files.fault, joined.files.paths
    lineage = Lineage()
    published = lineage.published
    copy = PolicyCopy(paths, joined.run.run_id, lineage)
    for attempt, record in joined.learner:
        if not isinstance(record, Published):
            continue
        published[record.version] = record
        step = joined.known.get(record.version)
        if record.version.attempt != attempt or step is None:
            fault("version_unknown", record.folder, f"version {tuple(record.version)} was published without its step record")
        elif step.weights_digest != record.weights_digest:
            fault(
                "weights_digest",
                record.folder,
                f"published {record.weights_digest}, the step record says {step.weights_digest}",
            )
        _check_version_files(joined, record, paths.root / record.folder)
        _prove_weights(joined, record, copy)
    final = joined.recipe.steps
    if joined.ended is not None and not any(version.step == final for version in published):
        fault("version_missing", f"version {final}", "the run ended, but its last version was not published")


def _check_version_files(joined: _Run, record: Published, folder: Path) -> None:
    fault = joined.files.fault
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
        manifest = PolicyManifest.model_validate_json(raw)
    except OSError as error:
        fault("version_missing", record.folder, f"manifest not readable: {error.strerror}")
        return
    except ValidationError as error:
        fault("version_manifest", record.folder, f"manifest not readable: {error.errors()[0]['msg']}")
        return
    if manifest.run_id != joined.run.run_id or manifest.version != record.version:
        fault("version_foreign", record.folder, f"is version {tuple(manifest.version)} of run {manifest.run_id}")
    if digest_file(folder / MANIFEST_NAME) != record.manifest_digest:
        fault("version_manifest", record.folder, "manifest.json differs from the digest in the step journal")
    if not manifest.weights_digest == record.weights_digest == digest_entries(manifest.tensors):
        fault("weights_digest", record.folder, "manifest, its tensors and the step journal name different weights")
    for file in manifest.files:
        try:
            check_file(folder / file.name, file.size_bytes, file.digest)
        except FileNotFoundError:
            fault("version_missing", f"{record.folder}/{file.name}", "not there")
        except DigestMismatch as error:
            fault("version_digest", f"{record.folder}/{file.name}", str(error))


def _prove_weights(joined: _Run, record: Published, copy: PolicyCopy) -> None:
    """Makes the version's tensors from its anchor and deltas, as a reader does, and compares their digests."""
    try:
        copy.reach(record)
    except (OSError, MilesError) as error:
        joined.files.fault("version_weights", record.folder, str(error))


def _check_checkpoints(joined: _Run) -> None:
    for attempt, record in joined.learner:
        if not isinstance(record, CheckpointSaved):
            continue
        step = joined.known.get(Version(record.step, attempt))
        if step is None or step.weights_digest != record.weights_digest:
            joined.files.fault(
                "checkpoint", record.folder, f"holds weights {record.weights_digest}, step {record.step} made others"
            )
        for file in record.files:
            try:
                check_file(joined.files.paths.root / record.folder / file.name, file.size_bytes, file.digest)
            except FileNotFoundError:
                joined.files.fault("checkpoint", f"{record.folder}/{file.name}", "not there")
            except DigestMismatch as error:
                joined.files.fault("checkpoint", f"{record.folder}/{file.name}", str(error))


def _check_evaluations(joined: _Run) -> None:
    for _, record in joined._accepted("evaluator-0"):
        if not isinstance(record, EvaluationPoint):
            continue
        step = joined.known.get(record.version)
        if step is None or step.weights_digest != record.weights_digest:
            joined.files.fault("evaluation", f"version {tuple(record.version)}", "evaluated weights that no accepted step made")


def _check_end(joined: _Run) -> str:
    """The state, from the supervisor's last word or the orchestrator's; a COMPLETED run has no open group."""
    closed = [record for _, record in joined._accepted("supervisor-0") if isinstance(record, RunClosed)]
    state = closed[-1].state if closed else ("COMPLETED" if joined.ended is not None else "RUNNING")
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
    for writer in SELF_CUTTING[1:]:
        if writer not in joined.files.done:
            fault("completion_record", f"done/{writer}.json", "not there, though the run is COMPLETED")
    for streams in joined.files.streams.values():
        stream = streams[max(streams)] if streams else None
        if stream is not None and stream.torn and stream.accepted_bytes < 0:
            fault("journal_torn", stream.where, f"attempt {stream.attempt} ends inside a frame, though the run is COMPLETED")
    return state


def _facts(joined: _Run) -> dict[str, Any]:
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
    }


def _owners(joined: _Run, open_groups: list[str]) -> dict[str, int]:
    """Live owners of open groups: the receivers of their newest orders."""
    owner = {order.group_id: order.receiver for order in joined.orders.values()}
    return dict(Counter(owner.get(group, "orchestrator-0") for group in open_groups))
