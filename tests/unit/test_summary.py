"""The figures that people quote: spans that overlap, means of few steps, shards that are torn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.paths import RunPaths
from miles_core.run import RunConfig
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.metrics import BusyMeter, MetricShard, read_metrics
from miles_core.tracking.summary import Span, intersect, length, merge, summarize, write_summary
from tests.protocol.simulation import finished_run

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    """Whole seconds inside any span."""
    return {second for start, end in spans for second in range(start, end)}


@given(SPANS, SPANS)
def test_seconds_are_counted_once_however_spans_overlap(first: list[Span], second: list[Span]) -> None:
    one, two = covered(first), covered(second)  # type: ignore[arg-type]
    assert length(merge(first)) == len(one)
    assert length(intersect(merge(first), merge(second))) == len(one & two)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return RunPaths(finished_run(tmp_path_factory.mktemp("summary") / "run", steps=6, kills=("learner-0", "rollout-0:ghost")))


def run_of(paths: RunPaths) -> RunConfig:
    return RunConfig.model_validate_json(paths.run_file.read_bytes())


def test_what_was_replaced_is_counted_once(finished: RunPaths) -> None:
    summary = write_summary(run_of(finished), finished)
    assert json.loads(finished.summary.read_text()) == json.loads(json.dumps(summary))
    groups, recipe = summary["groups"], run_of(finished).recipe
    assert summary["steps"] == 6 and groups["trained"] == 6 * recipe.orchestrator.prompts and groups["open"] == 0
    assert groups["issued"] == groups["trained"] + sum(groups["dropped"].values())
    attempts = {f"{job['role']}-{job['replica']}": job["attempts"] for job in summary["jobs"]}
    assert attempts["learner-0"] == 2 and attempts["grader-0"] == 1
    assert 0 <= summary["staleness"]["max"] <= summary["staleness"]["bound"]


def test_a_torn_metric_shard_costs_its_line(finished: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    shard = MetricShard(folder / "learner-0" / "a1.jsonl")
    BusyMeter(shard).add(1.0, 2.0)
    shard.log("step", step=1)
    shard.close()
    with open(folder / "learner-0" / "a1.jsonl", "ab") as file:
        file.write(b'\0\0\0\n{"event": "st\n[1]\n7\n\xff\n{"event": "step"}\n')
    shard.log("step", step=2)
    shard.close()
    assert [(writer, point["step"]) for writer, point in read_metrics(folder)] == [("learner-0", 1), ("learner-0", 2)]


def test_metrics_that_cannot_be_written_end_nobody(tmp_path: Path) -> None:
    (tmp_path / "metrics").touch()
    shard = MetricShard(tmp_path / "metrics" / "learner-0" / "a1.jsonl")
    shard.log("step", step=1)
    shard.close()


def test_a_run_that_has_only_begun_has_a_summary(finished: RunPaths, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    summary = summarize(read_ledger(run_of(finished), paths), paths)
    assert (summary["state"], summary["steps"], summary["reward"]["first5"]) == ("RUNNING", 0, None)
