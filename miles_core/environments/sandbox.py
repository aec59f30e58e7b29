"""One directory, and commands that can touch nothing else: what a shell tool runs in.

Every command is a bash of its own, under bubblewrap where that works (miles_core/environments/sandbox_kind.py): no network,
read-only programs, private /tmp and process ids. All state between two commands is the directory. Limits hold for CPU,
memory, processes, files, output and time; a command that passes one is stopped, with all its processes, and the result
says which. Where only less than bubblewrap works, one loud warning says what is not held.

Invariants: after `run` no process of it lives; after `close` the directory is gone. A directory is locked while its owner
lives, so whoever comes next on the node can tell and sweep what a killed owner left. The lock is on a file system of this
node, never on the shared one.

Failure: SandboxBroken when the machine, not the command, is at fault (no room, no sandbox any more).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import math
import os
import re
import secrets
import select
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_core.environments.sandbox_kind import ENVIRONMENT, SHELL, SandboxKind, sandbox_kind, sandbox_root

PREFIX = "miles-box-"
WATCH_S = 0.05
"""Between two looks at what a running command uses."""
END_POLL_S = 0.002
"""Between the end of its output and the end of a process."""
KILL_WAIT_S = 10.0
MAX_COMMAND_BYTES = 1 << 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Stopped = Literal["", "time", "output", "memory", "processes", "disk", "closed"]
log = logging.getLogger("miles")


class SandboxBroken(OSError):
    """The machine could not run a command as asked; says nothing about the command."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory_bytes: int = 512 << 20
    """Address space of one process, and resident memory of all of them."""
    processes: int = 64
    """At once."""
    file_bytes: int = 4 << 20
    """Size of one file."""
    disk_bytes: int = 16 << 20
    """All files of the directory, and those that a running command keeps open without a name."""
    files: int = 2048
    """Files and folders of the directory."""
    output_bytes: int = 64 << 10
    """Kept of one command's output; it is stopped when it writes more."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    exit_code: int
    """As bash says it; 128 + signal for one that was killed, 124 out of time."""
    output: str
    """What it wrote to both streams, in order, undecodable bytes replaced."""
    truncated: bool
    """Whether it wrote more than Limits.output_bytes."""
    timed_out: bool
    """Whether it was stopped at its deadline."""
    seconds: float
    stopped: Stopped = ""
    """The limit it passed, if any."""


class Sandbox:
    """See module. Thread-safe; commands run one at a time. `owner` names run and role, for people who find the folder."""

    def __init__(self, owner: str, limits: Limits = Limits(), kind: SandboxKind | None = None) -> None:
        self._kind = sandbox_kind() if kind is None else kind
        self._limits = limits
        if self._kind.missing:
            _warn_once(self._kind)
        try:
            self.path, self._lock_descriptor = _locked_folder(owner)
            self._kind.owned(self.path)
        except OSError as error:
            raise SandboxBroken(f"no directory for a sandbox in {sandbox_root()}: {error}") from error
        self._busy = threading.Lock()
        self._reaping = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._full = False

    def fill(self, files: Mapping[str, str]) -> None:
        """Writes files by their relative names, before the first command. Raises SandboxBroken."""
        try:
            for name, text in files.items():
                path = self.path / name
                for folder in reversed(path.relative_to(self.path).parents[:-1]):
                    if not (self.path / folder).exists():
                        (self.path / folder).mkdir()
                        self._kind.owned(self.path / folder)
                path.write_text(text)
                self._kind.owned(path)
        except OSError as error:
            raise SandboxBroken(f"the files of a sandbox cannot be written to {self.path}: {error}") from error

    def run(self, command: str, deadline_s: float) -> Result:
        """Runs one command to its end, its deadline or a limit. Raises SandboxBroken."""
        line = command.encode(errors="replace")
        if b"\0" in line or len(line) > MAX_COMMAND_BYTES:
            return Result(126, f"not a command: over {MAX_COMMAND_BYTES} bytes, or with a zero byte", False, False, 0.0)
        with self._busy:
            if self._full:
                return Result(137, "", False, False, 0.0, "disk")
            started = time.monotonic()
            process = self._start(line, deadline_s)
            try:
                output, stopped = self._follow(process, started + deadline_s)
            finally:
                self._end(process)
            return self._result(process.returncode, output, stopped, time.monotonic() - started)

    def close(self) -> None:
        """Ends a running command and removes the directory. Raises SandboxBroken if it cannot; a second call does nothing."""
        self._closing = True
        with self._reaping:
            if self._process is not None:
                _kill(self._process)
        with self._busy:
            if self._lock_descriptor < 0:
                return
            try:
                remove(self.path)
            finally:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    def files(self) -> dict[str, bytes | None]:
        """Relative name -> contents of every regular file; None for a link, a device or what cannot be read.

        Nothing is followed and no more is read than the limits allow. Call it between commands. Raises SandboxBroken.
        """
        found: dict[str, bytes | None] = {}
        try:
            for path, entry in _entries(self.path, self._limits.files):
                if not stat.S_ISDIR(entry.st_mode):
                    found[str(path.relative_to(self.path))] = _read_regular(path, self._limits.file_bytes)
        except OSError as error:
            raise SandboxBroken(f"{self.path} cannot be read: {error}") from error
        return found

    def _start(self, line: bytes, deadline_s: float) -> subprocess.Popen[bytes]:
        argv: list[str | bytes] = [*self._kind.argv(self.path, (*SHELL, self._script(deadline_s), "bash")), line]
        try:
            # A command may have shut the folder against the next one.
            os.chmod(self.path, 0o700)
            process = subprocess.Popen(
                argv, cwd=self.path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SandboxBroken(f"a command could not be started in {self.path}: {error}") from error
        with self._reaping:
            self._process = process
            if self._closing:
                _kill(process)
        return process

    def _script(self, deadline_s: float) -> str:
        """Sets the limits, says that the sandbox stands by one zero byte, and runs the command in the same shell.

        Where memory runs out the kernel is to end it before the role (runtime/hardening.py).
        """
        limits = self._limits
        processes = f" -u {limits.processes}" if self._kind.counts_processes else ""
        ulimit = f"ulimit -c 0 -t {math.ceil(deadline_s) + 1} -f {limits.file_bytes >> 10} -v {limits.memory_bytes >> 10}"
        first = "{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null"
        return f"{first}\n{ulimit}{processes} || exit 125\nprintf '\\0'\neval \"$1\""

    def _follow(self, process: subprocess.Popen[bytes], due: float) -> tuple[bytes, Stopped]:
        """Reads until the command has ended or passes a limit."""
        assert process.stdout is not None
        stream, most = process.stdout.fileno(), self._limits.output_bytes + 1
        os.set_blocking(stream, False)
        waiting = select.poll()
        waiting.register(stream, select.POLLIN)
        output, is_open, watch_at = bytearray(), True, time.monotonic() + WATCH_S
        while True:
            now = time.monotonic()
            if now >= due:
                return bytes(output), "time"
            is_watch = now >= watch_at
            if is_watch:
                watch_at = now + WATCH_S
                if passed := self._passed(process.pid):
                    return bytes(output), passed
            if is_open:
                if waiting.poll(1000 * max(0.0, min(watch_at, due) - now)):
                    is_open = _read(stream, output, most)
            else:
                time.sleep(END_POLL_S)
            has_ended = (is_watch or not is_open) and _has_ended(process.pid)
            # What a process that goes on by itself still writes is not waited for.
            while has_ended and is_open and len(output) <= most and waiting.poll(0):
                is_open = _read(stream, output, most)
            if len(output) > most:
                return bytes(output), "output"
            if has_ended:
                return bytes(output), ""

    def _passed(self, pid: int) -> Stopped:
        """The limit that a running command has passed, if any."""
        processes = _descendants(pid, 4 * self._limits.processes)
        if len(processes) > self._limits.processes:
            return "processes"
        if sum(map(_resident_bytes, processes)) > self._limits.memory_bytes:
            return "memory"
        return "disk" if self._disk_is_over(_nameless_bytes(processes)) else ""

    def _disk_is_over(self, used: int = 0) -> bool:
        try:
            for _, entry in _entries(self.path, self._limits.files):
                used += 512 * entry.st_blocks
        except OSError:  # too many files, a path longer than the system takes, or a folder that is closed to us
            return True
        return used > self._limits.disk_bytes

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Under a lock: once a process is reaped its number may be another's."""
        with self._reaping:
            _kill(process)
            self._process = None
            try:
                process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                raise SandboxBroken(f"process {process.pid} did not end {KILL_WAIT_S:g} s after SIGKILL") from None
            finally:
                if process.stdout is not None:
                    process.stdout.close()

    def _result(self, returncode: int, output: bytes, stopped: Stopped, seconds: float) -> Result:
        if self._closing:
            stopped = "closed"
        elif not output.startswith(b"\0") and stopped not in ("time", "output"):
            said = output.decode(errors="replace").strip()
            raise SandboxBroken(f"the sandbox ({self._kind.name}) did not start a command, exit code {returncode}: {said}")
        if not self._closing and self._disk_is_over():
            self._full, stopped = True, "disk"
        exit_code = 124 if stopped == "time" else 128 - returncode if returncode < 0 else returncode
        text = output[1 : 1 + self._limits.output_bytes].decode(errors="replace")
        return Result(exit_code, text, stopped == "output", stopped == "time", seconds, stopped)


