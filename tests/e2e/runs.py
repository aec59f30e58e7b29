"""Real runs for end-to-end tests: the `miles` command as a person types it, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.paths import RunPaths
from miles_core.run import RunConfig, read_run
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import Ledger, read_ledger

SHORT = ("steps=6", "evaluation.problems=16", "orchestrator.prompts=4", "orchestrator.samples=4", "learner.checkpoint_every=2")
DEADLINE_S = 240.0
REPOSITORY = Path(__file__).resolve().parents[2]


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """The test's own runs folder, the shared cache of base models."""
    return os.environ | {"MILES_RUNS": str(folder / "runs"), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | extra


def miles(folder: Path, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs a `miles` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *argv],
        cwd=folder, env=environment(folder, **extra), capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip


def start_miles(folder: Path, *argv: str, **extra: str) -> subprocess.Popen[str]:
    """Starts a `miles` command; its output goes to <folder>/output."""
    output = open(folder / "output", "a")  # noqa: SIM115 - the child holds it
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *argv],
        cwd=folder, env=environment(folder, **extra), stdout=output, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def short_run_arguments(run_id: str, *settings: str, cluster: str = "local") -> list[str]:
    """`run` of the chain_sum recipe, a few steps long."""
    argv = ["run", "chain_sum", "--cluster", cluster, "--run-id", run_id]
    for setting in (*SHORT, *settings):
        argv += ["--set", setting]
    return argv


FINISHED_RUN = short_run_arguments(
    "short", "retention.versions=false", 'rollout.pools=[{"name": "main", "slots": 128, "engines": 2}]'
)
"""The run of the fixture `finished_run`: one replica of two engines."""


def ledger_of(root: Path) -> tuple[RunConfig, RunPaths, Ledger]:
    """The ledger of a run directory, live or not."""
    run, paths = read_run(root)
    return run, paths, read_ledger(run, paths)


def wait_for(what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Polls until `condition` gives something true; the error names what was waited for."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {deadline_s:.0f} s for {what}")


def wait_for_step(root: Path, step: int) -> None:
    """Until step `step` of a live run is accepted."""
    wait_for(f"step {step} of {root}", lambda: (root / "run.json").exists() and ledger_of(root)[2].steps.newest_step >= step)


def process_of(root: Path, writer: str) -> int:
    """Pid of the newest attempt of a local role, from its lease."""
    run, paths = read_run(root)
    leases = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    leases.refresh()
    return leases.read(writer, leases.newest(writer)).pid


def kill_role(root: Path, writer: str) -> int:
    """kill -9 of a local role; returns the pid."""
    pid = process_of(root, writer)
    os.kill(pid, signal.SIGKILL)
    return pid


def summary_of(root: Path) -> dict[str, Any]:
    """reports/summary.json."""
    loaded: dict[str, Any] = json.loads((root / "reports" / "summary.json").read_text())
    return loaded
