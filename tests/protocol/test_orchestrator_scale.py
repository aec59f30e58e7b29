"""Twenty thousand trajectories from two hundred replicas: a round costs what is new, not what the run is old."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

from miles_core.records import Batch, GroupIssued
from tests.protocol.orchestrator_table import Table
from tests.protocol.simulation import simulated_recipe

STEPS, PROMPTS, SAMPLES, REPLICAS = 40, 64, 8, 200
EARLY, LATE = range(5, 11), range(30, 36)
RECIPE = simulated_recipe(
    steps=STEPS,
    rollout__pools=({"name": "main", "replicas": REPLICAS, "slots": 8},),
    grader__replicas=4,
    orchestrator__prompts=PROMPTS,
    orchestrator__samples=SAMPLES,
    orchestrator__capacity_batches=3.0,
    orchestrator__max_staleness=4,
)


class LineCount:
    """Counts the lines of miles_core/orchestrator that are executed, loops included."""

    def __init__(self) -> None:
        self.lines = 0

    def __enter__(self) -> LineCount:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if "/miles_core/orchestrator/" in frame.f_code.co_filename else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines += event == "line"
        return self._line


def one_step(table: Table, draw: random.Random) -> None:
    """Rounds until the next batch is trained; half of the replicas answer in each."""
    trained = table.state.trained_step
    while table.state.trained_step == trained:
        table.decide()
        for who in draw.sample(table.rollouts, REPLICAS // 2):
            for order in table.todo.pop(who, []):
                table.list_samples(who, order)
        for grader in table.graders:
            for order in table.to_grade.pop(grader, []):
                table.grade(grader, order)
        table.train()


def test_work_per_step_and_what_is_held_do_not_grow_with_the_run() -> None:
    table, draw = Table(RECIPE), random.Random(0)
    lines, applied, held = [], [], []
    for step in range(1, STEPS + 1):
        before = table.state.applied
        # Tracing is slow: some early and late steps are enough, an even number, for steps take turns in issuing.
        if step in EARLY or step in LATE:
            with LineCount() as count:
                one_step(table, draw)
            lines.append(count.lines)
        else:
            one_step(table, draw)
        applied.append(table.state.applied - before)
        held.append(len(table.state.groups))
    table.planner.end_run()
    assert len([record for record in table.own if isinstance(record, GroupIssued)]) * SAMPLES == STEPS * PROMPTS * SAMPLES
    assert [record.step for record in table.own if isinstance(record, Batch)] == list(range(1, STEPS + 1))
    early, late = sum(lines[: len(EARLY)]), sum(lines[len(EARLY) :])
    assert late < 1.1 * early, lines
    assert sum(applied[step - 1] for step in LATE) < 1.1 * sum(applied[step - 1] for step in EARLY)
    assert max(held) <= 3 * PROMPTS
    # A few hundred executed lines a trajectory, whatever the number of replicas.
    assert late / (len(LATE) * PROMPTS * SAMPLES) < 400


def test_a_round_without_news_costs_the_same_at_any_age() -> None:
    table, draw = Table(RECIPE), random.Random(0)
    idle = []
    for step in range(1, 21):
        one_step(table, draw)
        table.decide()
        if step in (4, 20):
            with LineCount() as count:
                table.decide()
            idle.append(count.lines)
    assert idle[1] <= 1.1 * idle[0] and idle[0] < 20 * REPLICAS
