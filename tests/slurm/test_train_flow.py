"""`prefect deployment run` trains the quickstart on a real Slurm cluster while one replica's node dies in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm.devslurm import DevSlurm
from miles_core.run import read_run
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from tests.e2e.prefect_server import PREFECT, background, parameters, prefect_server
from tests.e2e.runs import ledger_of, miles, summary_of, wait_for, wait_for_step
from tests.slurm.site import cluster_file

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(900)]

STEPS = 12


@pytest.fixture
def prefect_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A real Prefect server of its own, with the work pool, the deployment and a worker."""
    with prefect_server(tmp_path) as server:
        yield server.env


def node_of(root: Path, writer: str) -> str:
    """Where the newest attempt of a role runs, from its lease (a virtual node has its own host name)."""
    run, paths = read_run(root)
    leases = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    leases.refresh()
    return leases.read(writer, leases.newest(writer)).host


def test_a_node_dies_and_only_its_replica_is_replaced(tmp_path: Path, devslurm: DevSlurm, prefect_env: dict[str, str]) -> None:
    cluster = cluster_file(tmp_path, devslurm)
    settings = [
        f"steps={STEPS}", "evaluation.problems=32", "orchestrator.prompts=8", "orchestrator.samples=4",
        "rollout.pools=[{name: main, replicas: 2, slots: 16}]",
    ]  # fmt: skip
    root = tmp_path / "runs" / "nodekill"
    log = tmp_path / "flow.log"
    arguments = parameters(recipe="chain_sum", cluster=str(cluster), run_id="nodekill", settings=settings)
    with background(log, prefect_env, PREFECT, "deployment", "run", "train/manual", *arguments, "--watch") as flow:
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
