"""`miles doctor` against a real slurmctld, with its job on two real nodes; and what it says of a profile that cannot work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster.profile import ClusterProfile
from cluster.scheduler import Phase
from cluster.schedulers import make_scheduler
from cluster.slurm.devslurm import DevSlurm
from flows import doctor_nodes
from flows.doctor import examine
from flows.findings import Finding, findings_text


def profile_of(devslurm: DevSlurm, runs_root: Path, **changes: Any) -> ClusterProfile:
    folder = str(Path(devslurm.env()["SLURM_CONF"]).parent)
    timing = {"visibility_s": 5, "lease_s": 15}
    return ClusterProfile.model_validate({
        "name": "dev", "kind": "slurm", "runs_root": str(runs_root), "timing": timing, "slurm": {"devslurm": folder}, **changes
    })  # fmt: skip


def named(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def test_a_cluster_that_works_is_all_well_between_its_nodes_too(devslurm: DevSlurm, tmp_path: Path) -> None:
    profile = profile_of(devslurm, tmp_path / "runs", resources={"learner": {"partition": "learner", "gpus": 1}})
    found = examine(profile, nodes=True)
    assert not [finding for finding in found if finding.verdict in ("bad", "unknown")], findings_text(found)
    assert "fits learner" in named(found, "learner job").seen and "fits rollout" in named(found, "rollout job").seen
    nodes = named(found, "two nodes").seen
    assert "started this Python" in nodes and " and " in nodes and named(found, "munge").verdict == "ok"
    assert "20 rounds" in named(found, "visibility of names").seen and named(found, "node clocks").verdict == "ok"
    assert os.listdir(tmp_path / "runs") == []


def test_a_profile_that_cannot_work_is_told_before_anything_is_submitted(devslurm: DevSlurm, tmp_path: Path) -> None:
    resources = {"learner": {"partition": "gpu"}, "grader": {"mem_mb": 9_000_000}, "rollout": {"gpus": 9, "tasks": 1}}
    found = examine(profile_of(devslurm, tmp_path / "runs", resources=resources))
    assert named(found, "learner job").fix.endswith("rollout, learner, grader, orchestrator, spot")
    assert "9000000 MiB" in named(found, "grader job").seen and "4 GPUs" in named(found, "rollout job").seen
    assert named(found, "orchestrator job").verdict == "ok"


def test_a_job_that_waits_for_nodes_is_cancelled_and_leaves_nothing(
    devslurm: DevSlurm, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(doctor_nodes, "NODES_DEADLINE_S", 3.0)
    profile = profile_of(devslurm, tmp_path / "runs")
    # Nobody starts on a node that begins next year.
    site = profile.slurm.model_copy(update={"extra": {"begin": "now+365days"}})
    waiting = profile.model_copy(update={"slurm": site})
    run_ids: list[str] = []
    make = doctor_nodes.probe_spec

    def spec(*arguments: Any) -> Any:
        made = make(*arguments)
        run_ids.append(made.run_id)
        return made

    monkeypatch.setattr(doctor_nodes, "probe_spec", spec)
    (tmp_path / "runs").mkdir()
    (finding,) = doctor_nodes.examine_nodes(waiting, tmp_path / "runs")
    assert finding.verdict == "unknown" and "BeginTime" in finding.seen
    jobs = make_scheduler(profile, tmp_path).snapshot(run_ids[0]).jobs
    assert [job.phase for job in jobs] == [Phase.ENDED] and os.listdir(tmp_path / "runs") == []
