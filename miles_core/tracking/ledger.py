"""What a run directory says, read for people: no act depends on it, so it looks at every stream as far as it is visible.

For proof there is miles_core/verify; this is for `status` and reports.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.paths import RunPaths
from miles_core.policy.lineage import StepLog
from miles_core.records import (
    Batch,
    Deleted,
    Deletion,
    Done,
    Drained,
    Drop,
    EvaluationPoint,
    GroupIssued,
    Incident,
    Intent,
    JobEnded,
    LivenessTable,
    Rollback,
    RunClosed,
    RunEnded,
    ShardSealed,
    Submitted,
    parse_record,
)
from miles_core.rollbacks import Rollbacks, read_rollbacks
from miles_core.run import RunConfig, all_writers, grader_writers, rollout_writers
from miles_core.store.follow import Delivered, Follower, Reading
from miles_core.store.fs import FileSystem
from miles_core.store.journal import AttemptTail, list_segments
from miles_core.store.lease import LeaseFolder


@dataclass
class Ledger:
    """Everything a report needs, folded."""

    run: RunConfig
    steps: StepLog
    evaluations: dict[int, EvaluationPoint] = field(default_factory=dict)
    abandoned_evaluations: list[EvaluationPoint] = field(default_factory=list)
    """Points of versions that a rollback abandoned: they say nothing of this run's policy."""
    issued: int = 0
    open_groups: set[str] = field(default_factory=set)
    batches: dict[int, Batch] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)
    replaced: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By batch: rewards of the groups without spread that were replaced before it."""
    ended: RunEnded | None = None
    drained: Drained | None = None
    """Nobody was started since."""
    closed: RunClosed | None = None
    intents: dict[str, list[Intent]] = field(default_factory=lambda: defaultdict(list))
    submitted: dict[str, list[Submitted]] = field(default_factory=lambda: defaultdict(list))
    job_ends: list[JobEnded] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    sampled_tokens: int = 0
    trajectories: int = 0
    shard_bytes: int = 0
    """Written, also those that were deleted since."""
    deleted: dict[str, Deleted] = field(default_factory=dict)
    """What the collector deleted, by name."""
    liveness: LivenessTable | None = None
    done: set[str] = field(default_factory=set)

    @property
    def trained_groups(self) -> int:
        """Groups of batches whose step is accepted."""
        return sum(len(batch.groups) for step, batch in self.batches.items() if step in self.steps.steps)

    def sampled_reward(self, step: int) -> float:
        """Mean over all groups that were sampled for the batch of an accepted step, trained or replaced."""
        trained = self.steps.steps[step].mean_reward
        return mean_sampled(trained, self.run.recipe.orchestrator.prompts, self.replaced.get(step, ()))

    @property
    def state(self) -> str:
        """The supervisor's last word; RUNNING before there is one."""
        if self.closed is not None:
            return self.closed.state
        return "RUNNING" if self.drained is None else "DRAINED"


def mean_sampled(trained: float, num_trained: int, replaced: Sequence[float]) -> float:
    """Mean reward of `num_trained` groups of mean `trained` and of groups that were replaced for having no spread."""
    return (trained * num_trained + sum(replaced)) / (num_trained + len(replaced)) if replaced else trained


class _HeardFrom(LeaseFolder):
    """Leases whose holders have recorded something: one that is starting hides nothing of what its predecessors did."""

    def __init__(self, fs: FileSystem, paths: RunPaths, run_id: str) -> None:
        super().__init__(fs, paths.leases, run_id)
        self._files, self._paths = fs, paths
        self._heard: dict[str, int] = {}

    def newest(self, writer: str) -> int:
        """Highest attempt with a record, as it was when first asked."""
        if writer not in self._heard:
            attempts = reversed(self.attempts(writer))
            self._heard[writer] = next((attempt for attempt in attempts if self._has_recorded(writer, attempt)), 0)
        return self._heard[writer]

    def _has_recorded(self, writer: str, attempt: int) -> bool:
        tail = AttemptTail(self._files, self._paths.journal(writer), attempt, visibility_s=0.0)
        return bool(tail.read(list_now=True))


