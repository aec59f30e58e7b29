"""A rollout replica against a played orchestrator and learner: exactly its own samples, with exact versions, whatever fails."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from miles_core.errors import DeadlineExceeded, DigestMismatch, LeaseLost
from miles_core.policy.manifest import PolicyManifest, Probe
from miles_core.records import Leaving, Order, Published, Returned, ShardSealed, Stop, Version
from miles_core.rollout.sampler import SampleRequest
from miles_core.rollout.worker import STAY_S, RolloutWorker
from miles_core.tracking.metrics import read_metrics
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import read_shard
from tests.protocol.faulty_fs import PROPERTY
from tests.protocol.receiver_world import RECIPE, TIMING, World

MOST_ROUNDS = 3000
TICK_S = 0.02


class FakeEngine:
    """Weights are one number, the logprob that every token gets."""

    def __init__(self) -> None:
        self.version = Version(-1, 0)
        self.weights = 0.0
        self.running = 0
        """Set by FakeEpisodes."""

    def load_weights(self, tensors: dict[str, float], version: Version) -> None:
        self.weights, self.version = tensors["weights"], version

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[Any]:
        return [np.full(len(tokens) - 1, self.weights, np.float32) for tokens in token_lists]


class FakeEpisodes:
    """Each running sample gets one token a tick, from the engine's version of that tick; `length(sample_id)` tokens in all."""

    def __init__(self, world: World, engine: FakeEngine, attempt: int, slots: int) -> None:
        self._world, self._engine, self._attempt, self.slots = world, engine, attempt, slots
        self.length: Callable[[str], int] = lambda sample_id: 3
        self.spoil: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory
        self.started: list[SampleRequest] = []
        self.live: dict[str, tuple[SampleRequest, list[Version]]] = {}
        self.cancelled = False

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.live)

    def submit(self, request: SampleRequest) -> None:
        assert self.free_slots > 0 and request.sample_id not in self.live
        self.started.append(request)
        self.live[request.sample_id] = (request, [])
        self._engine.running = len(self.live)

    async def tick(self) -> list[Trajectory]:
        self._world.clock.sleep(TICK_S)
        finished = []
        for sample_id, (request, versions) in list(self.live.items()):
            versions.append(self._engine.version)
            if len(versions) >= self.length(sample_id):
                del self.live[sample_id]
                finished.append(self.spoil(_trajectory(request, versions, self._engine.weights, self._attempt)))
        self._engine.running = len(self.live)
        return finished

    async def cancel_all(self) -> None:
        self.live.clear()
        self.cancelled = True


def _trajectory(request: SampleRequest, versions: list[Version], logprob: float, attempt: int) -> Trajectory:
    sampled = len(versions)
    runs = [VersionRun(2, *versions[0])]
    runs += [VersionRun(2 + i, *new) for i, (old, new) in enumerate(itertools.pairwise(versions), 1) if old != new]
    return Trajectory(
        trajectory_id=f"{request.sample_id}@rollout-0.a{attempt}", sample_id=request.sample_id, group_id=request.group_id,
        order_id=request.order_id, producer="rollout-0", producer_attempt=attempt, task_seed=request.task_seed,
        tokens=np.arange(2 + sampled, dtype=np.int32), loss_mask=np.array([0, 0] + sampled * [1], np.uint8),
        logprobs=np.array([0, 0] + sampled * [logprob], np.float32), versions=tuple(runs),
        turns=(Turn("user", 0, 2), Turn("assistant", 2, 2 + sampled)), temperature=request.temperature, status="complete",
    )  # fmt: skip


