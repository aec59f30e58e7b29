"""The learner against its own deaths (I7, I8): whatever is cut off, the accepted lineage ends with the same bytes."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from miles_core.errors import DeadlineExceeded, LeaseLost, MilesError, NeedsRollback
from miles_core.learner.checkpoints import newest_valid
from miles_core.learner.consume import check_batch
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import read_version
from miles_core.policy.reader import check_probe
from miles_core.recipe import LearnerSpec, OrchestratorSpec, RewardScalerSpec
from miles_core.records import Cut, Done, Published, StepDone, Version, digest_record
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import EXIT_CODE, VARIABLE
from miles_core.store.follow import Delivered
from miles_core.store.fs import FileSystem
from miles_core.store.journal import encode_frame, segment_name
from miles_core.trajectories.schema import VersionRun
from miles_core.trajectories.shards import encode_shard
from tests.protocol.learner_run import (
    PROBE,
    STEPS,
    FakeOrchestrator,
    FakeTrainer,
    digests,
    learner_context,
    make_rows,
    make_run,
    metric_points,
    read_lineage,
    run_learner,
)

Run = tuple[RunConfig, RunPaths]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[RunConfig, RunPaths, FakeOrchestrator]:
    run, paths = make_run(tmp_path / "run")
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all()
    return run, paths, orchestrator


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Weights digests of a run in which nothing happened."""
    run, paths = make_run(tmp_path_factory.mktemp("uncrashed") / "run")
    FakeOrchestrator(run, paths).write_all()
    run_learner(run, paths)
    return digests(read_lineage(run, paths))


def crash(run: RunConfig, paths: RunPaths, where: str, attempt: int = 1) -> None:
    """Runs a learner in a child process that ends at the named point, as by SIGKILL."""

    def child() -> None:
        os.environ[VARIABLE] = f"learner:{where}:{attempt}"
        run_learner(run, paths, attempt)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == EXIT_CODE, f"the learner ended with {process.exitcode} instead of crashing at {where}"


def done(paths: RunPaths) -> Done:
    return Done.model_validate_json(paths.done("learner-0").read_bytes())


def assert_complete(run: RunConfig, paths: RunPaths, expected: dict[int, str], attempt: int) -> None:
    """K accepted steps with the expected weights, one batch each, and a last version that loads and answers its probe."""
    lineage = read_lineage(run, paths)
    assert digests(lineage) == expected
    assert [lineage.steps[step].batch_id for step in range(1, STEPS + 1)] == [f"b{step}.o1" for step in range(1, STEPS + 1)]
    newest = lineage.newest_published
    assert newest is not None and newest.version == (STEPS, attempt) and newest.weights_digest == expected[STEPS]
    assert all(lineage.knows(version) for version in lineage.published)
    _, manifest = read_version(paths, run.run_id, newest, lineage)
    assert manifest.learner_token == f"token-l{attempt}" and manifest.probe.prompts == PROBE
    assert done(paths).outcome == "completed" and done(paths).attempt == attempt


def test_a_run_without_faults_trains_every_batch_once_and_publishes_every_version(prepared):
    run, paths, orchestrator = prepared
    trainer = run_learner(run, paths)
    assert trainer.trained == [1, 2, 3, 4, 5, 6]
    lineage = read_lineage(run, paths)
    assert sorted(lineage.published) == [(step, 1) for step in range(STEPS + 1)]
    assert [step.staleness for step in lineage.steps.values()] == [0, 0, 1, 2, 3, 4, 5]
    assert not any(record.replay for record in lineage.steps.values())
    assert lineage.steps[3].manifest_digest == digest_record(orchestrator.batch(3))
    assert lineage.steps[3].mean_reward == 0.5
    assert lineage.steps[3].metrics.keys() == {"loss", "grad_norm"}
    assert sorted(lineage.checkpoints) == [(2, 1), (4, 1), (6, 1)]
    tensors, manifest = read_version(paths, run.run_id, lineage.published[Version(STEPS, 1)], lineage)
    assert tensors["model.b.weight"].reshape(-1).tolist() == trainer.weights.tolist()
    assert check_probe(manifest, trainer.logprobs([list(prompt) for prompt in PROBE])) == 0.0
    assert len(set(digests(lineage).values())) > STEPS // 2


def test_the_same_inputs_give_the_same_bytes(tmp_path, uncrashed):
    run, paths = make_run(tmp_path / "again")
    FakeOrchestrator(run, paths).write_all()
    run_learner(run, paths)
    assert_complete(run, paths, uncrashed, attempt=1)


