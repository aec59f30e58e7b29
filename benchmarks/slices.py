"""Slices shorter than the run: rollout jobs of 2 minutes, a learner of 3, on devslurm; into benchmarks/slices.json.

    .venv/bin/python benchmarks/slices.py [--hand-overs 3] [--recipe chain_sum]

Goes on until every sliced role has handed over as often as asked, then cancels the run and verifies it. A hand-over is a job
that Slurm warned ahead of its walltime and that left by itself (exit code 75); a lost sample is one that an attempt was asked
for and had neither announced nor given back when it was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from kill_one_or_all import Run
from record import machine

from cluster.faults.watch import Watch
from cluster.profile import load_cluster
from miles_core.records import JobEnded
from miles_core.run import read_run
from miles_core.runtime.context import DRAINED_EXIT_CODE

HERE = Path(__file__).resolve().parent
SLICED = {"rollout-0": 2, "rollout-1": 2, "learner-0": 3}
"""Minutes of walltime."""
LEAD_S = 40
LIMIT_S = 1500.0


def profile(folder: Path) -> Path:
    """The devslurm profile with these walltimes."""
    site = load_cluster("devslurm").model_dump(mode="json")
    site["resources"] = {"rollout": {"time_min": SLICED["rollout-0"]}, "learner": {"time_min": SLICED["learner-0"]}}
    site["slurm"] |= {"signal_lead_s": LEAD_S}
    path = folder / "slices.yaml"
    path.write_text(yaml.safe_dump(site))
    return path


def ends_of(watch: Watch) -> list[JobEnded]:
    """Ends of sliced jobs, as the supervisor recorded them."""
    return [record for record in watch.supervisor_records() if isinstance(record, JobEnded) and record.writer in SLICED]


def wait_for_hand_overs(run: Run, watch: Watch, wanted: int) -> None:
    """Until each sliced role has left by itself `wanted` times, or LIMIT_S."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        left = Counter(record.writer for record in ends_of(watch) if record.exit_code == DRAINED_EXIT_CODE)
        if all(left[writer] >= wanted for writer in SLICED):
            return
        if run.supervisor.poll() is not None:
            raise SystemExit(f"the run ended early (exit code {run.supervisor.returncode}); see {run.name}.log")
        time.sleep(5.0)


def main() -> None:
    """One run; prints and writes what became of every slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hand-overs", type=int, default=3)
    parser.add_argument("--recipe", default="chain_sum")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            "steps=100000", "rollout.pools=[{name: main, replicas: 2, slots: 64}]", "evaluation.problems=8",
            "environment.episode_deadline_s=30", "learner.checkpoint_every=20",
        )  # fmt: skip
        run = Run(Path(folder), "slices", arguments.recipe, str(profile(Path(folder))), settings)
        run.wait_for_step(1)
        config, paths = read_run(run.root)
        watch = Watch(config, paths)
        started = time.monotonic()
        wait_for_hand_overs(run, watch, arguments.hand_overs)
        result: dict[str, Any] = {
            "machine": machine(), "load_5min_at_end": round(os.getloadavg()[1], 2), "walltime_min": SLICED, "lead_s": LEAD_S,
            "seconds": round(time.monotonic() - started), "steps": run.newest_step(),
            "ends": [[record.writer, record.attempt, record.exit_code, record.state] for record in ends_of(watch)],
            "lost_samples": {f"{writer}.a{attempt}": lost for (writer, attempt), lost in sorted(watch.lost_samples().items())},
            "verify_ok": run.end(),
        }  # fmt: skip
    left = Counter(writer for writer, _, code, _ in result["ends"] if code == DRAINED_EXIT_CODE)
    print(json.dumps({"hand_overs": left, **result}, indent=1))
    (HERE / "slices.json").write_text(json.dumps({"hand_overs": left, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
