"""`miles drill` on a real Slurm cluster: every role and a node die in one run, which completes as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.faults.plan import load_plan
from cluster.slurm.devslurm import DevSlurm
from miles_core.paths import RunPaths
from tests.e2e.runs import start_miles, summary_of
from tests.slurm.site import cluster_file, settings

pytestmark = [pytest.mark.timeout(900)]

STEPS = 40


def test_every_role_and_a_node_die_in_one_run_which_completes(tmp_path: Path, devslurm: DevSlurm) -> None:
    cluster = cluster_file(tmp_path, devslurm)
    argv = ["drill", "chain_sum", "--cluster", str(cluster), "--plan", "short", "--run-id", "drilled"]
    drill = start_miles(tmp_path, *argv, *settings(f"steps={STEPS}"))
    code = drill.wait(timeout=800)
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    root = tmp_path / "runs" / "drilled"
    faults = json.loads(RunPaths(root).drill.read_text())["faults"]
    assert [(fault["role"], fault["kind"]) for fault in faults] == [
        (role, kind) for role, kind, _ in load_plan("short").rounds()
    ]
    for fault in faults:
        assert fault["fired"] and fault["verify"] and fault["others_unchanged"], fault
        assert 0 < fault["noticed_s"] < fault["productive_s"], fault
    summary = summary_of(root)
    assert summary["state"] == "COMPLETED" and summary["steps"] == STEPS and summary["groups"]["open"] == 0
    attempts = {job["role"]: job["attempts"] for job in summary["jobs"]}
    assert attempts == {"learner": 2, "orchestrator": 2, "grader": 2, "rollout": 3, "evaluator": 2}
    assert f"{len(faults)} of {len(faults)} faults good; run drilled: COMPLETED" in output
