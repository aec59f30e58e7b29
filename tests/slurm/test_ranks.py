"""A learner of two ranks on two nodes: one rank is killed, and the whole role, and nobody else, is replaced once."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cluster.slurm.devslurm import DevSlurm
from miles_core.errors import RankLost
from miles_core.paths import RunPaths
from tests.e2e.runs import ledger_of, miles, start_miles, summary_of, wait_for, wait_for_step
from tests.slurm.site import cluster_file, settings

pytestmark = [pytest.mark.timeout(900)]

STEPS = 10


def pid_of_rank(root: Path, rank: int) -> int | None:
    """A rank of the learner, whichever virtual node it is on."""
    for folder in filter(lambda folder: folder.name.isdigit(), Path("/proc").iterdir()):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            known = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        wanted = {str(root).encode(), b"miles_core.roles.learner"}
        if b"python" in words[0] and wanted < set(words) and f"SLURM_PROCID={rank}".encode() in known:
            return int(folder.name)
    return None


def test_a_killed_rank_costs_one_learner_attempt_and_nothing_else(tmp_path: Path, devslurm: DevSlurm) -> None:
    cluster = cluster_file(tmp_path, devslurm, resources={"learner": {"nodes": 2, "tasks": 1}})
    run = start_miles(tmp_path, "run", "chain_sum", "--cluster", str(cluster), "--run-id", "ranks", *settings(f"steps={STEPS}"))
    root = tmp_path / "runs" / "ranks"
    wait_for_step(root, 4)
    os.kill(wait_for("rank 1 of the learner", lambda: pid_of_rank(root, 1)), signal.SIGKILL)
    assert run.wait(timeout=600) == 0, (tmp_path / "output").read_text()

    summary = summary_of(root)
    jobs = {job["role"]: job for job in summary["jobs"]}
    assert summary["state"] == "COMPLETED" and summary["steps"] == STEPS and summary["groups"]["open"] == 0
    assert jobs.pop("learner")["attempts"] == 2
    assert all(job["attempts"] == 1 and len(job["job_ids"]) == 1 for job in jobs.values()), jobs
    verified = miles(tmp_path, "verify", str(root))
    assert verified.returncode == 0, verified.stdout

    logs = {path.name.rpartition("_")[2]: path.read_text() for path in RunPaths(root).logs("learner-0", 1).glob("*.out")}
    [lost] = [incident for incident in ledger_of(root)[2].incidents if incident.what == "role_lost"]
    assert lost.writer == "learner-0" and "exit code 137" in lost.detail
    assert re.search(r"srun: error: n\d: task 1: Killed", logs["0.out"])
    assert re.search(r"rank 1 \(pid \d+ on n\d\) is gone: its connection closed", logs["0.out"])
    assert re.search(rf"srun: error: n\d: task 0: Exited with exit code {RankLost.exit_code}", logs["0.out"])
    assert re.search(r"joined rank 0 \(pid \d+ on n\d\)", logs["1.out"])
