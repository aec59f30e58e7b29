"""What a kill costs: one of two rollout replicas, against the whole allocation at once; into benchmarks/kill_one_or_all.json.

    .venv/bin/python benchmarks/kill_one_or_all.py [--cluster devslurm] [--window-s 120] [--repeat 1]

Both arms are the same recipe with two replicas, killed once it has run for as long as the window. Arm `one`: SIGKILL to one
replica; the supervisor replaces it. Arm `all`: the supervisor leaves, SIGKILL to every job of the run, and `miles run` with
the same run id at once - what a system in one allocation does when a node of it dies.

Lost trajectory-seconds in the window after the kill: how far each replica's number of trajectories in the making lies below
its mean of the window before, summed over time and replicas, less the same sum over the window before (which is not zero: the
number varies by itself). Only trajectories that were sealed count, so work that the kill threw away is lost. Read from the
shards alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from record import machine

from cluster.profile import load_cluster
from cluster.scheduler import JobView, Phase
from cluster.schedulers import make_scheduler
from miles_core.records import ShardSealed
from miles_core.run import read_run, rollout_writers
from miles_core.store.follow import Reading
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import read_all, read_ledger
from miles_core.trajectories.shards import read_shard

HERE = Path(__file__).resolve().parent
SETTINGS = ("steps=100000", "rollout.pools=[{name: main, replicas: 2, slots: 64}]", "evaluation.problems=8")
VICTIM = "rollout-0"
DEADLINE_S = 600.0
STEP_S = 0.1
Counts = npt.NDArray[np.float64]


class Run:
    """One live run under a supervisor of its own."""

    def __init__(self, root: Path, name: str, recipe: str, cluster: str, settings: tuple[str, ...] = ()) -> None:
        self.root, self.name, self.recipe, self.cluster = root / "runs" / name, name, recipe, cluster
        self._folder, self._settings = root, (*SETTINGS, *settings)
        self.profile = load_cluster(cluster)
        self.supervisor = self.start()

    def start(self) -> subprocess.Popen[str]:
        """`miles run` of this run id."""
        command = [sys.executable, "-m", "flows.cli", "run", self.recipe, "--cluster", self.cluster, "--run-id", self.name]
        for setting in self._settings:
            command += ["--set", setting]
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_RUNS": str(self._folder / "runs"), "OMP_NUM_THREADS": "1"}
        output = open(self._folder / f"{self.name}.log", "a")  # noqa: SIM115 - the child holds it
        return subprocess.Popen(command, cwd=self._folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)

    def live(self) -> list[JobView]:
        """Jobs that the scheduler says are running."""
        snapshot = make_scheduler(self.profile, self.root).snapshot(self.name)
        return [job for job in snapshot.jobs if job.phase is Phase.RUNNING]

    def kill(self, jobs: list[JobView]) -> None:
        """SIGKILL."""
        make_scheduler(self.profile, self.root).cancel(tuple(job.job_id for job in jobs), signal="KILL")

    def leave(self) -> None:
        """The supervisor leaves as on Ctrl-C (which a background process of a shell would not hear); the jobs go on."""
        self.supervisor.send_signal(signal.SIGTERM)
        self.supervisor.wait(timeout=60)

    def end(self) -> bool:
        """Cancels the run; whether `miles verify` is clean."""
        self.miles("cancel")
        self.supervisor.wait(timeout=120)
        return self.miles("verify") == 0

    def miles(self, command: str) -> int:
        """Exit code of another command on this run."""
        env = os.environ | {"PYTHONPATH": str(HERE.parent)}
        done = subprocess.run([sys.executable, "-m", "flows.cli", command, str(self.root)], env=env, capture_output=True)
        return done.returncode

    def newest_step(self) -> int:
        """Last accepted step; -1 before there is a run."""
        if not (self.root / "run.json").exists():
            return -1
        run, paths = read_run(self.root)
        return read_ledger(run, paths).steps.newest_step


def kill_one(run: Run) -> None:
    """Arm `one`."""
    run.kill([job for job in run.live() if job.writer == VICTIM])


def kill_all(run: Run) -> None:
    """Arm `all`."""
    run.leave()
    run.kill(run.live())
    run.supervisor = run.start()


def measure(run: Run, kill: Callable[[Run], None], window_s: float) -> dict[str, Any]:
    """One arm, from the start of the run to its end."""
    until = time.monotonic() + DEADLINE_S
    while run.newest_step() < 3:
        if time.monotonic() > until or run.supervisor.poll() is not None:
            raise SystemExit(
                f"{run.root} made no 3 steps within {DEADLINE_S:.0f} s; see {run.root.parent.parent}/{run.name}.log"
            )
        time.sleep(1.0)
    time.sleep(window_s)
    steps_before, killed_s = run.newest_step(), time.time()
    kill(run)
    time.sleep(window_s + max(0.0, killed_s - time.time()))
    steps_after = run.newest_step()
    time.sleep(10.0)  # What was in the making at the end of the window is sealed.
    is_clean = run.end()
    before, after = in_the_making(run.root, killed_s - window_s, killed_s, killed_s + window_s)
    baseline = before.mean(axis=1, keepdims=True)
    below = [float(np.maximum(0.0, baseline - part).sum() * STEP_S) for part in (before, after)]
    return {
        "baseline_trajectories": [round(float(value), 1) for value in baseline[:, 0]], "below_before_s": round(below[0], 1),
        "below_after_s": round(below[1], 1), "lost_s": round(below[1] - below[0], 1), "steps_before": steps_before,
        "steps_in_window": steps_after - steps_before, "verify_ok": is_clean,
    }  # fmt: skip


def in_the_making(root: Path, begin: float, middle: float, end: float) -> tuple[Counts, Counts]:
    """[replicas, times] trajectories in the making every STEP_S, before and after `middle`; Unix seconds of this machine."""
    times = np.arange(begin, end, STEP_S)
    replicas = trajectory_spans(root)
    counts = np.zeros((len(replicas), times.size))
    for row, spans in enumerate(replicas):
        for started, finished in spans:
            counts[row] += (started <= times) & (times < finished)
    return counts[:, times < middle], counts[:, times >= middle]


def trajectory_spans(root: Path) -> list[list[tuple[float, float]]]:
    """By replica: (started_s, finished_s) of every sealed trajectory."""
    run, paths = read_run(root)
    fs = FileSystem()
    reading = Reading(fs, LeaseFolder(fs, paths.leases, run.run_id), run.timing.visibility_s)
    found = []
    for writer, _ in rollout_writers(run.recipe):
        shards = [record.path for record in read_all(reading, paths.journal(writer)) if isinstance(record, ShardSealed)]
        rows = [row for shard in shards for row in read_shard(paths.resolve(shard))]
        found.append([(row.started_s, row.finished_s) for row in rows])
    return found


def main() -> None:
    """Both arms in turn, as often as asked; prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="chain_sum")
    parser.add_argument("--cluster", default="devslurm")
    parser.add_argument("--window-s", type=float, default=120.0)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    arms: dict[str, Callable[[Run], None]] = {"one": kill_one, "all": kill_all}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.repeat):
            for name, kill in arms.items():
                run = Run(Path(folder), f"{name}{number}", arguments.recipe, arguments.cluster)
                results[name].append(measure(run, kill, arguments.window_s))
                print(name, number, results[name][-1], flush=True)
    load = round(os.getloadavg()[1], 2)
    record = {"machine": machine(), "load_5min_at_end": load, **vars(arguments), "replicas": 2, "arms": results}
    (HERE / "kill_one_or_all.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
