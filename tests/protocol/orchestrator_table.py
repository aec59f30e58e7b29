"""The orchestrator's planner and state on a table, without files or time: a test plays replicas, graders and learner."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from miles_core.grading.base import Grade
from miles_core.orchestrator.planner import Planner
from miles_core.orchestrator.state import Receiver, State, receiver_of
from miles_core.recipe import Recipe
from miles_core.records import (
    Cut,
    Graded,
    GradeEntry,
    GradeOrder,
    Order,
    Returned,
    ShardEntry,
    ShardSealed,
    Version,
    WriterCut,
    sample_id,
    trajectory_id,
)
from miles_core.run import grader_writers, rollout_writers


class Table:
    """One orchestrator attempt and everybody it gives work to."""

    def __init__(self, recipe: Recipe, *, seed: int = 0, state: State | None = None, attempt: int = 1) -> None:
        self.recipe, self.rng = recipe, random.Random(seed)
        self.state = state or State()
        self.own: list[Any] = []
        """Records of the own journal."""
        self.manifests: dict[Receiver, list[Any]] = defaultdict(list)
        self.ended: set[Receiver] = set()
        self.known = {Version(0, 1)}
        self.state.trained_step = 0
        self.planner = Planner(recipe, attempt, self.state, knows=lambda version: version in self.known, emit=self.emit)
        self.rollouts = [Receiver(writer, 1) for writer, _ in rollout_writers(recipe)]
        self.graders = [Receiver(writer, 1) for writer in grader_writers(recipe)]
        self.todo: dict[Receiver, list[Order]] = defaultdict(list)
        self.to_grade: dict[Receiver, list[GradeOrder]] = defaultdict(list)
        self.now_s = 0.0
        self.rewards: dict[str, float] = {}
        """Grades of trajectories, by sample id; 0.5 where nothing is said."""
        self._shards = 0

    def emit(self, record: Any) -> None:
        """Journals and applies."""
        self.own.append(record)
        self.state.apply(record)
        if isinstance(record, Order):
            self.todo[receiver_of(record)].append(record)
        elif isinstance(record, GradeOrder):
            self.to_grade[receiver_of(record)].append(record)

    def decide(self) -> None:
        """One round of decisions."""
        self.now_s += 1.0
        self.planner.decide(self.now_s, [who for who in self.rollouts if who not in self.state.leaving], self.graders)

    def say(self, who: Receiver, record: Any) -> None:
        """A replica or grader announces something."""
        self.manifests[who].append(record)
        self.state.fold(who, record)

    def list_samples(self, who: Receiver, order: Order, *, status: str = "complete", version: Version | None = None) -> None:
        """A replica lists all samples of an order as one shard."""
        self._shards += 1
        rows = tuple(
            row(who, order, index, at, status=status, version=version or Version(self.state.trained_step, 1))
            for at, index in enumerate(order.samples)
        )
        self.say(who, ShardSealed(path=f"shard-{self._shards}", size_bytes=1, digest=f"d{self._shards}", rows=rows))

    def grade(self, who: Receiver, order: GradeOrder, *, fails: bool = False) -> None:
        """A grader answers an order."""
        self.say(
            who, Graded(order_id=order.order_id, entries=tuple(self.answer(item.trajectory_id, fails) for item in order.items))
        )

    def answer(self, identifier: str, fails: bool) -> GradeEntry:
        """A grader's word on one trajectory."""
        value = self.rewards.get(identifier.partition("@")[0], 0.5)
        grade = None if fails else Grade(value=value, std=0.0, source="table", timestamp=0.0)
        return GradeEntry(trajectory_id=identifier, grade=grade, error="no" if fails else "")

    def give_back(self, who: Receiver, order: Order, samples: tuple[int, ...] | None = None) -> None:
        """A replica returns samples unstarted."""
        self.say(who, Returned(order_id=order.order_id, samples=order.samples if samples is None else samples))

    def cut(self, who: Receiver) -> Receiver:
        """An attempt is cut; its successor, two numbers on, takes its place on the table."""
        self.emit(WriterCut(cut=Cut(writer=who.writer, attempt=who.attempt, bytes=0, hash="")))
        self.state.end(who)
        self.ended.add(who)
        successor = Receiver(who.writer, who.attempt + 2)
        for table in (self.rollouts, self.graders):
            if who in table:
                table[table.index(who)] = successor
        self.todo.pop(who, None)
        self.to_grade.pop(who, None)
        return successor

    def train(self) -> bool:
        """The learner trains the next batch, if there is one."""
        if self.state.untrained_batches == 0:
            return False
        self.state.trained_step += 1
        self.known.add(Version(self.state.trained_step, 1))
        return True

    def work(self) -> None:
        """Everybody does everything that is on the table, well."""
        for who in self.rollouts:
            for order in self.todo.pop(who, []):
                self.list_samples(who, order)
        for grader in self.graders:
            for grade_order in self.to_grade.pop(grader, []):
                self.grade(grader, grade_order)

    def rebuilt(self) -> State:
        """The state of a successor: own records first, then the manifests, writer by writer in a drawn order."""
        state = State()
        state.trained_step = self.state.trained_step
        for record in self.own:
            state.apply(record)
        writers = sorted({who.writer for who in self.manifests} | {who.writer for who in self.ended})
        for writer in self.rng.sample(writers, len(writers)):
            attempts = sorted({who.attempt for who in self.manifests.keys() | self.ended if who.writer == writer})
            for who in (Receiver(writer, attempt) for attempt in attempts):
                for record in self.manifests.get(who, []):
                    state.fold(who, record)
                if who in self.ended:
                    state.end(who)
        return state


def row(who: Receiver, order: Order, index: int, at: int, *, status: str, version: Version) -> ShardEntry:
    """Manifest entry of one sample."""
    name = sample_id(order.group_id, index)
    return ShardEntry.model_validate(
        {
            "trajectory_id": trajectory_id(name, *who), "sample_id": name, "group_id": order.group_id,
            "order_id": order.order_id, "row": at, "status": status,
            "failure_kind": "infrastructure" if status == "failed" else "none", "versions": (version,), "num_tokens": 9,
            "num_sampled_tokens": 5,
        }
    )  # fmt: skip


def snapshot(state: State) -> dict[str, Any]:
    """Everything a decision may rest on."""
    groups = {
        group_id: [
            (
                [order.order_id for order in sample.orders], sorted(sample.returned),
                sample.listed and sample.listed.entry.trajectory_id,
                [order.order_id for order in sample.grade_orders], sample.grade,
            )
            for sample in group.samples
        ]
        for group_id, group in state.groups.items()
    }  # fmt: skip
    receivers = state._work.keys() | state._grading.keys()
    loads = {who: (state.load(who), state.grade_load(who)) for who in receivers}
    return {
        "groups": groups,
        "counts": {group_id: (group.num_listed, group.num_graded) for group_id, group in state.groups.items()},
        "lost": set(state.lost), "ungraded": set(state.ungraded), "answered": state.answered, "leaving": state.leaving,
        "loads": {who: load for who, load in loads.items() if any(load)},
        "cuts": state.cuts, "drops": state.drops, "numbers": state.numbers, "replaced": state.replaced,
        "next": (state.next_group, state.next_order, state.last_batch, state.ended),
    }  # fmt: skip
