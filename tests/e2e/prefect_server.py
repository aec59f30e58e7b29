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
    with open(log, "wb") as output:
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL, for a process and its children; nothing if it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
            return


@contextlib.contextmanager
def prefect_server(folder: Path, **extra: str) -> Iterator[dict[str, str]]:
    """Server, pool, deployments and worker; gives the environment that finds them. Logs are in `folder`.

    Its SQLite is in memory where it can be: on a busy disk it answers "database is locked" for minutes.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="prefect-", dir=memory if os.access(memory, os.W_OK) else folder) as home:
        with _server(folder, Path(home), extra) as env:
            yield env


@contextlib.contextmanager
def _server(folder: Path, home: Path, extra: dict[str, str]) -> Iterator[dict[str, str]]:
    port = free_port()
    env = os.environ | {f"PREFECT_API_SERVICES_{name}_ENABLED": "false" for name in UNUSED_SERVICES} | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    } | extra  # fmt: skip
    with background(folder / "server.log", env, PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port)):
        wait_for("the Prefect server", lambda: answers(f"{env['PREFECT_API_URL']}/health"), 120)
        prefect(env, "work-pool", "create", "miles", "--type", "process")
        prefect(env, "--no-prompt", "deploy", "--all")
        with background(folder / "worker.log", env, PREFECT, "worker", "start", "--pool", "miles"):
            yield env


def prefect(env: dict[str, str], *argv: str) -> str:
    """A `prefect` command that must succeed; its output."""
    done = subprocess.run([PREFECT, *argv], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def parameters(**values: object) -> list[str]:
    """`-p` arguments of `prefect deployment run`."""
    return [part for name, value in values.items() for part in ("-p", f"{name}={json.dumps(value)}")]
