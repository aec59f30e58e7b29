"""The simulated roles: generators that keep the protocol of the real ones and invent what these would compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from miles_core.errors import NeedsRollback
from miles_core.grading.base import Grade
from miles_core.learner.checkpoints import newest_valid
from miles_core.orchestrator.loop import Orchestrator
from miles_core.policy.lineage import Lineage, StepLog
from miles_core.records import (
    Batch,
    CheckpointSaved,
    EvaluationPoint,
    FileDigest,
    Graded,
    GradeEntry,
    GradeOrder,
    Order,
    Published,
    Returned,
    ShardEntry,
    ShardSealed,
    StepDone,
    Version,
    digest_record,
    sample_id,
    trajectory_id,
)
from miles_core.runtime.receiver import Inbox
from miles_core.runtime.succession import open_journal
from miles_core.store.follow import Delivered
from miles_core.store.journal import JournalWriter
from miles_core.store.publish import Durability, digest_bytes, publish_bytes
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import ShardWriter
from tests.protocol.simulation import Process, Steps

FAILED, TRUNCATED, NO_GRADE = 0.03, 0.08, 0.05
"""Shares of samples and grades that go wrong."""


def orchestrator(process: Process) -> Steps:
    """The real loop, one tick a step."""
    yield from _until_cuttable(process)
    loop = Orchestrator(process.context)
    process.orchestrator = loop
    loop.start()
    process.has_started = True
    while loop.tick():
        yield


def _until_cuttable(process: Process) -> Steps:
    """Waits as cut_predecessors would, but lets the others go on."""
    context = process.context
    while context.attempt > 1:
        seen_s = context.leases.seen_for_s(context.writer, context.attempt)
        if _patiently(context.leases.refresh) and seen_s >= 2 * context.timing.visibility_s:
            return
        yield


# --- rollout ---------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    order: Order
    index: int
    left: int
    versions: list[Version] = field(default_factory=list)


class _ThinShards:
    """ShardWriter without files, for schedules that nobody reads rows of."""

    def __init__(self, process: Process) -> None:
        self._process, self._rows, self._sealed = process, list[Trajectory](), 0

    @property
    def num_waiting(self) -> int:
        return len(self._rows)

    def add(self, row: Trajectory) -> None:
        self._rows.append(row)

    def due(self) -> bool:
        return bool(self._rows)

    def seal(self) -> ShardSealed:
        path = self._process.context.paths.shard(self._process.writer, self._process.attempt, self._sealed)
        rows, self._rows, self._sealed = self._rows[:4], self._rows[4:], self._sealed + 1
        name = self._process.context.paths.relative(path)
        return ShardSealed(path=name, size_bytes=1, digest=digest_bytes(name.encode()), rows=tuple(map(_entry, range(9), rows)))


def _entry(index: int, row: Trajectory) -> ShardEntry:
    return ShardEntry(
        trajectory_id=row.trajectory_id, sample_id=row.sample_id, group_id=row.group_id, order_id=row.order_id, row=index,
        status=row.status, failure_kind=row.failure_kind, num_tokens=len(row.tokens), num_sampled_tokens=row.num_sampled,
        versions=tuple(dict.fromkeys(Version(run.step, run.attempt) for run in row.versions)),
    )  # fmt: skip


class Rollout:
    """A replica: takes orders, lets each sample last a few steps, lists it with the versions it saw."""

    def __init__(self, process: Process, journal: JournalWriter) -> None:
        self.process, self.context, self.journal = process, process.context, journal
        self.inbox = Inbox(process.context)
        self.steps = StepLog(process.context.follow("learner-0"), process.context.rollbacks)
        self.queue: list[_Running] = []
        self.running: list[_Running] = []
        self.made: list[str] = []
        self.shards = ShardWriter(
            self.context.fs, self.context.paths, process.writer, process.attempt, rows=4, age_s=0.5, clock=self.context.clock
        ) if process.cluster.real_files else _ThinShards(process)  # fmt: skip

    def step(self) -> None:
        """One round. OSError: what was not written is written later."""
        context = self.context
        for order in self.inbox.poll():
            assert isinstance(order, Order)
            self.queue += [_Running(order, index, self.process.rng.randrange(1, 12)) for index in order.samples]
        self.steps.poll()
        newest = self.steps.newest_published
        context.version = None if newest is None else newest.version
        context.state = "waiting: first version" if newest is None else "serving"
        self._sample(context.version)
        context.load = len(self.queue) + len(self.running)
        self.publish(everything=False)

    def _sample(self, version: Version | None) -> None:
        if version is None:
            return
        ready = [item for item in self.queue if item.order.min_step <= version.step]
        for item in ready[: 4 - len(self.running)]:
            self.queue.remove(item)
            self.running.append(item)
        for item in list(self.running):
            if item.versions[-1:] != [version]:
                item.versions.append(version)
            item.left -= 1
            if item.left <= 0:
                self.running.remove(item)
                self.shards.add(self._trajectory(item))

    def _trajectory(self, item: _Running) -> Trajectory:
        draw, order = self.process.rng.random(), item.order
        name = sample_id(order.group_id, item.index)
        failed = draw < FAILED
        sampled = len(item.versions) + 2
        tokens = np.arange(4 + sampled, dtype=np.int32)
        mask = np.array([0] * 4 + [1] * sampled, dtype=np.uint8)
        return Trajectory(
            trajectory_id=trajectory_id(name, self.process.writer, self.process.attempt), sample_id=name,
            group_id=order.group_id, order_id=order.order_id, producer=self.process.writer,
            producer_attempt=self.process.attempt, task_seed=order.task_seed, tokens=tokens, loss_mask=mask,
            logprobs=-mask.astype(np.float32), turns=(Turn("user", 0, 4), Turn("assistant", 4, len(tokens))),
            versions=tuple(VersionRun(4 + nth, *version) for nth, version in enumerate(item.versions)), temperature=1.0,
            status="failed" if failed else ("truncated" if draw < FAILED + TRUNCATED else "complete"),
            failure_kind="infrastructure" if failed else "none",
        )  # fmt: skip

    def publish(self, *, everything: bool) -> None:
        """Seals what is due and announces it."""
        while self.shards.due() or (everything and self.shards.num_waiting):
            self.context.before_write()
            sealed = self.shards.seal()
            if sealed is not None:
                self.journal.append(sealed)
                self.made += [row.trajectory_id for row in sealed.rows]
        self.journal.flush()

    def give_back(self) -> None:
        """Returns what was not started."""
        for order_id in dict.fromkeys(item.order.order_id for item in self.queue):
            indices = tuple(item.index for item in self.queue if item.order.order_id == order_id)
            self.journal.append(Returned(order_id=order_id, samples=indices))
        self.queue.clear()


def rollout(process: Process) -> Steps:
    """A replica, from its first record to its last."""
    yield from serve(Rollout(process, process.context.journal()))


def serve(replica: Rollout) -> Steps:
    """Works until it is told to stop; asked to leave, it gives back, ends what runs, and leaves."""
    process = replica.process
    process.has_started = True
    while replica.inbox.stop is None:
        if process.context.leave.is_set():
            process.context.state = "leaving"
            replica.give_back()
            if not replica.running:
                break
        _patiently(replica.step)
        yield
    while not _patiently(lambda: replica.publish(everything=True)):
        yield
    if replica.inbox.stop is not None:
        while not _patiently(lambda: process.context.finish(replica.journal, "completed")):
            yield


def _patiently(action: Callable[[], object]) -> bool:
    """True if the action succeeded; False after an OSError."""
    try:
        action()
    except OSError:
        return False
    return True


# --- grader ----------------------------------------------------------------------------------------------------------


def reward_of(identifier: str) -> float:
    """The grade of a trajectory: any grader gives the same. In a quarter of the groups all samples have the same."""
    group = digest_bytes(identifier.partition("@")[0].rpartition("/")[0].encode())
    return int((group if group[0] in "0123" else digest_bytes(identifier.encode()))[:4], 16) / 0xFFFF


def grader(process: Process) -> Steps:
    """A grader until it is told to stop or to leave; now and then it has no grade."""
    yield from judge(process, lambda identifier: process.rng.random() < NO_GRADE)


def judge(process: Process, fails: Callable[[str], bool]) -> Steps:
    """Answers every trajectory; `fails`: whether there is no grade for it."""
    context, journal = process.context, process.context.journal()
    inbox, queue = Inbox(context), list[GradeOrder]()
    process.has_started, context.state = True, "serving"

    def step() -> None:
        for order in inbox.poll():
            assert isinstance(order, GradeOrder)
            queue.append(order)
        if queue and process.rng.random() < 0.5:
            journal.append(_answer(process, queue.pop(0), fails))
        context.load = sum(len(order.items) for order in queue)
        journal.flush()

    while inbox.stop is None and not context.leave.is_set():
        _patiently(step)
        yield
    if inbox.stop is not None:
        while not _patiently(lambda: context.finish(journal, "completed")):
            yield


def _answer(process: Process, order: GradeOrder, fails: Callable[[str], bool]) -> Graded:
    entries = []
    for item in order.items:
        value = reward_of(item.trajectory_id)
        grade = Grade(value=value, std=0.0, source="simulated", timestamp=process.cluster.clock())
        if fails(item.trajectory_id):
            entries.append(GradeEntry(trajectory_id=item.trajectory_id, grade=None, error="it failed"))
        else:
            entries.append(GradeEntry(trajectory_id=item.trajectory_id, grade=grade))
    return Graded(order_id=order.order_id, entries=tuple(entries))


# --- learner ---------------------------------------------------------------------------------------------------------


class Learner:
    """Rank 0: trains batch k as step k; a successor replays from the newest checkpoint (I7, I8)."""

    def __init__(self, process: Process) -> None:
        self.process, self.context = process, process.context
        self.journal, accepted = open_journal(process.context)
        self.lineage = Lineage(process.context.rollbacks)
        for item in accepted:
            self.lineage.fold(item)
        found = newest_valid(process.context.paths, self.lineage)
        self.step = 0 if found is None else found[0].step
        self.last = self.lineage.newest_step
        self.batches: dict[int, Batch] = {}
        self.follower = process.context.follow("orchestrator-0")

    def begin(self) -> Steps:
        """Step 0, or the last step again when the newest checkpoint holds it."""
        if self.last > self.step:
            return
        if self.last == self.step:
            record = self.lineage.steps[self.last].model_copy(update={"replay": True})
        else:
            record = StepDone(
                step=0, batch_id="", manifest_digest="", weights_digest=self._digest(0, ""), staleness=0, mean_reward=0.0
            )
        yield from self._write(record)
        yield from self._publish(record)

    def poll(self) -> None:
        """Takes new batches."""
        for item in self.follower.poll():
            if isinstance(item.record, Batch) and not self.context.rollbacks.voids(item.attempt, item.record):
                other = self.batches.setdefault(item.record.step, item.record)
                assert other == item.record, f"two batches {item.record.step}: {other.batch_id}, {item.record.batch_id}"

    def train(self, batch: Batch) -> Steps:
        """One step, with everything that belongs to it."""
        for _ in range(self.process.rng.randrange(1, 10)):
            yield
        members = [member for group in batch.groups for member in group.members]
        for shard in {member.ref.shard for member in members} if self.process.cluster.real_files else ():
            if not self.context.paths.resolve(shard).exists():
                raise NeedsRollback(f"batch {batch.step} needs {shard}")
        digest = digest_record(batch)
        record = StepDone(
            step=batch.step, batch_id=batch.batch_id, manifest_digest=digest, weights_digest=self._digest(batch.step, digest),
            staleness=batch.staleness, mean_reward=sum(member.reward for member in members) / len(members),
            replay=batch.step <= self.last,
        )  # fmt: skip
        yield from self._write(record)
        if batch.step >= self.last:
            yield from self._publish(record)
        if batch.step % self.context.recipe.learner.checkpoint_every == 0:
            yield from self._checkpoint(record)
        self.step = batch.step
        self.context.progress = self.step

    def _publish(self, record: StepDone) -> Steps:
        yield
        version = Version(record.step, self.context.attempt)
        published = Published(
            version=version, weights_digest=record.weights_digest, folder=f"policy/{record.step}-{version.attempt}",
            manifest_digest="none", size_bytes=1,
        )  # fmt: skip
        while self.process.cluster.real_files:
            try:
                published = _publish_for_real(self.process, version)
                break
            except OSError:
                yield
        yield from self._write(published)

    def _checkpoint(self, record: StepDone) -> Steps:
        folder = self.context.paths.checkpoint(record.step, self.context.attempt)
        data = record.weights_digest.encode()
        while not _patiently(lambda: publish_bytes(self.context.fs, folder / "state", data, Durability.RENAMED)):
            yield
        file = FileDigest(name="state", size_bytes=len(data), digest=digest_bytes(data))
        name = self.context.paths.relative(folder)
        yield from self._write(
            CheckpointSaved(step=record.step, folder=name, files=(file,), weights_digest=record.weights_digest)
        )

    def _write(self, record: StepDone | Published | CheckpointSaved) -> Steps:
        self.journal.append(record)
        while not _patiently(self.journal.flush):
            yield
        self.lineage.fold(Delivered(self.context.attempt, self.journal.bytes, record))
        yield

    def _digest(self, step: int, manifest_digest: str) -> str:
        if self.process.cluster.real_files:
            return _weights_digest(step)
        return digest_bytes(f"{step} {manifest_digest}".encode())


def learner(process: Process) -> Steps:
    """Trains to the last step; asked to leave, it leaves between two steps; without a shard it gives up."""
    yield from _until_cuttable(process)
    this = Learner(process)
    process.has_started, process.context.state = True, "training"
    try:
        yield from _train(process, this)
    except NeedsRollback as missing:
        detail = str(missing)
        while not _patiently(lambda: process.context.finish(this.journal, "needs_rollback", detail)):
            yield


def _train(process: Process, this: Learner) -> Steps:
    yield from this.begin()
    while this.step < process.context.recipe.steps:
        if process.context.leave.is_set():
            return
        _patiently(this.poll)
        batch = this.batches.get(this.step + 1)
        if batch is not None:
            yield from this.train(batch)
        yield
    while not _patiently(lambda: process.context.finish(this.journal, "completed")):
        yield


def _tensors(step: int) -> dict[str, object]:
    import torch

    return {"weight": torch.full((4,), float(step))}


def _weights_digest(step: int) -> str:
    from miles_core.policy.manifest import weights_digest

    return weights_digest(_tensors(step))  # type: ignore[arg-type]


def _publish_for_real(process: Process, version: Version) -> Published:
    from miles_core.policy.manifest import Probe
    from miles_core.policy.publisher import publish_version

    process.context.before_write()
    probe = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)
    return publish_version(
        process.context.fs, process.context.paths, run_id=process.context.run.run_id, version=version,
        tensors=_tensors(version.step), probe=probe, learner_token=process.context.token,  # type: ignore[arg-type]
    )  # fmt: skip


# --- evaluator -------------------------------------------------------------------------------------------------------


def evaluator(process: Process) -> Steps:
    """A point of the first and of the last version."""
    yield from _until_cuttable(process)
    context = process.context
    journal, accepted = open_journal(context)
    process.has_started = True
    steps = StepLog(context.follow("learner-0"), context.rollbacks)
    versions = [item.record.version for item in accepted if isinstance(item.record, EvaluationPoint)]
    recorded = {version.step for version in versions if not context.rollbacks.abandons(version)}
    for step in sorted({0, context.recipe.steps} - recorded):
        context.state = f"waiting: version {step}"
        while steps.published_at(step) is None:
            if context.leave.is_set():
                return
            _patiently(steps.poll)
            yield
        yield from _write_point(journal, steps.published_at(step))
    while not _patiently(lambda: context.finish(journal, "completed")):
        yield


def _write_point(journal: JournalWriter, published: Published | None) -> Iterator[None]:
    assert published is not None
    journal.append(
        EvaluationPoint(
            version=published.version, weights_digest=published.weights_digest, num_problems=4, greedy_score=0.5, seconds=1.0
        )
    )
    while not _patiently(journal.flush):
        yield


ROLES = {
    "orchestrator": orchestrator,
    "rollout": rollout,
    "grader": grader,
    "learner": learner,
    "evaluator": evaluator,
}
