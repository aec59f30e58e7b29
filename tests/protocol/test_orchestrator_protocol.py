"""The real orchestrator against what protocol.md found and what filesystems and people do to it, each on its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.orchestrator.loop import Orchestrator
from miles_core.records import (
    Batch,
    Drop,
    GradeOrder,
    LivenessTable,
    Order,
    RunEnded,
    Stop,
    WriterCut,
    parse_record,
)
from miles_core.run import rollout_writers
from miles_core.runtime.crash import EXIT_CODE
from miles_core.store.journal import AttemptTail, list_segments
from miles_core.verify import verify_run
from tests.protocol.audit import Audit
from tests.protocol.simulation import (
    Killed,
    NodeFS,
    Process,
    RoleSteps,
    SimCluster,
    Steps,
    finished_run,
    hurt,
    simulated_recipe,
    stall,
)
from tests.protocol.simulation_roles import Rollout, judge, orchestrator, reward_of, rollout, serve

SMALL = simulated_recipe(steps=2, orchestrator__prompts=2)


def cluster_of(folder: Path, **arguments: object) -> SimCluster:
    """A cluster with a working orchestrator."""
    cluster = SimCluster(folder, **arguments)  # type: ignore[arg-type]
    cluster.start()
    cluster.run_until(lambda: cluster.newest("orchestrator-0").has_started)
    return cluster


def records_in(cluster: SimCluster, folder: Path) -> list[tuple[int, object]]:
    """(attempt, record) of everything in one journal folder, cut or not."""
    found = []
    for attempt in list_segments(NodeFS(cluster.disk, "test"), folder):
        tail = AttemptTail(NodeFS(cluster.disk, "test"), folder, attempt, visibility_s=0.0, clock=cluster.clock)
        cluster.clock.advance(2.0)
        while frames := tail.read(list_now=True):
            found += [(attempt, parse_record(frame.payload)) for frame in frames]
    return found


def decisions(cluster: SimCluster, kind: type) -> list:
    """Records of one kind in the orchestrator's journals."""
    return [record for _, record in records_in(cluster, cluster.paths.journal("orchestrator-0")) if isinstance(record, kind)]


def current(cluster: SimCluster) -> Orchestrator:
    """The newest orchestrator's loop."""
    loop = cluster.newest("orchestrator-0").orchestrator
    assert loop is not None
    return loop


