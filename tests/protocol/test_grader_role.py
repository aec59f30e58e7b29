"""A grader against a played orchestrator: every ordered trajectory is answered, and no failure ever becomes a zero."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.errors import DeadlineExceeded, LeaseLost
from miles_core.grading.base import Estimate
from miles_core.grading.ranking import Ranker, brevity
from miles_core.grading.worker import MOST_STUCK, DeadlineCalls, GraderWorker
from miles_core.records import Graded, GradeEntry, GradeOrder, Leaving, Stop, TrajectoryRef
from miles_core.store.fs import FileSystem
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import ShardWriter, encode_shard
from tests.protocol.receiver_world import TIMING, World


class FakeVerifier:
    """Scores facts["score"]; `before` may raise or hang."""

    source = "fake/1"

    def __init__(self) -> None:
        self.before: Callable[[int, dict[str, Any]], None] = lambda task_seed, facts: None
        self.seen: list[int] = []

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        self.seen.append(task_seed)
        self.before(task_seed, facts)
        return facts["score"]  # type: ignore[no-any-return]


class Grader:
    """Attempt 1 (or another) of grader-0, with shards of a replica at hand."""

    def __init__(self, world: World, attempt: int = 1, ranker: Ranker | None = None) -> None:
        self.world, self.context, self.verifier = world, world.context(attempt), FakeVerifier()
        self.worker = GraderWorker(self.context, self.context.journal(), self.verifier, ranker, unix_time=lambda: 7.0)
        self._shards = ShardWriter(FileSystem(), world.paths, "rollout-0", attempt, rows=100, age_s=1, clock=world.clock)

    def shard(self, *rows: Trajectory) -> tuple[TrajectoryRef, ...]:
        """A shard of these rows, as the orchestrator would refer to them."""
        for row in rows:
            self._shards.add(row)
        sealed = self._shards.seal()
        assert sealed is not None
        return tuple(
            TrajectoryRef(trajectory_id=entry.trajectory_id, shard=sealed.path, row=entry.row, shard_digest=sealed.digest)
            for entry in sealed.rows
        )

    def order(self, number: int, *items: TrajectoryRef, attempt: int = 1) -> None:
        self.world.send(GradeOrder(order_id=f"w{number}.o1", receiver="grader-0", receiver_attempt=attempt, items=items))

    def until(self, reached: Callable[[], bool], *, rounds: int = 500) -> None:
        for _ in range(rounds):
            if reached():
                return
            if not self.worker.step():
                self.context.pause()
        raise AssertionError(f"not reached in {rounds} rounds: {self.context.state!r}, {self.answers()}")

    def idle(self, seconds: float = 2.0) -> None:
        end = self.world.clock.now + seconds
        self.until(lambda: self.world.clock.now >= end)

    def answers(self) -> list[tuple[str, GradeEntry]]:
        """(order id, entry) of every answer, in journal order."""
        records = self.world.records(self.context.attempt)
        return [(record.order_id, entry) for record in records if isinstance(record, Graded) for entry in record.entries]

    def grades(self) -> dict[str, float | None]:
        """Value by sample; None for no grade. Every trajectory is answered once."""
        entries = [entry for _, entry in self.answers()]
        assert len({entry.trajectory_id for entry in entries}) == len(entries)
        return {entry.trajectory_id.split("@")[0]: entry.grade.value if entry.grade else None for entry in entries}


def row(index: int, score: Any = 0.5, **changes: Any) -> Trajectory:
    made = Trajectory(
        trajectory_id=f"g1.o1/{index}@rollout-0.a1", sample_id=f"g1.o1/{index}", group_id="g1.o1", order_id="w9.o1",
        producer="rollout-0", producer_attempt=1, task_seed=index, tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8), logprobs=np.array([0, -1, -1], np.float32), versions=(VersionRun(1, 0, 1),),
        turns=(Turn("user", 0, 1), Turn("assistant", 1, 3)), temperature=1.0, status="complete", facts={"score": score},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "grader-0")


def test_every_ordered_trajectory_is_graded_once_with_its_own_facts(world: World) -> None:
    grader = Grader(world)
    refs = grader.shard(row(0, 0.0), row(1, 1.0), row(2, 0.25))
    other = grader.shard(row(3, 0.75))
    grader.order(1, refs[2], refs[0], *other)
    grader.order(2, refs[1], attempt=2)
    grader.order(1, refs[2], refs[0], *other)
    grader.until(lambda: len(grader.grades()) == 3)
    grader.idle()
    assert grader.grades() == {"g1.o1/0": 0.0, "g1.o1/2": 0.25, "g1.o1/3": 0.75}
    assert {order_id for order_id, _ in grader.answers()} == {"w1.o1"}
    grade = grader.answers()[0][1].grade
    assert grade is not None and (grade.std, grade.source, grade.timestamp) == (0.0, "fake/1", 7.0)
    assert (grader.context.progress, grader.context.load, grader.context.state) == (3, 0, "serving")


def test_an_order_of_another_id_for_the_same_trajectory_is_answered_again(world: World) -> None:
    grader = Grader(world)
    (ref,) = grader.shard(row(0))
    grader.order(1, ref)
    grader.order(2, ref)
    grader.until(lambda: [order_id for order_id, _ in grader.answers()] == ["w1.o1", "w2.o1"])


def _raises(task_seed: int, facts: dict[str, Any]) -> None:
    raise KeyError("no such question")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(1, -0.1), "a reward is in"),
        (row(1, 1.5), "a reward is in"),
        (row(1, "high"), "could not convert"),
        (row(1, None), "TypeError"),
        (row(1, 1.0, status="failed", failure_kind="environment"), "the episode failed"),
    ],
)
def test_what_cannot_be_judged_is_no_grade_and_its_neighbours_are_graded(world: World, bad: Trajectory, reason: str) -> None:
    grader = Grader(world)
    grader.order(1, *grader.shard(row(0), bad, row(2)))
    grader.until(lambda: len(grader.grades()) == 3)
    assert grader.grades() == {"g1.o1/0": 0.5, "g1.o1/1": None, "g1.o1/2": 0.5}
    assert reason in grader.answers()[1][1].error


def test_a_score_that_is_no_number_is_no_grade(world: World) -> None:
    grader = Grader(world)
    grader.verifier.before = lambda task_seed, facts: facts.update(score=float("nan"))
    grader.order(1, *grader.shard(row(0)))
    grader.until(lambda: grader.grades() == {"g1.o1/0": None})


def test_a_verifier_that_raises_gives_no_grade_with_its_words(world: World) -> None:
    grader = Grader(world)
    grader.verifier.before = _raises
    grader.order(1, *grader.shard(row(0), row(1)))
    grader.until(lambda: grader.grades() == {"g1.o1/0": None, "g1.o1/1": None})
    assert all(entry.error == "KeyError: 'no such question'" for _, entry in grader.answers())


def test_a_verifier_that_hangs_gives_no_grade_and_the_next_is_judged(world: World) -> None:
    grader, release = Grader(world), threading.Event()
    grader.verifier.before = lambda task_seed, facts: None if task_seed else _wait(release)
    grader.order(1, *grader.shard(row(0), row(1)))
    grader.until(lambda: len(grader.grades()) == 2)
    release.set()
    assert grader.grades() == {"g1.o1/0": None, "g1.o1/1": 0.5}
    assert "did not answer within 0.5 s" in grader.answers()[0][1].error


def _wait(release: threading.Event) -> None:
    assert release.wait(timeout=60)


def test_too_many_hanging_calls_end_the_grader_after_its_answers_are_written(tmp_path: Path) -> None:
    world = World(tmp_path, "grader-0")
    grader, release = Grader(world), threading.Event()
    grader.worker._calls = DeadlineCalls(deadline_s=0.01)
    grader.verifier.before = lambda task_seed, facts: _wait(release)
    grader.order(1, *grader.shard(*(row(index) for index in range(MOST_STUCK))))
    with pytest.raises(DeadlineExceeded, match=f"{MOST_STUCK} calls of fake/1 never returned"):
        grader.worker.run()
    release.set()
    assert list(grader.grades().values()) == MOST_STUCK * [None]


def test_calls_that_end_late_are_no_longer_counted_as_stuck() -> None:
    calls, release = DeadlineCalls(deadline_s=0.01), threading.Event()
    with pytest.raises(DeadlineExceeded):
        calls.call(lambda: float(release.wait(timeout=60)))
    assert calls.num_stuck == 1
    release.set()
    calls._left_behind[0].join(timeout=60)
    assert calls.num_stuck == 0 and calls.call(lambda: 0.5) == 0.5


def test_a_shard_that_appears_late_is_graded_and_others_do_not_wait_for_it(world: World) -> None:
    grader = Grader(world)
    late, early = grader.shard(row(0)), grader.shard(row(1))
    path = world.paths.resolve(late[0].shard)
    data = path.read_bytes()
    path.unlink()
    grader.order(1, *late, *early)
    grader.until(lambda: grader.grades() == {"g1.o1/1": 0.5})
    assert grader.context.load == 1
    path.write_bytes(data[:-9])
    grader.idle(0.2)
    path.write_bytes(data)
    grader.until(lambda: grader.grades() == {"g1.o1/0": 0.5, "g1.o1/1": 0.5})


@pytest.mark.parametrize("how", ["missing", "changed"])
def test_a_shard_that_stays_unreadable_is_no_grade_not_before_twice_visibility(tmp_path: Path, how: str) -> None:
    world = World(tmp_path, "grader-0", timing=TIMING.model_copy(update={"visibility_s": 2.0}))
    grader = Grader(world)
    refs = grader.shard(row(0), row(1))
    path = world.paths.resolve(refs[0].shard)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(encode_shard([row(0, 1.0), row(1, 1.0)]))
    grader.order(1, *refs)
    grader.until(lambda: grader.context.load == 2)
    begun = world.clock.now
    grader.until(lambda: len(grader.grades()) == 2)
    assert 4.0 <= world.clock.now - begun <= 10.0
    assert grader.grades() == {"g1.o1/0": None, "g1.o1/1": None} and not grader.verifier.seen
    assert all("shard not readable" in entry.error and refs[0].shard in entry.error for _, entry in grader.answers())


def test_a_row_of_another_trajectory_is_no_grade(world: World) -> None:
    grader = Grader(world)
    first, second = grader.shard(row(0), row(1))
    grader.order(1, first.model_copy(update={"row": second.row}))
    grader.until(lambda: grader.grades() == {"g1.o1/0": None})
    assert "is g1.o1/1@rollout-0.a1, the order names g1.o1/0@rollout-0.a1" in grader.answers()[0][1].error


def test_a_path_outside_the_run_directory_is_no_grade(world: World) -> None:
    grader = Grader(world)
    (ref,) = grader.shard(row(0))
    grader.order(1, ref.model_copy(update={"shard": "../" + ref.shard}))
    grader.until(lambda: grader.grades() == {"g1.o1/0": None})
    assert "outside the run directory" in grader.answers()[0][1].error


def test_a_full_disk_loses_no_answer(world: World) -> None:
    grader = Grader(world)
    world.fs.refuse = "grades"
    grader.order(1, *grader.shard(row(0)), *grader.shard(row(1)))
    grader.until(lambda: grader.context.state.startswith("waiting: disk full"))
    before = grader.grades()
    grader.order(2, *grader.shard(row(2)))
    grader.idle(20.0)
    assert grader.grades() == before and len(grader.verifier.seen) == 2, "nothing more is graded meanwhile"
    world.fs.refuse = ""
    grader.until(lambda: grader.grades() == {"g1.o1/0": 0.5, "g1.o1/1": 0.5, "g1.o1/2": 0.5})
    assert grader.context.state == "serving"


def test_a_stop_writes_the_completion_record(world: World) -> None:
    grader = Grader(world)
    grader.order(1, *grader.shard(row(0)))
    grader.until(lambda: grader.context.progress == 1)
    world.send(Stop(reason="all steps done"))
    grader.worker.run()
    assert grader.grades() == {"g1.o1/0": 0.5}
    done = world.done()
    assert done is not None and (done.outcome, done.detail) == ("completed", "all steps done")
    assert (done.journal_bytes, done.journal_hash) == world.stream


def test_leaving_answers_what_is_in_hand(world: World) -> None:
    grader = Grader(world)
    grader.order(1, *grader.shard(row(0)), *grader.shard(row(1)))
    grader.until(lambda: grader.context.load + grader.context.progress == 2)
    grader.context.leave.set()
    grader.worker.run()
    assert grader.grades() == {"g1.o1/0": 0.5, "g1.o1/1": 0.5} and world.done() is None
    assert sum(isinstance(record, Leaving) for record in world.records()) == 1


def test_leaving_takes_nothing_new_and_does_not_wait_for_a_shard_for_ever(world: World) -> None:
    grader = Grader(world)
    refs = grader.shard(row(0))
    world.paths.resolve(refs[0].shard).unlink()
    grader.order(1, *refs)
    grader.until(lambda: grader.context.load == 1)
    grader.context.leave.set()
    grader.order(2, *grader.shard(row(1)))
    begun = world.clock.now
    grader.worker.run()
    assert 0.5 <= world.clock.now - begun <= 5.0 and "g1.o1/1" not in grader.grades()


def test_a_superseded_grader_stops_publishing(world: World) -> None:
    grader = Grader(world)
    grader.order(1, *grader.shard(row(0)))
    world.lease("grader-0", 2)
    world.clock.sleep(TIMING.lease_s)
    with pytest.raises(LeaseLost, match="superseded by attempt 2"):
        grader.worker.run()
    assert grader.grades() == {}


def test_a_kill_after_a_grade_leaves_it_announced(tmp_path: Path) -> None:
    code = f"from tests.protocol.test_grader_role import grade_once; grade_once({str(tmp_path)!r})"
    environment, folder = os.environ | {"MILES_CRASH_AT": "grader:after_grade:1"}, Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60, cwd=folder)
    assert ended.returncode == 9
    records = World(tmp_path, "grader-0", orchestrator=2).records()
    assert [entry.grade.value for record in records for entry in record.entries] == [0.5]


def grade_once(root: str) -> None:
    """Run in a child that is killed behind its first answer."""
    grader = Grader(World(Path(root), "grader-0"))
    grader.order(1, *grader.shard(row(0)))
    grader.until(lambda: grader.grades() != {})


# --- a ranking grader, and a verifier that is not sure


def qualities(grader: Grader, *rows: Trajectory) -> list[float | None]:
    """Of these rows; each has its grade whatever becomes of its quality."""
    before = len(grader.answers())
    grader.order(before + 1, *grader.shard(*rows))
    grader.until(lambda: len(grader.answers()) == before + len(rows))
    grades = [entry.grade for _, entry in grader.answers()[before:]]
    return [grade.quality for grade in grades if grade is not None and grade.value == 0.5]


def test_a_ranking_grader_adds_a_quality_and_leaves_the_reward(world: World) -> None:
    short = row(1, loss_mask=np.array([0, 0, 1], np.uint8), logprobs=np.array([0, 0, -1], np.float32))
    assert qualities(Grader(world, ranker=brevity), row(0), short) == [-2.0, -1.0]


def test_without_a_ranking_grader_there_is_no_quality_and_a_std_is_kept(world: World) -> None:
    grader = Grader(world)
    assert qualities(grader, row(0)) == [None]
    grader.verifier.value = lambda task_seed, facts: Estimate(0.25, 0.5)  # type: ignore[method-assign]
    grader.order(9, *grader.shard(row(1)))
    grader.until(lambda: len(grader.answers()) == 2)
    grade = grader.answers()[1][1].grade
    assert grade is not None and (grade.value, grade.std) == (0.25, 0.5)


def test_a_ranking_grader_that_is_down_costs_the_quality_alone(world: World) -> None:
    def broken(row: Trajectory) -> float:
        if row.task_seed == 0:
            raise RuntimeError("down")
        return float("nan") if row.task_seed == 1 else 3.0

    assert qualities(Grader(world, ranker=broken), row(0), row(1), row(2)) == [None, None, 3.0]


def test_a_ranking_grader_that_hangs_is_left_alone_and_the_grader_stays(world: World) -> None:
    release = threading.Event()
    asked: list[int] = []

    def hanging(row: Trajectory) -> float:
        asked.append(row.task_seed)
        release.wait(60)
        return 1.0

    grader = Grader(world, ranker=hanging)
    try:
        assert qualities(grader, *map(row, range(MOST_STUCK + 2))) == [None] * (MOST_STUCK + 2)
        assert asked == list(range(MOST_STUCK)) and grader.context.state == "serving"
    finally:
        release.set()
