"""What a run may not leave behind when it is over: jobs, processes of this machine, temporary folders.

A temporary *file* in the run directory is none: a writer that was killed may leave one, which nobody believes (I1).
"""

from __future__ import annotations

from cluster.faults.processes import role_processes
from cluster.job_spec import live_jobs
from cluster.scheduler import Scheduler
from miles_core.paths import RunPaths
from miles_core.run import RunConfig
from miles_core.store.publish import TEMP_PREFIX


def leftovers(run: RunConfig, paths: RunPaths, scheduler: Scheduler) -> list[str]:
    """A line for each; empty when all is gone. Raises SchedulerError if the scheduler does not say, OSError."""
    jobs = [f"job {job.job_id} of {job.writer} ({job.state})" for job in live_jobs(run, scheduler)]
    processes = [f"process {process.pid} ({process.comm}, state {process.state})" for process in role_processes(paths)]
    folders = [f"folder {path}" for path in paths.root.glob(f"{TEMP_PREFIX}*") if path.is_dir()]
    return jobs + processes + folders + ([f"file {paths.drill_filler}"] if paths.drill_filler.exists() else [])
