"""What must hold of a simulated run, proved from its journals with verify's reader, which shares no code with the followers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

from miles_core.records import (
    Batch,
    Drop,
    Graded,
    GradesChosen,
    GroupIssued,
    Order,
    Returned,
    RunEnded,
    ShardEntry,
    ShardSealed,
    StepDone,
    Version,
    WriterCut,
    digest_record,
    sample_id,
)
from miles_core.run import all_writers, grader_writers, rollout_writers
from miles_core.verify.streams import Files
from tests.protocol.simulation import SimCluster

SELF_CUTTING = ("orchestrator-0", "learner-0", "evaluator-0")


class Audit:
    """Accepted records of one run, and the checks."""

    def __init__(self, cluster: SimCluster) -> None:
        self.recipe, self.seed = cluster.recipe, cluster.seed
        self._files = Files(cluster.paths, cluster.run.run_id)
        for writer in all_writers(cluster.recipe):
            self._files.read_writer(writer)
        for writer in SELF_CUTTING:
            self._files.apply_own_cuts(writer)
        self._rollbacks = [
            json.loads(path.read_text()) for path in sorted(cluster.paths.rollback(1).parent.glob("rollback-*.json"))
        ]
        self.voided: list[Batch] = []
        """Batches that a rollback took back."""
        self.decisions: list[Any] = []
        for attempt, record in self._accepted("orchestrator-0"):
            later = [rollback["step"] for rollback in self._after("orchestrator-0", attempt)]
            if isinstance(record, Batch) and record.step > min(later, default=record.step):
                self.voided.append(record)
            elif not (isinstance(record, RunEnded) and later):
                self.decisions.append(record)
        for cut in self._of(WriterCut):
            self._files.apply_cut(cut.cut.writer, cut.cut)
        self.listed: dict[str, tuple[str, int, ShardEntry]] = {}
        self.rows_of: dict[str, tuple[ShardEntry, ...]] = {}
        self.gone: dict[tuple[str, str], str] = {}
        self.grades: set[tuple[str, str, int, float]] = set()
        self._read_workers()
        self.steps: dict[int, list[StepDone]] = defaultdict(list)
        self.known: set[Version] = set()
        for attempt, record in self._accepted("learner-0"):
            if isinstance(record, StepDone):
                self.known.add(Version(record.step, attempt))
                if self._fork(Version(record.step, attempt)) == record.step:
                    self.steps[record.step].append(record)

    def _after(self, writer: str, attempt: int) -> list[dict[str, Any]]:
        """Rollbacks that came after an attempt."""
        return [rollback for rollback in self._rollbacks if attempt <= rollback["attempts"][writer]]

    def age_at(self, step: int, version: Version) -> int:
        """Steps from a version to the one before `step`, back to the last rollback below it and forward again."""
        return (version.step - self._fork(version)) + (step - 1 - self._fork(version))

    def _fork(self, version: Version) -> int:
        """The last step at or before a version that was never abandoned."""
        return min([rollback["step"] for rollback in self._after("learner-0", version.attempt)] + [version.step])

    def _accepted(self, writer: str) -> list[tuple[int, Any]]:
        streams = self._files.streams[writer]
        return [(attempt, record) for attempt in sorted(streams) for record in streams[attempt].accepted]

    def _of(self, kind: type) -> list[Any]:
        return [record for record in self.decisions if isinstance(record, kind)]

    def _read_workers(self) -> None:
        for writer, _ in rollout_writers(self.recipe):
            for attempt, record in self._accepted(writer):
                if isinstance(record, ShardSealed):
                    self.rows_of[record.path] = record.rows
                    for row in record.rows:
                        self.listed[row.trajectory_id] = (writer, attempt, row)
                        if row.status == "failed":
                            self.gone[row.order_id, row.sample_id] = "failed"
                elif isinstance(record, Returned):
                    for index in record.samples:
                        self.gone[record.order_id, str(index)] = "returned"
        for writer in grader_writers(self.recipe):
            for attempt, record in self._accepted(writer):
                for entry in record.entries if isinstance(record, Graded) else ():
                    if entry.grade is not None:
                        self.grades.add((entry.trajectory_id, writer, attempt, entry.grade.value))

    def check(self) -> None:
        """Everything."""
        assert self._files.faults == [], self._files.faults
        self.check_groups()
        self.check_lineage()
        self.check_batches()
        self.check_ownership()

    def check_groups(self) -> None:
        """Every group that was issued left once, by a batch or by a drop; the run says once that it ended."""
        issued = [record.group_id for record in self._of(GroupIssued)]
        left = [group.group_id for batch in self._of(Batch) for group in batch.groups]
        left += [record.group_id for record in self._of(Drop)]
        taken_back = {group.group_id for batch in self.voided for group in batch.groups}
        lost = {shard for rollback in self._rollbacks for shard in rollback["lost"]}
        with_lost_rows = {row.group_id for shard in lost for row in self.rows_of.get(shard, ())}
        rolled_back = {record.group_id for record in self._of(Drop) if record.reason == "rolled_back"}
        assert taken_back <= rolled_back <= taken_back | with_lost_rows
        assert len(set(issued)) == len(issued)
        assert Counter(issued) == Counter(left)
        assert len(self._of(RunEnded)) == 1

    def check_lineage(self) -> None:
        """Batches 1..K, each trained as its step, by whatever attempts, from one manifest."""
        batches = {batch.step: batch for batch in self._of(Batch)}
        assert [batch.step for batch in self._of(Batch)] == list(range(1, self.recipe.steps + 1))
        assert sorted(self.steps) == list(range(self.recipe.steps + 1))
        for step, batch in batches.items():
            assert {record.manifest_digest for record in self.steps[step]} == {digest_record(batch)}

    def check_batches(self) -> None:
        """Members are accepted rows of accepted orders, with the grade that counts, no staler than the bound."""
        orders = {order.order_id: order for order in self._of(Order)}
        chosen = {ref.trajectory_id: ref for record in self._of(GradesChosen) for ref in record.grades}
        for batch in self._of(Batch):
            assert len(batch.groups) == self.recipe.orchestrator.prompts
            ages = []
            for group in batch.groups:
                rows = [self.listed[member.ref.trajectory_id] for member in group.members]
                wanted = [sample_id(group.group_id, index) for index in range(self.recipe.orchestrator.samples)]
                assert [row.sample_id for _, _, row in rows] == wanted
                for member, (writer, attempt, row) in zip(group.members, rows, strict=True):
                    order, grade = orders[row.order_id], chosen[row.trajectory_id]
                    assert (order.receiver, order.receiver_attempt) == (writer, attempt)
                    assert row.status in ("complete", "truncated") and set(row.versions) <= self.known
                    assert min(version.step for version in row.versions) >= order.min_step
                    assert (row.trajectory_id, grade.grader, grade.grader_attempt, member.reward) in self.grades
                    ages += [self.age_at(batch.step, version) for version in row.versions]
            assert 0 <= batch.staleness == max(ages) <= self.recipe.orchestrator.max_staleness

    def check_ownership(self) -> None:
        """A sample is given out again only when its owner was cut before, or listed it as failed, or returned it (I10)."""
        cut: set[tuple[str, int]] = set()
        owner: dict[str, Order] = {}
        times: Counter[str] = Counter()
        usable = {
            (row.order_id, row.sample_id, writer, attempt)
            for writer, attempt, row in self.listed.values()
            if row.status != "failed"
        }
        for record in self.decisions:
            if isinstance(record, WriterCut):
                cut.add((record.cut.writer, record.cut.attempt))
            for index in record.samples if isinstance(record, Order) else ():
                sample, before = sample_id(record.group_id, index), owner.get(sample_id(record.group_id, index))
                owner[sample] = record
                times[sample] += 1
                if before is None:
                    continue
                why = self.gone.get((before.order_id, sample)) or self.gone.get((before.order_id, str(index)))
                times[sample] -= why == "returned"
                before_owner = (before.receiver, before.receiver_attempt)
                assert why or before_owner in cut, f"{sample}: {before.order_id} taken away"
                assert (before.order_id, sample, *before_owner) not in usable, f"{sample}: asked for again though it was listed"
        assert max(times.values(), default=0) <= self.recipe.rollout.sample_attempts
