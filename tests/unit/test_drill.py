"""Drills without a cluster: plans, what a place allows, what is counted, when a drill has failed, and the hosted supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cluster.faults.drill import Drill
from cluster.faults.host import HostedSupervisor
from cluster.faults.plan import Plan, load_plan
from cluster.faults.processes import is_stopped, listeners, role_processes, signal_pid
from cluster.faults.record import FaultRecord, read_drill, write_drill
from cluster.faults.site import Site, check_plan
from cluster.faults.watch import Watch
from cluster.profile import ClusterProfile
from miles_core.errors import RecipeError, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import GradeOrder, Order, sample_id
from miles_core.run import read_run
from miles_core.store.follow import Reading
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import read_all
from tests.protocol.simulation import finished_run
from tests.unit.sleeping_run import SleepingRun

DEADLINE_S = 30.0
LOCAL = ClusterProfile(name="local", kind="local")
GOOD = FaultRecord(
    role="rollout", kind="kill", fired=True, noticed_s=1.0, productive_s=2.0, verify=True, others_unchanged=True
)  # fmt: skip


def plan_of(*faults: dict[str, object], **options: object) -> Plan:
    return Plan.model_validate({"faults": faults, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run in which a replica, a grader and the learner died."""
    folder = tmp_path_factory.mktemp("drilled") / "run"
    return finished_run(folder, steps=6, kills=("rollout-0", "grader-0", "learner-0"))


def drill_of(root: Path, plan: Plan, *, argv: tuple[str, ...] = (sys.executable, "-c", "print('supervised')")) -> Drill:
    return Drill(root, LOCAL, plan, HostedSupervisor(argv), lambda text: None)


@pytest.mark.parametrize("name", ["first", "short", "slow", "hundred", "disk", "prefect"])
def test_every_plan_of_ours_is_one(name: str) -> None:
    assert load_plan(name).rounds()


def test_the_hundred_hit_every_role_twenty_times() -> None:
    hits = Counter(role for role, _, _ in load_plan("hundred").rounds())
    assert hits == dict.fromkeys(("rollout", "orchestrator", "grader", "learner", "evaluator"), 20)


