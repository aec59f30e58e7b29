"""Records a drill of a hundred faults, over several runs on a devslurm, into benchmarks/drill.json.

    .venv/bin/python benchmarks/drill.py [--plan hundred] [--until 18:15]

Each run takes the next faults of the plan and then trains to its end; what a run did not get to, or what did not go well, is
taken by the next one, and every attempt stays in the record. At `--until` (local time) the run at hand is cancelled. Counts
are of what was done, by that time; the load of the machine stands beside each run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from record import machine

from cluster.faults.plan import Round, load_plan
from cluster.faults.record import FaultRecord, left_of, read_drill
from cluster.slurm.devslurm import DevSlurm
from miles_core.paths import RunPaths
from miles_core.verify import verify_run

HERE = Path(__file__).resolve().parent
RECIPE = "chain_sum"
FAULTS_PER_RUN = 25
STEPS = 90
SETTINGS = (
    f"steps={STEPS}", "evaluation.problems=16", "orchestrator.prompts=4", "orchestrator.samples=4",
    "orchestrator.max_staleness=0", "orchestrator.capacity_batches=1", "learner.checkpoint_every=3", "rollout.shard_age_s=2",
)  # fmt: skip
"""Small steps of two seconds and some, so that a run outlives its share of the plan on a fast machine, too."""
STOP_S = 90.0
"""What it takes to leave and to cancel."""


@dataclass
class Bench:
    """Where it runs, and until when."""

    folder: Path
    cluster: Path
    until_unix_s: float

    def miles(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *argv]

    def env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}

    def left_s(self) -> float:
        return self.until_unix_s - STOP_S - time.time()


def drill(bench: Bench, name: str, rounds: list[Round]) -> tuple[dict[str, Any], list[FaultRecord]]:
    """One run, and the faults it saw."""
    plan = bench.folder / f"{name}.yaml"
    plan.write_text(yaml.safe_dump({"faults": [{"role": role, "kind": kind} for role, kind, _ in rounds], "deadline_s": 600}))
    argv = bench.miles("drill", RECIPE, "--cluster", str(bench.cluster), "--plan", str(plan), "--run-id", name)
    for setting in SETTINGS:
        argv += ["--set", setting]
    loads, began = [os.getloadavg()[0]], time.monotonic()
    with subprocess.Popen(argv, cwd=bench.folder, env=bench.env()) as process:
        while process.poll() is None and bench.left_s() > 0:
            time.sleep(5)
            loads.append(os.getloadavg()[0])
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    paths = RunPaths(bench.folder / "runs" / name)
    if process.returncode not in (0, 12):
        subprocess.run(bench.miles("cancel", str(paths.root)), cwd=bench.folder, env=bench.env(), check=False)
    verified, faults = verify_run(paths.root), list(read_drill(paths).faults)
    return {
        "run": name, "state": verified.state, "steps": verified.facts["steps"], "groups_open": verified.facts["groups_open"],
        "verify_ok": not verified.faults, "drill_exit_code": process.returncode, "faults": len(faults),
        "wall_s": round(time.monotonic() - began, 1),
        "load_1min": {"median": round(statistics.median(loads), 1), "max": round(max(loads), 1)},
    }, faults  # fmt: skip


def totals(rounds: list[Round], faults: list[FaultRecord]) -> dict[str, Any]:
    """Counts, and medians of the good ones, by role and by kind."""
    good = [fault for fault in faults if fault.is_good]
    return {
        "planned": len(rounds), "injected": len(faults), "fired": sum(fault.fired for fault in faults), "good": len(good),
        "verify_clean": sum(fault.verify for fault in faults),
        "others_unchanged": sum(fault.others_unchanged for fault in faults),
        "lost_samples_given_out_again": sum(fault.lost_samples for fault in faults),
        "good_by_role": Counter(fault.role for fault in good),
        "median_s_by_kind": {kind: _medians([fault for fault in good if fault.kind == kind]) for kind in _kinds(good)},
        "median_s_by_role_kill": {role: _medians(_kills(good, role)) for role in sorted({fault.role for fault in good})},
    }  # fmt: skip


def _kinds(faults: list[FaultRecord]) -> list[str]:
    return sorted({fault.kind for fault in faults})


def _kills(faults: list[FaultRecord], role: str) -> list[FaultRecord]:
    return [fault for fault in faults if (fault.role, fault.kind) == (role, "kill")]


def _medians(faults: list[FaultRecord]) -> dict[str, Any]:
    noticed = [fault.noticed_s for fault in faults if fault.noticed_s is not None]
    productive = [fault.productive_s for fault in faults if fault.productive_s is not None]
    return {
        "n": len(faults), "noticed": round(statistics.median(noticed), 1) if noticed else None,
        "productive": round(statistics.median(productive), 1) if productive else None,
    }  # fmt: skip


def unix_s_of(clock: str) -> float:
    """Of HH:MM today."""
    now = time.localtime()
    hour, minute = map(int, clock.split(":"))
    return time.mktime((now.tm_year, now.tm_mon, now.tm_mday, hour, minute, 0, 0, 0, -1))


def record(rounds: list[Round], bench: Bench, plan: str) -> list[FaultRecord]:
    """Runs until the plan is done or the time is over; writes the file after each run."""
    runs: list[dict[str, Any]] = []
    faults: list[FaultRecord] = []
    while (left := left_of(rounds, faults)) and bench.left_s() > 120:
        run, seen = drill(bench, f"drill-{len(runs) + 1}", left[:FAULTS_PER_RUN])
        runs.append(run)
        faults += seen
        result = {
            "machine": {**machine(), "cluster": "devslurm: a real slurmctld 22.05 and 7 virtual nodes on this machine"},
            "recipe": RECIPE, "settings": SETTINGS, "plan": plan, "lease_s": 15, "totals": totals(rounds, faults), "runs": runs,
            "faults": [fault.model_dump() for fault in faults],
        }  # fmt: skip
        (HERE / "drill.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{json.dumps(run)}\n{json.dumps(result['totals'])}", flush=True)
        if not seen:
            break
    return faults


def main() -> None:
    """Makes the cluster, records, and takes it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="hundred")
    parser.add_argument("--until", default="23:59", help="HH:MM of today, local time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-drill-") as name:
        folder = Path(name)
        devslurm = DevSlurm(folder / "slurm")
        devslurm.up()
        try:
            profile = yaml.safe_load((HERE.parent / "configs" / "clusters" / "devslurm.yaml").read_text())
            profile["runs_root"] = str(folder / "runs")
            profile["slurm"]["devslurm"] = str(folder / "slurm")
            cluster = folder / "cluster.yaml"
            cluster.write_text(yaml.safe_dump(profile))
            record(load_plan(arguments.plan).rounds(), Bench(folder, cluster, unix_s_of(arguments.until)), arguments.plan)
        finally:
            devslurm.down()


if __name__ == "__main__":
    main()
