"""A real Prefect server of a test's own, with the work pool, the deployments and a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.runs import REPOSITORY, wait_for

UNUSED_SERVICES = ("FOREMAN", "LATE_RUNS", "PAUSE_EXPIRATIONS", "TASK_RUN_RECORDER", "TRIGGERS")
PREFECT = str(Path(sys.executable).with_name("prefect"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def background(log: Path, env: dict[str, str], *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children in a session of its own, ended at the end."""
    process = start_group(log, env, *argv)
    try:
        yield process
    finally:
        end_group(process)


def start_group(log: Path, env: dict[str, str], *argv: str) -> subprocess.Popen[bytes]:
    """A process in a session of its own, whose output is appended to `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(argv, cwd=REPOSITORY, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL, for a process and its children; nothing if it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            return


class Server:
    """A server that can be away for a while: what it knows is in its home, which stays."""

    def __init__(self, folder: Path, home: Path, extra: dict[str, str]) -> None:
        self._log, self._port = folder / "server.log", free_port()
        self.env = os.environ | {f"PREFECT_API_SERVICES_{name}_ENABLED": "false" for name in UNUSED_SERVICES} | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self._port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        } | extra  # fmt: skip
        """Finds it."""

    def start(self) -> None:
        """Until it answers."""
        argv = (PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(self._port))
        self._process = start_group(self._log, self.env, *argv)
        wait_for("the Prefect server", self.answers, 300)

    def stop(self) -> None:
        """Until its process is gone."""
        end_group(self._process)

    def answers(self) -> bool:
        """It is there."""
        try:
            return httpx.get(f"{self.env['PREFECT_API_URL']}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@contextlib.contextmanager
def prefect_server(folder: Path, **extra: str) -> Iterator[Server]:
    """Server, pool, deployments and worker. Logs are in `folder`.

    Its SQLite is in memory where it can be: on a busy disk it answers "database is locked" for minutes.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="prefect-", dir=memory if os.access(memory, os.W_OK) else folder) as home:
        server = Server(folder, Path(home), extra)
        try:
            server.start()
            prefect(server.env, "work-pool", "create", "miles", "--type", "process")
            prefect(server.env, "--no-prompt", "deploy", "--all")
            with background(folder / "worker.log", server.env, PREFECT, "worker", "start", "--pool", "miles"):
                yield server
        finally:
            server.stop()


def prefect(env: dict[str, str], *argv: str) -> str:
    """A `prefect` command that must succeed; its output."""
    done = subprocess.run([PREFECT, *argv], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def parameters(**values: object) -> list[str]:
    """`-p` arguments of `prefect deployment run`."""
    return [part for name, value in values.items() for part in ("-p", f"{name}={json.dumps(value)}")]
