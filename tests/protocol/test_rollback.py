"""Rollback (I8): whatever is lost, whoever dies, one lineage is left, and nothing of the abandoned branch is trained as new."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.epoch import supervisor_context
from cluster.rollback import describe, request_rollback, roll_back
from miles_core.errors import DeadlineExceeded, HeldElsewhere, JournalCorrupt, NeedsRollback, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import Batch, Cut, Drop, EvaluationPoint, Rollback, RunClosed, RunEnded, StepDone, Version
from miles_core.rollbacks import Rollbacks, read_rollbacks
from miles_core.run import all_writers, read_run
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.summary import summarize
from miles_core.verify import verify_run
from tests.e2e.tamper import Record, edit_records, of_kind
from tests.protocol.audit import Audit
from tests.protocol.learner_run import FakeOrchestrator, learner_context, make_run, read_lineage, run_learner
from tests.protocol.rollback_world import RECIPE, batches, close, finish, gave_up, give_up, lose_shard, started, until_step
from tests.protocol.simulation import KILLS, Killed, NodeFS, SimCluster, hurt, simulated_recipe


def rollback_to(step: int, number: int = 1, **attempts: int) -> Rollback:
    """A record; `attempts` by role, of replica 0."""
    return Rollback(
        number=number, step=step, last_step=9, groups=0, missing="x", unix_s=0.0,
        attempts={f"{role}-0": attempt for role, attempt in attempts.items()},
    )  # fmt: skip


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_tokens_of_an_abandoned_version_count_the_way_through_its_fork() -> None:
    """Back to 4: a token of version 6 is (k-1-4) + 2 old for batch k."""
    rollbacks = Rollbacks([rollback_to(4, learner=2)])
    assert [rollbacks.counted_step(Version(step, 2)) for step in (3, 4, 5, 6, 9)] == [3, 4, 3, 2, -1]
    assert [rollbacks.counted_step(Version(step, 3)) for step in (4, 5, 6)] == [4, 5, 6]
    assert [rollbacks.abandons(Version(step, 1)) for step in (4, 5)] == [False, True]
    assert not rollbacks.abandons(Version(5, 3)) and not Rollbacks().abandons(Version(5, 3))


@pytest.mark.parametrize("seed", range(50))
def test_the_age_is_the_distance_in_the_tree_of_versions(seed: int) -> None:
    """Versions as nodes, each made from the one before it: the distance to the newest, counted by walking."""
    draw, parent, tip = random.Random(seed), dict[Version, Version | None](), Version(0, 1)
    parent[tip] = None
    records: list[Rollback] = []
    for number in range(1, 5):
        for _ in range(draw.randrange(1, 6)):
            parent[Version(tip.step + 1, number)], tip = tip, Version(tip.step + 1, number)
        line = [tip]
        while (before := parent[line[-1]]) is not None:
            line.append(before)
        tip = draw.choice(line)
        records.append(rollback_to(tip.step, number, learner=number))
        parent[Version(tip.step + 1, number + 1)], tip = tip, Version(tip.step + 1, number + 1)

    def ancestors(version: Version) -> list[Version]:
        return [version, *(ancestors(parent[version]) if parent[version] is not None else ())]  # type: ignore[arg-type]

    rollbacks, way = Rollbacks(records), ancestors(tip)
    for version in parent:
        steps_up = next(count for count, one in enumerate(ancestors(version)) if one in way)
        distance = steps_up + way.index(ancestors(version)[steps_up])
        assert tip.step - rollbacks.counted_step(version) == distance, (version, tip)
        assert rollbacks.abandons(version) == (version not in way)


def test_what_the_orchestrator_said_before_a_rollback() -> None:
    rollbacks = Rollbacks([rollback_to(4, 1, orchestrator=2), rollback_to(2, 2, orchestrator=5)])
    batch = lambda step: Batch(step=step, batch_id="b", groups=(), staleness=0)  # noqa: E731
    assert [rollbacks.voids(1, batch(step)) for step in (2, 3, 5)] == [False, True, True]
    assert [rollbacks.voids(4, batch(step)) for step in (2, 3)] == [False, True]
    assert not rollbacks.voids(6, batch(9)) and not rollbacks.voids(1, Drop(group_id="g1.o1", reason="stale"))
    ended = RunEnded(state="COMPLETED", steps=9)
    assert [rollbacks.voids(attempt, ended) for attempt in (2, 5, 6)] == [True, True, False]
    assert [rollbacks.precede("orchestrator-0", attempt) for attempt in (5, 6)] == [False, True]


def test_a_missing_record_is_no_rollback_less(tmp_path: Path) -> None:
    run, paths = make_run(tmp_path / "run")
    assert read_rollbacks(FileSystem(), paths).records == ()
    for number in (1, 2):
        paths.rollback(number).parent.mkdir(exist_ok=True)
        paths.rollback(number).write_text(rollback_to(3, number, learner=1).model_dump_json())
    assert [record.number for record in read_rollbacks(FileSystem(), paths).records] == [1, 2]
    paths.rollback(1).unlink()
    with pytest.raises(JournalCorrupt, match="one is missing"):
        learner_context(run, paths).rollbacks  # noqa: B018


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_that_lost_a_shard_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    assert verify_run(cluster.paths.root).state == "NEEDS_ROLLBACK"
    rollback = cluster.roll_back()
    assert (rollback.number, rollback.step) == (1, 3) and rollback.last_step >= 5
    assert "batch 5" in rollback.missing and describe(rollback).startswith("back to the checkpoint of step 3: steps 4 to ")
    finish(cluster)
    audit = Audit(cluster)
    assert len(audit.voided) * RECIPE.orchestrator.prompts == rollback.groups > 0
    assert any(Version(step, 1) in audit.known for step in (4, 5)), "nothing was abandoned: this test tests nothing"


def test_tokens_of_the_abandoned_branch_are_trained_with_their_distance(tmp_path: Path) -> None:
    """Open groups survive a rollback; there are some, for the buffer holds two thirds of a batch more than two batches."""
    sections = {"learner__checkpoint_every": 3, "orchestrator__max_staleness": 9, "orchestrator__capacity_batches": 2.7}
    trained, recipe = 0, simulated_recipe(steps=9, **sections)
    for seed in range(3):
        cluster = started(tmp_path / str(seed), seed, recipe=recipe)
        give_up(cluster, step=5, lost=5)
        rollbacks = Rollbacks([cluster.roll_back()])
        finish(cluster)
        audit = Audit(cluster)
        rows = [audit.listed[m.ref.trajectory_id][2] for b in audit._of(Batch) for g in b.groups for m in g.members]
        trained += sum(any(rollbacks.abandons(version) for version in row.versions) for row in rows)
    assert trained > 0, "no token of an abandoned version was ever trained: this test tests nothing"


def test_a_run_that_seemed_over_goes_on(tmp_path: Path) -> None:
    """The last step was trained and the run ended; only the learner's last checkpoint was not there yet."""
    cluster = started(tmp_path / "run", recipe=simulated_recipe(steps=4, learner__checkpoint_every=3))
    process = cluster.newest("learner-0")
    process.context.finish = lambda *arguments: (_ for _ in ()).throw(Killed("done"))  # type: ignore[method-assign]
    cluster.run_until(lambda: process.end == "killed" and cluster.is_done("orchestrator-0") and cluster.is_done("evaluator-0"))
    lose_shard(cluster, 4)
    close(cluster)
    cluster.roll_back()
    finish(cluster)
    points = [record for _, record in Audit(cluster)._accepted("evaluator-0") if isinstance(record, EvaluationPoint)]
    assert [point.version.step for point in points] == [0, 4, 4] and points[1].version.attempt == 1
    ledger = read_ledger(cluster.run, cluster.paths)
    summary = summarize(ledger, cluster.paths)
    assert summary["eval"]["abandoned"] == [{"step": 4, "attempt": 1, "greedy": 0.5}]
    assert ledger.evaluations[4].version.attempt > 1