CRASHES = [
    f"{name}:{step}"
    for name in ("before_train", "after_train", "after_step_record", "after_publish_data", "after_publish")
    for step in (3, 6)
] + ["after_step_record:0", "after_publish_data:0", "after_publish:0", "after_checkpoint:4", "after_checkpoint:6"]


@pytest.mark.parametrize("where", CRASHES)
def test_a_successor_ends_with_the_bytes_of_an_uncrashed_run(prepared, uncrashed, where):
    run, paths, _ = prepared
    crash(run, paths, where)
    name, _, step = where.partition(":")
    left = read_lineage(run, paths)
    assert left.newest_step == int(step) - (name in ("before_train", "after_train"))
    run_learner(run, paths, attempt=2)
    assert_complete(run, paths, uncrashed, attempt=2)
    lineage = read_lineage(run, paths)
    assert lineage.published_at(left.newest_step).version.attempt == 2
    assert all(point["bit_exact"] for point in metric_points(paths, 2, "replay"))


def test_a_replay_does_not_publish_and_marks_its_records(prepared):
    run, paths, _ = prepared
    crash(run, paths, "after_step_record:5")
    trainer = run_learner(run, paths, attempt=2)
    assert trainer.loaded == ["step_000004-a1"]
    assert trainer.trained == [5, 6]
    lineage = read_lineage(run, paths)
    assert {step: record.replay for step, record in lineage.steps.items() if lineage.attempts[step] == 2} == {5: True, 6: False}
    assert [version for version in sorted(lineage.published) if version.attempt == 2] == [(5, 2), (6, 2)]


