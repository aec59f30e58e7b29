"""The collector (I12): only what retired, recorded before the bytes go, taken up by a successor."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.collector import MOST_A_TICK, MOST_REFUSED, READING_CAP_S, Collector, remove_object
from cluster.epoch import WRITER, supervisor_context
from miles_core.errors import DigestMismatch, LeaseLost
from miles_core.paths import RunPaths
from miles_core.policy.manifest import MANIFEST_NAME, PolicyManifest
from miles_core.recipe import RetentionSpec
from miles_core.records import (
    Cuts,
    Deletion,
    Drop,
    EvaluationPoint,
    GroupIssued,
    Published,
    Rollback,
    ShardEntry,
    ShardSealed,
    Version,
)
from miles_core.rollout.worker import PolicyFeed
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder, read_heartbeat
from miles_core.store.publish import publish_exclusive
from miles_core.tracking.ledger import read_all
from tests.protocol.learner_run import STEPS, FakeOrchestrator, learner_context, make_run, read_lineage, run_learner
from tests.unit.fake_slurm import ManualClock
from tests.unit.supervised_site import Site

Run = tuple[RunConfig, RunPaths]


class Epoch:
    """A supervisor as far as the collector needs one: its lease, its journal, a clock."""

    def __init__(
        self, run: Run, epoch: int = 1, remove: Callable[[Path], None] = remove_object, fs: FileSystem | None = None
    ) -> None:
        self.clock = ManualClock()
        made = supervisor_context(*run, epoch)
        self.context = RoleContext(*run, WRITER, epoch, token=made.token, fs=fs, clock=self.clock, sleep=self.clock.sleep)
        self.context.leases.acquire(WRITER, epoch, made.token)
        predecessors = read_all(self.context.reading, self.context.paths.journal(WRITER))
        self.journal = self.context.journal()
        self.journal.write(Cuts())
        self.collector = Collector(self.context, self.record, remove=remove)
        for record in predecessors:
            if isinstance(record, Deletion):
                self.collector.fold(record)

    def record(self, deletion: Deletion) -> None:
        self.journal.write(deletion)

    def tick(self, *reading: Version, seconds: float = 1.0) -> None:
        self.clock.sleep(seconds)
        self.collector.tick(reading)

    def settle(self, *reading: Version) -> None:
        """A few ticks: a deletion may free what another waits for."""
        for _ in range(4):
            self.tick(*reading)


def deletions(run: Run) -> list[str]:
    """Names of all that any epoch recorded, in order."""
    context = supervisor_context(*run, 0)
    records = read_all(context.reading, context.paths.journal(WRITER))
    return [item.name for record in records if isinstance(record, Deletion) for item in record.items]


def versions_on_disk(run: Run) -> list[tuple[int, int]]:
    """(step, attempt) of every version folder."""
    return sorted((int(path.name[1:7]), int(path.name[9:])) for path in run[1].root.glob("policy/*/v*"))


def checkpoints_on_disk(run: Run) -> list[str]:
    return sorted(path.name for path in run[1].checkpoints.glob("step_*"))


def evaluated(run: Run, *steps: int) -> None:
    """The evaluator's points."""
    config, paths = run
    context = RoleContext(config, paths, "evaluator-0", 1, token="token-e")
    context.leases.acquire("evaluator-0", 1, "token-e")
    journal = context.journal()
    journal.write(Cuts())
    for step in steps:
        journal.write(
            EvaluationPoint(version=Version(step, 1), weights_digest="w", num_problems=5, greedy_score=0.5, seconds=1.0)
        )


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    """A real learner's run: versions 0 to 6, all full, checkpoints of steps 2, 4 and 6; nothing was evaluated."""
    run = make_run(tmp_path / "run")
    FakeOrchestrator(*run).write_all()
    run_learner(*run)
    return run


# --- what goes and what stays ----------------------------------------------------------------------------------------


def test_two_full_versions_and_two_checkpoints_stay(trained: Run) -> None:
    evaluated(trained, 0)
    Epoch(trained).settle()
    assert versions_on_disk(trained) == [(STEPS - 1, 1), (STEPS, 1)]
    assert checkpoints_on_disk(trained) == ["step_000004-a1", "step_000006-a1"]
    assert len(deletions(trained)) == len(set(deletions(trained))) == STEPS - 1 + 1