def test_without_a_checkpoint_it_goes_back_to_the_base_model(tmp_path: Path) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=2, lost=1)
    rollback = cluster.roll_back()
    assert rollback.step == 0 and describe(rollback).startswith("back to the base model: steps 1 to ")
    finish(cluster)


def test_a_batch_that_was_never_trained(tmp_path: Path) -> None:
    """Its shard goes before the learner reads it; no step is lost but those behind the checkpoint."""
    cluster = started(tmp_path / "run")
    until_step(cluster, 2)
    cluster.run_until(lambda: len(batches(cluster)) >= 4)
    lose_shard(cluster, 4)
    close(cluster)
    assert cluster.roll_back().step <= 3
    finish(cluster)


def test_one_after_the_other(tmp_path: Path) -> None:
    """The second goes further back than the first: all checkpoints are damaged, one is made again, then a shard is missed."""
    cluster = started(tmp_path / "run", recipe=simulated_recipe(steps=9, learner__checkpoint_every=2))
    give_up(cluster, step=5, lost=5)
    assert cluster.roll_back().step == 4
    until_step(cluster, 7)
    for saved in cluster.paths.checkpoints.glob("step_*"):
        (saved / "state").write_bytes(b"damaged")
    lose_shard(cluster, 3)
    close(cluster)
    second = cluster.roll_back()
    assert (second.number, second.step) == (2, 2) and second.last_step >= 7
    finish(cluster)
    told = verify_run(cluster.paths.root).facts["rollbacks"]
    assert told == ["to step 4 of 5", f"to step 2 of {second.last_step}"]


