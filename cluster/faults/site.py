"""How each fault of a plan is done to a live run, and which of them this place allows.

On Slurm a role is killed, hung or cancelled through scancel, as its owner may; on local processes by pid. What needs an
administrator (nodes, slurmctld) is done only to a devslurm. Every fault that does not mend itself has a `heal`, which may be
called again. Failure: SchedulerError or OSError of what was tried.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from cluster.faults.plan import Fault, Kind, Plan, Target
from cluster.faults.processes import is_stopped, listeners, signal_pid
from cluster.job_spec import live_jobs
from cluster.profile import ClusterProfile
from cluster.scheduler import JobView
from cluster.schedulers import make_scheduler
from cluster.slurm.devslurm import DevSlurm
from cluster.slurm.devslurm_processes import Process, send_signal
from miles_core.errors import RecipeError, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import split_writer
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder

_NEEDS_ADMIN = "it needs an administrator, so it is done only to a devslurm (slurm.devslurm in the cluster profile)"
_LITTLE_BYTES = 64 << 10
"""With less than this left, the disk is full."""


class Host(Protocol):
    """The process that supervises the run, as a child of the drill."""

    def start(self) -> None: ...

    def send(self, number: signal.Signals) -> None: ...

    def has_ended(self) -> bool: ...


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Injection:
    """One fault, ready to be fired."""

    what: str
    """For people: whom it hits and where."""
    fire: Callable[[], None]
    victims: tuple[str, ...] = ()
    """Writers that are lost by it, all others go on as they are; empty: nobody shall be replaced."""
    took: Callable[[], bool] = lambda: True
    """Whether it is in force; where there are victims their loss tells."""
    heal: Callable[[], None] = _nothing
    heals_at_loss: bool = False
    """Healed as soon as the loss is recorded; otherwise when all victims are replaced, and not before `hold_s`."""
    hold_s: float = 0.0
    """So long it stays in force."""
    ends_supervisor: bool = False
    """Another one has to take the run."""
    incident: str = ""
    """What the supervisor records when it notices, if it is not the loss of a victim."""
    settle_s: float = 0.0
    """So long after it nobody may have been replaced."""


def check_plan(plan: Plan, profile: ClusterProfile, paths: RunPaths) -> None:
    """Refuses, before anything is started, what this place does not allow. Raises RecipeError."""
    refused = [f"{fault.role} {fault.kind}: {why}" for fault in plan.faults if (why := _why_not(fault, plan, profile, paths))]
    if refused:
        raise RecipeError("this plan cannot be carried out here:\n  " + "\n  ".join(refused))


def _why_not(fault: Fault, plan: Plan, profile: ClusterProfile, paths: RunPaths) -> str:
    if fault.role == "controller" or fault.kind in ("node_kill", "node_zombie"):
        return "" if profile.slurm.devslurm is not None and profile.kind == "slurm" else _NEEDS_ADMIN
    if fault.role == "disk":
        there = next(folder for folder in (paths.root, *paths.root.parents) if folder.is_dir())
        size_mib = shutil.disk_usage(there).total >> 20
        if size_mib > plan.disk_max_mib:
            return (
                f"the filesystem of {there} has {size_mib} MiB and the plan's disk_max_mib is {plan.disk_max_mib}; fill only "
                f"one that was made for it (mount -t tmpfs -o size=512m ...)"
            )
    if fault.role == "prefect" and not _prefect_processes():
        return "PREFECT_API_URL names no server of yours on this machine"
    return ""


class Site:
    """Where one run runs."""

    def __init__(self, run: RunConfig, paths: RunPaths, profile: ClusterProfile, plan: Plan, host: Host) -> None:
        self._run, self._paths, self._profile, self._plan, self._host = run, paths, profile, plan, host
        self.scheduler = make_scheduler(profile, paths.root)

    def injection(self, role: Target, kind: Kind, turn: int) -> Injection:
        """The fault of one round. Raises SchedulerError when its victim does not run now."""
        special = {
            "supervisor": self._kill_supervisor, "controller": self._kill_controller, "all": self._stall, "disk": self._fill,
            "prefect": self._take_prefect,
        }  # fmt: skip
        if role in special:
            return special[role]()
        job = self._victim(role, turn)
        if kind.startswith("node_"):
            return self._node_fault(job, kind)
        where = f"{job.writer} attempt {job.attempt}, job {job.job_id} on {','.join(job.nodes)}"
        fire = {
            "kill": lambda: self._signal((job,), signal.SIGKILL),
            "hang": lambda: self._signal((job,), signal.SIGSTOP),
            "cancel": lambda: self.scheduler.cancel((job.job_id,)),
        }[kind]
        return Injection(where, fire, (job.writer,))

    # --- roles -------------------------------------------------------------------------------------------------------

    def _running(self) -> tuple[JobView, ...]:
        """Neither ending nor standing still."""
        return tuple(job for job in live_jobs(self._run, self.scheduler) if job.state == "RUNNING")

    def _victim(self, role: str, turn: int) -> JobView:
        """Of several replicas each in turn; of several jobs of one writer the newest attempt's."""
        newest = {job.writer: job for job in sorted(self._running(), key=lambda job: job.attempt)}
        jobs = [newest[writer] for writer in sorted(newest) if split_writer(writer)[0] == role]
        if not jobs:
            raise SchedulerError(f"no job of role {role} runs now")
        return jobs[turn % len(jobs)]

    def _signal(self, jobs: tuple[JobView, ...], number: signal.Signals) -> None:
        if self._profile.kind == "slurm":
            self.scheduler.cancel(tuple(job.job_id for job in jobs), signal=number.name.removeprefix("SIG"))
            return
        for job in jobs:
            if not signal_pid(self._paths, self._pid(job), number):
                raise SchedulerError(f"the process of {job.writer} attempt {job.attempt} is gone")

    def _pid(self, job: JobView) -> int:
        """Of a local process, from its lease."""
        return LeaseFolder(FileSystem(), self._paths.leases, self._run.run_id).read(job.writer, job.attempt).pid

    # --- everybody ---------------------------------------------------------------------------------------------------

    def _stall(self) -> Injection:
        """A filesystem that hangs, seen from outside: whoever touches it stands still. Observers stop first and go on last."""
        jobs, hold_s = self._running(), 2 * self._run.timing.lease_s

        def fire() -> None:
            self._host.send(signal.SIGSTOP)
            self._signal(jobs, signal.SIGSTOP)

        def heal() -> None:
            try:
                self._signal(jobs, signal.SIGCONT)
            finally:
                self._host.send(signal.SIGCONT)

        names = ", ".join(job.writer for job in jobs)
        return Injection(
            f"supervisor, {names} for {hold_s:g} s", fire, took=lambda: self._all_stopped(jobs), heal=heal,
            hold_s=hold_s, settle_s=self._run.timing.lease_s,
        )  # fmt: skip

    def _all_stopped(self, jobs: tuple[JobView, ...]) -> bool:
        if self._profile.kind == "local":
            return all(is_stopped(self._pid(job)) for job in jobs)
        ids = {job.job_id for job in jobs}
        return ids <= {job.job_id for job in live_jobs(self._run, self.scheduler) if job.state == "STOPPED"}

    def _kill_supervisor(self) -> Injection:
        return Injection(
            "the supervisor", lambda: self._host.send(signal.SIGKILL), took=self._host.has_ended, heal=self._host.start,
            ends_supervisor=True,
        )  # fmt: skip

    # --- the place ---------------------------------------------------------------------------------------------------

    def _node_fault(self, job: JobView, kind: Kind) -> Injection:
        devslurm, node = self._devslurm(), job.nodes[0]
        victims = tuple(other.writer for other in self._running() if node in other.nodes)
        where = f"node {node} with {', '.join(victims)}"
        if kind == "node_kill":
            return Injection(
                where, lambda: devslurm.kill_node(node), victims, heal=lambda: devslurm.start_node(node), heals_at_loss=True
            )
        return Injection(
            where, lambda: devslurm.stop_node(node), victims, heal=lambda: devslurm.start_node(node),
            hold_s=self._run.timing.lease_s,
        )  # fmt: skip

    def _kill_controller(self) -> Injection:
        devslurm = self._devslurm()
        return Injection(
            f"slurmctld for {self._plan.away_s:g} s", devslurm.kill_controller,
            took=lambda: devslurm.status()["slurmctld"] is None, heal=devslurm.start_controller,
            hold_s=self._plan.away_s,
        )  # fmt: skip

    def _devslurm(self) -> DevSlurm:
        return DevSlurm(Path(str(self._profile.slurm.devslurm)).expanduser())

    def _fill(self) -> Injection:
        filler = self._paths.drill_filler

        def is_full() -> bool:
            return shutil.disk_usage(self._paths.root).free < _LITTLE_BYTES

        return Injection(
            f"the filesystem of {self._paths.root} for {self._plan.away_s:g} s", lambda: _fill_up(filler), took=is_full,
            heal=lambda: filler.unlink(missing_ok=True), hold_s=self._plan.away_s, incident="disk_low",
        )  # fmt: skip

    def _take_prefect(self) -> Injection:
        """A server that hangs, which is worse than one that refuses."""
        processes = _prefect_processes()

        def send(number: signal.Signals) -> None:
            for process in processes:
                send_signal(process, number)

        return Injection(
            f"the Prefect server for {self._plan.away_s:g} s", lambda: send(signal.SIGSTOP),
            took=lambda: bool(processes) and all(is_stopped(process.pid) for process in processes),
            heal=lambda: send(signal.SIGCONT), hold_s=self._plan.away_s,
        )  # fmt: skip


def _fill_up(filler: Path) -> None:
    """Takes all room there is, in ever smaller pieces."""
    with filler.open("ab") as file:
        size_bytes, piece_bytes = file.tell(), 64 << 20
        while piece_bytes >= 4096:
            try:
                os.posix_fallocate(file.fileno(), size_bytes, piece_bytes)
                size_bytes += piece_bytes
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                piece_bytes //= 2


def _prefect_processes() -> list[Process]:
    url = urlsplit(os.environ.get("PREFECT_API_URL", ""))
    if url.hostname not in ("127.0.0.1", "localhost", "::1") or url.port is None:
        return []
    return listeners(url.port)
