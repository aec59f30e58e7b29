"""What a command of the model runs under on this machine: bubblewrap, or the best that is there instead.

Candidates are tried, best first, by running a command under each; the first that runs it is taken and says what it does not
hold and why nothing better did. As root the command runs as `nobody`; inside a node where processes inherit capabilities
(a user namespace that keeps them) those are dropped first, since bubblewrap refuses to start with them. Bubblewrap before
0.8 (many clusters have 0.4) bounds neither a private /tmp nor namespaces inside; there /tmp is read-only.

    kind = sandbox_kind();  kind.name, kind.missing, kind.reasons
"""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

FOLDER = "<folder>"
"""Stands for the sandbox's directory in a prefix."""
INSIDE = "/work"
"""Where a command finds that directory under bubblewrap."""
TMP_BYTES = 16 << 20
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LC_ALL": "C"}
"""All that a command gets of it."""
SHELL = ("bash", "--norc", "--noprofile", "-c")
PROBE_DEADLINE_S = 20.0
_OWN_COUNT_SINCE = (5, 14)
"""From this kernel on a user namespace counts its own processes, so that a limit does not count the rest of the user's."""

_NAMESPACES = "a command can make namespaces of its own"
Name = Literal["bubblewrap", "unshare", "process group"]
_FILES = "the rest of the filesystem can be read, and written as this user may"
_NETWORK = "the network can be reached"
_PROCESSES = "other processes of this user can be seen and signalled, and one that leaves its process group outlives the call"


@dataclass(frozen=True)
class SandboxKind:
    """One way to run a command."""

    name: Name
    prefix: tuple[str, ...]
    """argv in front of the shell; FOLDER is replaced."""
    missing: tuple[str, ...] = ()
    """What it does not hold; empty for bubblewrap."""
    uid: int | None = None
    """The user it runs as, if that is not this one."""
    counts_processes: bool = False
    """Whether a limit on processes counts those of the sandbox alone."""
    reasons: tuple[str, ...] = ()
    """Why the better candidates were not taken."""

    @property
    def is_closed(self) -> bool:
        """Whether a command reaches no file of others, no other process and no network."""
        return not set(self.missing) & {_FILES, _NETWORK, _PROCESSES}

    def argv(self, folder: Path, command: Sequence[str]) -> list[str]:
        """The whole command line for one sandbox directory."""
        return [*(str(folder) if part == FOLDER else part for part in self.prefix), *command]

    def owned(self, path: Path) -> None:
        """Gives a file or directory to the user that the commands run as."""
        if self.uid is not None:
            os.chown(path, self.uid, -1, follow_symlinks=False)


@functools.lru_cache(maxsize=1)
def sandbox_kind() -> SandboxKind:
    """The best kind that works here, tried once per process."""
    return best_of(candidates())


def best_of(kinds: Sequence[SandboxKind]) -> SandboxKind:
    """The first kind that can run a command. Raises OSError with all reasons if none can: there is no bash."""
    reasons: list[str] = []
    for kind in kinds:
        fault = _fault(kind)
        if fault is None:
            return replace(kind, reasons=tuple(reasons))
        if fault not in reasons:
            reasons.append(fault)
    raise OSError("no command can be run on this machine, not even without a sandbox: " + "; ".join(reasons))


def candidates() -> list[SandboxKind]:
    """All kinds, best first."""
    drops, own_count = _privilege_drops(), _own_count()
    found = [SandboxKind("bubblewrap", (*drop, *_bubblewrap()), (), uid, own_count) for drop, uid in drops]
    found += [SandboxKind("bubblewrap", (*drop, *_old_bubblewrap()), (_NAMESPACES,), uid, own_count) for drop, uid in drops]
    spaces = ("--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    for drop, uid in drops:
        dies = (*_setpriv(drop), "--pdeathsig", "KILL")
        found.append(SandboxKind("unshare", (*dies, _program("unshare"), *spaces), (_FILES,), uid, own_count))
    for drop, uid in drops:
        dies = (*_setpriv(drop), "--pdeathsig", "KILL")
        found.append(SandboxKind("process group", dies, (_FILES, _NETWORK, _PROCESSES), uid))
    return [*found, SandboxKind("process group", (), (_FILES, _NETWORK, _PROCESSES))]


def _privilege_drops() -> list[tuple[tuple[str, ...], int | None]]:
    """Prefixes that give up what this process has, and the user that is left: best first."""
    capabilities = ("--ambient-caps=-all", "--inh-caps=-all")
    plain: list[tuple[tuple[str, ...], int | None]] = [((), None), ((_program("setpriv"), *capabilities), None)]
    if os.geteuid() != 0:
        return plain
    nobody = pwd.getpwnam("nobody")
    user = (f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups")
    return [((_program("setpriv"), *user, *capabilities), nobody.pw_uid), *plain]


def _setpriv(drop: tuple[str, ...]) -> tuple[str, ...]:
    return drop or (_program("setpriv"),)


def _program(name: str) -> str:
    """Its path by this process's PATH, which may know more than the one that a command gets."""
    return shutil.which(name) or name


def _own_count() -> bool:
    release = os.uname().release.split(".")
    return (int(release[0]), int(release[1])) >= _OWN_COUNT_SINCE


def _bubblewrap() -> tuple[str, ...]:
    """No network, nothing but read-only programs, private /tmp, /proc and process ids; dies with its parent."""
    return (*_mounts("--unshare-user", "--disable-userns"), "--size", str(TMP_BYTES), "--tmpfs", "/tmp", *_closed())


def _old_bubblewrap() -> tuple[str, ...]:
    return (*_mounts(), "--dir", "/tmp", *_closed())


def _mounts(*options: str) -> tuple[str, ...]:
    mounts: list[str] = []
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            mounts += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            mounts += ["--ro-bind", folder, folder]
    return (
        _program("bwrap"), "--unshare-all", *options, "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--hostname", "sandbox", *mounts, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
    )  # fmt: skip


def _closed() -> tuple[str, ...]:
    return ("--bind", FOLDER, INSIDE, "--remount-ro", "/", "--chdir", INSIDE)


def sandbox_root() -> Path:
    """Where sandbox directories are: in memory if the node has that, else the temp folder."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _fault(kind: SandboxKind) -> str | None:
    """Why a kind cannot run a command here; None if it can."""
    programs = [*kind.prefix[:1], *(part for part in kind.prefix if os.path.basename(part) in ("bwrap", "unshare")), SHELL[0]]
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        hint = " (install the package bubblewrap)" if "bwrap" in missing else ""
        return f"{kind.name}: no {missing[0]} in PATH{hint}"
    with tempfile.TemporaryDirectory(prefix="miles-probe-", dir=sandbox_root()) as name:
        folder = Path(name)
        kind.owned(folder)
        argv = kind.argv(folder, (*SHELL, ": >probe && true | true"))
        try:
            done = subprocess.run(
                argv, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=PROBE_DEADLINE_S, check=False, start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{kind.name}: {error}"
        if done.returncode == 0 and (folder / "probe").exists():
            return None
    said = done.stderr.strip().splitlines()
    return f"{kind.name}: {said[-1] if said else f'exit code {done.returncode}'}"