def sweep() -> list[str]:
    """Removes directories of this user whose owner is dead and returns their names; one that stays is a warning."""
    mine = {os.geteuid(), sandbox_kind().uid}
    swept = []
    for name in sorted(os.listdir(sandbox_root())):
        path = sandbox_root() / name
        if not name.startswith(PREFIX):
            continue
        try:
            entry = os.lstat(path)
            if entry.st_uid not in mine or not stat.S_ISDIR(entry.st_mode):
                continue
            os.chmod(path, 0o700)  # a command may have closed it
            if (descriptor := _lock(path)) is None:
                continue
            try:
                remove(path)
            finally:
                os.close(descriptor)
            swept.append(name)
        except FileNotFoundError:  # another sweeper, or its owner, was first
            continue
        except OSError as error:
            log.warning("a sandbox directory of a dead process stays: %s", error)
    return swept


def remove(path: Path) -> None:
    """Removes a tree in which nobody writes any more, whatever its permissions and depth. Raises SandboxBroken."""
    try:
        shutil.rmtree(path)
        return
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        commands = (["chmod", "-R", "u+rwx", "--", str(path)], ["rm", "-rf", "--one-file-system", "--", str(path)])
        done = [subprocess.run(command, capture_output=True, text=True, errors="replace", check=False) for command in commands]
    if path.exists():
        raise SandboxBroken(f"{path} cannot be removed: {done[-1].stderr.strip()[:300]}")


