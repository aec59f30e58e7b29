"""Cluster profiles: how many ranks a role may have, and what is refused with the sentence that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.job_spec import make_job_spec
from cluster.profile import ClusterProfile, short_lead
from cluster.role_env import role_env
from miles_core.recipe import load_recipe
from tests.protocol.learner_run import make_run


def profile(kind: str = "slurm", **fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", "kind": kind, **fields})


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("slurm", {"resources": {"rollout": {"tasks": 2}}}, "resources.rollout: nodes=1, tasks=2, but only the learner"),
        ("slurm", {"resources": {"evaluator": {"nodes": 3}}}, "resources.evaluator: nodes=3, tasks=1, but only the learner"),
        ("slurm", {"pools": {"main": {"nodes": 2}}}, "pools.main: nodes=2, tasks=1, but only the learner"),
        ("slurm", {"resources": {"learner": {"gpus": 4}}}, "gpus=4 and tasks=1 per node, .* set tasks: 4"),
        ("slurm", {"resources": {"learner": {"gpus": 2, "tasks": 4}}}, "gpus=2 and tasks=4 per node, .* set tasks: 2"),
        ("local", {"resources": {"learner": {"nodes": 2}}}, "nodes=2, but kind: local is one machine; set nodes: 1 and tasks"),
    ],
)
def test_impossible_ranks_are_refused_with_the_fix(kind: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        profile(kind, **fields)


def test_a_learner_of_several_ranks_knows_how_many_must_meet(tmp_path) -> None:
    run, paths = make_run(tmp_path / "run")
    for kind, resources, expected in (
        ("slurm", {"nodes": 2, "tasks": 4, "gpus": 4}, "8"),
        ("local", {"tasks": 2}, "2"),
        ("slurm", {"gpus": 1}, None),
    ):
        made = profile(kind, resources={"learner": resources})
        for writer, ranks in (("learner-0", expected), ("rollout-0", None)):
            assert role_env(make_job_spec(run, paths, made, writer, 1)).get("MILES_RANKS") == ranks


@pytest.mark.parametrize(("kind", "lead_s", "warns"), [("slurm", 89, True), ("slurm", 90, False), ("local", 1, False)])
def test_a_lead_shorter_than_an_episode_is_said_with_both_numbers(kind: str, lead_s: int, warns: bool) -> None:
    recipe = load_recipe("chain_sum", ("environment.episode_deadline_s=90",))
    said = short_lead(profile(kind, slurm={"signal_lead_s": lead_s}), recipe)
    assert ("signal_lead_s=89 " in said and "episode_deadline_s=90:" in said and "to 90" in said) if warns else said == ""
