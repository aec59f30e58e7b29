"""Processes of this machine that a drill signals or looks for: never by name alone, only the owner's own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from cluster.slurm.devslurm_processes import GONE, PROC, Process, all_processes, find_process, send_signal
from miles_core.paths import RunPaths

_LISTEN = "0A"


def role_processes(paths: RunPaths) -> list[Process]:
    """Roles of this run on this machine, also those inside a virtual node: their arguments name the run directory."""
    return [process for process in all_processes() if _names(process.pid, str(paths.root.resolve()))]


def signal_pid(paths: RunPaths, pid: int, number: signal.Signals) -> bool:
    """Signals a role of this run by its pid; False if that process is gone or another one by now."""
    process = find_process(pid)
    if process is None or not _names(pid, str(paths.root.resolve())):
        return False
    send_signal(process, number)
    return True


def is_stopped(pid: int) -> bool:
    """It stands still."""
    process = find_process(pid)
    return process is not None and process.state in "Tt"


def listeners(port: int) -> list[Process]:
    """Own processes that accept connections on a TCP port of this machine."""
    inodes = _listening_inodes(port)
    return [process for process in all_processes() if inodes & _socket_inodes(process.pid)]


def _names(pid: int, root: str) -> bool:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except GONE:
        return False
    return "--run-dir" in words and words[words.index("--run-dir") + 1] == root


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    try:
        for link in (PROC / str(pid) / "fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except GONE:
        return set()
    return found
