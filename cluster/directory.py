"""Whether the run directory is still there: a supervisor without one can decide and record nothing, and says so once.

A directory that was deleted does not come back; one that a mount hides for a moment does. What was not looked at for a while,
because the scheduler hung or this process stood still, is no time in which it was missing (I4).
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from cluster.profile import ClusterProfile
from cluster.scheduler import Phase, Snapshot
from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths

GONE_LEASES = 4
"""One that is missing for so many lease_s is gone."""


class DirectoryWatch:
    """Looks once a tick. It cancels nothing: on the nodes of the jobs the mount may be there."""

    def __init__(self, paths: RunPaths, profile: ClusterProfile, lease_s: float, clock: Callable[[], float]) -> None:
        self._paths, self._profile, self._lease_s, self._clock = paths, profile, lease_s, clock
        self._looked_at = clock()
        self._missing_since: float | None = None

    def is_there(self) -> bool:
        """Raises OSError where that cannot be told."""
        return self._paths.run_file.exists()

    def check(self, is_there: bool | None, snapshot: Snapshot) -> None:
        """`is_there`: None, it could not be told. Raises RunDirectoryError, which names the jobs that are left."""
        now = self._clock()
        is_late, self._looked_at = now - self._looked_at > self._lease_s + self._profile.scheduler_poll_s, now
        if is_there is not False:
            self._missing_since = None
        elif self._missing_since is None or is_late:
            self._missing_since = now
        elif now - self._missing_since >= GONE_LEASES * self._lease_s:
            raise RunDirectoryError(
                f"{self._paths.run_file} has not been there for {now - self._missing_since:.0f} s, seen from "
                f"{platform.node()}: nothing of its run can be decided or recorded. If a mount is away, `miles resume "
                f"{self._paths.root}` goes on when it is back; if the run was deleted, {self._how_to_end_jobs(snapshot)}"
            )

    def _how_to_end_jobs(self, snapshot: Snapshot) -> str:
        if self._profile.kind == "local":
            return f"end what is left of its processes: `pgrep -af -- '--run-dir {self._paths.root}'` lists them"
        if not snapshot.ok:
            return f"cancel its jobs by hand; which are left is not known: {snapshot.error}"
        live = [job.job_id for job in snapshot.jobs if job.phase is not Phase.ENDED]
        return f"cancel what is left of its jobs by hand ({', '.join(live)})" if live else "no job of it is listed"
