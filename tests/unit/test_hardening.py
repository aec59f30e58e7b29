"""What a role takes for itself on its node, and that what is forbidden there is one warning. In processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows import doctor
from miles_core.environments.sandbox import Sandbox
from miles_core.runtime import hardening
from miles_core.runtime.hardening import OOM_SCORE, hold_cores, hold_kill_order

REPOSITORY = Path(__file__).resolve().parents[2]
SHOW = """
import json, logging, os, resource, sys
from miles_core.runtime.hardening import harden
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
exec(sys.argv[1])
holds = harden()
print(json.dumps({
    "fixes": {hold.name: hold.fix for hold in holds}, "seen": {hold.name: hold.seen for hold in holds},
    "cores": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"],
    "oom": int(open("/proc/self/oom_score_adj").read()),
    "locked": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck")),
}))
"""


def hardened(before: str = "", **environ: str) -> tuple[dict[str, Any], str]:
    """What a process that hardened itself says, and its log; `before` is done in it first."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, before], cwd=REPOSITORY, env={**clean, **environ}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_role_takes_what_it_may() -> None:
    found, _ = hardened(OMP_NUM_THREADS="1000")
    assert set(found["fixes"]) == {"cores", "memory", "kill order"} and found["fixes"]["cores"] == ""
    assert found["cores"] == sorted(os.sched_getaffinity(0)) and 1 <= int(found["threads"]) <= len(found["cores"])
    assert (int(found["locked"]) > 0) == (found["fixes"]["memory"] == "")
    assert found["oom"] <= 0 and str(found["oom"]) in found["seen"]["kill order"]


def test_what_a_site_forbids_is_one_warning_and_no_error() -> None:
    """A user like any other, with no right to lock memory, in a job that Slurm binds to no core."""
    forbids = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0)); os.getuid() or os.setuid(65534)"
    found, log = hardened(forbids, SLURM_CPUS_ON_NODE="1", OMP_NUM_THREADS="1")
    assert log.count("WARNING") == 1 and found["locked"] == "0" and found["fixes"]["kill order"] == ""
    (told,) = [line for line in log.splitlines() if "`ulimit -l` is 0 KiB" in line]
    assert told.startswith("INFO") and "LimitMEMLOCK=infinity for slurmd" in told
    assert hardening.MEMLOCK_FIX in (REPOSITORY / "docs" / "admin.md").read_text()
    assert f"this job has 1 CPUs of the node and may run on all {len(found['cores'])}" in log
    assert "may not lower" in found["seen"]["kill order"] or found["oom"] == OOM_SCORE


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[int]]:
    """A process that may use cores 4 to 11 of a node that does not tell its topology, and what it was pinned to."""
    cores = [list(range(4, 12))]
    monkeypatch.setattr(hardening, "_CPUS", tmp_path)
    monkeypatch.setattr(hardening.os, "sched_getaffinity", lambda pid: set(cores[-1]))
    monkeypatch.setattr(hardening.os, "sched_setaffinity", lambda pid, wanted: cores.append(sorted(wanted)))
    monkeypatch.setattr(hardening, "usable_cpus", lambda: len(cores[-1]))
    return cores


def slurm(**values: int) -> dict[str, str]:
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environ", "mine"),
    [
        (slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=2, NTASKS_PER_NODE=4, LOCALID=3), [10, 11]),
        (slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=3, NTASKS_PER_NODE=2, LOCALID=0), [4, 5, 6, 7]),
        (slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=1, NTASKS_PER_NODE=4, LOCALID=3), [10, 11]),
        (slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=8, NTASKS_PER_NODE=1, LOCALID=0), list(range(4, 12))),
        (slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=4, NTASKS_PER_NODE=4, LOCALID=1), list(range(4, 12))),
        (slurm(CPUS_ON_NODE=4, CPUS_PER_TASK=2, NTASKS_PER_NODE=2, LOCALID=1), list(range(4, 12))),
        (slurm(CPUS_PER_TASK=2, NTASKS_PER_NODE=2, LOCALID=1), list(range(4, 12))),
        ({"SLURM_CPUS_ON_NODE": "8(x2)", "SLURM_LOCALID": "x"}, list(range(4, 12))),
    ],
)  # fmt: skip
def test_tasks_of_one_allocation_take_a_part_each(pinned: list[list[int]], environ: dict[str, str], mine: list[int]) -> None:
    hold = hold_cores(environ)
    assert pinned[-1] == mine and environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == str(len(mine))
    assert bool(hold.fix) == (environ.get("SLURM_CPUS_ON_NODE") == "4")


def test_hyperthreads_of_a_core_go_to_one_task(pinned: list[list[int]], tmp_path: Path) -> None:
    """Four cores of two threads each, numbered as kernels do; those of even number are of one socket."""
    node = [0, 1, 2, 3, 64, 65, 66, 67]
    for cpu in node:
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 64},{cpu % 64 + 64}\n")
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n")
    for place, mine in enumerate(([0, 2, 64, 66], [1, 3, 65, 67])):
        pinned[:] = [node]
        hold_cores(slurm(CPUS_ON_NODE=8, CPUS_PER_TASK=4, NTASKS_PER_NODE=2, LOCALID=place))
        assert pinned[-1] == mine
    (topology / "physical_package_id").write_text("?\n")
    assert hardening.by_physical_core(node, tmp_path) == node


def test_threads_are_bounded_by_the_cores_and_never_raised(pinned: list[list[int]]) -> None:
    for asked, threads in (("3", "3"), ("64", "8"), ("", "8"), ("many", "8")):
        environ = {"OMP_NUM_THREADS": asked}
        hold_cores(environ)
        assert environ["OMP_NUM_THREADS"] == threads


def test_a_proc_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert hold_kill_order(tmp_path / "none").fix == "is /proc mounted?"
    (tmp_path / "score").write_text("-900\n")
    assert hold_kill_order(tmp_path / "score").seen.startswith("oom_score_adj -900")


def test_the_kernel_ends_a_command_before_its_role() -> None:
    box = Sandbox("test")
    try:
        assert box.run("cat /proc/self/oom_score_adj; (cat /proc/self/oom_score_adj)", 10).output == "1000\n1000\n"
    finally:
        box.close()


def test_the_doctor_says_what_holds() -> None:
    found = {finding.name: finding for finding in doctor._hardening()}
    assert set(found) == {"cores", "memory", "kill order"} and found["cores"].verdict == "ok"
    assert all((finding.verdict == "warn") == bool(finding.fix) for finding in found.values())
