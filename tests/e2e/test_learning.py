"""The small recipes learn through the whole system, shortened; a shell's sandboxes leave nothing on the node."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from miles_core.environments.sandbox import PREFIX
from miles_core.environments.sandbox_kind import sandbox_root
from tests.e2e.runs import kill_role, ledger_of, miles, start_miles, summary_of, wait_for

pytestmark = [pytest.mark.timeout(1500)]

DEADLINE_S = 1200.0


def arguments(recipe: str, run_id: str, *, steps: int = 20, problems: int = 128) -> list[str]:
    return ["run", recipe, "--run-id", run_id, "--set", f"steps={steps}", "--set", f"evaluation.problems={problems}"]


def check_that_it_learned(folder: Path, run_id: str, *, steps: int = 20) -> dict[str, Any]:
    """Greedy on held-out tasks rose by at least 0.2, and the run proves itself."""
    summary = summary_of(folder / "runs" / run_id)
    assert summary["state"] == "COMPLETED" and summary["steps"] == steps and summary["groups"]["open"] == 0
    before, after = summary["eval"]["greedy_before"], summary["eval"]["greedy_after"]
    assert after - before >= 0.2, summary
    assert summary["reward"]["last5"] > summary["reward"]["first5"] + 0.2
    verified = miles(folder, "verify", run_id, "--json")
    assert verified.returncode == 0, json.loads(verified.stdout)["faults"]
    return summary


def left_behind(run_id: str) -> list[str]:
    """Sandbox directories of a run, and processes that name the run or such a directory."""
    found = [name for name in os.listdir(sandbox_root()) if name.startswith(f"{PREFIX}{run_id}.")]
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if name.isdigit() and (f"/runs/{run_id}\0" in words or f"{PREFIX}{run_id}." in words):
            found.append(words.replace("\0", " "))
    return found


def test_the_shell_puzzle_learns_although_its_rollout_is_killed_and_leaves_nothing(tmp_path: Path) -> None:
    run_id = f"shell-{os.getpid()}"
    root = tmp_path / "runs" / run_id
    process = start_miles(tmp_path, *arguments("shell_puzzle", run_id))
    wait_for("step 3", lambda: (root / "run.json").exists() and ledger_of(root)[2].steps.newest_step >= 3, DEADLINE_S)
    kill_role(root, "rollout-0")
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
    summary = check_that_it_learned(tmp_path, run_id)
    assert summary["eval"]["greedy_before"] <= 0.7
    assert {job["role"]: job["attempts"] for job in summary["jobs"]}["rollout"] == 2
    assert left_behind(run_id) == []
    assert "SANDBOX" not in miles(tmp_path, "logs", run_id).stdout, "the sandbox was less than bubblewrap"


def test_terminal_tasks_learn_from_what_their_checks_say_and_leave_nothing(tmp_path: Path) -> None:
    run_id = f"terminal-{os.getpid()}"
    process = start_miles(tmp_path, *arguments("terminal", run_id, steps=10, problems=64))
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
    assert check_that_it_learned(tmp_path, run_id, steps=10)["eval"]["greedy_before"] <= 0.7
    assert left_behind(run_id) == []


def test_chain_sum_learns(tmp_path: Path) -> None:
    process = start_miles(tmp_path, *arguments("chain_sum", "sums"))
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
    check_that_it_learned(tmp_path, "sums")
