"""The process that stands between LocalScheduler and one role: `python -I -S shim.py PREFIX RANKS LOG COMMAND...`.

It leads a session of its own, so it outlives whoever started it, and writes two small files: PREFIX.pid (its pid and start
time) and, when the role has ended, PREFIX.exit (the exit code as a shell gives it). It imports only the standard library and
nothing of ours: it must start in no time and must not break when the code changes under it.

- With RANKS > 1 the role is that many processes, as under srun: SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID say who is who,
  rank r > 0 writes to LOG_r.out, the exit code is the highest one, and who is still there WAIT_S after the first is killed.
- A signal to the shim is passed on to the role alone; TERM reaches the whole process group by itself.
- The role dies with the shim (parent-death signal): a shim that is gone without an exit file means the role is gone too.
- What the role left behind in its process group is killed at its end, as a batch system would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
PR_SET_PDEATHSIG = 1
CANCELLED_EXIT_CODE = 128 + signal.SIGTERM
NOT_STARTED_EXIT_CODE = 127
WAIT_S = 60.0
POLL_S = 0.1


class Shim:
    """One role's keeper."""

    def __init__(self, prefix: str, ranks: int, log: str, command: list[str]) -> None:
        self._prefix, self._ranks, self._log, self._command = prefix, ranks, log, command
        self._children: list[subprocess.Popen[bytes]] = []
        self._early: list[int] = []
        """Signals that came before there was a whole role to give them to."""
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
            for rank in range(self._ranks):
                self._children.append(self._start(rank))
        except OSError as error:
            print(f"{self._command[0]} cannot be started: {error}", flush=True)
            return NOT_STARTED_EXIT_CODE
        for number in self._early:
            self._pass_on(number)
        return max(code if code >= 0 else 128 - code for code in self._codes())

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        place = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(self._ranks), "SLURM_LOCALID": str(rank)}
        env = {**os.environ, **(place if self._ranks > 1 else {})}
        # Rank 0 writes where the shim does.
        with open(f"{self._log}_{rank}.out", "ab") if rank else contextlib.nullcontext() as output:
            return subprocess.Popen(
                self._command, env=env, stdout=output, stderr=output,
                preexec_fn=self._die_with_parent,  # noqa: PLW1509 - no threads here
            )  # fmt: skip

    def _codes(self) -> list[int]:
        if self._ranks > 1:
            while all(child.poll() is None for child in self._children):
                time.sleep(POLL_S)
            until = time.monotonic() + WAIT_S
            for child in self._children:
                try:
                    child.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
        return [child.wait() for child in self._children]

    def _die_with_parent(self) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def _on_signal(self, number: int, frame: object) -> None:
        if len(self._children) < self._ranks:
            self._early.append(number)
        elif number != signal.SIGTERM:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)

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
    Shim(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]).run()
