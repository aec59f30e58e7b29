"""Whole simulated runs under random schedules: kills, zombies, drains and stalls of every role, checked from the journals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from miles_core.run import all_writers
from tests.protocol.audit import Audit
from tests.protocol.simulation import KILLS, SimCluster, hurt, simulated_recipe, stall

SCHEDULES = 204
CHUNKS = 12
RECIPES = (
    simulated_recipe(),
    simulated_recipe(steps=3, orchestrator__max_staleness=0, orchestrator__capacity_batches=1.0),
    simulated_recipe(
        steps=5,
        orchestrator__prompts=2,
        orchestrator__samples=3,
        orchestrator__capacity_batches=3.0,
        orchestrator__replace_flat=2,
    ),
    simulated_recipe(grader__replicas=1, orchestrator__max_staleness=1, rollout__sample_attempts=2),
)


def run_schedule(folder: Path, seed: int) -> SimCluster:
    """One run: up to seven things go wrong in its first minute."""
    draw = random.Random(f"schedule {seed}")
    cluster = SimCluster(folder, seed=seed, recipe=RECIPES[seed % len(RECIPES)])
    cluster.start()
    writers = all_writers(cluster.recipe)
    for _ in range(draw.randrange(8)):
        due_s = cluster.clock() + draw.uniform(0, 5)
        cluster.run_until(lambda due_s=due_s: cluster.clock() >= due_s or cluster.is_over())
        if cluster.is_over():
            break
        if draw.random() < 0.2:
            stall(cluster, draw.uniform(0.2, 20), draw.choice(["", cluster.newest(draw.choice(writers)).node]))
        else:
            hurt(cluster, draw.choice(writers), draw.choice(KILLS))
    cluster.run_to_the_end(4000)
    return cluster


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_schedules_end_with_one_lineage(tmp_path: Path, chunk: int) -> None:
    for seed in range(chunk, SCHEDULES, CHUNKS):
        Audit(run_schedule(tmp_path / str(seed), seed)).check()
