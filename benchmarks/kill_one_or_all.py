"""What a kill costs: one of two rollout replicas, against the whole allocation at once; into benchmarks/kill_one_or_all.json.

    PYTHONPATH=. .venv/bin/python benchmarks/kill_one_or_all.py [--cluster devslurm] [--window-s 120] [--repeat 3] [--spare]

One run of agent_load.yaml: two replicas whose episodes wait for tools, so that all slots are full and the CPU mostly idles.
With `--spare` the orchestrator's capacity bounds what is in the making, and each replica has slots for all of it: then the
lost samples go on with the survivor as soon as the death is noticed, and need not wait for the replacement. The figures of
both loads stand side by side in the file, `full` and `spare`.
Once it is steady the arms take turns, the first of them changing. `one`: SIGKILL to one replica, which the supervisor
replaces. `all`: the supervisor leaves, SIGKILL to every job, and `miles run` with the same run id at once - what a system in
one allocation does when a node of it dies. `none`: nothing happens; what is measured then is the noise.

Lost trajectory-seconds: how far the number of trajectories in the making lies below its mean of the BASE_S before, summed over
time and replicas. Only trajectories that were sealed count, so the sum over one longest episode ahead of the kill is the work
that the kill threw away, and the sum over the window behind it are slots that stood empty. Read from the shards alone. Where
`one` lost less than the noise, the factor is `all` over the noise: it is at least that.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from record import machine

from cluster.profile import load_cluster
from cluster.scheduler import JobView, Phase
from cluster.schedulers import make_scheduler
from miles_core.recipe import load_recipe
from miles_core.records import ShardSealed
from miles_core.run import read_run, rollout_writers
from miles_core.store.follow import Reading
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import read_all, read_ledger
from miles_core.trajectories.shards import read_shard
from tasks.prepare import ensure_base_model

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "agent_load.yaml"
SPARE = ("rollout.pools=[{name: main, replicas: 2, slots: 96}]", "orchestrator.capacity_batches=3")
VICTIM = "rollout-0"
DEADLINE_S = 600.0
BASE_S = 20.0
"""Of steady work, right before the longest episode that a kill could throw away."""
STEP_S = 0.1
Spans = list[list[tuple[float, float]]]
Floats = npt.NDArray[np.float64]


class Run:
    """One live run under a supervisor of its own."""

    def __init__(self, root: Path, name: str, recipe: str, cluster: str, settings: tuple[str, ...] = ()) -> None:
        self.root, self.name, self.recipe, self.cluster = root / "runs" / name, name, recipe, cluster
        self._folder, self._settings = root, settings
        self.profile = load_cluster(cluster)
        self.supervisor = self.start()

    def start(self) -> subprocess.Popen[str]:
        """`miles run` of this run id."""
        command = [sys.executable, "-m", "flows.cli", "run", self.recipe, "--cluster", self.cluster, "--run-id", self.name]
        for setting in self._settings:
            command += ["--set", setting]
        env = self._env() | {"MILES_RUNS": str(self._folder / "runs"), "OMP_NUM_THREADS": "1"}
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
        self.supervisor.wait(timeout=120)

    def end(self) -> bool:
        """Cancels the run; whether `miles verify` is clean."""
        self.miles("cancel")
        self.supervisor.wait(timeout=120)
        return self.miles("verify") == 0

    def miles(self, command: str) -> int:
        """Exit code of another command on this run."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", command, str(self.root)], env=self._env(), capture_output=True
        )
        return done.returncode

    def newest_step(self) -> int:
        """Last accepted step; -1 before there is a run."""
        if not (self.root / "run.json").exists():
            return -1
        run, paths = read_run(self.root)
        return read_ledger(run, paths).steps.newest_step

    def wait_for_step(self, step: int) -> None:
        """Ends this program if the run does not come so far within DEADLINE_S."""
        until = time.monotonic() + DEADLINE_S
        while self.newest_step() < step:
            if time.monotonic() > until or self.supervisor.poll() is not None:
                raise SystemExit(
                    f"{self.root} is not at step {step} after {DEADLINE_S:.0f} s; see {self._folder}/{self.name}.log"
                )
            time.sleep(1.0)

    def _env(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}


def kill_none(run: Run) -> float:
    """Arm `none`. Unix seconds of this machine, as of the other arms: when it happened."""
    return time.time()


def kill_one(run: Run) -> float:
    """Arm `one`."""
    victims = [job for job in run.live() if job.writer == VICTIM]
    killed_s = time.time()
    run.kill(victims)
    return killed_s