def test_what_the_evaluator_still_has_to_look_at_stays(trained: Run) -> None:
    epoch = Epoch(trained)
    epoch.settle()
    assert versions_on_disk(trained) == [(0, 1), (STEPS - 1, 1), (STEPS, 1)]
    evaluated(trained, 0)
    epoch.settle()
    assert versions_on_disk(trained) == [(STEPS - 1, 1), (STEPS, 1)]


def test_a_version_that_is_read_stays_for_a_while(trained: Run) -> None:
    evaluated(trained, 0)
    epoch = Epoch(trained)
    epoch.settle(Version(3, 1), Version(99, 1))
    assert (3, 1) in versions_on_disk(trained) and (2, 1) not in versions_on_disk(trained)
    epoch.tick(Version(3, 1), seconds=READING_CAP_S - 10)
    assert (3, 1) in versions_on_disk(trained)
    epoch.tick(Version(3, 1), seconds=20)
    assert (3, 1) not in versions_on_disk(trained)


def test_a_reader_that_arrived_frees_its_version(trained: Run) -> None:
    evaluated(trained, 0)
    epoch = Epoch(trained)
    epoch.settle(Version(3, 1))
    epoch.tick()
    assert versions_on_disk(trained) == [(STEPS - 1, 1), (STEPS, 1)]


def test_a_checkpoint_that_lost_a_file_does_not_count(trained: Run) -> None:
    (trained[1].checkpoint(6, 1) / "weights.npy").unlink()
    Epoch(trained).settle()
    assert checkpoints_on_disk(trained) == ["step_000002-a1", "step_000004-a1", "step_000006-a1"]


