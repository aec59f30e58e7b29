"""A simulated run that loses a shard, and the judges of what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from miles_core.records import Batch
from miles_core.rollbacks import read_rollbacks
from miles_core.store.fs import FileSystem
from miles_core.tracking.ledger import read_all
from miles_core.verify import verify_run
from tests.protocol.audit import Audit
from tests.protocol.simulation import SimCluster, simulated_recipe

RECIPE = simulated_recipe(steps=7, learner__checkpoint_every=3)


def batches(cluster: SimCluster) -> list[Batch]:
    """All batches that any orchestrator recorded."""
    records = read_all(cluster.supervisor_context.reading, cluster.paths.journal("orchestrator-0"))
    return [record for record in records if isinstance(record, Batch)]


def lose_shard(cluster: SimCluster, step: int) -> str:
    """A shard of the newest batch of a step is gone for good, and the learner dies, which wants it again. Its name."""
    batch = [batch for batch in batches(cluster) if batch.step == step][-1]
    shard = batch.groups[0].members[0].ref.shard
    cluster.paths.resolve(shard).unlink(missing_ok=True)
    cluster.newest("learner-0").end = "killed"
    return shard


def gave_up(cluster: SimCluster) -> bool:
    """The learner needs a rollback."""
    done = cluster.read_done("learner-0")
    return done is not None and done.outcome == "needs_rollback"


def close(cluster: SimCluster, zombies: tuple[str, ...] = ()) -> None:
    """Once the learner gave up all jobs end, but for zombies, and the run is closed."""
    cluster.run_until(lambda: gave_up(cluster))
    done = cluster.read_done("learner-0")
    assert done is not None
    cluster.end_jobs(done.detail, zombies)


def until_step(cluster: SimCluster, step: int) -> None:
    cluster.run_until(lambda: cluster.newest("learner-0").context.progress >= step)


def give_up(cluster: SimCluster, step: int, lost: int, zombies: tuple[str, ...] = ()) -> None:
    """Trains to `step`, loses a shard of batch `lost`, and is closed by its supervisor."""
    until_step(cluster, step)
    lose_shard(cluster, lost)
    close(cluster, zombies)


def started(folder: Path, seed: int = 0, **arguments: object) -> SimCluster:
    cluster = SimCluster(folder, seed=seed, real_files=True, **{"recipe": RECIPE, **arguments})  # type: ignore[arg-type]
    cluster.start()
    return cluster


def finish(cluster: SimCluster, lost: Iterable[str] = ()) -> None:
    """To the end, and both judges. `lost`: shards that are gone; those that no rollback named are the only faults."""
    cluster.run_to_the_end()
    cluster.close()
    Audit(cluster).check()
    verification = verify_run(cluster.paths.root)
    unnamed = set(lost) - read_rollbacks(FileSystem(), cluster.paths).lost_shards
    assert {(fault.kind, fault.where) for fault in verification.faults} == {("shard_missing", shard) for shard in unnamed}
    assert verification.state == "COMPLETED"