def kill_all(run: Run) -> float:
    """Arm `all`."""
    everybody = run.live()
    run.leave()
    killed_s = time.time()
    run.kill(everybody)
    run.supervisor = run.start()
    return killed_s


ARMS: dict[str, Callable[[Run], float]] = {"none": kill_none, "one": kill_one, "all": kill_all}


@dataclass(frozen=True)
class Event:
    """One turn of an arm."""

    arm: str
    at_s: float
    steps: int
    """Trained in the window behind it."""


def take_turns(run: Run, repeat: int, window_s: float, settle_s: float) -> list[Event]:
    """All arms, so often; each begins `settle_s` after the window of the one before."""
    events, names = [], list(ARMS)
    for number in range(repeat * len(names)):
        time.sleep(settle_s)
        # 0 1 2, 1 2 0, 2 0 1: none is always first.
        arm = names[(number + number // len(names)) % len(names)]
        before, at_s = run.newest_step(), ARMS[arm](run)
        time.sleep(max(0.0, at_s + window_s - time.time()))
        events.append(Event(arm, at_s, run.newest_step() - before))
        print(f"{time.strftime('%H:%M:%S')} {arm}: {events[-1].steps} steps in the window", flush=True)
    return events


def measure(spans: Spans, event: Event, longest_s: float, window_s: float) -> dict[str, Any]:
    """What one event cost, in trajectory-seconds, and how long each replica began nothing."""
    at_s = event.at_s
    baseline = in_the_making(spans, at_s - longest_s - BASE_S, at_s - longest_s).mean(axis=1, keepdims=True)
    thrown, empty = (
        float((baseline - in_the_making(spans, *borders)).sum() * STEP_S)
        for borders in ((at_s - longest_s, at_s), (at_s, at_s + window_s))
    )
    idle = [min((began for began, _ in replica if began > at_s + 0.5), default=at_s + window_s) - at_s for replica in spans]
    return {
        "lost_s": round(thrown + empty, 1), "thrown_away_s": round(thrown, 1), "empty_s": round(empty, 1),
        "baseline": [round(float(value), 1) for value in baseline[:, 0]], "first_start_s": [round(value, 1) for value in idle],
        "steps": event.steps,
    }  # fmt: skip


def in_the_making(spans: Spans, begin_s: float, end_s: float) -> Floats:
    """[replicas, times] sealed trajectories that were in the making, every STEP_S."""
    times = np.arange(begin_s, end_s, STEP_S)
    counts = np.zeros((len(spans), times.size))
    for row, replica in enumerate(spans):
        for began, ended in replica:
            counts[row] += (began <= times) & (times < ended)
    return counts


def trajectory_spans(root: Path) -> Spans:
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
    """All arms in turn, as often as asked; prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="devslurm")
    parser.add_argument("--window-s", type=float, default=120.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--spare", action="store_true", help="each replica has slots for the work of both")
    arguments = parser.parse_args()
    model, load = ensure_base_model(load_recipe("chain_sum")), os.getloadavg()[0]
    deadline_s = load_recipe(str(RECIPE)).environment.episode_deadline_s
    with tempfile.TemporaryDirectory() as folder:
        settings = (f"model.path={model}", *(SPARE if arguments.spare else ()))
        run = Run(Path(folder), "kill", str(RECIPE), arguments.cluster, settings)
        run.wait_for_step(3)
        events = take_turns(run, arguments.repeat, arguments.window_s, BASE_S + deadline_s / 2)
        time.sleep(deadline_s / 2)  # What was in the making at the end of the last window is sealed.
        is_clean = run.end()
        spans = trajectory_spans(run.root)
    lengths = [ended - began for replica in spans for began, ended in replica]
    longest_s = max(lengths)
    turns = [{"arm": event.arm, **measure(spans, event, longest_s, arguments.window_s)} for event in events]
    medians = {arm: statistics.median(turn["lost_s"] for turn in turns if turn["arm"] == arm) for arm in ARMS}
    record = {
        "machine": machine(), "load_1min_at_start": round(load, 2), "load_15min_at_end": round(os.getloadavg()[2], 2),
        **vars(arguments), "cluster": run.profile.name, "replicas": len(spans),
        "episode_s": {"mean": round(statistics.mean(lengths), 1), "longest": round(longest_s, 1)},
        "lost_s_median": medians, "all_over_one": round(medians["all"] / max(medians["one"], abs(medians["none"])), 2),
        "verify_ok": is_clean, "turns": turns,
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    file = HERE / "kill_one_or_all.json"
    figures = json.loads(file.read_text()) | {"spare" if arguments.spare else "full": record}
    file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