def _locked_folder(owner: str) -> tuple[Path, int]:
    """A new directory and the descriptor whose lock says that its owner lives."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "_", owner)[:100]
    while True:
        path = sandbox_root() / f"{PREFIX}{clean}.{os.getpid()}.{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        # A sweeper may take the directory for a dead one's before it is locked.
        with contextlib.suppress(FileNotFoundError):
            descriptor = _lock(path)
            if descriptor is not None and path.exists():
                return path, descriptor
            if descriptor is not None:
                os.close(descriptor)


def _lock(path: Path) -> int | None:
    """The descriptor of a directory nobody else holds, locked until it is closed; None if somebody does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@functools.lru_cache(maxsize=1)
def _warn_once(kind: SandboxKind) -> None:
    log.warning(
        "SANDBOX: commands of the model run under %r only. NOT HELD: %s. Why nothing better: %s",
        kind.name, "; ".join(kind.missing), "; ".join(kind.reasons) or "it was asked for",
    )  # fmt: skip


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Everything of the process group; under bubblewrap and unshare the namespace dies with its parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(stream: int, output: bytearray, most: int) -> bool:
    """Appends what is there, at most one byte more than `most` in all; False at the end of the stream."""
    try:
        chunk = os.read(stream, max(1, min(1 << 16, most + 1 - len(output))))
    except BlockingIOError:
        return True
    output += chunk
    return bool(chunk)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is not reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _entries(root: Path, most: int) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a directory, nothing followed. Raises OSError for more than `most` entries or what cannot be listed."""
    folders, seen = [root], 0
    while folders:
        try:
            with os.scandir(folders.pop()) as listing:
                for item in listing:
                    seen += 1
                    if seen > most:
                        raise OSError(f"more than {most} files")
                    entry = item.stat(follow_symlinks=False)
                    yield Path(item.path), entry
                    if stat.S_ISDIR(entry.st_mode):
                        folders.append(Path(item.path))
        except (FileNotFoundError, NotADirectoryError):  # it changes while it is read
            continue


def _read_regular(path: Path, most: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # a link, a socket, no permission
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _descendants(pid: int, most: int) -> list[int]:
    """Processes below `pid`, itself left out; stops counting at `most`. Empty where the kernel does not tell."""
    found: list[int] = []
    parents = [pid]
    while parents and len(found) < most:
        parent = parents.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                found += map(int, children)
                parents += map(int, children)
    return found


def _nameless_bytes(pids: list[int]) -> int:
    """Of files that these processes have open and that have no name any more: no look at a directory finds them."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    entry = os.stat(f"/proc/{pid}/fd/{name}")
                    if entry.st_nlink == 0:
                        sizes[entry.st_dev, entry.st_ino] = 512 * entry.st_blocks
    return sum(sizes.values())


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