def test_a_recovery_after_the_collector_is_bit_exact(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the older one is still there."""
    runs = [make_run(tmp_path / name) for name in ("collected", "untouched")]
    for run in runs:
        FakeOrchestrator(*run).write_all()
        context = learner_context(*run)
        run_learner(*run, context=context)
        run[1].done("learner-0").unlink()
    Epoch(runs[0]).settle()
    for run in runs:
        (run[1].checkpoint(6, 1) / "weights.npy").unlink()
        assert run_learner(*run, attempt=2).loaded == ["step_000004-a1"]
    newest = [read_lineage(*run).newest_published for run in runs]
    assert newest[0] is not None and newest[0] == newest[1]


@pytest.mark.parametrize("spec", [RetentionSpec(versions=False, checkpoints=3), RetentionSpec(checkpoints=3)])
def test_the_recipe_says_what_goes(tmp_path: Path, spec: RetentionSpec) -> None:
    run = make_run(tmp_path / "run", retention=spec)
    FakeOrchestrator(*run).write_all()
    run_learner(*run)
    evaluated(run, 0)
    Epoch(run).settle()
    assert len(versions_on_disk(run)) == (2 if spec.versions else STEPS + 1)
    assert len(checkpoints_on_disk(run)) == 3


def test_a_folder_that_is_not_where_it_belongs_is_nobodys_to_delete(trained: Run) -> None:
    _, paths = trained
    journal = JournalWriter(
        FileSystem(), paths.journal("learner-0"), run_id="tiny-1", writer="learner-0", attempt=2, token="token-l2"
    )
    LeaseFolder(FileSystem(), paths.leases, "tiny-1").acquire("learner-0", 2, "token-l2")
    journal.write(Cuts())
    for step, folder in enumerate(("", "base_model", "../elsewhere", "policy/000/v000009-a9", "policy")):
        published = Published(version=Version(step, 2), weights_digest="", folder=folder, manifest_digest="", size_bytes=1)
        journal.write(published)
    Epoch(trained).settle()
    assert deletions(trained) == [] and paths.root.is_dir()


# --- who reads -------------------------------------------------------------------------------------------------------


class OpenEngine:
    """Takes any weights."""

    version = Version(-1, 0)

    def load_weights(self, tensors: object, version: Version) -> None:
        self.version = version

    def logprobs(self, token_lists: list[list[int]]) -> list[list[float]]:
        raise DigestMismatch("no model here")


def test_a_replica_says_what_it_reads_while_it_reads(trained: Run) -> None:
    context = RoleContext(*trained, "rollout-0", 1, clock=ManualClock())
    said: list[Version | None] = []

    def read(published: Published) -> tuple[dict[str, object], PolicyManifest]:
        context.fs.mkdir(context.paths.heartbeats)
        context.beat()
        heartbeat = read_heartbeat(context.fs, context.paths.heartbeats, "rollout-0", 1)
        said.append(None if heartbeat is None or heartbeat.reading is None else Version(*heartbeat.reading))
        return {}, PolicyManifest.model_validate_json((context.paths.resolve(published.folder) / MANIFEST_NAME).read_bytes())

    feed = PolicyFeed(context, OpenEngine(), read)  # type: ignore[arg-type]
    for _ in range(3):
        feed.poll()
    assert said == [Version(STEPS, 1)] and context.reads is None


def test_a_replica_behind_a_rollback_waits_for_a_learner_that_queues(trained: Run) -> None:
    """Back to 4, whose version was collected while 5 and 6 were the newest. The learner publishes anew when it comes."""
    run, paths = trained
    evaluated(trained, 0)
    Epoch(trained).settle()
    rollback = Rollback(
        number=1, step=4, last_step=STEPS, groups=0, missing="x", attempts={"learner-0": 2, "orchestrator-0": 2}, unix_s=0.0
    )
    publish_exclusive(FileSystem(), paths.rollback(1), rollback.model_dump_json().encode())
    clock = ManualClock()
    feed = PolicyFeed(RoleContext(run, paths, "rollout-0", 3, clock=clock), OpenEngine())  # type: ignore[arg-type]
    while clock() < 10 * run.timing.stall_s:
        feed.poll()
        clock.sleep(60.0)
    assert feed.version is None and feed.waiting.startswith("waiting: policy version (4, 1)")


def test_the_supervisor_deletes_and_waits_for_those_who_read(tmp_path: Path) -> None:
    """The whole way: a table that the orchestrator wrote, the supervisor's loop, the folder, the record."""
    site = Site(tmp_path / "run")
    site.train(0)
    for step in range(6):
        folder, version = site.paths.version(step, 1), Version(step, 1)
        folder.mkdir(parents=True)
        assert site._learner is not None
        name = site.paths.relative(folder)
        site._learner.write(Published(version=version, weights_digest="", folder=name, manifest_digest="m", size_bytes=1))
    site.reading["rollout-0"] = Version(2, 1)
    run = (site.run, site.paths)
    site.run_until(site.supervisor(), lambda: versions_on_disk(run) == [(0, 1), (2, 1), (4, 1), (5, 1)])
    site.reading.clear()
    site.run_until(site.supervisor(), lambda: versions_on_disk(run) == [(0, 1), (4, 1), (5, 1)])
    assert len(deletions(run)) == 3


# --- shards ----------------------------------------------------------------------------------------------------------


def seal(run: Run, name: str, *groups: str, attempt: int = 1) -> Path:
    """A shard of rollout-0 with a row of each group."""
    config, paths = run
    path = paths.root / "trajectories/rollout-0/000" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"rows")
    rows = tuple(
        ShardEntry(
            trajectory_id=f"{group}/0@rollout-0.a{attempt}", sample_id=f"{group}/0", group_id=group, order_id="w1.o1", row=row,
            status="complete", versions=(Version(0, 1),), num_tokens=4, num_sampled_tokens=2,
        )
        for row, group in enumerate(groups)
    )  # fmt: skip
    journal = JournalWriter(
        FileSystem(), paths.journal("rollout-0"), run_id=config.run_id, writer="rollout-0", attempt=attempt, token="t"
    )
    journal.write(ShardSealed(path=paths.relative(path), size_bytes=4, digest=name, rows=rows))
    return path