class Replica:
    """Attempt 1 (or another) of rollout-0 with everything fake behind it."""

    def __init__(self, world: World, attempt: int = 1, *, slots: int = 4) -> None:
        self.world, self.context = world, world.context(attempt)
        self.engine = FakeEngine()
        self.episodes = FakeEpisodes(world, self.engine, attempt, slots)
        self.on_disk: dict[int, float] = {}
        """What a version's file holds where that is not what the learner's probe says."""
        self.read_error: Exception | None = None
        self.worker = RolloutWorker(
            self.context, self.context.journal(), self.engine, self.episodes, read=self._read, unix_time=world.clock
        )  # fmt: skip

    def _read(self, published: Published) -> tuple[dict[str, float], PolicyManifest]:
        if self.read_error is not None:
            raise self.read_error
        right = -1.0 - published.version.step
        probe = Probe(prompts=((1, 2, 3),), logprobs=((right, right),), dtype="float32", tolerance=1e-3)
        manifest = PolicyManifest(
            run_id="r1", version=published.version, weights_digest="w", files=(), tensors=(), probe=probe, learner_token="t"
        )
        return {"weights": self.on_disk.get(published.version.step, right)}, manifest

    def run(self) -> None:
        """Runs the role to its end."""
        asyncio.run(self.worker.run())

    def until(self, reached: Callable[[], bool], *, rounds: int = MOST_ROUNDS) -> None:
        """Rounds, sleeping when idle, until `reached`."""

        async def loop() -> None:
            for _ in range(rounds):
                if reached():
                    return
                if not await self.worker.step():
                    self.context.pause()
            raise AssertionError(f"not reached in {rounds} rounds: {self.context.state!r}, started {self.episodes.started}")

        asyncio.run(loop())

    def idle(self, seconds: float = 2.0) -> None:
        """Rounds for some time."""
        end = self.world.clock.now + seconds
        self.until(lambda: self.world.clock.now >= end)

    def rows(self) -> list[Trajectory]:
        """Every announced trajectory, from shards whose digest was checked and whose entries agree."""
        found = []
        for record in self.world.records(self.context.attempt):
            if isinstance(record, ShardSealed):
                rows = read_shard(self.world.paths.resolve(record.path), digest=record.digest)
                assert [row.trajectory_id for row in rows] == [entry.trajectory_id for entry in record.rows]
                found += rows
        return found

    def listed(self) -> list[str]:
        """Sample ids of all announced trajectories, sorted."""
        return sorted(row.sample_id for row in self.rows())

    def returned(self) -> dict[str, tuple[int, ...]]:
        """Samples given back, by order; each order is given back once."""
        records = [r for r in self.world.records(self.context.attempt) if isinstance(r, Returned)]
        assert len({r.order_id for r in records}) == len(records)
        return {r.order_id: r.samples for r in records}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "rollout-0")


def replica_with_version(world: World, **options: Any) -> Replica:
    world.publish(0)
    return Replica(world, **options)


def test_exactly_the_ordered_samples_come_back_once(world: World) -> None:
    replica = replica_with_version(world)
    world.send(
        world.order(1, samples=(0, 2)),
        world.order(2, "g2.o1", receiver_attempt=2),
        world.order(1, samples=(0, 2)),
        world.order(3, "g3.o1", tuple(range(7))),
    )
    expected = sorted([f"g3.o1/{i}" for i in range(7)] + ["g1.o1/0", "g1.o1/2"])
    replica.until(lambda: replica.listed() == expected)
    replica.idle()
    assert replica.listed() == expected and replica.context.load == 0 and replica.context.progress == len(expected)
    assert len({request.seed for request in replica.episodes.started}) == 7, "the seed is that of (order seed, index)"


def test_a_successor_orchestrators_copies_are_read_and_known_orders_skipped(world: World) -> None:
    replica = replica_with_version(world)
    world.send(world.order(1))
    replica.until(lambda: len(replica.episodes.started) == 2)
    old = world._copies
    world.new_orchestrator()
    world.send(world.order(1), world.order(2, "g2.o2", order_id="w2.o2"))
    old.write(world.order(3, "g3.o1"))
    replica.until(lambda: len(replica.listed()) == 4)
    replica.idle()
    assert replica.listed() == ["g1.o1/0", "g1.o1/1", "g2.o2/0", "g2.o2/1"], "a zombie's copy (g3) is not acted upon"


def test_a_sample_in_work_is_not_started_again_by_another_order(world: World) -> None:
    replica = replica_with_version(world, slots=2)
    world.send(world.order(1, samples=(0, 1, 2)), world.order(2, samples=(1, 2)))
    replica.until(lambda: len(replica.listed()) == 3)
    replica.idle()
    assert replica.listed() == ["g1.o1/0", "g1.o1/1", "g1.o1/2"]


