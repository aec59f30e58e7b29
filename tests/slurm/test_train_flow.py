"""`prefect deployment run` trains the quickstart on a real Slurm cluster while one replica's node dies in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.slurm.devslurm import DevSlurm
from miles_core.run import read_run
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from tests.e2e.runs import REPOSITORY, ledger_of, miles, summary_of, wait_for, wait_for_step

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]

STEPS = 12


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


@pytest.fixture
def prefect_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real Prefect server of its own, with the work pool, the deployment and a worker."""
    port = free_port()
    env = os.environ | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    prefect = str(Path(sys.executable).with_name("prefect"))
    with background(tmp_path / "server.log", env, prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)):
        wait_for("the Prefect server", lambda: answers(f"{env['PREFECT_API_URL']}/health"), 120)
        for argv in (("work-pool", "create", "miles", "--type", "process"), ("--no-prompt", "deploy", "--all")):
            done = subprocess.run([prefect, *argv], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
        with background(tmp_path / "worker.log", env, prefect, "worker", "start", "--pool", "miles"):
            yield env


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def cluster_file(folder: Path, devslurm: DevSlurm, slurm_folder: Path) -> Path:
    profile: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs/clusters/devslurm.yaml").read_text())
    profile["runs_root"] = str(folder / "runs")
    profile["slurm"]["devslurm"] = str(slurm_folder)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def node_of(root: Path, writer: str) -> str:
    """Where the newest attempt of a role runs, from its lease (a virtual node has its own host name)."""
    run, paths = read_run(root)
    leases = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    leases.refresh()
    return leases.read(writer, leases.newest(writer)).host


def test_a_node_dies_and_only_its_replica_is_replaced(tmp_path: Path, devslurm: DevSlurm, prefect_env: dict[str, str]) -> None:
    cluster = cluster_file(tmp_path, devslurm, Path(devslurm.status()["folder"]))
    settings = [
        f"steps={STEPS}", "evaluation.problems=32", "orchestrator.prompts=8", "orchestrator.samples=4",
        "rollout.pools=[{name: main, replicas: 2, slots: 16}]",
    ]  # fmt: skip
    root = tmp_path / "runs" / "nodekill"
    prefect = str(Path(sys.executable).with_name("prefect"))
    log = tmp_path / "flow.log"
    arguments = ("recipe=chain_sum", f"cluster={cluster}", "run_id=nodekill", f"settings={json.dumps(settings)}")
    parameters = [part for argument in arguments for part in ("-p", argument)]
    with background(log, prefect_env, prefect, "deployment", "run", "train/manual", *parameters, "--watch") as flow:
        wait_for_step(root, 2)
        wait_for("replica 1 to have taken its lease", (root / "leases" / "rollout-1.a1").exists)
        node = node_of(root, "rollout-1")
        devslurm.kill_node(node)
        try:
            assert flow.wait(timeout=240) == 0, log.read_text() + (tmp_path / "worker.log").read_text()[-4000:]
        finally:
            devslurm.start_node(node)
    summary = summary_of(root)
    jobs = {f"{job['role']}-{job['replica']}": job for job in summary["jobs"]}
    assert summary["state"] == "COMPLETED" and summary["steps"] == STEPS and summary["groups"]["open"] == 0
    assert jobs.pop("rollout-1")["attempts"] == 2
    assert all(job["attempts"] == 1 and len(job["job_ids"]) == 1 for job in jobs.values()), jobs
    assert any(incident.what == "role_lost" for incident in ledger_of(root)[2].incidents)
    verified = miles(tmp_path, "verify", str(root))
    assert verified.returncode == 0, verified.stdout
