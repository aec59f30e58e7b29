"""`miles doctor --nodes`: one small job on two nodes measures how late each sees what the other wrote.

It goes through the same scheduler, script and folder as a run's jobs, so it also proves that nodes see the runs folder and this
Python. Every wait has a deadline; the job and its folder are gone afterwards, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.job_spec import log_tail
from cluster.profile import ClusterProfile, Resources
from cluster.scheduler import JobSpec, JobView, Phase, Scheduler
from cluster.schedulers import make_scheduler
from flows import node_probe
from flows.findings import Finding, bad, ok, unknown, warn
from miles_core.errors import MilesError, RecipeError
from miles_core.paths import RunPaths

log = logging.getLogger("miles")

WRITER = "doctor-0"
NODES_DEADLINE_S = 300.0
"""In the queue, and to its end, each."""
_PROBE_S = 120.0
_ROUNDS = 20
_GONE_S = 60.0
_CLOCK_S = 2.0


def examine_nodes(
    profile: ClusterProfile,
    root: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Finding]:
    """Submits, waits, judges, cleans up."""
    spec = probe_spec(profile, root)
    try:
        scheduler = make_scheduler(profile, spec.run_dir)
        with _cleaned(spec, scheduler, clock, sleep):
            return list(_run(profile, spec, scheduler, clock, sleep))
    except RecipeError:
        raise
    except (MilesError, OSError) as error:
        return [unknown("two nodes", str(error).partition("\n")[0], "see `slurmctld` above; then run this again")]


def probe_spec(profile: ClusterProfile, root: Path) -> JobSpec:
    """Two nodes of the partition that rollout runs in, for minutes."""
    run_id = f"doctor-{secrets.token_hex(4)}"
    run_dir = root.resolve() / f".{run_id}"
    wanted = profile.resources_for("rollout")
    lead_min = profile.slurm.signal_lead_s // 60
    return JobSpec(
        run_id=run_id, run_dir=run_dir, writer=WRITER, attempt=1, token=run_id,
        command=(sys.executable, "-I", "-S", "node_probe.py", str(run_dir), str(_ROUNDS), str(_PROBE_S)),
        resources=Resources(partition=wanted.partition, nodes=2, time_min=lead_min + 5),
        log_dir=RunPaths(run_dir).logs(WRITER, 1),
    )  # fmt: skip


@contextlib.contextmanager
def _cleaned(spec: JobSpec, scheduler: Scheduler, clock: Callable[[], float], sleep: Callable[[float], None]) -> Iterator[None]:
    RunPaths(spec.run_dir).code.mkdir(parents=True)
    shutil.copyfile(node_probe.__file__, RunPaths(spec.run_dir).code / "node_probe.py")
    try:
        yield
    finally:
        _end_jobs(spec, scheduler, clock, sleep)
        shutil.rmtree(spec.run_dir, ignore_errors=True)


def _end_jobs(spec: JobSpec, scheduler: Scheduler, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    until = clock() + _GONE_S
    try:
        while live := [job.job_id for job in scheduler.snapshot(spec.run_id).jobs if job.phase is not Phase.ENDED]:
            if clock() > until:
                log.warning("job %s of the examination does not end: cancel it by hand", ", ".join(live))
                return
            scheduler.cancel(tuple(live))
            sleep(1.0)
    except MilesError as error:
        log.warning("jobs named miles-%s may be left: cancel them by hand (%s)", spec.run_id, error)


def _run(
    profile: ClusterProfile, spec: JobSpec, scheduler: Scheduler, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[Finding]:
    job_id = scheduler.submit(spec)
    began = clock()
    job = _wait(scheduler, spec, lambda job: job.phase is not Phase.PENDING, clock, sleep)
    if job is None or job.phase is Phase.PENDING:
        reason = f" ({job.reason})" if job is not None and job.reason else ""
        yield unknown(
            "two nodes", f"job {job_id} was not started within {NODES_DEADLINE_S:.0f} s{reason}",
            "run this again when two nodes of that partition are free",
        )  # fmt: skip
        return
    waited_s = clock() - began
    job = _wait(scheduler, spec, lambda job: job.phase is Phase.ENDED, clock, sleep)
    result = _read_result(spec, 2 * profile.timing.visibility_s + 5, clock, sleep)
    if result is None:
        yield _no_result(spec, job)
        return
    yield ok("two nodes", f"{' and '.join(result['nodes'])} started this Python after {waited_s:.0f} s in the queue")
    yield from judge_result(profile, result)


def _wait(
    scheduler: Scheduler,
    spec: JobSpec,
    done: Callable[[JobView], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> JobView | None:
    """The job once that is so, or as it was last seen when the deadline passed."""
    until, job = clock() + NODES_DEADLINE_S, None
    while clock() < until:
        snapshot = scheduler.snapshot(spec.run_id)
        job = next(iter(snapshot.jobs), job)
        if job is not None and done(job):
            return job
        sleep(1.0)
    return job


def _read_result(
    spec: JobSpec, patience_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, Any] | None:
    until = clock() + patience_s
    while True:
        try:
            found: dict[str, Any] = json.loads((spec.run_dir / "result.json").read_text())
        except (OSError, ValueError):
            if clock() > until:
                return None
            sleep(0.2)
        else:
            return found


def _no_result(spec: JobSpec, job: JobView | None) -> Finding:
    state = "is not listed any more" if job is None else f"{job.state} {job.exit_code if job.exit_code is not None else ''}"
    tail = " / ".join(line.strip() for line in log_tail(RunPaths(spec.run_dir), WRITER, 1, lines=3).splitlines())
    return bad(
        "two nodes", f"the job left no result: {state.strip()}; {tail}",
        f"do the nodes see {spec.run_dir.parent} and {sys.executable}? Both must be on a shared filesystem",
    )  # fmt: skip


def judge_result(profile: ClusterProfile, result: dict[str, Any]) -> Iterator[Finding]:
    """A round is there and back: at least as long as the later of the two sights, so it is a safe bound."""
    visibility_s = profile.timing.visibility_s
    for name, key in (("names", "names_s"), ("lines", "lines_s")):
        yield _judge_rounds(f"visibility of {name}", result[key], visibility_s, result["error"])
    if clocks := result["clock_s"]:
        ahead = statistics.median(clocks)
        seen = f"{result['nodes'][1]} is {abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} {result['nodes'][0]}"
        fix = "start chrony or ntpd on the nodes; no role decides by clocks, but times in reports are off by that much"
        yield ok("node clocks", seen) if abs(ahead) < _CLOCK_S else warn("node clocks", seen, fix)


def _judge_rounds(name: str, rounds: list[float], visibility_s: float, error: str) -> Finding:
    if not rounds:
        return bad(name, error or "no round was done", "is runs_root shared by the nodes, and writable there?")
    seen = f"median {statistics.median(rounds):.3f} s, largest {max(rounds):.3f} s there and back, {len(rounds)} rounds"
    if max(rounds) <= visibility_s and not error:
        return ok(name, f"{seen}; timing.visibility_s is {visibility_s:g}")
    needed = max(rounds) if not error else max(*rounds, _PROBE_S)
    fix = f"set timing.visibility_s to {needed * 2:.2g} and timing.lease_s to {needed * 6:.2g} or more"
    if max(rounds) / 2 <= visibility_s and not error:
        return warn(name, f"{seen}; timing.visibility_s is only {visibility_s:g}", fix)
    return bad(name, f"{seen}{f'; {error}' if error else ''}; timing.visibility_s is {visibility_s:g}", fix)
