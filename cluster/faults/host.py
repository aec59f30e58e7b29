"""The run's supervisor as a child process of a drill, so that it can be killed and stopped like anything else."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence

log = logging.getLogger("miles")

_LEAVE_DEADLINE_S = 60.0
_PR_SET_PDEATHSIG = 1


class HostedSupervisor:
    """The run's supervisor as a child, in a session of its own; it dies with this process.

    What it prints goes to a file without a name, outside the run directory, whose disk a drill may fill.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._shown_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, again after a kill; one that lives stays."""
        if self._process is not None and not self.has_ended():
            return
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no threads here
        )  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        """Signals it; nothing to one that has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def has_ended(self) -> bool:
        """It runs no more."""
        return self.exit_code() is not None

    def exit_code(self) -> int | None:
        """None while it runs; negative: a signal."""
        return None if self._process is None else self._process.poll()

    def leave(self) -> None:
        """Asks it to leave, and kills it after a deadline; the jobs go on."""
        if self._process is None or self.has_ended():
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=_LEAVE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            log.warning("the supervisor did not leave within %g s and is killed", _LEAVE_DEADLINE_S)
            self._process.kill()
            self._process.wait()

    def new_lines(self) -> list[str]:
        """Whole lines that it printed since the last call."""
        data = os.pread(self._output.fileno(), 1 << 20, self._shown_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._shown_bytes += len(whole)
        return whole.decode(errors="replace").splitlines()