def test_what_repeats_comes_round_after_round() -> None:
    plan = plan_of({"role": "rollout", "kind": "kill", "repeat": 3}, {"role": "grader", "kind": "hang", "repeat": 2})
    assert plan.rounds() == [
        ("rollout", "kill", 0), ("grader", "hang", 0), ("rollout", "kill", 1), ("grader", "hang", 1), ("rollout", "kill", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults: [{role: disk, kind: kill}]", "role disk has no kind 'kill', only fill"),
        ("faults: [{role: rollout, kind: stall}]", "role rollout has no kind 'stall', only kill, cancel, hang"),
        ("faults: [{role: rollout, kind: kill, twice: 2}]", "twice: no such key; cluster/faults/plan.py has the keys"),
        ("faults: [{role: rollout, kind: kill, repeat: 0}]", "repeat"),
        ("faults: []", "faults"),
        ("- {role: rollout, kind: kill}", "expected a mapping"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_way_out(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_plan(str(path))


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ({"role": "rollout", "kind": "node_kill"}, {}, "rollout node_kill: it needs an administrator"),
        ({"role": "grader", "kind": "node_zombie"}, {}, "only to a devslurm"),
        ({"role": "controller", "kind": "kill"}, {}, "needs an administrator"),
        ({"role": "disk", "kind": "fill"}, {"disk_max_mib": 1}, "disk_max_mib is 1; fill only one that was made for it"),
        ({"role": "prefect", "kind": "away"}, {}, "PREFECT_API_URL names no server of yours"),
    ],
)
def test_what_a_place_does_not_allow_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], options: dict[str, object], words: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere:4200/api")
    for kind in ("local", "slurm"):
        profile = ClusterProfile.model_validate({"name": "site", "kind": kind})
        with pytest.raises(RecipeError, match=words):
            check_plan(plan_of({"role": "rollout", "kind": "kill"}, fault, **options), profile, RunPaths(tmp_path / "run"))
        check_plan(load_plan("first"), profile, RunPaths(tmp_path / "run"))


def test_lost_samples_are_those_that_were_given_out_again(finished: Path) -> None:
    run, paths = read_run(finished)
    lost = Watch(run, paths).lost_samples()
    orders = [record for record in orchestrator_records(finished) if isinstance(record, (Order, GradeOrder))]
    newest = {item: (order.receiver, order.receiver_attempt) for order in orders for item in items_of(order)}
    for owner, count in lost.items():
        asked = {item for order in orders if (order.receiver, order.receiver_attempt) == owner for item in items_of(order)}
        assert count == sum(newest[item] != owner for item in asked), owner
    assert {writer for writer, _ in lost} >= {"rollout-0", "grader-0"} and sum(lost.values()) > 0


def items_of(order: Order | GradeOrder) -> set[str]:
    if isinstance(order, Order):
        return {sample_id(order.group_id, index) for index in order.samples}
    return {item.trajectory_id for item in order.items}


def orchestrator_records(root: Path) -> list[object]:
    run, paths = read_run(root)
    reading = Reading(FileSystem(), LeaseFolder(FileSystem(), paths.leases, run.run_id), run.timing.visibility_s)
    return read_all(reading, paths.journal("orchestrator-0"))


def test_progress_is_that_of_the_attempt_asked_for_or_a_later_one(finished: Path) -> None:
    watch = Watch(*read_run(finished))
    newest = watch.attempts()
    assert newest["learner-0"] == 2 and newest["rollout-0"] == 3
    for writer, attempt in newest.items():
        assert watch.works(writer, attempt) and not watch.works(writer, attempt + 1)
    assert watch.step() == 6


@pytest.mark.parametrize(
    "change",
    [{"fired": False}, {"productive_s": None}, {"verify": False}, {"others_unchanged": False}],
    ids=lambda change: next(iter(change)),
)
def test_a_fault_that_did_not_go_well_fails_the_drill_and_is_tried_again(finished: Path, change: dict[str, object]) -> None:
    paths = RunPaths(finished)
    plan = plan_of({"role": "rollout", "kind": "kill", "repeat": 2})
    write_drill(paths, [GOOD, GOOD.model_copy(update=change)])
    outcome = drill_of(finished, plan).run()
    assert not outcome["ok"] and outcome["problems"] == ["rollout kill: 1 did not fire or did not go well"]
    assert len(read_drill(paths).faults) == 2
    write_drill(paths, [GOOD, GOOD.model_copy(update=change), GOOD])
    outcome = drill_of(finished, plan).run()
    assert outcome["ok"] and outcome["state"] == "COMPLETED" and outcome["groups_open"] == 0


def test_what_a_run_left_fails_its_drill(finished: Path) -> None:
    write_drill(RunPaths(finished), [GOOD])
    leftover = finished / ".tmp.code.0123"
    leftover.mkdir()
    drill = drill_of(finished, plan_of({"role": "rollout", "kind": "kill"}))
    try:
        assert drill.run(left_deadline_s=0.0)["problems"] == [f"left behind: folder {leftover}"]
    finally:
        leftover.rmdir()
    assert drill_of(finished, plan_of({"role": "rollout", "kind": "kill"})).run()["ok"]


def test_the_supervisor_is_killed_stopped_and_asked_to_leave(tmp_path: Path) -> None:
    host = HostedSupervisor((sys.executable, "-u", "-c", "print('begun'); import time; time.sleep(600)"))
    host.start()
    host.start()
    assert wait_for(host.new_lines) == ["begun"]
    host.send(signal.SIGKILL)
    assert wait_for(host.has_ended) and host.exit_code() == -signal.SIGKILL
    host.start()
    assert wait_for(host.new_lines) == ["begun"] and not host.has_ended()
    host.send(signal.SIGSTOP)
    host.leave()
    assert host.exit_code() == -signal.SIGTERM


def test_a_drill_that_is_killed_takes_its_supervisor_along(tmp_path: Path) -> None:
    code = (
        "import sys, time; from cluster.faults.host import HostedSupervisor\n"
        "host = HostedSupervisor((sys.executable, '-c', 'import time; time.sleep(600)')); host.start()\n"
        "print(host._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as drill:
        assert drill.stdout is not None
        child = Path("/proc") / drill.stdout.readline().strip()
        assert child.exists()
        drill.kill()
    wait_for(lambda: not child.exists())


def test_only_roles_of_this_run_are_signalled(tmp_path: Path) -> None:
    with SleepingRun(tmp_path, "one") as one, SleepingRun(tmp_path, "other") as other:
        one.start_job()
        other.start_job()
        [process] = wait_for(lambda: role_pids(one.paths))
        [stranger] = wait_for(lambda: role_pids(other.paths))
        assert not signal_pid(one.paths, stranger, signal.SIGKILL)
        assert not signal_pid(one.paths, os.getpid(), signal.SIGKILL)
        assert signal_pid(one.paths, process, signal.SIGKILL)
        wait_for(lambda: not role_pids(one.paths))
        assert role_pids(other.paths) == [stranger]


class Bystander:
    """A host that only remembers its signals."""

    def __init__(self) -> None:
        self.signals: list[signal.Signals] = []

    def start(self) -> None:
        raise AssertionError("nobody killed it")

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def has_ended(self) -> bool:
        return False


def test_local_roles_are_stalled_hung_and_killed_by_their_leases(tmp_path: Path) -> None:
    host = Bystander()
    with SleepingRun(tmp_path, "one") as one:
        for writer in ("learner-0", "rollout-0"):
            one.start_job(writer)
        pids = {writer: wait_for(lambda writer=writer: pid_of(one.paths, writer)) for writer in ("learner-0", "rollout-0")}
        leases = LeaseFolder(FileSystem(), one.paths.leases, one.run.run_id)
        for writer, pid in pids.items():
            leases.acquire(writer, 1, "token", pid=pid)
        site = Site(one.run, one.paths, one.profile, load_plan("first"), host)
        stall = site.injection("all", "stall", 0)
        assert not stall.took() and not stall.victims and stall.hold_s == 2 * one.run.timing.lease_s
        stall.fire()
        assert wait_for(stall.took) and host.signals == [signal.SIGSTOP]
        stall.heal()
        stall.heal()
        wait_for(lambda: not any(is_stopped(pid) for pid in pids.values()))
        hang = site.injection("learner", "hang", 0)
        hang.fire()
        wait_for(lambda: is_stopped(pids["learner-0"]))
        assert hang.victims == ("learner-0",) and not is_stopped(pids["rollout-0"])
        site.injection("rollout", "kill", 5).fire()
        wait_for(lambda: pid_of(one.paths, "rollout-0") is None)
        site.injection("learner", "cancel", 0).fire()
        with pytest.raises(SchedulerError, match="no job of role grader runs now"):
            site.injection("grader", "kill", 0)


def pid_of(paths: RunPaths, writer: str) -> int | None:
    """Of a role itself."""
    role = f"miles_core.roles.{writer.partition('-')[0]}".encode()
    return next((pid for pid in role_pids(paths) if role in cmdline(pid)), None)


def role_pids(paths: RunPaths) -> list[int]:
    """Of the roles themselves, not of those that wait for them."""
    return [process.pid for process in role_processes(paths) if b"shim.py" not in cmdline(process.pid)]


def cmdline(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_the_server_behind_a_port_is_found() -> None:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert [process.pid for process in listeners(port)] == [server.pid]
        server.kill()
    assert listeners(port) == []


def test_a_full_disk_is_full_until_the_filler_goes(tmp_path: Path) -> None:
    code = (
        "import shutil, sys; from pathlib import Path; from cluster.faults.site import _fill_up\n"
        "root = Path(sys.argv[1]); _fill_up(root / 'filler'); full = shutil.disk_usage(root).free\n"
        "(root / 'filler').unlink(); print(full, shutil.disk_usage(root).free)"
    )
    script = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    full, free = map(int, done.stdout.split())
    assert full < 64 << 10 and free > 7 << 20


def wait_for(condition):  # type: ignore[no-untyped-def]
    """The first true answer."""
    until = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return found