@pytest.mark.parametrize("seed", range(6))
def test_zombies_of_before_count_for_nothing(tmp_path: Path, seed: int) -> None:
    """Every role goes on behind the rollback for a while, as if its job had not ended at all."""
    cluster = started(tmp_path / "run", seed)
    give_up(cluster, step=5, lost=4 + seed % 2, zombies=tuple(all_writers(RECIPE)))
    zombies = [process for process in cluster.processes if process.lives]
    cluster.roll_back()
    finish(cluster)
    assert zombies and all(process.end in ("lost", "killed", "left", "done", "failed") for process in zombies)


@pytest.mark.parametrize("chunk", range(4))
def test_random_schedules_with_rollbacks_end_with_one_lineage(tmp_path: Path, chunk: int) -> None:
    rollbacks = sum(run_schedule(tmp_path / str(seed), seed) for seed in range(chunk, 16, 4))
    assert rollbacks > 0, "no run was rolled back: this test tests nothing"


def run_schedule(folder: Path, seed: int) -> int:
    """Up to two lost shards, with up to two roles hurt before each; returns the number of rollbacks."""
    draw, cluster, gone = random.Random(f"rollback {seed}"), started(folder, seed), list[str]()
    for lost in sorted(draw.sample(range(2, 7), draw.randrange(1, 3))):
        for _ in range(draw.randrange(3)):
            hurt(cluster, draw.choice(all_writers(RECIPE)), draw.choice(KILLS))
        cluster.run_until(lambda lost=lost: cluster.newest("learner-0").context.progress >= lost or cluster.is_over())  # type: ignore[misc]
        if cluster.is_over():
            break
        gone.append(lose_shard(cluster, lost))
        cluster.run_until(lambda: gave_up(cluster) or cluster.is_over())
        if not gave_up(cluster):
            break  # A checkpoint came in time.
        close(cluster, tuple(draw.sample(all_writers(RECIPE), 3)))
        cluster.roll_back()
    finish(cluster, gone)
    return cluster.epoch // 2


# --- the rollback itself dies ----------------------------------------------------------------------------------------


def epoch_over_a_copy(cluster: SimCluster, folder: Path, epoch: int) -> RoleContext:
    """A supervisor's context over a copy of the run directory."""
    writer = "supervisor-0"
    context = RoleContext(
        cluster.run, RunPaths(folder), writer, epoch, token="t", fs=NodeFS(cluster.disk, f"{folder.name}.a{epoch}"),
        clock=cluster.clock, sleep=cluster.clock.advance,
    )  # fmt: skip
    context.leases.acquire(writer, epoch, context.token)
    return context


def test_killed_at_any_write_the_next_request_does_the_same(tmp_path: Path) -> None:
    """Every write of a rollback is once the last one, with nothing, a part or all of it on disk."""
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    epoch = cluster.epoch + 1
    shutil.copytree(cluster.paths.root, tmp_path / "clean")
    told = {"attempts", "unix_s"}
    expected = roll_back(epoch_over_a_copy(cluster, tmp_path / "clean", epoch)).model_dump(exclude=told)
    num_writes = cluster.disk.writes[f"clean.a{epoch}"]
    assert num_writes > 5
    for number, share in itertools.product(range(num_writes), (0.0, 0.6, 1.0)):
        copy = tmp_path / f"{number}-{share}"
        shutil.copytree(cluster.paths.root, copy)
        cluster.disk.deaths[f"{copy.name}.a{epoch}"] = (number, share)
        with pytest.raises(Killed):
            roll_back(epoch_over_a_copy(cluster, copy, epoch))
        rollback = roll_back(epoch_over_a_copy(cluster, copy, epoch + 1))
        assert rollback.model_dump(exclude=told) == expected, (number, share)
        assert read_rollbacks(FileSystem(), RunPaths(copy)).records == (rollback,), (number, share)