def test_a_failed_sample_is_made_again_on_a_new_order(world: World) -> None:
    replica = replica_with_version(world)
    fails = {"g1.o1/1"}
    replica.episodes.spoil = lambda row: (
        dataclasses.replace(row, status="failed", failure_kind="environment") if row.sample_id in fails else row
    )
    world.send(world.order(1))
    replica.until(lambda: len(replica.listed()) == 2)
    fails.clear()
    world.send(world.order(2, samples=(1,)))
    replica.until(lambda: len(replica.listed()) == 3)
    assert [(row.order_id, row.status) for row in replica.rows() if row.sample_id == "g1.o1/1"] == [
        ("w1.o1", "failed"), ("w2.o1", "complete"),
    ]  # fmt: skip


def test_an_invalid_trajectory_is_listed_as_failed_without_tokens(world: World) -> None:
    replica = replica_with_version(world)
    replica.episodes.spoil = lambda row: dataclasses.replace(row, logprobs=np.full_like(row.logprobs, np.nan))
    world.send(world.order(1, samples=(0,)))
    replica.until(lambda: len(replica.listed()) == 1)
    row = replica.rows()[0]
    assert (row.status, row.failure_kind, len(row.tokens)) == ("failed", "infrastructure", 0) and "not finite" in row.facts[
        "error"
    ]


def test_nothing_is_sampled_before_a_version_has_passed_its_probe(world: World) -> None:
    replica = Replica(world)
    replica.on_disk[0] = -7.0
    world.send(world.order(1))
    replica.idle(1.0)
    assert replica.context.state == "waiting: first policy version"
    world.publish(0)
    replica.idle(3.0)
    assert not replica.episodes.started and "(0, 1)" in replica.context.state and replica.context.version is None
    assert replica.context.load == 2
    world.publish(1)
    replica.until(lambda: len(replica.listed()) == 2)
    assert replica.context.state == "serving" and replica.context.version == (1, 1)
    assert {run for row in replica.rows() for run in row.versions} == {VersionRun(2, 1, 1)}


def test_a_probe_that_keeps_failing_ends_the_replica_naming_the_version(world: World) -> None:
    replica = replica_with_version(world)
    replica.on_disk[0] = -7.0
    with pytest.raises(DigestMismatch, match=r"policy version \(0, 1\).*could not be loaded for .*differ from the learner's"):
        replica.run()
    assert replica.episodes.cancelled and not replica.episodes.started


def test_a_failed_probe_stops_sampling_with_the_wrong_weights(world: World) -> None:
    replica = replica_with_version(world)
    replica.episodes.length = lambda sample_id: 100
    world.send(world.order(1))
    replica.until(lambda: len(replica.episodes.live) == 2)
    replica.on_disk[1] = -7.0
    world.publish(1)
    replica.idle(3.0)
    assert all(Version(1, 1) not in versions for _, versions in replica.episodes.live.values())
    world.publish(2)
    replica.until(lambda: len(replica.listed()) == 2)
    assert {run.step for row in replica.rows() for run in row.versions} == {0, 2}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ESTALE, "stale"), DigestMismatch("torn"), DeadlineExceeded("not visible")],
    ids=lambda e: type(e).__name__,
)
def test_while_a_new_version_cannot_be_read_the_old_one_goes_on(world: World, error: Exception) -> None:
    replica = replica_with_version(world)
    replica.until(lambda: replica.context.state == "serving")
    replica.read_error = error
    world.publish(1)
    world.send(world.order(1))
    replica.until(lambda: len(replica.listed()) == 2)
    assert replica.context.version == (0, 1) and {run.step for row in replica.rows() for run in row.versions} == {0}
    replica.read_error = None
    world.send(world.order(2, "g2.o1"))
    replica.until(lambda: replica.context.version == (1, 1))


def test_a_version_that_stays_unreadable_ends_the_replica(world: World) -> None:
    replica = replica_with_version(world)
    replica.read_error = OSError(errno.EIO, "I/O error")
    with pytest.raises(DeadlineExceeded, match=r"policy version \(0, 1\) \(policy/0\) could not be loaded .*I/O error"):
        replica.run()


