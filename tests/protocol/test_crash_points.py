"""Every named crash point: the list is all there are in the code, and a run whose role dies there ends complete and proven.

Whole runs of real role code (real_cluster.py); what a rank's death costs is in test_exact_resume.py, with real processes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from miles_core.records import Drained, Drop, Incident, JobEnded, Leaving, Record, Returned, Rollback, Stop, WriterCut
from miles_core.run import all_writers
from miles_core.runtime import crash
from miles_core.runtime.crash import OF_EVERY_ROLE, POINTS, VARIABLE
from miles_core.tracking.ledger import read_all
from miles_core.verify import verify_run
from tests.protocol import rollback_world as world
from tests.protocol.real_cluster import RealCluster, end_process
from tests.protocol.simulation import Killed, Process
from tests.protocol.test_exact_resume import OF_TWO_RANKS

ROOT = Path(__file__).parents[2]
ROLES = ("orchestrator", "rollout", "grader", "learner", "evaluator", "supervisor")
ROLE_OF_MODULE = {"orchestrator": "orchestrator", "liveness": "orchestrator", "supervise": "supervisor", "context": "every"}
"""Where the call does not say it."""
NEEDS_A_LOSS = ("orchestrator:after_cut", "supervisor:before_tombstone", "supervisor:after_tombstone",
                "supervisor:before_cancel", "supervisor:after_cancel")  # fmt: skip
"""Passed only in a run that also loses a replica's node."""
NUMBERS = {"after_copy_order": 2, "after_batch_journal": 2, "before_run_ended": 4, "after_point": 0}


# --- the list --------------------------------------------------------------------------------------------------------


def calls_in(path: Path) -> Iterator[tuple[str, str]]:
    """(role, name) of every call; a wrapper in a class is called with the name alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called not in ("crash_point", "_crash_point", "_crash"):
            continue
        words = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
        is_function = isinstance(node.func, ast.Name)
        name = words[1] if is_function else words[0]
        part = words[0] if is_function else (words[1] if len(words) > 1 else None)
        if isinstance(name, str):
            yield part if isinstance(part, str) else role_of(path), name


def role_of(path: Path) -> str:
    return ROLE_OF_MODULE.get(path.stem) or ROLE_OF_MODULE.get(path.parent.name) or path.parent.name


def commands_of_rank_0() -> set[str]:
    """What rank 0 tells the other ranks; each passes a point before it does it."""
    tree = ast.parse((ROOT / "miles_core/learner/ranked.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return {call.args[0].value for call in calls if call.func.attr == "tell"}  # type: ignore[attr-defined]


def test_the_list_is_all_crash_points_of_the_code() -> None:
    found = defaultdict(set)
    for package in ("miles_core", "cluster", "tasks", "flows"):
        for path in (ROOT / package).rglob("*.py"):
            for role, name in calls_in(path):
                found[role].add(name)
    found["every"] |= found.pop("store")  # A journal's hook is its context's.
    found["rank"] = {f"before_{command}" for command in commands_of_rank_0()}
    assert found == {**{role: set(names) for role, names in POINTS.items()}, "every": set(OF_EVERY_ROLE)}


def test_without_the_variable_or_elsewhere_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash, "end_process", end_process)
    crash.crash_point("learner", "after_train", 3)
    monkeypatch.setenv(VARIABLE, "learner:after_train:3:2")
    for other in (("grader", "after_train", 3, 2), ("learner", "after_train", 4, 2), ("learner", "after_train", 3, 1)):
        crash.crash_point(*other)
    with pytest.raises(Killed):
        crash.crash_point("learner", "after_train", 3, 2)


# --- a kill at each of them ------------------------------------------------------------------------------------------


def places() -> Iterator[str]:
    """`role:name:number` of all but those of ranks, of a rollback, and of the writes of journals."""
    for role in ROLES:
        for name in OF_EVERY_ROLE:
            if "flush" not in name and not (role == "supervisor" and "done" in name):
                yield f"{role}:{name}:1"
    for role in (*ROLES, "collector"):
        default = 2 if role == "learner" else 1
        yield from (f"{role}:{name}:{NUMBERS.get(name, default)}" for name in POINTS[role])
    # The first one retires the lost replica, the second is left by a supervisor that goes.
    yield from ("supervisor:before_tombstone:2", "supervisor:after_tombstone:2")


def lose_a_node(cluster: RealCluster) -> None:
    """A replica's node dies once it has sampled."""

    def sampled() -> list[Process]:
        return [process for process in cluster.processes if process.writer == "rollout-0" and process.context.progress]

    cluster.run_until(lambda: bool(sampled()))
    (replica,) = sampled()
    cluster.jobs.down.add(replica.context.job_id)
    replica.end = "node lost"


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory) -> RealCluster:
    """A run without a fault."""
    cluster = RealCluster(tmp_path_factory.mktemp("uncrashed") / "run")
    cluster.start()
    cluster.run_to_the_end(2000)
    return cluster