def read_ledger(run: RunConfig, paths: RunPaths) -> Ledger:
    """Reads a run directory, live or finished."""
    fs = FileSystem()
    leases = _HeardFrom(fs, paths, run.run_id)
    reading = Reading(fs, leases, run.timing.visibility_s)
    rollbacks = read_rollbacks(fs, paths)
    ledger = Ledger(run, StepLog(Follower(reading, paths.journal("learner-0"), "learner-0"), rollbacks))
    if not paths.leases.is_dir():
        return ledger
    while ledger.steps.poll():
        pass
    for item in _follow(reading, paths, "orchestrator-0"):
        if not rollbacks.voids(item.attempt, item.record):
            _fold_orchestrator(ledger, item.record)
    for item in _follow(reading, paths, "evaluator-0"):
        if isinstance(item.record, EvaluationPoint):
            if rollbacks.abandons(item.record.version):
                ledger.abandoned_evaluations.append(item.record)
            else:
                ledger.evaluations[item.record.version.step] = item.record
    for record in read_all(reading, paths.journal("supervisor-0")):
        _fold_supervisor(ledger, record)
    for writer in [name for name, _ in rollout_writers(run.recipe)] + grader_writers(run.recipe):
        for record in read_all(reading, paths.journal(writer)):
            if isinstance(record, ShardSealed):
                ledger.trajectories += len(record.rows)
                ledger.shard_bytes += record.size_bytes
                ledger.sampled_tokens += sum(row.num_sampled_tokens for row in record.rows)
    ledger.liveness = _read_table(fs, paths.liveness_table)
    ledger.done = {writer for writer in all_writers(run.recipe) if _is_done(fs, paths, writer, rollbacks)}
    return ledger


def _is_done(fs: FileSystem, paths: RunPaths, writer: str, rollbacks: Rollbacks) -> bool:
    try:
        return rollbacks.precede(writer, Done.model_validate_json(fs.read(paths.done(writer))).attempt)
    except (OSError, ValidationError):
        return False


def read_all(reading: Reading, folder: Path) -> list[Any]:
    """Records of all attempts in one journal folder, in attempt order, without judging cuts."""
    records = []
    for attempt in list_segments(reading.fs, folder):
        tail = reading.tail(folder, attempt)
        while frames := tail.read(list_now=True):
            records += [parse_record(frame.payload) for frame in frames]
    return records


def _follow(reading: Reading, paths: RunPaths, writer: str) -> list[Delivered]:
    follower = Follower(reading, paths.journal(writer), writer)
    found: list[Delivered] = []
    while new := follower.poll():
        found += new
    return found


def _fold_orchestrator(ledger: Ledger, record: Any) -> None:
    if isinstance(record, GroupIssued):
        ledger.issued += 1
        ledger.open_groups.add(record.group_id)
    elif isinstance(record, Batch):
        ledger.batches[record.step] = record
        ledger.open_groups.difference_update(group.group_id for group in record.groups)
    elif isinstance(record, Drop):
        ledger.drops[record.reason] += 1
        if record.reason == "no_spread" and record.reward is not None:
            ledger.replaced[max(ledger.batches, default=0) + 1].append(record.reward)
        ledger.open_groups.discard(record.group_id)
    elif isinstance(record, RunEnded):
        ledger.ended = record


def _fold_supervisor(ledger: Ledger, record: Any) -> None:
    if isinstance(record, Intent):
        ledger.intents[record.writer].append(record)
        ledger.drained = None
    elif isinstance(record, Submitted):
        ledger.submitted[record.writer].append(record)
    elif isinstance(record, JobEnded):
        ledger.job_ends.append(record)
    elif isinstance(record, Incident):
        ledger.incidents.append(record)
    elif isinstance(record, Drained):
        ledger.drained = record
    elif isinstance(record, Deletion):
        ledger.deleted.update((item.name, item) for item in record.items)
    elif isinstance(record, RunClosed):
        ledger.closed = record
    elif isinstance(record, Rollback):
        ledger.closed = ledger.drained = None


def _read_table(fs: FileSystem, path: Path) -> LivenessTable | None:
    try:
        return LivenessTable.model_validate_json(fs.read(path))
    except (OSError, ValidationError):
        return None