def test_three_deaths_in_a_row(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_step_record:3")
    crash(run, paths, "after_train:3", attempt=2)
    crash(run, paths, "before_train:6", attempt=3)
    run_learner(run, paths, attempt=4)
    assert_complete(run, paths, uncrashed, attempt=4)


def test_an_attempt_that_died_before_its_first_record_is_passed_over(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_publish:2")
    context = learner_context(run, paths, attempt=2)
    context.start()
    context.journal()
    context.stop()
    run_learner(run, paths, attempt=3)
    assert_complete(run, paths, uncrashed, attempt=3)


def test_a_checkpoint_with_other_bytes_is_never_loaded(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_step_record:5")
    torn = paths.checkpoint(4, 1) / "zero" / "momentum.npy"
    torn.write_bytes(torn.read_bytes()[:-1])
    trainer = run_learner(run, paths, attempt=2)
    assert trainer.loaded == ["step_000002-a1"]
    assert trainer.trained == [3, 4, 5, 6]
    assert_complete(run, paths, uncrashed, attempt=2)


def test_without_a_usable_checkpoint_the_base_model_is_the_start(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_publish:4")
    (paths.checkpoint(2, 1) / "planted.pkl").write_bytes(b"cos\nsystem\n")
    trainer = run_learner(run, paths, attempt=2)
    assert trainer.loaded == [] and trainer.trained == [1, 2, 3, 4, 5, 6]
    assert_complete(run, paths, uncrashed, attempt=2)


def test_a_step_that_replays_to_other_bytes_is_reported_and_counts(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_step_record:5")
    run_learner(run, paths, attempt=2, trainer=FakeTrainer(noise=0.5))
    lineage = read_lineage(run, paths)
    assert lineage.newest_step == STEPS and digests(lineage)[5] != uncrashed[5]
    assert [(point["step"], point["bit_exact"]) for point in metric_points(paths, 2, "replay")] == [(5, False)]
    assert lineage.published_at(5).weights_digest == digests(lineage)[5]


def test_records_of_a_zombie_count_for_nobody(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "after_publish:3")
    run_learner(run, paths, attempt=2)
    segment = paths.journal("learner-0") / segment_name(1, 0)
    ghost = Version(4, 1)
    step = StepDone(step=4, batch_id="b4.o1", manifest_digest="x", weights_digest="ghost", staleness=0, mean_reward=1.0)
    published = Published(version=ghost, weights_digest="ghost", folder="policy", manifest_digest="x", size_bytes=1)
    for record in (step, published):
        FileSystem().append(segment, encode_frame(record.model_dump_json().encode()))
    lineage = read_lineage(run, paths)
    assert not lineage.knows(ghost) and ghost not in lineage.published
    assert_complete(run, paths, uncrashed, attempt=2)


def test_a_zombie_in_the_middle_of_a_step_leaves_without_a_record(prepared, uncrashed):
    run, paths, _ = prepared
    context = learner_context(run, paths)
    successor = learner_context(run, paths, attempt=2)

    def be_replaced(step: int) -> None:
        if step == 3:
            successor.start()
            assert context.leave.wait(30), "the heartbeat did not notice the newer lease"

    with pytest.raises(LeaseLost, match="superseded by attempt 2"):
        run_learner(run, paths, trainer=FakeTrainer(on_train=be_replaced), context=context)
    successor.stop()
    run_learner(run, paths, attempt=3)
    assert_complete(run, paths, uncrashed, attempt=3)
    assert metric_points(paths, 3, "replay")[-1]["step"] == 2


def leaving_at(step: int, context: RoleContext) -> FakeTrainer:
    """A trainer in whose step the signal to leave arrives."""
    return FakeTrainer(on_train=lambda trained: context.leave.set() if trained == step else None)


def test_asked_to_leave_it_finishes_the_step_saves_and_leaves_without_a_completion_record(prepared, uncrashed):
    run, paths, _ = prepared
    context = learner_context(run, paths)
    run_learner(run, paths, context=context, trainer=leaving_at(3, context))
    assert not paths.done("learner-0").exists()
    lineage = read_lineage(run, paths)
    assert lineage.newest_step == 3 and (3, 1) in lineage.published and (3, 1) in lineage.checkpoints
    trainer = run_learner(run, paths, attempt=2)
    assert trainer.loaded == ["step_000003-a1"] and trainer.trained == [4, 5, 6]
    assert read_lineage(run, paths).knows(Version(3, 2))
    assert_complete(run, paths, uncrashed, attempt=2)


def test_asked_to_leave_while_it_waits_it_leaves(tmp_path):
    run, paths = make_run(tmp_path / "run")
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all(steps=1)
    context = learner_context(run, paths)
    thread = threading.Thread(target=run_learner, args=(run, paths), kwargs={"context": context})
    thread.start()
    deadline = time.monotonic() + 30
    while context.state != "waiting: batch 2" and time.monotonic() < deadline:
        time.sleep(0.01)
    context.leave.set()
    thread.join(30)
    assert not thread.is_alive() and (1, 1) in read_lineage(run, paths).checkpoints


def test_asked_to_leave_in_the_middle_of_a_replay_it_keeps_what_was_replayed(prepared, uncrashed):
    run, paths, _ = prepared
    crash(run, paths, "before_train:6")
    for folder in (paths.checkpoint(4, 1), paths.checkpoint(2, 1)):
        (folder / "weights.npy").unlink()
    context = learner_context(run, paths, attempt=2)
    run_learner(run, paths, context=context, trainer=leaving_at(3, context))
    lineage = read_lineage(run, paths)
    assert [version for version in lineage.published if version.attempt == 2] == []
    assert Version(3, 2) in lineage.checkpoints
    trainer = run_learner(run, paths, attempt=3)
    assert trainer.loaded == ["step_000003-a2"] and trainer.trained == [4, 5, 6]
    assert_complete(run, paths, uncrashed, attempt=3)


def assert_needs_rollback(run: RunConfig, paths: RunPaths, attempt: int, missing: str) -> None:
    with pytest.raises(NeedsRollback, match=missing):
        run_learner(run, paths, attempt)
    assert done(paths).outcome == "needs_rollback" and missing in done(paths).detail


def test_a_missing_shard_needs_a_rollback(prepared):
    run, paths, orchestrator = prepared
    crash(run, paths, "after_step_record:5")
    orchestrator.shard(5).unlink()
    assert_needs_rollback(run, paths, 2, str(paths.relative(orchestrator.shard(5))))
    assert read_lineage(run, paths).published_at(5) is None


def test_what_is_in_hand_is_saved_before_it_gives_up(prepared):
    run, paths, orchestrator = prepared
    orchestrator.shard(6).unlink()
    assert_needs_rollback(run, paths, 1, "batch 6")
    lineage = read_lineage(run, paths)
    found = newest_valid(paths, lineage)
    assert found is not None and found[0].step == lineage.newest_step == 5


def test_a_changed_shard_needs_a_rollback_also_before_it_was_ever_trained(prepared):
    run, paths, orchestrator = prepared
    rows = [dataclasses.replace(row, temperature=0.5) for row in make_rows(3, (VersionRun(2, 0, 1),))]
    orchestrator.shard(3).write_bytes(encode_shard(rows))
    assert_needs_rollback(run, paths, 1, "batch 3")
    assert read_lineage(run, paths).newest_step == 2


def test_a_batch_that_is_gone_needs_a_rollback(prepared):
    run, paths, orchestrator = prepared
    crash(run, paths, "after_step_record:5")
    position, stream_hash = orchestrator.ends[4]
    cut = Cut(writer="orchestrator-0", attempt=1, bytes=position, hash=stream_hash)
    FakeOrchestrator(run, paths, attempt=2, cuts=(cut,))
    assert_needs_rollback(run, paths, 2, "batch 5")


def test_another_batch_in_the_place_of_a_trained_one_needs_a_rollback(prepared):
    run, paths, orchestrator = prepared
    crash(run, paths, "after_step_record:5")
    position, stream_hash = orchestrator.ends[4]
    cut = Cut(writer="orchestrator-0", attempt=1, bytes=position, hash=stream_hash)
    successor = FakeOrchestrator(run, paths, attempt=2, cuts=(cut,))
    successor.write(successor.batch(5, batch_id="b5.o2"))
    assert_needs_rollback(run, paths, 2, "b5.o2")


def test_batches_of_a_later_orchestrator_go_on_where_its_cut_ends(tmp_path, uncrashed):
    run, paths = make_run(tmp_path / "run")
    first = FakeOrchestrator(run, paths)
    first.write_all(steps=4)
    position, stream_hash = first.ends[2]
    cut = Cut(writer="orchestrator-0", attempt=1, bytes=position, hash=stream_hash)
    second = FakeOrchestrator(run, paths, attempt=2, cuts=(cut,))
    for step in range(3, STEPS + 1):
        second.write(second.batch(step, batch_id=f"b{step}.o2"))
    run_learner(run, paths)
    lineage = read_lineage(run, paths)
    assert [lineage.steps[step].batch_id for step in range(1, 5)] == ["b1.o1", "b2.o1", "b3.o2", "b4.o2"]
    assert digests(lineage) == uncrashed


def test_two_accepted_batches_of_one_step_are_a_fault(tmp_path):
    run, paths = make_run(tmp_path / "run")
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all(steps=2)
    orchestrator.write(orchestrator.batch(2, batch_id="b2.o9"))
    with pytest.raises(MilesError, match=r"two accepted batches of step 2: b2\.o1 and b2\.o9"):
        run_learner(run, paths)


def test_a_run_that_ended_without_the_batch_is_a_fault(tmp_path):
    run, paths = make_run(tmp_path / "run")
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all(steps=2)
    orchestrator.end(steps=2)
    with pytest.raises(MilesError, match="without batch 3"):
        run_learner(run, paths)


@pytest.mark.parametrize(
    ("versions", "changes", "fault"),
    [
        ((VersionRun(2, 0, 1),), {"staleness": 1}, "staleness 2 by the rows, 1 by the batch"),
        ((VersionRun(2, 2, 7),), {}, r"no accepted step made version \(2, 7\)"),
        ((VersionRun(2, 3, 1),), {}, r"no accepted step made version \(3, 1\)"),
    ],
)
def test_a_batch_that_contradicts_its_rows_is_a_fault_and_is_not_trained(tmp_path, versions, changes, fault):
    run, paths = make_run(tmp_path / "run")
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all(steps=2)
    orchestrator.write(orchestrator.batch(3, versions=versions, **changes))
    with pytest.raises(MilesError, match=fault):
        run_learner(run, paths)
    assert read_lineage(run, paths).newest_step == 2


def test_staleness_over_the_bound_is_a_fault(tmp_path):
    run, paths = make_run(tmp_path / "run", orchestrator=OrchestratorSpec(prompts=2, samples=2, max_staleness=2))
    FakeOrchestrator(run, paths).write_all()
    with pytest.raises(MilesError, match="staleness 3 by the rows, 3 by the batch, bound 2"):
        run_learner(run, paths)


def lineage_of(*versions: Version) -> Lineage:
    lineage = Lineage()
    for step, attempt in versions:
        record = StepDone(step=step, batch_id="", manifest_digest="", weights_digest="", staleness=0, mean_reward=0)
        lineage.fold(Delivered(attempt, 0, record))
    return lineage


def test_rows_of_mixed_versions_count_by_their_oldest(tmp_path):
    run, paths = make_run(tmp_path / "run")
    versions = (VersionRun(2, 1, 1), VersionRun(3, 3, 2))
    batch = FakeOrchestrator(run, paths).batch(5, versions=versions)
    rows = make_rows(5, versions)
    check_batch(batch, rows, lineage_of(Version(1, 1), Version(3, 2)), bound=3)
    with pytest.raises(MilesError, match="staleness 3 by the rows, 3 by the batch, bound 2"):
        check_batch(batch, rows, lineage_of(Version(1, 1), Version(3, 2)), bound=2)
    with pytest.raises(MilesError, match="oldest version is of step 0, the batch says 1"):
        check_batch(batch, make_rows(5, (VersionRun(2, 0, 1),)), lineage_of(Version(0, 1)), bound=5)
    with pytest.raises(MilesError, match=r"is g10.o1/1@rollout-0.a1 of g10.o1, not g10.o1/0@rollout-0.a1"):
        check_batch(batch, [rows[1], rows[0], *rows[2:]], lineage_of(Version(1, 1), Version(3, 2)), bound=3)


class FullDisk(FileSystem):
    """Refuses some writes below one folder."""

    def __init__(self, below: str, refusals: int) -> None:
        self.below, self.refusals = below, refusals

    def append(self, path: Path, data: bytes) -> None:
        if self.below in path.parts and self.refusals > 0:
            self.refusals -= 1
            super().append(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().append(path, data)


@pytest.mark.parametrize("below", ["policy", "learner"])
def test_a_full_disk_is_waited_for(prepared, uncrashed, below):
    run, paths, _ = prepared
    disk = FullDisk(below, refusals=0)
    context = learner_context(run, paths, fs=disk)

    def fill(step: int) -> None:
        disk.refusals = 2 if step == 3 else disk.refusals

    run_learner(run, paths, context=context, trainer=FakeTrainer(on_train=fill))
    assert disk.refusals == 0
    assert_complete(run, paths, uncrashed, attempt=1)


def test_a_disk_that_stays_full_ends_the_wait(prepared):
    run, paths, _ = prepared
    run = run.model_copy(update={"timing": run.timing.model_copy(update={"orphan_s": 0.3})})
    disk = FullDisk("policy", refusals=1_000_000)
    with pytest.raises(DeadlineExceeded, match="publishing version"):
        run_learner(run, paths, context=learner_context(run, paths, fs=disk))
    assert read_lineage(run, paths).published == {}


def test_a_step_with_a_loss_that_is_no_number_is_not_recorded(prepared):
    run, paths, _ = prepared

    class Diverging(FakeTrainer):
        def train(self, trajectories, advantages, step, staleness, kl_weights):
            metrics = super().train(trajectories, advantages, step, staleness, kl_weights)
            return metrics | ({"loss": float("nan")} if step == 2 else {})

    with pytest.raises(MilesError, match=r"step 2 .*nan"):
        run_learner(run, paths, trainer=Diverging())
    assert read_lineage(run, paths).newest_step == 1


def test_a_successor_scales_rewards_as_its_predecessor_did(tmp_path):
    """The reward scaler's windows are in no checkpoint: they come from the batches of the orchestrator's journal."""
    learner = LearnerSpec(checkpoint_every=2, advantage="group_mean", reward_scaler=RewardScalerSpec(short=8, long=12))
    runs = [make_run(tmp_path / name, learner=learner) for name in ("straight", "crashed")]
    for run, paths in runs:
        FakeOrchestrator(run, paths).write_all()
    (straight, straight_paths), (crashed, crashed_paths) = runs
    run_learner(straight, straight_paths)
    crash(crashed, crashed_paths, "after_train:5")
    run_learner(crashed, crashed_paths, 2)
    expected = read_lineage(straight, straight_paths)
    assert_complete(crashed, crashed_paths, digests(expected), 2)
    assert expected.steps[6].metrics["reward_var_after"] > expected.steps[6].metrics["reward_var_before"] > 0
    assert read_lineage(crashed, crashed_paths).steps[6].metrics == expected.steps[6].metrics
    assert expected.steps[6].mean_reward == 0.5


def test_the_pull_to_the_base_model_grows_with_the_staleness_of_the_batch(prepared):
    """Batch k was sampled by the base model, so its staleness is k - 1; a replay has the same."""
    run, paths, _ = prepared
    learner = run.recipe.learner.model_copy(update={"kl_coef": 0.1, "staleness_pull": 0.5})
    run = run.model_copy(update={"recipe": run.recipe.model_copy(update={"learner": learner})})
    seen = {}

    class Listening(FakeTrainer):
        def train(self, trajectories, advantages, step, staleness, kl_weights):
            seen[step] = kl_weights
            return super().train(trajectories, advantages, step, staleness, kl_weights)

    run_learner(run, paths, trainer=Listening())
    assert seen[1] is None
    assert [seen[step].tolist() for step in (2, 3, 6)] == [[1.5] * 4, [2.0] * 4, [3.5] * 4]
    steps = read_lineage(run, paths).steps
    assert [steps[step].metrics["kl_coef"] for step in (1, 3)] == pytest.approx([0.1, 0.2])
