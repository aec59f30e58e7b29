"""A mixture of experts learns with rollout in bfloat16 and replayed routing; the run proves itself and shows both."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from miles_core.trajectories.shards import read_shard
from tests.e2e.runs import ledger_of, miles, start_miles, summary_of

pytestmark = [pytest.mark.timeout(1200)]

SETTINGS = ("steps=16", "learner.lr=3e-4", "evaluation.problems=128", "orchestrator.prompts=12")


def drawn(page: str, title: str) -> dict[str, list[float]]:
    """Numbers behind a chart of the report, by series."""
    points = re.search(rf'aria-label="{title}" data-points="([^"]*)"', page)
    assert points is not None, f"no chart {title!r}"
    series: list[dict[str, Any]] = json.loads(html.unescape(points[1]))["series"]
    return {one["name"]: [float(value) for value in one["values"]] for one in series}


def test_a_mixture_learns_with_replayed_routing_and_shows_what_that_changes(tmp_path: Path) -> None:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    run = start_miles(tmp_path, "run", "chain_sum_moe", "--run-id", "mixture", *settings)
    assert run.wait(timeout=1000) == 0, (tmp_path / "output").read_text()
    root = tmp_path / "runs" / "mixture"
    score = summary_of(root)["eval"]
    assert score["greedy_after"] - score["greedy_before"] >= 0.2, score
    verified = miles(tmp_path, "verify", str(root))
    assert verified.returncode == 0, verified.stdout
    check_records(root)
    check_page_of(root)


def check_records(root: Path) -> None:
    """Every trained row has its experts, and the learner replayed them all."""
    ledger = ledger_of(root)[2]
    trained = {m.ref.trajectory_id for batch in ledger.batches.values() for group in batch.groups for m in group.members}
    rows = {row.trajectory_id: row for shard in root.glob("trajectories/*/*/*.arrow") for row in read_shard(shard)}
    assert trained <= rows.keys()
    for trajectory_id in trained:
        experts = rows[trajectory_id].experts
        assert experts is not None and experts.shape == (len(rows[trajectory_id].tokens) - 1, 3, 4) and experts.max() < 16
    metrics = [step.metrics for number, step in ledger.steps.steps.items() if number > 0]
    assert all(found["routing_missing_tokens"] == 0 for found in metrics)
    assert [number for number, step in ledger.steps.steps.items() if "k3_no_replay" in step.metrics] == [1, 6, 11, 16]
    assert ledger.steps.steps[1].metrics["routing_changed_frac"] > 0, "bfloat16 and float32 choose alike?"


def check_page_of(root: Path) -> None:
    """The section on routing is there, and both ways are drawn."""
    page = (root / "reports" / "index.html").read_text()
    assert "<h2>Routing</h2>" in page
    found = {title: list(drawn(page, title).values()) for title in ("Mismatch without and with replay", "Largest logprob gap")}
    for title, (own, replayed) in found.items():
        assert len(own) == len(replayed) == 4 and all(map(math.isfinite, own + replayed)) and min(replayed) > 0, title
    # Of the mean, not of the largest: that is one token's rounding, which may fall either way.
    own, replayed = found["Mismatch without and with replay"]
    assert statistics.median(a / b for a, b in zip(own, replayed, strict=True)) > 1, "replay does not bring the two closer"
    assert all(len(values) == 16 for values in drawn(page, "Expert load").values())