def test_a_swap_between_two_tokens_gives_exact_version_runs(world: World) -> None:
    replica = replica_with_version(world)
    replica.episodes.length = lambda sample_id: 40
    world.send(world.order(1, samples=(0,)))
    replica.until(lambda: bool(replica.episodes.live) and len(replica.episodes.live["g1.o1/0"][1]) >= 5)
    world.publish(1)
    replica.until(lambda: replica.context.version == (1, 1))
    before = len(replica.episodes.live["g1.o1/0"][1])
    replica.until(lambda: len(replica.listed()) == 1)
    (row,) = replica.rows()
    first, second = row.versions
    assert (first, second[1:]) == (VersionRun(2, 0, 1), (1, 1)) and 7 <= second.start <= 2 + before
    entry = next(r for r in world.records() if isinstance(r, ShardSealed)).rows[0]
    assert entry.versions == (Version(0, 1), Version(1, 1))


def test_a_recovered_learners_version_replaces_a_higher_step(world: World) -> None:
    world.publish(0)
    world.publish(5)
    replica = Replica(world)
    replica.until(lambda: replica.context.version == (5, 1))
    world.publish(4, attempt=2)
    replica.until(lambda: replica.context.version == (4, 2))


def test_min_step_holds_back_its_own_samples_only_and_order_is_kept(world: World) -> None:
    replica = replica_with_version(world, slots=1)
    world.send(
        world.order(1, "g1.o1", min_step=1),
        world.order(2, "g2.o1"),
        world.order(3, "g3.o1", min_step=1),
    )
    replica.until(lambda: len(replica.listed()) == 2)
    replica.idle()
    assert replica.listed() == ["g2.o1/0", "g2.o1/1"] and replica.context.load == 4
    world.publish(1)
    replica.until(lambda: len(replica.listed()) == 6)
    assert [request.sample_id for request in replica.episodes.started] == [
        "g2.o1/0", "g2.o1/1", "g1.o1/0", "g1.o1/1", "g3.o1/0", "g3.o1/1",
    ]  # fmt: skip
    assert all(run.step == 1 for row in replica.rows() for run in row.versions if row.group_id != "g2.o1")


def test_a_stop_abandons_what_runs_and_writes_the_completion_record(world: World) -> None:
    replica = replica_with_version(world)
    replica.episodes.length = lambda sample_id: 3 if sample_id.endswith("/0") else 10**9
    world.send(world.order(1))
    replica.until(lambda: replica.context.progress == 1)
    world.send(Stop(reason="all steps done"))
    replica.run()
    assert replica.listed() == ["g1.o1/0"] and replica.episodes.cancelled and not replica.returned()
    done = world.done()
    assert done is not None and (done.outcome, done.attempt, done.detail) == ("completed", 1, "all steps done")
    assert (done.journal_bytes, done.journal_hash) == world.stream


def test_leaving_returns_the_unstarted_and_finishes_the_rest(world: World) -> None:
    replica = replica_with_version(world, slots=2)
    replica.episodes.length = lambda sample_id: 100 if sample_id.endswith("/0") else 20
    world.send(world.order(1, samples=(0, 1, 2, 3)), world.order(2, "g2.o1", min_step=9))
    replica.until(lambda: len(replica.episodes.live) == 2)
    replica.context.leave.set()
    world.send(world.order(3, "g3.o1"))
    replica.run()
    assert replica.listed() == ["g1.o1/0", "g1.o1/1"]
    assert replica.returned() == {"w1.o1": (2, 3), "w2.o1": (0, 1), "w3.o1": (0, 1)}
    assert world.done() is None and replica.context.state == "leaving"


@pytest.mark.parametrize(("visibility_s", "stays_s"), [(0.5, 1.0), (60.0, STAY_S)])
def test_one_that_leaves_says_so_at_once_and_gives_back_what_was_on_its_way(
    tmp_path: Path, visibility_s: float, stays_s: float
) -> None:
    """Nothing runs: gone at once, it would be given work until somebody cuts it."""
    slow = {"visibility_s": visibility_s, "lease_s": max(TIMING.lease_s, 3 * visibility_s)}
    world = World(tmp_path, "rollout-0", timing=TIMING.model_copy(update=slow))
    replica = replica_with_version(world)
    replica.idle(1.0)
    replica.context.leave.set()
    asked, orders = world.clock.now, [world.order(1)]

    def sleep(seconds: float) -> None:
        world.clock.sleep(seconds)
        if orders and world.clock.now >= asked + 0.5:
            assert isinstance(world.records(replica.context.attempt)[-1], Leaving)
            world.send(orders.pop())

    replica.context.sleep = sleep
    replica.run()
    assert replica.returned() == {"w1.o1": (0, 1)} and not replica.listed()
    assert world.clock.now - asked == pytest.approx(stays_s, abs=0.3)


