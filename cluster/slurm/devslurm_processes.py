"""Finds and signals the processes of a throw-away Slurm cluster through /proc.

Invariants: no process is signalled but through a pidfd opened before its start time was compared, so a reused process id
is never hit. Pid files are not used: inside a pid namespace slurmd's says "1". Zombies count as dead. Failure: a process
that vanishes or belongs to somebody else is skipped; one that outlives SIGKILL raises DeadlineExceeded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.slurm.devslurm_config import Layout
from miles_core.errors import DeadlineExceeded, SchedulerError

PROC = Path("/proc")
KILL_DEADLINE_S = 15.0
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What /proc answers for a process that ended meanwhile or is not ours."""


@dataclass(frozen=True)
class Process:
    """One process as seen at one moment. (pid, start_ticks) names it for as long as the machine is up."""

    pid: int
    ppid: int
    start_ticks: int
    """Clock ticks between the machine's start and the process's."""
    state: str
    """R, S, D, T (stopped), Z (zombie), ..."""
    comm: str


@dataclass(frozen=True)
class Record:
    """What the cluster's folder remembers of a daemon that it started."""

    pid: int
    start_ticks: int
    boot_id: str
    namespaced: bool
    """The process holds a pid namespace, everything in which is the node."""


def boot_id() -> str:
    """Differs after each start of the machine: start times are comparable only within one."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def find_process(pid: int) -> Process | None:
    """The living process of this id, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except GONE:
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    process = Process(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2])
    return None if process.state in "ZX" else process


