"""What the orchestrator knows, folded from records: the same while it runs and when a successor reads everything again.

Two kinds of input: records of the orchestrator's own accepted journal (`apply`), and what the manifests of replicas and
graders say (`fold`, and `end` once an attempt is cut and read up to its cut). The running orchestrator sees them
interleaved, a successor folds its predecessors' journals first and the manifests afterwards. Both end in one state, because
a manifest's record counts only for the order that is current for its sample: the last one in the own journal.

Invariants: only open groups are held; each index (by receiver, lost, ungraded, answered) is changed by the record that
changes its truth, so no decision scans all groups. A record about a closed group, an unknown order or another receiver's
order (a ghost's work) is ignored and counted. Nothing here reads a clock or a file.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from miles_core.errors import JournalCorrupt
from miles_core.orchestrator.decide import unusable
from miles_core.records import (
    Batch,
    Cut,
    Drop,
    Graded,
    GradeOrder,
    GradeRef,
    GradesChosen,
    GroupIssued,
    Leaving,
    Order,
    Returned,
    RunEnded,
    ShardEntry,
    ShardSealed,
    TrajectoryRef,
    WriterCut,
    number_of,
    sample_id,
)
from miles_core.rollbacks import Rollbacks
from miles_core.store.follow import Delivered


class Receiver(NamedTuple):
    """One attempt of a rollout replica or grader."""

    writer: str
    attempt: int


class Key(NamedTuple):
    """One sample."""

    group_id: str
    nth: int
    """Index in the group."""

    def __str__(self) -> str:
        return sample_id(self.group_id, self.nth)


class Listed(NamedTuple):
    """A trajectory that an accepted manifest announced, and where it is."""

    entry: ShardEntry
    shard: str
    digest: str

    @property
    def ref(self) -> TrajectoryRef:
        """As orders and batches name it."""
        return TrajectoryRef(
            trajectory_id=self.entry.trajectory_id, shard=self.shard, row=self.entry.row, shard_digest=self.digest
        )


@dataclass(slots=True)
class Sample:
    """One sample of an open group."""

    orders: list[Order] = field(default_factory=list)
    """All that named it; the last is current."""
    returned: set[str] = field(default_factory=set)
    """Ids of orders whose owner gave it back unstarted: they cost no attempt."""
    failure: str = ""
    """Why the last attempt gave nothing."""
    listed: Listed | None = None
    grade_orders: list[GradeOrder] = field(default_factory=list)
    """All that named its trajectory; the last is current."""
    grade: GradeRef | None = None
    """The grade that counts."""

    @property
    def attempts(self) -> int:
        """Times it was given out, without those that came back unstarted."""
        return len(self.orders) - len(self.returned)


@dataclass(slots=True)
class Group:
    """An open group."""

    number: int
    issued: GroupIssued
    samples: list[Sample]
    num_listed: int = 0
    num_graded: int = 0

    @property
    def is_complete(self) -> bool:
        """All samples are listed and graded."""
        return self.num_listed == self.num_graded == len(self.samples)


def receiver_of(order: Order | GradeOrder) -> Receiver:
    """The attempt that an order names."""
    return Receiver(order.receiver, order.receiver_attempt)


def key_of(identifier: str) -> Key | None:
    """The sample of a sample id or trajectory id; None if it has not their form."""
    group_id, slash, index = identifier.partition("@")[0].rpartition("/")
    return Key(group_id, int(index)) if slash and index.isdigit() else None


class State:
    """The fold."""

    def __init__(self, rollbacks: Rollbacks | None = None) -> None:
        self._lost_shards = (rollbacks or Rollbacks()).lost_shards
        self.groups: dict[str, Group] = {}
        """Open groups, in issue order."""
        self.numbers: list[int] = []
        """Their numbers, ascending."""
        self.lost: dict[Key, None] = {}
        """Samples without an owner and without a trajectory."""
        self.ungraded: dict[Key, None] = {}
        """Listed samples without a grade and without a grader that has them."""
        self.answered: dict[Key, GradeRef] = {}
        """Grades that came and were not yet chosen."""
        self.completed: list[str] = []
        """Groups that became complete since the reader of this list emptied it."""
        self.leaving: set[Receiver] = set()
        """Attempts that gave work back: they get no more."""
        self.cuts: dict[str, dict[int, Cut]] = {}
        """Recorded cuts, by writer and attempt; the first of an attempt counts."""
        self.rolled_back: dict[str, str] = {}
        """Groups that are to be dropped after a rollback, with the reason: of voided batches, and with rows in lost shards."""
        self.drops: Counter[str] = Counter()
        self.replaced: list[float] = []
        """Rewards of the groups dropped for no spread since the last batch."""
        self.ended, self.last_batch = False, 0
        self.trained_step = -1
        """Last accepted step of the learner; -1 before the base model was loaded."""
        self.next_group = self.next_order = 1
        self.applied = 0
        """Records and manifest rows taken: what the work of this object is proportional to."""
        self.ignored = 0
        """Manifest rows about closed groups, unknown orders or another receiver's orders."""
        self._orders: dict[str, Order] = {}
        self._work: dict[Receiver, dict[Key, None]] = {}
        self._grading: dict[Receiver, dict[Key, None]] = {}
        self._apply: dict[type, Callable[[Any], None]] = {
            GroupIssued: self._issue, Order: self._order, GradeOrder: self._grade_order, GradesChosen: self._choose,
            WriterCut: self._cut, Drop: self._drop, Batch: self._batch, RunEnded: self._end_run,
        }  # fmt: skip
        self._fold: dict[type, Callable[[Receiver, Any], None]] = {
            ShardSealed: self._list_shard, Returned: self._take_back, Leaving: self._note_leaving,
            Graded: self._take_answers,
        }  # fmt: skip

    # --- input -------------------------------------------------------------------------------------------------------

    def apply(self, record: Any) -> None:
        """Takes one record of the orchestrator's own accepted journal."""
        self.applied += 1
        handler = self._apply.get(type(record))
        if handler is not None:
            handler(record)

    def roll_back(self, record: Batch | RunEnded) -> None:
        """Takes one record of that journal that a rollback voided: the groups are to be dropped, the end was none."""
        self.applied += 1
        if isinstance(record, Batch):
            self.replaced.clear()
            for group in record.groups:
                self._close(group.group_id)
                self.rolled_back[group.group_id] = f"of batch {record.step}, which was taken back"

    def take_over(self, accepted: Iterable[Delivered], rollbacks: Rollbacks) -> None:
        """Takes the predecessors' records that count, in order, as one that follows them."""
        for item in accepted:
            if rollbacks.voids(item.attempt, item.record):
                self.roll_back(item.record)
            else:
                self.apply(item.record)

    def fold(self, receiver: Receiver, record: Any) -> None:
        """Takes one accepted record of a replica's or grader's manifest."""
        handler = self._fold.get(type(record))
        if handler is not None:
            handler(receiver, record)

    def end(self, receiver: Receiver) -> None:
        """The attempt is cut and read to its cut: what it still owned is lost."""
        for key in self._work.pop(receiver, {}):
            self.sample(key).failure = f"{receiver.writer} attempt {receiver.attempt} was cut"
            self.lost[key] = None
        for key in self._grading.pop(receiver, {}):
            if self.sample(key).listed is not None:
                self.ungraded[key] = None
        self.leaving.discard(receiver)

    # --- questions ---------------------------------------------------------------------------------------------------

    def sample(self, key: Key) -> Sample:
        """A sample of an open group."""
        return self.groups[key.group_id].samples[key.nth]

    def load(self, receiver: Receiver) -> int:
        """Unfinished samples that a replica attempt owns."""
        return len(self._work.get(receiver, ()))

    def grade_load(self, receiver: Receiver) -> int:
        """Trajectories that a grader attempt has not answered."""
        return len(self._grading.get(receiver, ()))

    @property
    def in_flight(self) -> int:
        """Samples that some replica owns."""
        return sum(map(len, self._work.values()))

    @property
    def in_grading(self) -> int:
        """Trajectories that some grader has."""
        return sum(map(len, self._grading.values()))

    @property
    def untrained_batches(self) -> int:
        """Batches that the learner has not trained."""
        return self.last_batch - max(self.trained_step, 0)

    def groups_ahead(self, group: Group) -> int:
        """Open groups issued before this one."""
        return bisect_left(self.numbers, group.number)

    def open_orders(self) -> Iterator[Order | GradeOrder]:
        """Every order that someone still has to answer, by receiver, each once. For a successor, and for the watchdog."""
        seen: set[str] = set()
        for current, pending in ((_current_order, self._work), (_current_grade_order, self._grading)):
            for keys in pending.values():
                for key in keys:
                    order = current(self.sample(key))
                    if order.order_id not in seen:
                        seen.add(order.order_id)
                        yield order

    def orders_to_repeat(self, newest: Callable[[str], int]) -> Iterator[Order | GradeOrder]:
        """What a successor copies to the receivers again; `newest`: highest lease of a writer. A retired one reads no more."""
        return (order for order in self.open_orders() if order.receiver_attempt >= newest(order.receiver))

    # --- own journal -------------------------------------------------------------------------------------------------

    def _issue(self, record: GroupIssued) -> None:
        number = number_of(record.group_id)
        self.groups[record.group_id] = Group(number, record, [Sample() for _ in range(record.num_samples)])
        insort(self.numbers, number)
        self.next_group = max(self.next_group, number + 1)
        for key in (Key(record.group_id, nth) for nth in range(record.num_samples)):
            self.lost[key] = None  # Until its order, which a crash may have torn off.

    def _order(self, record: Order) -> None:
        self.next_order = max(self.next_order, number_of(record.order_id) + 1)
        self._orders[record.order_id] = record
        work = self._work.setdefault(receiver_of(record), {})
        for key in (Key(record.group_id, index) for index in record.samples):
            sample = self.sample(key)
            self._release(self._work, sample.orders, key)
            self.lost.pop(key, None)
            sample.orders.append(record)
            work[key] = None

    def _grade_order(self, record: GradeOrder) -> None:
        self.next_order = max(self.next_order, number_of(record.order_id) + 1)
        grading = self._grading.setdefault(receiver_of(record), {})
        for key in self._open_keys(item.trajectory_id for item in record.items):
            sample = self.sample(key)
            self._release(self._grading, sample.grade_orders, key)
            self.ungraded.pop(key, None)
            sample.grade_orders.append(record)
            grading[key] = None

    def _choose(self, record: GradesChosen) -> None:
        for grade in record.grades:
            key = key_of(grade.trajectory_id)
            if key is None or key.group_id not in self.groups or self.sample(key).grade is not None:
                continue
            sample, group = self.sample(key), self.groups[key.group_id]
            self._release(self._grading, sample.grade_orders, key)
            self.ungraded.pop(key, None)
            self.answered.pop(key, None)
            sample.grade = grade
            group.num_graded += 1
            self._note_complete(group)

    def _cut(self, record: WriterCut) -> None:
        self.cuts.setdefault(record.cut.writer, {}).setdefault(record.cut.attempt, record.cut)

    def _drop(self, record: Drop) -> None:
        self.drops[record.reason] += 1
        if record.reason == "no_spread" and record.reward is not None:
            self.replaced.append(record.reward)
        if self.rolled_back.pop(record.group_id, None) is None or record.group_id in self.groups:
            self._close(record.group_id)

    def _batch(self, record: Batch) -> None:
        self.last_batch = record.step
        self.replaced.clear()
        for group in record.groups:
            self._close(group.group_id)

    def _end_run(self, record: RunEnded) -> None:
        self.ended = True

    def _close(self, group_id: str) -> None:
        group = self.groups.pop(group_id, None)
        if group is None:
            raise JournalCorrupt(f"the orchestrator's journal closes group {group_id}, which is not open; run `miles verify`")
        del self.numbers[bisect_left(self.numbers, group.number)]
        for index, sample in enumerate(group.samples):
            key = Key(group_id, index)
            self._release(self._work, sample.orders, key)
            self._release(self._grading, sample.grade_orders, key)
            self.lost.pop(key, None)
            self.ungraded.pop(key, None)
            self.answered.pop(key, None)
            for order in sample.orders:
                self._orders.pop(order.order_id, None)

    # --- manifests ---------------------------------------------------------------------------------------------------

    def _list_shard(self, receiver: Receiver, record: ShardSealed) -> None:
        for row in record.rows:
            self.applied += 1
            key = key_of(row.sample_id)
            if key is None or not self._owns(receiver, key, row.order_id):
                self.ignored += 1
                continue
            self._work[receiver].pop(key)
            fault = unusable(row)
            if record.path in self._lost_shards:
                self.rolled_back[key.group_id] = f"{row.trajectory_id} was in {record.path}, which is lost"
            elif fault:
                self.sample(key).failure = f"{row.trajectory_id} {fault}"
                self.lost[key] = None
            else:
                self._list(key, Listed(row, record.path, record.digest))

    def _list(self, key: Key, listed: Listed) -> None:
        sample, group = self.sample(key), self.groups[key.group_id]
        sample.listed = listed
        group.num_listed += 1
        pending = sample.grade_orders and key in self._grading.get(receiver_of(sample.grade_orders[-1]), ())
        if sample.grade is None and not pending and key not in self.answered:
            self.ungraded[key] = None
        self._note_complete(group)

    def _note_leaving(self, receiver: Receiver, record: Leaving) -> None:
        self.leaving.add(receiver)

    def _take_back(self, receiver: Receiver, record: Returned) -> None:
        self.leaving.add(receiver)
        order = self._orders.get(record.order_id)
        if order is None or receiver_of(order) != receiver:
            self.ignored += 1
            return
        for key in (Key(order.group_id, index) for index in record.samples if index in order.samples):
            self.applied += 1
            sample = self.sample(key)
            sample.returned.add(order.order_id)
            if self._owns(receiver, key, order.order_id):
                self._work[receiver].pop(key)
                sample.failure = f"{receiver.writer} attempt {receiver.attempt} returned it unstarted"
                self.lost[key] = None

    def _take_answers(self, receiver: Receiver, record: Graded) -> None:
        for entry in record.entries:
            self.applied += 1
            key = key_of(entry.trajectory_id)
            if key is None or key not in self._grading.get(receiver, ()):
                self.ignored += 1
                continue
            sample = self.sample(key)
            if sample.grade_orders[-1].order_id != record.order_id:
                self.ignored += 1
                continue
            self._grading[receiver].pop(key)
            if entry.grade is not None:
                self.answered[key] = GradeRef(
                    trajectory_id=entry.trajectory_id,
                    grader=receiver.writer,
                    grader_attempt=receiver.attempt,
                    grade=entry.grade,
                )
            else:
                sample.failure = f"{receiver.writer} attempt {receiver.attempt} gave no grade: {entry.error}"
                if sample.listed is not None:
                    self.ungraded[key] = None

    # --- indexes -----------------------------------------------------------------------------------------------------

    def _owns(self, receiver: Receiver, key: Key, order_id: str) -> bool:
        return key in self._work.get(receiver, ()) and self.sample(key).orders[-1].order_id == order_id

    def _open_keys(self, identifiers: Iterable[str]) -> Iterator[Key]:
        return (key for key in map(key_of, identifiers) if key is not None and key.group_id in self.groups)

    def _release(self, table: dict[Receiver, dict[Key, None]], orders: list[Order] | list[GradeOrder], key: Key) -> None:
        """Takes a sample out of the work of the attempt that its current order names."""
        if orders:
            table.get(receiver_of(orders[-1]), {}).pop(key, None)

    def _note_complete(self, group: Group) -> None:
        if group.is_complete:
            self.completed.append(group.issued.group_id)


def _current_order(sample: Sample) -> Order:
    return sample.orders[-1]


def _current_grade_order(sample: Sample) -> GradeOrder:
    return sample.grade_orders[-1]