@pytest.fixture(scope="module")
def flushes(uncrashed: RealCluster) -> dict[str, int]:
    """Writes of its journal that each role does in it; of several replicas the fewest."""
    found: dict[str, int] = {}
    for process in uncrashed.processes:
        role = process.writer.partition("-")[0]
        times = process.context.passed[f"{role} after_flush"]
        found[role] = min(times, found.get(role, times))
    return found


def die_at(place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run in which the role dies there; of several replicas each dies once."""
    monkeypatch.setattr(crash, "end_process", end_process)
    monkeypatch.setenv(VARIABLE, place)
    cluster = RealCluster(folder)
    cluster.start()
    if place.rpartition(":")[0] in NEEDS_A_LOSS:
        lose_a_node(cluster)
    cluster.run_to_the_end(2000)
    role = place.partition(":")[0].replace("collector", "supervisor")
    assert {node.partition("-")[0] for node in cluster.killed()} == {role}, place
    verification = verify_run(cluster.paths.root)
    assert (verification.state, verification.faults) == ("COMPLETED", []), place


@pytest.mark.parametrize("place", tuple(places()))
def test_a_run_whose_role_dies_there_is_complete_and_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    die_at(place, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("name", ["before_flush", "after_flush"])
@pytest.mark.parametrize("role", ROLES)
def test_a_run_whose_role_dies_at_any_write_of_its_journal_is_complete_and_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: dict[str, int], role: str, name: str
) -> None:
    """At every one of them: as many as the same run has without a fault."""
    for number in range(1, flushes[role] + 1):
        die_at(f"{role}:{name}:{number}", tmp_path / str(number), monkeypatch)


def test_every_kind_of_record_is_in_the_run_whose_writes_are_counted(uncrashed: RealCluster) -> None:
    """So one that somebody adds is killed at, too; those named here only a fault, a request or bad luck makes a role write."""
    written = {
        type(record)
        for writer in ("supervisor-0", *all_writers(uncrashed.recipe))
        for record in read_all(uncrashed.processes[0].context.reading, uncrashed.paths.journal(writer))
    }
    elsewhere = {Rollback, Drained, Incident, JobEnded, WriterCut, Returned, Leaving, Stop, Drop}
    assert written | elsewhere == set(get_args(get_args(Record)[0]))


@pytest.mark.parametrize(
    "place",
    [
        *(f"rollback:{name}:1" for name in POINTS["rollback"]),
        *(f"supervisor:{name}:{number}" for name in ("before_flush", "after_flush") for number in (1, 2, 3)),
    ],
)
def test_a_rollback_that_dies_there_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(crash, "end_process", end_process)
    cluster = world.started(tmp_path / "run")
    world.give_up(cluster, step=5, lost=5)
    monkeypatch.setenv(VARIABLE, f"{place}:{cluster.epoch + 1}")
    with pytest.raises(Killed):
        cluster.roll_back()
    assert cluster.roll_back().number == 1
    world.finish(cluster)


def test_every_point_of_a_rank_has_a_run_that_dies_there() -> None:
    killed = {place.split(":")[1] for crashes in OF_TWO_RANKS for place in crashes if place.startswith("rank1:")}
    assert killed == set(POINTS["rank"])