# --- the orchestrator dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quarter", range(4))
def test_killed_at_any_write_its_successor_goes_on(tmp_path: Path, quarter: int) -> None:
    """Each write of a run is once the last one, with nothing, a part or all of it on disk: journal, copies, table, end."""
    clean = cluster_of(tmp_path / "clean", seed=3, recipe=SMALL)
    clean.run_to_the_end()
    num_writes = clean.disk.writes["orchestrator-0.a1"]
    for number in range(quarter, num_writes, 4):
        cluster = SimCluster(tmp_path / str(number), seed=3, recipe=SMALL)
        cluster.disk.deaths["orchestrator-0.a1"] = (number, (0.0, 0.3, 0.7, 1.0)[(number // 4) % 4])
        cluster.start()
        cluster.run_to_the_end(2000)
        assert cluster.newest("orchestrator-0").attempt == 2, number
        Audit(cluster).check()


class _DiesAtCopies(NodeFS):
    """Kills the process at its first order, after the journal has it and before any byte of the copy is written."""

    def append(self, path: Path, data: bytes) -> None:
        if "orders" in path.parts and b'"kind":"order"' in data:
            raise Killed(str(path))
        super().append(path, data)


def test_killed_between_journal_and_copy_the_successor_copies(tmp_path: Path) -> None:
    def dies_once(process: Process) -> Steps:
        if process.attempt == 1:
            process.context.fs = _DiesAtCopies(process.cluster.disk, process.node)
        yield from orchestrator(process)

    cluster = cluster_of(tmp_path / "run", recipe=SMALL, roles={"orchestrator": dies_once})
    cluster.run_until(lambda: cluster.newest("orchestrator-0").end == "killed")
    journaled = [order.order_id for order in decisions(cluster, Order)]
    assert journaled
    for writer, _ in rollout_writers(SMALL):
        assert [record for _, record in records_in(cluster, cluster.paths.orders(writer))] == []
    cluster.run_to_the_end()
    Audit(cluster).check()
    copied = {
        record.order_id: attempt
        for writer, _ in rollout_writers(SMALL)
        for attempt, record in records_in(cluster, cluster.paths.orders(writer))
        if isinstance(record, Order)
    }
    assert all(copied[order_id] == 2 for order_id in journaled)


class _RefusesJournal(NodeFS):
    """Refuses every write to the orchestrator's own journal while `refuses`."""

    refuses = False

    def append(self, path: Path, data: bytes) -> None:
        if self.refuses and "journal" in path.parts:
            raise OSError(28, "no space left", str(path))
        super().append(path, data)


def test_no_copy_is_written_before_its_original(tmp_path: Path) -> None:
    """The own journal is refused for a while, the copies' folders are not: what is decided meanwhile reaches nobody."""

    def with_that_disk(process: Process) -> Steps:
        process.context.fs = _RefusesJournal(process.cluster.disk, process.node)
        yield from orchestrator(process)

    cluster = cluster_of(tmp_path / "run", roles={"orchestrator": with_that_disk})
    cluster.run_until(lambda: current(cluster).state.last_batch == 1)
    fs = cluster.newest("orchestrator-0").context.fs
    assert isinstance(fs, _RefusesJournal)
    fs.refuses = True
    due_s, decided = cluster.clock() + 15, current(cluster).state.next_order
    cluster.run_until(lambda: cluster.clock() >= due_s)
    assert current(cluster).state.next_order > decided
    journaled = {order.order_id for kind in (Order, GradeOrder) for order in decisions(cluster, kind)}
    for writer in ("rollout-0", "rollout-1", "grader-0", "grader-1"):
        copied = {record.order_id for _, record in records_in(cluster, cluster.paths.orders(writer))}  # type: ignore[attr-defined]
        assert copied <= journaled
    fs.refuses = False
    cluster.run_to_the_end()
    Audit(cluster).check()


def test_ended_twice_it_says_so_once_and_sends_everybody_home_again(tmp_path: Path) -> None:
    """Killed after RunEnded: the successor adds no second one, but its own stops, for receivers read the newest copies only."""

    def dies_before_done(process: Process) -> Steps:
        if process.attempt == 1:
            process.context.finish = lambda *arguments: (_ for _ in ()).throw(Killed("done"))  # type: ignore[method-assign]
        yield from orchestrator(process)

    cluster = cluster_of(tmp_path / "run", recipe=SMALL, roles={"orchestrator": dies_before_done})
    cluster.run_to_the_end()
    Audit(cluster).check()
    assert cluster.newest("orchestrator-0").attempt == 2
    assert len(decisions(cluster, RunEnded)) == 1
    stops = {attempt for attempt, record in records_in(cluster, cluster.paths.orders("rollout-0")) if isinstance(record, Stop)}
    assert stops == {1, 2}


def crash_run(folder: Path) -> None:
    """A run with a replaced replica, in a process that MILES_CRASH_AT may end."""
    cluster = cluster_of(folder, recipe=SMALL)
    cluster.run_until(lambda: current(cluster).state.in_flight > 0)
    hurt(cluster, "rollout-0", "ghost")
    cluster.run_to_the_end()


@pytest.mark.parametrize(
    "point",
    ["after_journal_order:1", "after_copy_order:2", "after_cut:1", "after_batch_journal:2", "before_run_ended:2", "none:1"],
)
def test_named_crash_points_are_reached(tmp_path: Path, point: str) -> None:
    code = (
        f"from pathlib import Path; from tests.protocol.{__name__.rpartition('.')[2]} import crash_run as run; run(Path('run'))"
    )
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"MILES_CRASH_AT": f"orchestrator:{point}", "PYTHONPATH": root}
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False, timeout=120)
    assert ended.returncode == (0 if point == "none:1" else EXIT_CODE)


def test_asked_to_leave_it_leaves_without_a_completion_record(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path / "run")
    cluster.run_until(lambda: current(cluster).state.last_batch == 1)
    process = cluster.newest("orchestrator-0")
    process.context.leave.set()
    cluster.run_until(lambda: not process.lives)
    assert process.end == "left"
    cluster.run_to_the_end()
    Audit(cluster).check()


# --- ghosts ----------------------------------------------------------------------------------------------------------


class _Gullible:
    """An inbox that believes every orchestrator attempt, and if `anyone`, orders for other attempts of its replica, too."""

    def __init__(self, process: Process, *, anyone: bool) -> None:
        context = process.context
        folder = context.paths.orders(process.writer)
        self._attempt, self._anyone = process.attempt, anyone
        self._tails = [context.reading.tail(folder, attempt) for attempt in range(1, 5)]
        self._known: set[str] = set()
        self.stop: Stop | None = None

    def poll(self) -> list[Order | GradeOrder]:
        new = []
        for frame in [frame for tail in self._tails for frame in tail.read()]:
            record = parse_record(frame.payload)
            if isinstance(record, Stop):
                self.stop = record
            elif record.order_id not in self._known and (self._anyone or record.receiver_attempt == self._attempt):
                self._known.add(record.order_id)
                new.append(record)
        return new


def gullible(*, anyone: bool) -> RoleSteps:
    """A replica with such an inbox."""

    def steps(process: Process) -> Steps:
        replica = Rollout(process, process.context.journal())
        replica.inbox = _Gullible(process, anyone=anyone)  # type: ignore[assignment]
        yield from serve(replica)

    return steps


def test_ce8_what_a_ghost_ordered_beyond_its_cut_is_listed_and_not_counted(tmp_path: Path) -> None:
    unknown = 0
    for seed in range(6):
        cluster = cluster_of(tmp_path / str(seed), seed=seed, roles={"rollout": gullible(anyone=False)})
        cluster.run_until(lambda cluster=cluster: current(cluster).state.last_batch >= 1)  # type: ignore[misc]
        cluster.replace("orchestrator-0")  # the old one goes on until it looks at the leases
        cluster.run_to_the_end()
        audit = Audit(cluster)
        audit.check()
        accepted = {order.order_id for order in audit.decisions if isinstance(order, Order)}
        unknown += len([row for _, _, row in audit.listed.values() if row.order_id not in accepted])
    assert unknown > 0, "no ghost's order was ever sampled: this test tests nothing"


def test_ce9_another_attempts_order_is_run_and_not_counted(tmp_path: Path) -> None:
    twice = 0
    for seed in range(4):
        cluster = cluster_of(tmp_path / str(seed), seed=seed, roles={"rollout": gullible(anyone=True)})
        cluster.run_until(lambda cluster=cluster: current(cluster).state.in_flight > 4)  # type: ignore[misc]
        hurt(cluster, "rollout-0", "ghost")
        cluster.run_to_the_end()
        audit = Audit(cluster)
        audit.check()
        orders = {order.order_id: order for order in audit.decisions if isinstance(order, Order)}
        twice += len([row for _, attempt, row in audit.listed.values() if orders[row.order_id].receiver_attempt != attempt])
    assert twice > 0, "no order of another attempt was ever sampled: this test tests nothing"


# --- replicas and graders --------------------------------------------------------------------------------------------


def test_a_dead_replicas_samples_wait_for_its_cut(tmp_path: Path) -> None:
    """Dead by its heartbeat moves nothing; a tombstone does, after 2 x visibility_s, without a successor."""
    cluster = cluster_of(tmp_path / "run")
    cluster.run_until(lambda: current(cluster).state.in_flight > 6)
    dead = cluster.newest("rollout-0")
    dead.end = "killed"
    cluster.attempts["rollout-0"] = 0  # nobody replaces it
    owned = {order.order_id for order in current(cluster).state.open_orders() if order.receiver == "rollout-0"}
    assert owned
    due_s = cluster.clock() + 60
    cluster.run_until(lambda: cluster.clock() >= due_s)
    table = LivenessTable.model_validate_json(cluster.paths.liveness_table.read_bytes())
    assert {entry.writer: entry.verdict for entry in table.entries}["rollout-0"] == "dead"
    before = decisions(cluster, Order)
    assert decisions(cluster, WriterCut) == []
    assert owned <= {order.order_id for order in current(cluster).state.open_orders()}
    cluster._leases.tombstone("rollout-0", 2, "grave")
    buried_s = cluster.clock()
    cluster.run_until(lambda: bool(decisions(cluster, WriterCut)))
    assert cluster.clock() - buried_s >= 2 * cluster.run.timing.visibility_s
    cluster.run_until(lambda: len(decisions(cluster, Order)) > len(before))
    assert {order.receiver for order in decisions(cluster, Order)[len(before) :]} == {"rollout-1"}
    cluster.attempts["rollout-0"] = 2
    cluster.replace("rollout-0")
    cluster.run_to_the_end()
    Audit(cluster).check()


def test_a_failing_grader_costs_nothing_but_time(tmp_path: Path) -> None:
    def first_fails(process: Process) -> Steps:
        yield from judge(process, lambda identifier: process.writer == "grader-0")

    cluster = cluster_of(tmp_path / "run", roles={"grader": first_fails})
    cluster.run_to_the_end()
    Audit(cluster).check()
    members = [member for batch in decisions(cluster, Batch) for group in batch.groups for member in group.members]
    assert all(member.reward == reward_of(member.ref.trajectory_id) for member in members)
    assert [drop for drop in decisions(cluster, Drop) if drop.reason == "ungraded"] == []


def test_what_nobody_can_grade_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    def never_the_first_sample_of_odd_groups(process: Process) -> Steps:
        yield from judge(process, lambda identifier: int(identifier[1:].partition(".")[0]) % 2 == 1 and "/0@" in identifier)

    cluster = cluster_of(tmp_path / "run", roles={"grader": never_the_first_sample_of_odd_groups})
    cluster.run_to_the_end()
    Audit(cluster).check()
    dropped = {drop.group_id: drop for drop in decisions(cluster, Drop) if drop.reason == "ungraded"}
    assert dropped and all(int(group_id[1:].partition(".")[0]) % 2 == 1 for group_id in dropped)
    assert all("3 attempts" in drop.detail and "it failed" in drop.detail for drop in dropped.values())


def test_a_drained_replicas_unstarted_samples_move_at_once(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path / "run", recipe=simulated_recipe(rollout__sample_attempts=1))
    cluster.run_until(lambda: cluster.newest("rollout-0").context.load >= 5)
    hurt(cluster, "rollout-0", "drain")
    cluster.run_to_the_end()
    Audit(cluster).check()
    first = [order.group_id for order in decisions(cluster, Order)]
    assert len(set(first)) < len(first), "nothing was given out again"


def test_synchronous_mode_runs_through_with_kills(tmp_path: Path) -> None:
    recipe = simulated_recipe(orchestrator__max_staleness=0, orchestrator__capacity_batches=1.0)
    cluster = cluster_of(tmp_path / "run", recipe=recipe)
    for writer in ("learner-0", "rollout-1", "orchestrator-0"):
        due_s = cluster.clock() + 4
        cluster.run_until(lambda due_s=due_s: cluster.clock() >= due_s)  # type: ignore[misc]
        hurt(cluster, writer, "kill")
    cluster.run_to_the_end()
    Audit(cluster).check()
    assert {batch.staleness for batch in decisions(cluster, Batch)} == {0}


# --- the filesystem and the watchdog ---------------------------------------------------------------------------------


def test_a_minute_without_a_filesystem_kills_nobody(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path / "run")
    cluster.run_until(lambda: current(cluster).state.last_batch == 1)
    stall(cluster, 60.0)
    due_s = cluster.clock() + 65
    cluster.run_until(lambda: cluster.clock() >= due_s)
    table = LivenessTable.model_validate_json(cluster.paths.liveness_table.read_bytes())
    assert {entry.verdict for entry in table.entries if entry.attempt == 1} == {"alive"}
    cluster.run_to_the_end()
    assert cluster.attempts == dict.fromkeys(cluster.attempts, 1)
    Audit(cluster).check()


def test_the_liveness_table_says_what_each_role_said(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path / "run")
    cluster.run_until(lambda: current(cluster).state.trained_step == 1)
    first = LivenessTable.model_validate_json(cluster.paths.liveness_table.read_bytes())
    cluster.run_until(lambda: current(cluster).state.trained_step == 2)
    table = LivenessTable.model_validate_json(cluster.paths.liveness_table.read_bytes())
    assert table.counter > first.counter and table.attempt == 1
    entries = {entry.writer: entry for entry in table.entries}
    assert entries["learner-0"].state == "training" and entries["rollout-0"].state == "serving"
    assert entries["rollout-1"].version is not None and entries["rollout-1"].verdict == "alive"


def until_stalled(cluster: SimCluster) -> str:
    """The orchestrator's state once its watchdog spoke."""
    context = cluster.newest("orchestrator-0").context
    cluster.run_until(lambda: context.state.startswith("waiting"))
    return context.state


def test_the_watchdog_names_the_learner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_of(tmp_path / "run")
    cluster.run_until(lambda: current(cluster).state.trained_step == 1)
    cluster.newest("learner-0").frozen_until = cluster.clock() + 100
    with caplog.at_level(logging.WARNING, "miles"):
        state = until_stalled(cluster)
        last = cluster.ticks + 20
        cluster.run_until(lambda: cluster.ticks >= last)
    assert state.startswith("waiting: step ") and "of learner-0 attempt 1 (dead, says 'training')" in state
    assert len([text for text in caplog.messages if text.startswith("nothing happened")]) == 1
    cluster.run_to_the_end()
    assert "waiting" not in cluster.newest("orchestrator-0").context.state
    Audit(cluster).check()


def test_the_watchdog_names_an_order_and_its_replica(tmp_path: Path) -> None:
    def deaf(process: Process) -> Steps:
        process.context.state = "serving"
        while process.cluster.clock() < 1100:
            yield
        yield from rollout(process)

    cluster = cluster_of(tmp_path / "run", roles={"rollout": deaf})
    assert until_stalled(cluster) == "waiting: order r1.o1 at rollout-0 attempt 1 (alive, says 'serving')"
    cluster.run_to_the_end()


def test_the_watchdog_names_a_role_that_is_not_there(tmp_path: Path) -> None:
    cluster = SimCluster(tmp_path / "run")
    cluster.start("learner-0", "orchestrator-0", "grader-0")
    assert until_stalled(cluster).endswith("a serving rollout replica, for new groups; there is rollout-0 (never started)")


def test_without_a_supervisor_it_leaves(tmp_path: Path) -> None:
    timing = SimCluster(tmp_path / "other").run.timing.model_copy(update={"orphan_s": 30.0})
    cluster = SimCluster(tmp_path / "run", timing=timing)
    cluster.start("orchestrator-0")  # the simulated supervisor has a lease and no heartbeat
    process = cluster.newest("orchestrator-0")
    cluster.run_until(lambda: not process.lives)
    assert process.end == "left" and cluster.clock() < 1000 + 60


def test_a_round_costs_one_listing_of_the_leases_for_any_number_of_replicas(tmp_path: Path) -> None:
    """I16: per round, the calls grow with the number of replicas and not faster."""
    calls: dict[int, int] = {}
    for replicas in (10, 40):
        recipe = simulated_recipe(rollout__pools=({"name": "main", "replicas": replicas, "slots": 4},))
        cluster = SimCluster(tmp_path / str(replicas), recipe=recipe, hidden_s=0.0)
        cluster.start()
        cluster.run_until(lambda cluster=cluster: cluster.ticks > 20)  # type: ignore[misc]
        loop, listings = current(cluster), []
        folder = cluster.paths.leases
        fs = cluster.newest("orchestrator-0").context.fs
        plain = fs.listdir
        fs.listdir = lambda path, plain=plain, into=listings: into.append(path) or plain(path)  # type: ignore[method-assign]
        loop.tick()
        calls[replicas] = listings.count(folder)
    assert calls[10] == calls[40] <= 4


# --- whole runs with files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kills",
    [(), ("orchestrator-0", "rollout-0:ghost", "learner-0:freeze"), ("learner-0", "grader-0", "orchestrator-0:ghost")],
    ids=["quiet", "ghosts", "kills"],
)
def test_verify_proves_a_finished_run(tmp_path: Path, kills: tuple[str, ...]) -> None:
    root = finished_run(tmp_path / "run", kills=kills, seed=len(kills))
    verification = verify_run(root)
    assert verification.faults == []
    assert (verification.state, verification.facts["steps"], verification.facts["groups_open"]) == ("COMPLETED", 4, 0)
