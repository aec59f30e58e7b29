"""The scheduler that a cluster profile names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.local.scheduler import LocalScheduler
from cluster.profile import ClusterProfile
from cluster.scheduler import JobSpec, Scheduler


def make_scheduler(profile: ClusterProfile, run_dir: Path, *, patient: bool = True) -> Scheduler:
    """The scheduler for one run; `run_dir` need not exist yet. Raises SchedulerError if its Slurm is not there.

    `patient` False: for a person who waits, queries give up after some seconds.
    """
    if profile.kind == "local":
        return LocalScheduler(run_dir)
    # Only here: submitit is not imported for a run on this machine.
    from cluster.slurm.client import slurm_for

    return slurm_for(profile, patient=patient)


def make_script(profile: ClusterProfile, run_dir: Path) -> Callable[[JobSpec], str]:
    """What writes the exact text of a job; needs no cluster. It raises RecipeError for flags that cannot be."""
    if profile.kind == "local":
        return LocalScheduler(run_dir).script
    from cluster.slurm.script import sbatch_text

    return lambda spec: sbatch_text(spec, profile.slurm)