def test_shards_go_behind_two_checkpoints_once_all_their_groups_are_settled(tmp_path: Path) -> None:
    """Batch k is of groups 2k and 2k + 1; checkpoints 4 and 6 stay, so a recovery needs groups from 10 on, and open ones."""
    run = make_run(tmp_path / "run", retention=RetentionSpec(trajectories="after_two_checkpoints"))
    orchestrator = FakeOrchestrator(*run)
    for number in range(1, 14):
        orchestrator.journal.append(GroupIssued(group_id=f"g{number}.o1", task_seed=1, num_samples=2))
    orchestrator.write_all()
    run_learner(*run)
    settled = seal(run, "a1-000900.arrow", "g2.o1", "g7.o1", attempt=1)
    mixed = seal(run, "a2-000001.arrow", "g3.o1", "g10.o1", attempt=2)
    late = seal(run, "a3-000001.arrow", "g9.o1", attempt=3)
    newest = seal(run, "a4-000001.arrow", "g12.o1", attempt=4)
    Epoch(run).settle()
    assert settled.exists() and mixed.exists() and late.exists() and newest.exists()
    orchestrator.journal.write(Drop(group_id="g1.o1", reason="stale"))
    Epoch(run, epoch=2).settle()
    assert not settled.exists() and not late.exists() and mixed.exists() and newest.exists()
    names = [name for name in deletions(run) if name.startswith("trajectories")]
    assert names == [run[1].relative(settled), run[1].relative(late)]


def test_a_group_without_a_number_keeps_shards_and_ends_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A row's keeps its shard; the orchestrator's keeps all, for nothing is known of what is open any more."""
    run = make_run(tmp_path / "run", retention=RetentionSpec(trajectories="after_two_checkpoints"))
    orchestrator = FakeOrchestrator(*run)
    for number in range(2, 14):
        orchestrator.journal.append(GroupIssued(group_id=f"g{number}.o1", task_seed=1, num_samples=2))
    orchestrator.write_all()
    run_learner(*run)
    odd = seal(run, "a1-000900.arrow", "g2.o1", "twelve", attempt=1)
    settled = seal(run, "a2-000001.arrow", "g3.o1", attempt=2)
    Epoch(run).settle()
    assert odd.exists() and not settled.exists()
    orchestrator.journal.write(Drop(group_id="", reason="stale"))
    other = seal(run, "a3-000001.arrow", "g4.o1", attempt=3)
    Epoch(run, epoch=2).settle()
    assert other.exists()
    assert any("all shards stay" in text for text in caplog.messages)


def test_shards_stay_unless_the_recipe_says_otherwise(trained: Run) -> None:
    shard = seal(trained, "a1-000900.arrow", "g2.o1")
    Epoch(trained).settle()
    assert shard.exists()


# --- order, crashes, epochs ------------------------------------------------------------------------------------------


class Died(BaseException):
    """kill -9."""


def test_the_record_is_on_disk_before_the_bytes_go(trained: Run) -> None:
    def look(path: Path) -> None:
        assert trained[1].relative(path) in deletions(trained) and path.is_dir()
        remove_object(path)

    Epoch(trained, remove=look).settle()
    assert deletions(trained)


@pytest.mark.parametrize("after", range(4))
def test_a_successor_takes_up_what_was_recorded(trained: Run, after: int) -> None:
    """Killed before an object goes, or with half of it gone."""
    done: list[Path] = []

    def die(path: Path) -> None:
        if len(done) == after:
            (path / MANIFEST_NAME).unlink(missing_ok=after % 2 == 0)
            raise Died
        done.append(path)
        remove_object(path)

    with pytest.raises(Died):
        Epoch(trained, remove=die).settle()
    recorded = deletions(trained)
    Epoch(trained, epoch=2).settle()
    assert versions_on_disk(trained) == [(0, 1), (STEPS - 1, 1), (STEPS, 1)]
    assert checkpoints_on_disk(trained) == ["step_000004-a1", "step_000006-a1"]
    assert deletions(trained)[: len(recorded)] == recorded
    assert len(deletions(trained)) == len(set(deletions(trained)))


def test_nothing_is_recorded_while_bytes_of_the_last_record_are_left(trained: Run) -> None:
    def refuse(path: Path) -> None:
        raise OSError(116, "Stale file handle", str(path))

    epoch = Epoch(trained, remove=refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="Stale"):
            epoch.tick()
    assert len(read_all(epoch.context.reading, epoch.context.paths.journal(WRITER))) == 2


class Forbidden:
    """Deletes what it may; one folder belongs to somebody else."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def __call__(self, path: Path) -> None:
        if path.name in self.names:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        remove_object(path)