def test_leaving_ends_at_the_drain_deadline(world: World) -> None:
    replica = replica_with_version(world)
    replica.episodes.length = lambda sample_id: 3 if sample_id.endswith("/0") else 10**9
    world.send(world.order(1))
    replica.until(lambda: len(replica.episodes.live) == 2)
    replica.context.leave.set()
    asked = world.clock.now
    replica.run()
    assert world.clock.now - asked == pytest.approx(RECIPE.environment.episode_deadline_s, abs=0.5)
    assert replica.listed() == ["g1.o1/0"] and replica.episodes.cancelled and world.done() is None


def test_leaving_before_the_first_version_is_quick(world: World) -> None:
    replica = Replica(world)
    world.send(world.order(1))
    replica.idle(1.0)
    replica.context.leave.set()
    replica.run()
    assert replica.returned() == {"w1.o1": (0, 1)}


@pytest.mark.parametrize("notice", ["heartbeat thread", "gap in renewal"])
def test_a_superseded_replica_stops_publishing(world: World, notice: str) -> None:
    replica = replica_with_version(world)
    world.send(world.order(1))
    replica.until(lambda: len(replica.listed()) == 2)
    before = world.records()
    world.send(world.order(2, "g2.o1"))
    world.lease("rollout-0", 2)
    if notice == "heartbeat thread":
        replica.context.leases_check_in_background()
    else:
        world.clock.sleep(TIMING.lease_s)
    with pytest.raises(LeaseLost, match="superseded by attempt 2"):
        replica.run()
    assert world.records() == before and world.done() is None and replica.episodes.cancelled


@pytest.mark.parametrize("refused", [".arrow", ".journal"])
def test_a_full_disk_pauses_sampling_and_loses_nothing(world: World, refused: str) -> None:
    replica = replica_with_version(world, slots=2)
    world.send(world.order(1, samples=tuple(range(8))))
    replica.until(lambda: len(replica.episodes.started) > 0)
    world.fs.refuse = refused
    replica.until(lambda: replica.context.state.startswith("waiting: disk full"))
    started, progress, listed = len(replica.episodes.started), replica.context.progress, replica.listed()
    replica.idle(30.0)
    assert (len(replica.episodes.started), replica.context.progress, replica.listed()) == (started, progress, listed)
    world.fs.refuse = ""
    replica.until(lambda: len(replica.listed()) == 8)
    assert Counter(replica.listed()) == Counter(f"g1.o1/{i}" for i in range(8)) and replica.context.state == "serving"
    assert not list(world.paths.root.rglob(".tmp.*"))


def test_leaving_with_a_full_disk_names_what_is_lost(world: World) -> None:
    replica = replica_with_version(world)
    world.fs.refuse = ".arrow"
    world.send(world.order(1))
    replica.until(lambda: replica.context.state.startswith("waiting: disk full"))
    replica.context.leave.set()
    with pytest.raises(DeadlineExceeded, match=r"2 finished trajectories could not be written .*No space left"):
        replica.run()


def test_a_disk_that_stays_full_ends_the_replica_after_orphan_s(tmp_path: Path) -> None:
    world = World(tmp_path, "rollout-0", timing=TIMING.model_copy(update={"orphan_s": 30.0}))
    replica = replica_with_version(world)
    world.fs.refuse = ".arrow"
    world.send(world.order(1))
    begun = world.clock.now
    with pytest.raises(DeadlineExceeded, match=r"writing shards and their journal: refused for 3\d s, last: .*No space left"):
        replica.run()
    assert 30.0 <= world.clock.now - begun <= 40.0


def test_a_stale_orders_folder_is_waited_for(world: World) -> None:
    replica = replica_with_version(world)
    replica.until(lambda: replica.context.state == "serving")
    world.fs.hide = "orders"
    world.send(world.order(1))
    replica.idle(10.0)
    assert not replica.episodes.started and replica.context.state.startswith("waiting: filesystem")
    world.fs.hide = ""
    replica.until(lambda: len(replica.listed()) == 2)


