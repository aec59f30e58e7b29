"""A supervisor whose run directory goes: it waits for one that comes back, and says so where it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.directory import GONE_LEASES, DirectoryWatch
from cluster.profile import ClusterProfile
from cluster.scheduler import Snapshot
from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths
from tests.protocol.simulation import TIMING
from tests.unit.fake_slurm import ManualClock
from tests.unit.supervised_site import Site

GONE_S = GONE_LEASES * TIMING.lease_s


def hide(site: Site) -> Path:
    """As if its filesystem were not mounted."""
    hidden = site.paths.root.with_name("hidden")
    site.paths.root.rename(hidden)
    site.move = lambda: None  # type: ignore[method-assign]
    return hidden


def test_a_run_that_was_deleted_ends_its_supervisor_which_names_the_jobs(tmp_path: Path) -> None:
    site = Site(tmp_path / "run")
    site.start_all()
    supervisor = site.supervisor()
    site.run_for(supervisor, 5.0)
    supervisor, began = site.supervisor(), site.clock()
    hide(site)
    ids = [job.job_id for job in site.jobs() if job.state == "RUNNING"]
    with pytest.raises(RunDirectoryError, match="by hand") as error:
        site.run_until(supervisor, lambda: False)
    assert all(job_id in str(error.value) for job_id in ids) and GONE_S <= site.clock() - began < 2 * GONE_S
    assert not any(command[0] == "scancel" for command in site.fake.commands), "a mount that is away on one node costs no job"


def test_what_a_hanging_controller_hides_is_not_missing(tmp_path: Path) -> None:
    """Looks that are far apart do not know for how long it was away."""
    clock = ManualClock()
    watch = DirectoryWatch(RunPaths(tmp_path), ClusterProfile.model_validate({"name": "here", "kind": "slurm"}), 1.0, clock)
    for _ in range(20):
        watch.check(watch.is_there(), Snapshot(ok=False))
        clock.sleep(1.0 + 60.0)
    (tmp_path / "run.json").touch()
    watch.check(watch.is_there(), Snapshot(ok=True))


def test_a_supervisor_that_is_asked_to_leave_meanwhile_leaves(tmp_path: Path) -> None:
    site = Site(tmp_path / "run")
    site.start_all()

    def is_asked() -> bool:
        if not site.ticks:
            return False
        hide(site)
        site.clock.sleep(2 * GONE_S)
        return True

    assert site.run_until(site.supervisor(), is_asked) is None


@pytest.mark.parametrize(
    ("kind", "snapshot", "says"),
    [
        ("local", Snapshot(ok=True), "pgrep -af -- '--run-dir"),
        ("slurm", Snapshot(ok=False, error="slurmctld is away"), "which are left is not known: slurmctld is away"),
        ("slurm", Snapshot(ok=True), "no job of it is listed"),
    ],
)
def test_who_cannot_know_which_jobs_are_left_says_how_to_find_them(
    tmp_path: Path, kind: str, snapshot: Snapshot, says: str
) -> None:
    clock, profile = ManualClock(), ClusterProfile.model_validate({"name": "here", "kind": kind})
    watch = DirectoryWatch(RunPaths(tmp_path), profile, 1.0, clock)
    with pytest.raises(RunDirectoryError, match=says):
        for _ in range(10):
            watch.check(watch.is_there(), snapshot)
            clock.sleep(1.0)
    assert clock() - ManualClock()() == GONE_LEASES


def test_a_run_that_comes_back_in_time_goes_on(tmp_path: Path) -> None:
    site = Site(tmp_path / "run")
    site.start_all()
    supervisor, move = site.supervisor(), site.move
    until = site.clock() + GONE_S / 2
    hidden = hide(site)

    def is_over() -> bool:
        if hidden.exists() and site.clock() >= until:
            shutil.rmtree(site.paths.root)  # heartbeats made it anew
            hidden.rename(site.paths.root)
            site.move = move  # type: ignore[method-assign]
        return site.clock() >= until + 2 * GONE_S

    assert site.run_until(supervisor, is_over) is None
    assert len(site.running()) == len(site.writers)
