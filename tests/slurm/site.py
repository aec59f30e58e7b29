"""A devslurm as a run sees it: its cluster profile, and a recipe whose pace does not depend on how fast the machine is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cluster.slurm.devslurm import DevSlurm
from tests.e2e.runs import REPOSITORY

PACED = (
    "evaluation.problems=16", "orchestrator.prompts=4", "orchestrator.samples=4", "orchestrator.max_staleness=0",
    "orchestrator.capacity_batches=1", "learner.checkpoint_every=3", "rollout.shard_age_s=2",
)  # fmt: skip
"""A step takes two seconds and some: one batch at a time, and its shard is sealed only when it is that old. So a run has room
for its faults on a fast machine, too, and none but the evaluator's lets it train on."""


def cluster_file(folder: Path, devslurm: DevSlurm, **changes: Any) -> Path:
    """The profile of this cluster, with runs below `folder`."""
    profile: dict[str, Any] = yaml.safe_load((REPOSITORY / "configs/clusters/devslurm.yaml").read_text()) | changes
    profile["runs_root"] = str(folder / "runs")
    profile["slurm"] = profile["slurm"] | {"devslurm": devslurm.status()["folder"]}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def settings(*changes: str) -> list[str]:
    """The --set arguments of a paced run."""
    return [part for setting in (*PACED, *changes) for part in ("--set", setting)]
