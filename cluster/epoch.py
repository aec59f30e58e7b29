"""Epochs of a run's supervisor: who holds the run, taking it, and the last word on it (I3)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from cluster.job_spec import token_of
from cluster.profile import ClusterProfile
from miles_core.errors import HeldElsewhere, LeaseLost, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import Drained, Intent, Rollback, RunClosed
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.lease import LivenessJudge
from miles_core.tracking.ledger import read_all

log = logging.getLogger("miles")

WRITER = "supervisor-0"
_TRIES = 3


def supervisor_context(run: RunConfig, paths: RunPaths, epoch: int) -> RoleContext:
    """The context of one epoch."""
    return RoleContext(run, paths, WRITER, epoch, token=token_of(run, WRITER, epoch))


def take_epoch(context_of: Callable[[int], RoleContext], *, takeover: bool) -> RoleContext:
    """Takes the supervisor's lease. Raises HeldElsewhere while another supervisor renews its own.

    Without `takeover` a holder is watched for lease_s; one that does not move is dead and its run is adopted.
    """
    probe = context_of(0)
    probe.fs.mkdir(probe.paths.leases)
    for _ in range(_TRIES):
        probe.leases.refresh()
        newest = probe.leases.newest(WRITER)
        if newest and not takeover and probe.leases.read(WRITER, newest).kind == "lease":
            _wait_until_dead(probe, newest)
        context = context_of(newest + 1)
        try:
            context.start()
        except LeaseLost as lost:
            log.debug("epoch %d was taken in the meantime: %s", newest + 1, lost)
            continue
        return context
    raise HeldElsewhere(f"run {probe.run.run_id}: other supervisors start and leave all the time; look at `miles status`")


def _wait_until_dead(probe: RoleContext, epoch: int) -> None:
    lease, lease_s = probe.leases.read(WRITER, epoch), probe.timing.lease_s
    holder = f"process {lease.pid} on {lease.host or 'an unknown host'} (epoch {epoch})"
    log.warning(
        "run %s was last supervised by %s: watching for up to %g s whether it lives (--takeover does not wait)",
        probe.run.run_id, holder, lease_s,
    )  # fmt: skip
    judge = LivenessJudge(probe.fs, probe.paths.heartbeats, lease_s, probe.clock)
    judge.observe(WRITER, epoch)
    first = judge.heartbeat(WRITER, epoch)
    deadline = probe.clock() + 3 * lease_s
    while judge.observe(WRITER, epoch) != "dead":
        current = judge.heartbeat(WRITER, epoch)
        first = first or current
        if current is not None and first is not None and current.counter > first.counter:
            raise HeldElsewhere(
                f"run {probe.run.run_id} is supervised by {holder}. Watch it with `miles status {probe.paths.root}`, or take "
                f"it over with --takeover"
            )
        if probe.clock() > deadline:
            raise HeldElsewhere(
                f"whether {holder} still supervises {probe.run.run_id} could not be judged within {3 * lease_s:g} s; is "
                f"{probe.paths.heartbeats} readable? --takeover does not wait"
            )
        probe.sleep(lease_s / 10)


def read_outcome(run: RunConfig, paths: RunPaths) -> RunClosed | Drained | None:
    """The last word on a run: closed and not rolled back since, or drained and not taken up since."""
    outcome: RunClosed | Drained | None = None
    for record in read_all(supervisor_context(run, paths, 0).reading, paths.journal(WRITER)):
        if isinstance(record, RunClosed | Drained):
            outcome = record
        elif isinstance(record, Rollback) or (isinstance(record, Intent) and isinstance(outcome, Drained)):
            outcome = None
    return outcome


def read_closed(run: RunConfig, paths: RunPaths) -> RunClosed | None:
    """The last word on a run, if a supervisor closed it."""
    outcome = read_outcome(run, paths)
    return outcome if isinstance(outcome, RunClosed) else None


def read_cluster(run: RunConfig) -> ClusterProfile:
    """The cluster profile that a run was made with. Raises RunDirectoryError."""
    try:
        return ClusterProfile.model_validate(json.loads(json.dumps(run.cluster)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RunDirectoryError(
            f"run.json of {run.run_id} holds no cluster profile of this version ({key}: {first['msg']}); use the version of "
            f"miles that made it: its code is in the run directory"
        ) from error


def check_same_cluster(run: RunConfig, root: Path, profile: ClusterProfile) -> None:
    """Partitions, limits and flags may be corrected; not the cluster, whose jobs they are, nor the number of the learner's
    ranks, over which its checkpoints are parted. Raises RunDirectoryError."""
    there = read_cluster(run)
    if (there.kind, there.name, there.slurm.devslurm) != (profile.kind, profile.name, profile.slurm.devslurm):
        raise RunDirectoryError(
            f"{root} was started on cluster {there.name} ({there.kind}), not on {profile.name} ({profile.kind}): its "
            f"jobs are there. Continue it with --cluster {there.name}, or take another --run-id"
        )
    before, now = (each.resources_for("learner").ranks for each in (there, profile))
    if before != now:
        raise RunDirectoryError(
            f"{root} was started with {before} ranks of the learner, not {now}: its checkpoints are parted by rank. Set nodes "
            f"and tasks of resources.learner back (their product counts), or take another --run-id"
        )
    if run.timing != profile.timing:
        log.warning("%s keeps the times it was made with (%r): roles that live know those", root, run.timing)
