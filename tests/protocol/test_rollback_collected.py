"""Rollback over what the collector deleted, or had just recorded (I8, I12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.records import CheckpointSaved, Deleted, Deletion, digest_record
from miles_core.tracking.ledger import read_all
from miles_core.verify import verify_run
from tests.protocol.rollback_world import close, finish, lose_shard, started, until_step
from tests.protocol.simulation import SimCluster, simulated_recipe


def read(cluster: SimCluster, writer: str) -> list[Any]:
    """All that a writer recorded."""
    return list(read_all(cluster.supervisor_context.reading, cluster.paths.journal(writer)))


def deleted(cluster: SimCluster) -> list[Deleted]:
    """All that the supervisor recorded as deleted."""
    return [item for record in read(cluster, "supervisor-0") if isinstance(record, Deletion) for item in record.items]


def test_a_checkpoint_that_is_recorded_as_deleted_is_not_gone_back_to(tmp_path: Path) -> None:
    """The supervisor died between the record and the bytes, and the newer checkpoint is damaged."""
    cluster = started(tmp_path / "run", recipe=simulated_recipe(steps=9, learner__checkpoint_every=2))
    until_step(cluster, 5)
    saved = {record.step: record for record in read(cluster, "learner-0") if isinstance(record, CheckpointSaved)}
    folder, digest = saved[2].folder, digest_record(saved[2])
    item = Deleted(what="checkpoint", name=folder, size_bytes=saved[2].files[0].size_bytes, digest=digest)
    cluster._supervisor.write(Deletion(items=(item,)))
    (cluster.paths.resolve(saved[4].folder) / "state").write_bytes(b"damaged")
    lose_shard(cluster, 3)
    close(cluster)
    assert cluster.paths.resolve(folder).is_dir() and cluster.roll_back().step == 0
    finish(cluster)


def test_behind_what_the_collector_deleted_it_goes_back_to_the_base_model(tmp_path: Path) -> None:
    """Both checkpoints are damaged, and shards behind them were deleted; verify knows that nobody needs those any more."""
    sections = {"learner__checkpoint_every": 2, "retention__trajectories": "after_two_checkpoints"}
    cluster = started(tmp_path / "run", recipe=simulated_recipe(steps=9, **sections))
    cluster.run_until(lambda: any(item.what == "shard" for item in deleted(cluster)))
    for saved in cluster.paths.checkpoints.glob("step_*"):
        (saved / "state").write_bytes(b"damaged")
    cluster.newest("learner-0").end = "killed"
    close(cluster)
    assert cluster.roll_back().step == 0
    assert "deletion" not in {fault.kind for fault in verify_run(cluster.paths.root).faults}
    finish(cluster)
