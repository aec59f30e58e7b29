"""A run whose episodes are driven by an agent over HTTP: short, and proved like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_core.trajectories.shards import read_shard
from tests.e2e.runs import miles

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]

SHORT = ("steps=3", "evaluation.problems=8", "orchestrator.prompts=2", "orchestrator.samples=4", "learner.checkpoint_every=3")


def test_an_agents_run_completes_and_proves_itself(tmp_path: Path) -> None:
    settings = [word for setting in SHORT for word in ("--set", setting)]
    done = miles(tmp_path, "run", "chain_sum_agent", "--run-id", "agent", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(miles(tmp_path, "verify", "agent", "--json").stdout)
    assert result["faults"] == [] and (result["state"], result["steps"], result["groups_open"]) == ("COMPLETED", 3, 0)
    rows = [row for path in (tmp_path / "runs/agent/trajectories").rglob("*.arrow") for row in read_shard(path)]
    sessions = [row.facts["session"] for row in rows]
    assert {row.status for row in rows} <= {"complete", "truncated"} and len(rows) >= 3 * 2 * 4
    assert any(row.facts["tool_calls"] for row in rows) and max(session["turns"] for session in sessions) == 2
    kinds = {kind for session in sessions for kind in session["mismatches"]}
    assert kinds <= {"assistant_text"}
    for row in rows:
        sampled = [turn for turn in row.turns if turn.role == "assistant"]
        assert len(sampled) == row.facts["session"]["turns"]
        assert row.num_sampled == sum(turn.end - turn.start for turn in sampled)