def test_an_object_that_may_not_be_deleted_holds_nobody_up_and_goes_when_it_may(
    trained: Run, caplog: pytest.LogCaptureFixture
) -> None:
    folder = trained[1].version(1, 1)
    Epoch(trained, remove=Forbidden(folder.name)).settle()
    assert versions_on_disk(trained) == [(0, 1), (1, 1), (STEPS - 1, 1), (STEPS, 1)]
    told = [text for text in caplog.messages if "may not be deleted" in text]
    assert len(told) == 1 and folder.name in told[0] and "Permission denied" in told[0]
    evaluated(trained, 0)
    Epoch(trained, epoch=2, remove=Forbidden(folder.name)).settle()
    assert versions_on_disk(trained) == [(1, 1), (STEPS - 1, 1), (STEPS, 1)]
    assert deletions(trained)[-1] == trained[1].relative(folder), "the newest record names all that is left"
    Epoch(trained, epoch=3).settle()
    assert versions_on_disk(trained) == [(STEPS - 1, 1), (STEPS, 1)]


def test_where_nothing_may_be_deleted_the_records_do_not_grow(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1000)
    announce(run, 60)
    evaluated(run, 0)
    epoch = Epoch(run, remove=Forbidden(*(run[1].version(step, 1).name for step in range(60))))
    epoch.settle()
    recorded = deletions(run)
    assert len(recorded) >= MOST_REFUSED
    epoch.settle()
    assert deletions(run) == recorded


def test_a_newer_epoch_ends_the_collector_before_the_next_object(trained: Run) -> None:
    leases = LeaseFolder(FileSystem(), trained[1].leases, trained[0].run_id)
    gone: list[Path] = []

    def be_superseded(path: Path) -> None:
        remove_object(path)
        gone.append(path)
        leases.tombstone(WRITER, 2, "t")

    with pytest.raises(LeaseLost):
        Epoch(trained, remove=be_superseded).settle()
    assert len(gone) == 1


def test_a_record_that_cannot_be_written_deletes_nothing(trained: Run) -> None:
    epoch = Epoch(trained, remove=pytest.fail)

    def full(deletion: Deletion) -> None:
        raise OSError(28, "No space left on device")

    epoch.collector._record = full
    with pytest.raises(OSError, match="No space"):
        epoch.settle()


def test_what_is_gone_already_is_fine(trained: Run) -> None:
    shutil.rmtree(trained[1].version(1, 1))
    Epoch(trained).settle()
    assert versions_on_disk(trained) == [(0, 1), (STEPS - 1, 1), (STEPS, 1)]


class Counting(FileSystem):
    """Counts calls."""

    calls = 0

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        self.calls += 1
        return super().read(path, offset, limit)

    def listdir(self, path: Path) -> list[str]:
        self.calls += 1
        return super().listdir(path)


def announce(run: Run, num_versions: int) -> None:
    """A learner's journal of so many versions, every tenth full, without their bytes."""
    context = learner_context(*run)
    context.leases.acquire("learner-0", 1, context.token)
    journal = context.journal()
    journal.write(Cuts())
    for step in range(num_versions):
        version = Version(step, 1)
        journal.append(
            Published(
                version=version, weights_digest="", folder=run[1].relative(run[1].version(*version)), manifest_digest="",
                size_bytes=1, base=Version(step - 1, 1) if step % 10 else None,
            )
        )  # fmt: skip
    journal.flush()


def test_a_tick_costs_what_is_new_not_the_age_of_the_run(tmp_path: Path) -> None:
    """I16: calls of the filesystem, and versions that are looked at, once everything was deleted that may be."""
    costs = []
    for age in (100, 600):
        run, fs = make_run(tmp_path / str(age), steps=1000), Counting()
        announce(run, age)
        evaluated(run, 0)
        epoch = Epoch(run, remove=lambda path: None, fs=fs)
        for _ in range(2 + age // MOST_A_TICK):
            epoch.tick()
        fs.calls = 0
        epoch.tick()
        costs.append((fs.calls, len(epoch.collector._versions)))
    assert costs[0] == costs[1]
