"""What tests of the sandbox share: one sandbox, a server to be reached, and what a command left running."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_core.environments.sandbox import Result, Sandbox
from miles_core.environments.sandbox_kind import sandbox_kind

REPOSITORY = Path(__file__).resolve().parents[2]
DEEP = "d/" * 1500
"""Deeper than Python recurses; two of them are longer than a path may be."""
PATIENT_S = 60.0
"""Deadline of commands that end by themselves, on however busy a machine."""
MARK = f"4242.{os.getpid()}"
"""An argument of `sleep` by which a test finds what it left."""


def need_bubblewrap() -> None:
    """Skips a test where bubblewrap cannot run; under CI=true it fails."""
    kind = sandbox_kind()
    if kind.missing and os.environ.get("CI") != "true":
        pytest.skip(f"bubblewrap does not work here: {'; '.join(kind.reasons)}")
    assert not kind.missing, kind.reasons


@contextlib.contextmanager
def open_box() -> Iterator[Sandbox]:
    """A sandbox with two files; its directory is gone afterwards."""
    made = Sandbox("test.sandbox")
    made.fill({"a.txt": "kiwi\nplum\n", "deep/er/b.txt": "fig\n"})
    try:
        yield made
    finally:
        made.close()
        assert not made.path.exists()


@contextlib.contextmanager
def open_server() -> Iterator[socket.socket]:
    """Listens on all addresses of this machine."""
    with socket.create_server(("0.0.0.0", 0)) as listening:
        listening.settimeout(0.3)
        yield listening


def run(box: Sandbox, command: str, deadline_s: float = PATIENT_S) -> Result:
    """Runs one command, patiently."""
    return box.run(command, deadline_s)


def living(argument: str) -> list[int]:
    """Processes of this machine with such an argument."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and argument.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = PATIENT_S) -> None:
    """Polls; the error names what was waited for."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.02)