@pytest.mark.parametrize("number", [1, 3, 5])
def test_killed_in_a_rollback_the_run_goes_on_all_the_same(tmp_path: Path, number: int) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    cluster.disk.deaths[f"supervisor-0.a{cluster.epoch + 1}"] = (number, 0.6)
    with pytest.raises(Killed):
        roll_back(cluster.take_epoch())
    cluster.roll_back()
    finish(cluster)


def test_asked_twice_it_answers_the_same_until_somebody_goes_on(tmp_path: Path) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    rollback = roll_back(cluster.take_epoch())
    assert cluster.roll_back() == rollback == read_rollbacks(FileSystem(), cluster.paths).records[0]
    cluster.run_until(lambda: cluster.newest("learner-0").attempt > rollback.attempts["learner-0"])
    with pytest.raises(RunDirectoryError, match="is not closed: only a run that ended as NEEDS_ROLLBACK"):
        roll_back(cluster.take_epoch())
    cluster._supervisor = cluster._open_supervisor()
    finish(cluster)


def test_a_lease_that_no_listing_shows_is_waited_for_with_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    context = cluster.take_epoch()
    monkeypatch.setattr(context.leases, "tombstone", lambda *lease: False)
    with pytest.raises(DeadlineExceeded, match=r"holds a lease of learner-0 attempt \d, but no listing shows it for"):
        roll_back(context)


def test_a_lease_that_never_became_whole_stops_no_rollback(tmp_path: Path) -> None:
    cluster = started(tmp_path / "run")
    give_up(cluster, step=5, lost=5)
    (cluster.paths.leases / "rollout-0.a9").touch()
    assert cluster.roll_back().attempts["rollout-0"] == 10


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED"])
def test_a_run_that_needs_none_is_left_alone(tmp_path: Path, state: str) -> None:
    cluster = started(tmp_path / "run", recipe=simulated_recipe(steps=2))
    cluster.run_to_the_end()
    cluster._supervisor.write(RunClosed(state=state, unix_s=0.0))  # type: ignore[arg-type]
    with pytest.raises(RunDirectoryError, match=f"is {state}: only"):
        roll_back(cluster.take_epoch())
    assert read_rollbacks(FileSystem(), cluster.paths).records == ()


def test_a_live_supervisor_is_not_rolled_back_under(tmp_path: Path) -> None:
    """`request_rollback` takes the epoch like any supervisor; here with the clocks of a real run."""
    run, paths = make_run(tmp_path / "run")
    paths.done("x").parent.mkdir()
    holder = supervisor_context(run, paths, 1)
    holder.start()
    try:
        with pytest.raises(HeldElsewhere):
            request_rollback(paths)
    finally:
        holder.stop()


# --- the real learner ------------------------------------------------------------------------------------------------


def test_the_real_learner_goes_on_from_the_checkpoint_with_the_batches_of_the_new_branch(tmp_path: Path) -> None:
    run, paths = make_run(tmp_path / "run")
    first = FakeOrchestrator(run, paths)
    first.write_all(steps=6)
    first.shard(4).unlink()
    with pytest.raises(NeedsRollback):
        run_learner(run, paths)
    paths.rollback(1).parent.mkdir(exist_ok=True)
    attempts = {"learner-0": 2, "orchestrator-0": 2}
    paths.rollback(1).write_text(rollback_to(2).model_copy(update={"attempts": attempts}).model_dump_json())
    position, stream_hash = first.ends[6]
    cuts = (
        Cut(writer="orchestrator-0", attempt=1, bytes=position, hash=stream_hash),
        Cut(writer="orchestrator-0", attempt=2, bytes=0, hash="99aa06d3014798d86001c324468d497f"),
    )
    second = FakeOrchestrator(run, paths, attempt=3, cuts=cuts)
    for step in range(3, 7):
        second.write(second.batch(step, batch_id=f"b{step}.o3"))
    trainer = run_learner(run, paths, attempt=3)
    assert trainer.loaded == ["step_000002-a1"] and trainer.trained == [3, 4, 5, 6]
    lineage = read_lineage(run, paths)
    assert [lineage.steps[step].batch_id for step in range(1, 7)] == [
        "b1.o1",
        "b2.o1",
        *(f"b{step}.o3" for step in range(3, 7)),
    ]
    assert lineage.knows(Version(3, 1)) and Version(3, 1) not in lineage.published
    assert lineage.published_at(3) is not None and lineage.newest_published.version == (6, 3)  # type: ignore[union-attr]


