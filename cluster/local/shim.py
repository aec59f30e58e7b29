"""The process that stands between LocalScheduler and one role: `python -I -S shim.py PREFIX COMMAND...`.

It leads a session of its own, so it outlives whoever started it, and writes two small files: PREFIX.pid (its pid and start
time) and, when the role has ended, PREFIX.exit (the exit code as a shell gives it). It imports only the standard library and
nothing of ours: it must start in no time and must not break when the code changes under it.

- A signal to the shim is passed on to the role alone; TERM reaches the whole process group by itself.
- The role dies with the shim (parent-death signal): a shim that is gone without an exit file means the role is gone too.
- What the role left behind in its process group is killed at its end, as a batch system would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
PR_SET_PDEATHSIG = 1
CANCELLED_EXIT_CODE = 128 + signal.SIGTERM
NOT_STARTED_EXIT_CODE = 127


class Shim:
    """One role's keeper."""

    def __init__(self, prefix: str, command: list[str]) -> None:
        self._prefix, self._command = prefix, command
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        """Signals that came before there was a role to give them to."""
        self._libc = ctypes.CDLL(None)

    def run(self) -> None:
        """Runs the role to its end and records how it ended."""
        for number in (signal.SIGTERM, *PASSED_ON):
            signal.signal(number, self._on_signal)
        # The pid file comes before the look for a cancel mark, and a cancel writes its mark before it looks for the pid file:
        # one of the two sees the other.
        self._write("pid", f"{os.getpid()} {start_ticks(os.getpid())}")
        code = CANCELLED_EXIT_CODE if Path(f"{self._prefix}.cancel").exists() else self._role()
        self._write("exit", str(code))
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)

    def _role(self) -> int:
        try:
            self._child = subprocess.Popen(self._command, preexec_fn=self._die_with_parent)  # noqa: PLW1509 - no threads here
        except OSError as error:
            print(f"{self._command[0]} cannot be started: {error}", flush=True)
            return NOT_STARTED_EXIT_CODE
        for number in self._early:
            self._child.send_signal(number)
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _die_with_parent(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._child is None:
            self._early.append(number)
        elif number != signal.SIGTERM:
            self._child.send_signal(number)

    def _write(self, suffix: str, text: str) -> None:
        path = f"{self._prefix}.{suffix}"
        with open(f"{path}.tmp", "w") as file:
            file.write(text)
        os.replace(f"{path}.tmp", path)


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None if there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


if __name__ == "__main__":
    Shim(sys.argv[1], sys.argv[2:]).run()
