"""A run whose episodes are driven by an agent over HTTP: short, and proved like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.trajectories.lines import lines
from miles_core.trajectories.shards import read_shard
from miles_core.verify import verify_run
from tests.e2e.runs import miles

pytestmark = [pytest.mark.timeout(900)]

SHORT = ("steps=3", "evaluation.problems=8", "orchestrator.prompts=2", "orchestrator.samples=4", "learner.checkpoint_every=3")
BRANCHING = ("environment.agent.run=tests.e2e.branching_agent:run", "environment.agent.history=branching")


def test_a_run_of_a_branching_agent_completes_and_proves_itself(tmp_path: Path) -> None:
    settings = [word for setting in (*SHORT, *BRANCHING) for word in ("--set", setting)]
    done = miles(tmp_path, "run", "chain_sum_agent", "--run-id", "agent", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    result = verify_run(tmp_path / "runs/agent")
    assert result.faults == [] and result.state == "COMPLETED"
    assert (result.facts["steps"], result.facts["groups_open"]) == (3, 0)
    rows = [row for path in (tmp_path / "runs/agent/trajectories").rglob("*.arrow") for row in read_shard(path)]
    assert {row.status for row in rows} <= {"complete", "truncated"} and len(rows) >= 3 * 2 * 4
    assert any(row.facts.get("tool_calls") for row in rows) and any(row.facts.get("second_answer") for row in rows)
    sessions = [row.facts["session"] for row in rows]
    assert {kind for session in sessions for kind in session["mismatches"]} <= {"assistant_text"}
    for row, session in zip(rows, sessions, strict=True):
        sampled = [turn for turn in row.turns if turn.role == "assistant"]
        assert len(sampled) == session["turns"] and row.num_sampled == sum(turn.end - turn.start for turn in sampled)
        # Each conversation begins with the task; what was sampled in one is trained in one.
        conversations = lines(row)
        assert sum(line.num_sampled for line in conversations) == row.num_sampled
        assert all(line.turns[0][:2] == ("user", 0) for line in conversations)
    assert max(len(lines(row)) for row in rows) == 2