# --- verify ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cluster = started(tmp_path_factory.mktemp("verify") / "run")
    give_up(cluster, step=5, lost=5)
    cluster.roll_back()
    finish(cluster)
    return cluster.paths.root


def record_changed(**changes: object) -> Callable[[Path], None]:
    """In the file and in its copy."""

    def falsify(root: Path) -> None:
        path = root / "supervisor" / "rollback-001.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        for segment in (root / "supervisor/journal").glob("a*.journal"):
            edit_records(segment, lambda records: [record.update(changes) for record in of_kind(records, "rollback")])

    return falsify


def file_removed(root: Path) -> None:
    (root / "supervisor" / "rollback-001.json").unlink()


def file_changed(root: Path) -> None:
    path = root / "supervisor" / "rollback-001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"missing": "nothing"}))


def orchestrators_records(root: Path, edit: Callable[[list[Record]], None]) -> None:
    """In the newest journal with work in it, and the completion record made to fit by leaving it out."""
    *_, newest = sorted((root / "orchestrator/journal").glob("a*.journal"))
    edit_records(newest, edit)


def drop_removed(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        records.remove(next(record for record in of_kind(records, "drop") if record["reason"] == "rolled_back"))

    orchestrators_records(root, edit)


def reason_polished(root: Path) -> None:
    """A group of a voided batch is said to be dropped for another reason."""

    def edit(records: list[Record]) -> None:
        next(record for record in of_kind(records, "drop") if record["reason"] == "rolled_back")["reason"] = "stale"

    orchestrators_records(root, edit)


def another_group_rolled_back(root: Path) -> None:
    """A group that was trained, of a batch that nobody took back."""

    def edit(records: list[Record]) -> None:
        group_id = of_kind(records, "batch")[-1]["groups"][0]["group_id"]
        records.insert(-1, {"kind": "drop", "group_id": group_id, "reason": "rolled_back", "detail": ""})

    orchestrators_records(root, edit)


def age_polished(root: Path) -> None:
    """A trained trajectory is made one version younger than its way through the fork."""

    def edit(records: list[Record]) -> None:
        for group in of_kind(records, "batch")[0]["groups"]:
            for member in group["members"]:
                member["oldest_step"] += 1

    orchestrators_records(root, edit)


CASES = [
    (file_removed, "rollback"),
    (file_removed, "manifest_digest"),
    (file_changed, "rollback"),
    (record_changed(step=2), "rollback"),
    (record_changed(step=4), "rollback"),
    (record_changed(last_step=9), "rollback"),
    (record_changed(groups=1), "rollback"),
    (drop_removed, "rolled_back"),
    (reason_polished, "rolled_back"),
    (another_group_rolled_back, "rolled_back"),
    (age_polished, "staleness"),
]


@pytest.mark.parametrize(("falsify", "kind"), CASES, ids=[f"{index}-{case[1]}" for index, case in enumerate(CASES)])
def test_a_falsified_rollback_is_named(rolled_back: Path, tmp_path: Path, falsify: Callable[[Path], None], kind: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(rolled_back, copy)
    falsify(copy)
    found = {fault.kind for fault in verify_run(copy).faults}
    assert kind in found, f"found only {found}"


def test_a_version_that_is_served_after_it_was_abandoned_is_named(rolled_back: Path, tmp_path: Path) -> None:
    """The step records stay; a row of a later replica says that an abandoned version sampled it."""
    copy = tmp_path / "copy"
    shutil.copytree(rolled_back, copy)
    *_, newest = sorted((copy / "trajectories/rollout-0/manifest").glob("a*.journal"))

    def edit(records: list[Record]) -> None:
        of_kind(records, "shard")[0]["rows"][0]["versions"] = [[4, 1]]

    edit_records(newest, edit)
    assert "abandoned_version" in {fault.kind for fault in verify_run(copy).faults}


def test_the_summary_says_what_was_rolled_back(rolled_back: Path) -> None:
    run, paths = read_run(rolled_back)
    ledger = read_ledger(run, paths)
    summary = summarize(ledger, paths)
    (told,) = summary["rollbacks"]
    assert told["step"] == 3 and "batch 5" in told["missing"] and told["groups"] == summary["groups"]["dropped"]["rolled_back"]
    assert summary["state"] == "COMPLETED" and summary["steps"] == RECIPE.steps
    assert summary["groups"]["issued"] == summary["groups"]["trained"] + sum(summary["groups"]["dropped"].values())
    assert ledger.incidents[-1].what == "rolled_back"
    assert all(isinstance(record, StepDone) is False or record.step > 3 for record in ledger.steps.abandoned)