def all_processes() -> list[Process]:
    """All living processes that this process can see."""
    found = (find_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def pid_namespace(pid: int) -> str | None:
    """Identity of the process's pid namespace, or None if the process is gone or somebody else's."""
    try:
        return os.readlink(PROC / str(pid) / "ns/pid")
    except GONE:
        return None


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signals exactly this process; a process that is gone, and another one that got its id, are left alone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        now = find_process(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def wait_until(what: str, deadline_s: float, condition: Callable[[], bool]) -> None:
    """Polls until the condition holds. Raises DeadlineExceeded naming what was waited for."""
    end_s = time.monotonic() + deadline_s
    pause_s = 0.01
    while not condition():
        if time.monotonic() > end_s:
            raise DeadlineExceeded(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(pause_s)
        pause_s = min(0.2, pause_s * 1.5)


class ClusterProcesses:
    """The processes of one cluster: starts daemons, remembers them in the folder, finds and signals all that is theirs."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def start(self, name: str, argv: list[str], env: Mapping[str, str], *, namespaced: bool = False) -> None:
        """Starts a daemon in its own session and remembers it under `name`.

        A shell in between makes it a child of init: the caller may end, and no zombie stays with a caller that does not.
        """
        with self._layout.output(name).open("ab") as output:
            shell = subprocess.run(
                ["/bin/sh", "-c", 'exec 3>&1 >&2; setsid "$@" </dev/null 3>&- & echo $! >&3', "sh", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                env=dict(env),
                cwd=self._layout.folder,
                check=True,
                timeout=30,
            )
        process = find_process(int(shell.stdout))
        if process is None:
            raise SchedulerError(f"{name} ended at once: {' '.join(argv)}\n{tail(self._layout.output(name))}")
        record = Record(process.pid, process.start_ticks, boot_id(), namespaced)
        self._record_file(name).write_text(json.dumps(asdict(record)) + "\n")

    def find(self, name: str) -> Process | None:
        """The living daemon of this name (of a node in a pid namespace: the process that holds the namespace)."""
        record = self._record(name)
        process = find_process(record.pid) if record is not None and record.boot_id == boot_id() else None
        return process if process is not None and record is not None and process.start_ticks == record.start_ticks else None

    def recorded(self) -> list[str]:
        """Names of all daemons that were started and not yet removed by `forget`."""
        return sorted(path.stem for path in self._layout.process_dir.glob("*.json"))

    def forget(self, name: str) -> None:
        """Removes the memory of a daemon."""
        self._record_file(name).unlink(missing_ok=True)

    def of_node(self, name: str) -> list[Process]:
        """All living processes of a node: slurmd, slurmstepds and all that its jobs left running."""
        everything = all_processes()
        if (holder := self._holder(name)) is not None:
            return self._in_namespace_of(holder, everything)
        return _with_descendants([p for p in everything if self._runs_on(p) == name], everything)

    def of_controller(self) -> list[Process]:
        """slurmctld and its helper slurmscriptd, which outlives a killed slurmctld for some time."""
        everything = all_processes()
        controller = self.find("slurmctld")
        roots = [p for p in everything if self._is_script_helper(p)] + ([controller] if controller is not None else [])
        return _with_descendants(roots, everything)

    def of_cluster(self) -> list[Process]:
        """All living processes of the cluster, also such as no record names."""
        everything = all_processes()
        found = [p for p in everything if self._is_daemon(p) or self._runs_on(p) is not None]
        for name in self.recorded():
            if (daemon := self.find(name)) is not None:
                found.append(daemon)
            if (holder := self._holder(name)) is not None:
                found.extend(self._in_namespace_of(holder, everything))
        return _with_descendants(found, everything)

    def kill(self, what: str, find: Callable[[], list[Process]]) -> None:
        """Kills what `find` finds until it finds nothing. Raises DeadlineExceeded naming what is left."""
        left: list[Process] = []

        def all_dead() -> bool:
            left[:] = find()
            for process in left:
                send_signal(process, signal.SIGKILL)
            return not left

        try:
            wait_until(f"the end of {what}", KILL_DEADLINE_S, all_dead)
        except DeadlineExceeded as error:
            names = ", ".join(f"{p.pid} ({p.comm}, state {p.state})" for p in left)
            raise DeadlineExceeded(f"{error}: still there after SIGKILL: {names}") from error

    def terminate(self, name: str, grace_s: float) -> None:
        """Ends a daemon by SIGTERM, after grace_s by SIGKILL, and forgets it."""
        process = self.find(name)
        if process is not None:
            send_signal(process, signal.SIGTERM)
            try:
                wait_until(f"the end of {name}", grace_s, lambda: self.find(name) is None)
            except DeadlineExceeded:
                self.kill(name, lambda: [p for p in [self.find(name)] if p is not None])
        self.forget(name)

    def stop_node(self, name: str) -> None:
        """Freezes every process of a node; repeated until none runs, as a process may fork meanwhile."""

        def all_stopped() -> bool:
            running = [p for p in self._inside(name) if p.state not in "Tt"]
            for process in running:
                send_signal(process, signal.SIGSTOP)
            return not running

        wait_until(f"all processes of node {name} to stop", KILL_DEADLINE_S, all_stopped)

    def continue_node(self, name: str) -> None:
        """Lets every stopped process of a node go on."""
        for process in self._inside(name):
            send_signal(process, signal.SIGCONT)

    def _inside(self, name: str) -> list[Process]:
        """Processes of a node without the outer holder of its namespace, which must stay able to see its child end."""
        holder = self._holder(name)
        return [p for p in self.of_node(name) if holder is None or p.pid != holder.pid]

    def _holder(self, name: str) -> Process | None:
        """The living process that holds the node's pid namespace, None for a node without one."""
        record = self._record(name)
        return self.find(name) if record is not None and record.namespaced else None

    @staticmethod
    def _in_namespace_of(holder: Process, everything: list[Process]) -> list[Process]:
        """The holder and all in the namespace of its child, whatever their parents and environment are."""
        children = {pid_namespace(p.pid) for p in everything if p.ppid == holder.pid}
        spaces = children - {None, pid_namespace(holder.pid)}
        return [p for p in everything if p.pid == holder.pid or pid_namespace(p.pid) in spaces]

    def _record_file(self, name: str) -> Path:
        return self._layout.process_dir / f"{name}.json"

    def _record(self, name: str) -> Record | None:
        try:
            return Record(**json.loads(self._record_file(name).read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError) as error:
            raise SchedulerError(f"{self._record_file(name)} is not a process record ({error}); remove it") from error

    def _is_daemon(self, process: Process) -> bool:
        """Whether it is munged, slurmctld, slurmd or a namespace holder of this folder."""
        if self._is_script_helper(process):
            return True
        if process.comm not in ("munged", "slurmctld", "slurmd", "unshare"):
            return False
        arguments = _read_words(process.pid, "cmdline")
        ours = {str(self._layout.slurm_conf), f"--key-file={self._layout.munge_key}"}
        return not ours.isdisjoint(arguments)

    def _is_script_helper(self, process: Process) -> bool:
        """Whether it is slurmctld's slurmscriptd: that overwrites its arguments but keeps the log open."""
        return process.comm == "slurmscriptd" and self._layout.log("slurmctld") in _open_files(process.pid)

    def _runs_on(self, process: Process) -> str | None:
        """The node of this cluster on which the process runs, or None for a process that is none of its own.

        SLURM_CONF alone would also match a person's shell; a job's processes have SLURMD_NODENAME beside it. slurmstepd
        overwrites its environment but keeps its node's log open.
        """
        if process.comm == "slurmd" and self._is_daemon(process):
            arguments = _read_words(process.pid, "cmdline")
            return arguments[arguments.index("-N") + 1] if "-N" in arguments else None
        if process.comm.startswith("slurmstepd"):
            return self._node_of_open_log(process.pid)
        environment = dict(word.split("=", 1) for word in _read_words(process.pid, "environ") if "=" in word)
        if environment.get("SLURM_CONF") != str(self._layout.slurm_conf):
            return None
        return environment.get("SLURMD_NODENAME")

    def _node_of_open_log(self, pid: int) -> str | None:
        """NODE if the process holds slurmd-NODE.log of this cluster open."""
        for target in _open_files(pid):
            if target.parent == self._layout.log_dir and target.name.startswith("slurmd-"):
                return target.name.removeprefix("slurmd-").removesuffix(".log")
        return None


def _with_descendants(roots: list[Process], everything: list[Process]) -> list[Process]:
    """The roots and everything below them, each once."""
    found = {process.pid: process for process in roots}
    size = -1
    while size != len(found):
        size = len(found)
        found.update({p.pid: p for p in everything if p.ppid in found})
    return list(found.values())


def _open_files(pid: int) -> list[Path]:
    """Targets of the process's open files; empty for a process that is gone or somebody else's."""
    targets = []
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            try:
                targets.append(Path(os.readlink(link)))
            except FileNotFoundError:
                continue
    except GONE:
        return []
    return targets


def _read_words(pid: int, name: str) -> list[str]:
    """The zero-separated words of /proc/PID/NAME; empty for a process that is gone or somebody else's."""
    try:
        return (PROC / str(pid) / name).read_bytes().decode(errors="replace").split("\0")
    except GONE:
        return []


def tail(path: Path, num_lines: int = 15) -> str:
    """The last lines of a log with its name, for an error message."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"({path} does not exist)"
    return f"--- end of {path}:\n" + "\n".join(lines[-num_lines:])