def test_an_orphan_leaves(tmp_path: Path) -> None:
    world = World(tmp_path, "rollout-0", timing=TIMING.model_copy(update={"orphan_s": 30.0}))
    world.lease("supervisor-0", 1)
    replica = replica_with_version(world)
    begun = world.clock.now
    replica.run()
    assert 30.0 <= world.clock.now - begun <= 60.0 and world.done() is None


def test_metrics_name_tokens_version_and_the_busy_span(world: World) -> None:
    replica = replica_with_version(world)
    world.send(world.order(1))
    replica.until(lambda: len(replica.listed()) == 2)
    replica.idle(2.0)
    world.send(Stop(reason="end"))
    replica.run()
    replica.context.metrics.close()
    points = [point for _, point in read_metrics(world.paths.metrics("rollout-0", 1).parents[1])]
    rollout = [point for point in points if point["event"] == "rollout"][-1]
    assert {**rollout, "unix_s": 0} == {
        "event": "rollout", "unix_s": 0, "tokens": 6, "trajectories": 2, "active": 0, "version": 0, "waiting": 0,
    }  # fmt: skip
    (busy,) = [point for point in points if point["event"] == "busy"]
    assert busy["end_s"] - busy["start_s"] == pytest.approx(3 * TICK_S, abs=1e-3)


@pytest.mark.parametrize(("point", "announced"), [("after_shard", 0), ("after_manifest", 3)])
def test_a_kill_leaves_a_shard_announced_whole_or_not_at_all(tmp_path: Path, point: str, announced: int) -> None:
    code = f"from tests.protocol.test_rollout_role import sample_once; sample_once({str(tmp_path)!r})"
    environment = os.environ | {"MILES_CRASH_AT": f"rollout:{point}:1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 9
    world = World(tmp_path, "rollout-0", orchestrator=2)
    assert sum(len(r.rows) for r in world.records() if isinstance(r, ShardSealed)) == announced
    successor = Replica(world, 2)
    world.send(world.order(1), world.order(2, samples=(0, 1, 2), receiver_attempt=2))
    successor.until(lambda: len(successor.listed()) == 3)


def sample_once(root: str) -> None:
    """Run in a child that is killed: three samples, one shard."""
    world = World(Path(root), "rollout-0")
    replica = replica_with_version(world)
    world.send(world.order(1, samples=(0, 1, 2)))
    replica.until(lambda: len(replica.listed()) == 3)


@settings(PROPERTY, max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_whatever_fails_in_between_every_sample_is_listed_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Orders, twins, versions, full disks and stale reads in any order: the announced samples are the ordered ones, once."""
    world = World(tmp_path_factory.mktemp("run"), "rollout-0")
    replica = replica_with_version(world, slots=data.draw(st.integers(1, 3)))
    orders: list[Order] = []
    step = 0
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(["order", "order", "twin", "other", "version", "disk", "stale", "well", "takeover"]))
        if event == "order":
            number = len(orders) + 1
            orders.append(world.order(number, f"g{number}.o1", tuple(range(data.draw(st.integers(1, 4)))), min_step=step))
            world.send(orders[-1])
        elif event == "twin" and orders:
            world.send(data.draw(st.sampled_from(orders)))
        elif event == "other":
            world.send(world.order(99, "g99.o1", receiver_attempt=2))
        elif event == "version":
            step += 1
            world.publish(step)
        elif event == "disk":
            world.fs.refuse = data.draw(st.sampled_from([".arrow", ".journal"]))
        elif event == "stale":
            world.fs.hide = data.draw(st.sampled_from(["orders", "learner"]))
        elif event == "well":
            world.fs.refuse = world.fs.hide = ""
        elif event == "takeover":
            world.new_orchestrator()
            world.send(*orders)
        replica.idle(data.draw(st.sampled_from([0.05, 0.3, 1.0])))
    world.fs.refuse = world.fs.hide = ""
    expected = sorted(f"{order.group_id}/{index}" for order in orders for index in order.samples)
    replica.until(lambda: replica.context.load == 0 and len(replica.listed()) >= len(expected))
    replica.idle()
    assert replica.listed() == expected
    minimum = {order.order_id: order.min_step for order in orders}
    assert all(run.step >= minimum[row.order_id] for row in replica.rows() for run in row.versions)
