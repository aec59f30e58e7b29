"""The chain_sum recipe, shortened, on local processes: whole runs, and what a supervisor or a learner that dies costs."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from miles_core.paths import RunPaths
from miles_core.tracking.metrics import read_metrics
from miles_core.tracking.summary import summarize
from tests.e2e.runs import (
    FINISHED_RUN,
    kill_role,
    ledger_of,
    miles,
    process_of,
    short_run_arguments,
    start_miles,
    summary_of,
    wait_for,
    wait_for_step,
)

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


def test_a_run_completes_and_proves_itself(finished_run: Path) -> None:
    done = miles(finished_run.parent.parent, "verify", "short", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0, result["faults"]
    assert result["state"] == "COMPLETED" and result["groups_open"] == 0 and result["steps"] == 6


def test_the_summary_has_every_promised_figure(finished_run: Path) -> None:
    summary = summary_of(finished_run)
    assert {
        "run_id",
        "state",
        "steps",
        "reward",
        "eval",
        "staleness",
        "groups",
        "seconds",
        "tokens_per_s",
        "policy",
        "jobs",
    } <= set(summary)
    assert summary["state"] == "COMPLETED" and summary["steps"] == 6
    assert summary["groups"]["open"] == 0
    assert summary["groups"]["trained"] == 24
    assert summary["groups"]["issued"] == 24 + sum(summary["groups"]["dropped"].values())
    assert 0 <= summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert all(0.0 <= summary["eval"][key] <= 1.0 for key in ("greedy_before", "greedy_after"))
    assert summary["policy"]["versions"] == 7
    assert all(job["attempts"] == 1 and len(job["job_ids"]) == 1 for job in summary["jobs"])
    assert summary["seconds"]["both_busy"] <= summary["seconds"]["learner_busy"] <= summary["seconds"]["total"]


def test_its_replica_had_two_engines_and_neither_died(finished_run: Path) -> None:
    points = [point for _, point in read_metrics(finished_run / "metrics") if point["event"] == "rollout"]
    assert {len(point["engine_active"]) for point in points} == {2} and points[-1]["engine_deaths"] == 0


def test_status_and_logs_of_a_finished_run(finished_run: Path) -> None:
    folder = finished_run.parent.parent
    status = json.loads(miles(folder, "status", "short", "--json").stdout)
    assert status | summary_of(finished_run) == status and status["progress"]["step"] == status["progress"]["of"] == 6
    assert "COMPLETED" in miles(folder, "status", str(finished_run)).stdout
    logs = miles(folder, "logs", "short", "--role", "learner").stdout
    assert logs and all(line.startswith("learner-0 1| ") for line in logs.splitlines())


def test_a_closed_run_is_only_read(finished_run: Path) -> None:
    again = miles(finished_run.parent.parent, *FINISHED_RUN)
    assert again.returncode == 0 and "COMPLETED" in again.stdout
    assert all(job["attempts"] == 1 for job in summary_of(finished_run)["jobs"])


def test_a_killed_supervisor_is_followed_by_one_that_adopts(tmp_path: Path) -> None:
    arguments = short_run_arguments("adopt", "steps=25")
    root = tmp_path / "runs" / "adopt"
    first = start_miles(tmp_path, *arguments)
    wait_for_step(root, 1)
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    second = miles(tmp_path, *arguments)
    assert second.returncode == 0, second.stdout + second.stderr
    assert all(job["attempts"] == 1 and len(job["job_ids"]) == 1 for job in summary_of(root)["jobs"])
    assert miles(tmp_path, "verify", str(root)).returncode == 0


def test_a_second_supervisor_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    arguments = short_run_arguments("held", "steps=200")
    root = tmp_path / "runs" / "held"
    first = start_miles(tmp_path, *arguments)
    wait_for_step(root, 0)
    second = miles(tmp_path, *arguments)
    assert second.returncode == 3
    assert str(first.pid) in second.stderr and "--takeover" in second.stderr
    pids = [process_of(root, writer) for writer in ("learner-0", "rollout-0", "orchestrator-0")]
    cancelled = miles(tmp_path, "cancel", str(root))
    assert cancelled.returncode == 0 and "CANCELLED" in cancelled.stdout, cancelled.stdout + cancelled.stderr
    first.wait(timeout=60)
    wait_for("all roles to be gone", lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), 30)


def test_a_killed_learner_replays_to_the_same_bytes_and_nobody_else_is_touched(tmp_path: Path) -> None:
    """With an adapter; tests/protocol/test_exact_resume.py does the same with all weights, at every place."""
    root = tmp_path / "runs" / "replay"
    settings = ("steps=12", "learner.checkpoint_every=5", "model.lora={rank: 8}", "evaluation.every=3")
    first = start_miles(tmp_path, *short_run_arguments("replay", *settings))
    wait_for_step(root, 3)
    kill_role(root, "learner-0")
    assert first.wait(timeout=240) == 0, (tmp_path / "output").read_text()
    attempts = {f"{job['role']}-{job['replica']}": job["attempts"] for job in summary_of(root)["jobs"]}
    assert attempts.pop("learner-0") == 2
    assert set(attempts.values()) == {1}
    assert miles(tmp_path, "verify", str(root)).returncode == 0
    policy = summary_of(root)["policy"]
    assert policy["adapter"] == {"rank": 8, "alpha": 32.0} and policy["bytes_newest"] < 300_000
    assert set(point["step"] for point in summary_of(root)["eval"]["points"]) <= {0, 3, 6, 9, 12}
    replayed = digests_by_step(root)
    assert any(len(digests) == 2 for digests in replayed.values()), "the successor replayed nothing"
    assert all(len(set(digests)) == 1 for digests in replayed.values())


def test_every_role_is_killed_in_turn_and_only_it_is_started_again(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "killed"
    victims = ("rollout-0", "orchestrator-0", "grader-0", "learner-0", "evaluator-0")
    first = start_miles(tmp_path, *short_run_arguments("killed", "steps=2000", "learner.checkpoint_every=10"))
    wait_for_step(root, 2)
    for victim in victims:
        before = job_ids(root)
        step = ledger_of(root)[2].steps.newest_step
        kill_role(root, victim)
        wait_for(
            f"a successor of {victim}", lambda victim=victim, before=before: len(job_ids(root)[victim]) > len(before[victim])
        )
        wait_for_step(root, step + 5)
        after = job_ids(root)
        assert len(after.pop(victim)) == len(before.pop(victim)) + 1
        assert after == before
    cancelled = miles(tmp_path, "cancel", str(root))
    assert "CANCELLED" in cancelled.stdout, cancelled.stdout + cancelled.stderr
    first.wait(timeout=60)
    verified = miles(tmp_path, "verify", str(root))
    assert verified.returncode == 0, verified.stdout


def job_ids(root: Path) -> dict[str, list[str]]:
    """Job ids of every role so far, from the supervisor's journal."""
    return {f"{job['role']}-{job['replica']}": job["job_ids"] for job in summarize(ledger_of(root)[2], RunPaths(root))["jobs"]}


def digests_by_step(root: Path) -> dict[int, list[str]]:
    """Weights digests of all accepted records of each step, over attempts."""
    from miles_core.records import StepDone
    from miles_core.store.follow import Follower, Reading
    from miles_core.store.fs import FileSystem
    from miles_core.store.lease import LeaseFolder

    run, paths, _ = ledger_of(root)
    reading = Reading(FileSystem(), LeaseFolder(FileSystem(), paths.leases, run.run_id), run.timing.visibility_s)
    follower = Follower(reading, paths.journal("learner-0"), "learner-0")
    found: dict[int, list[str]] = {}
    while new := follower.poll():
        for item in new:
            if isinstance(item.record, StepDone):
                found.setdefault(item.record.step, []).append(item.record.weights_digest)
    return found
