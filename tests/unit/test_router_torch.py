"""Engines with a real model behind the router: wherever one dies, what is sampled is what one engine alone samples."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import RecipeError
from miles_core.recipe import RolloutPool, load_recipe
from miles_core.records import Version
from miles_core.roles import rollout
from miles_core.rollout.engine import Engine, Finished, Request
from miles_core.rollout.router import RoutedEngine
from miles_core.rollout.torch_engine import TorchEngine
from tests.unit.contract_engines import V0, V1
from tests.unit.engine_history import prompt
from tests.unit.tiny_models import save_tiny_model, tiny_model

SESSIONS = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.7}
"""Key and temperature."""


class Mortal(TorchEngine):
    """Dies in a step: before it, or behind it, when its tokens are sampled and nobody was told."""

    steps = 0
    dies: tuple[int, bool] | None = None

    def step(self) -> list[Finished]:
        self.steps += 1
        number, is_before = self.dies or (0, False)
        if self.steps == number and is_before:
            raise RuntimeError("device lost")
        turns = super().step()
        if self.steps == number:
            raise RuntimeError("device lost")
        return turns


def mortal(dies: tuple[int, bool] | None = None) -> Mortal:
    engine = Mortal(tiny_model("qwen3_moe"), end_id=-1, slots=len(SESSIONS), max_tokens=96, version=V0, record_experts=True)
    engine.dies = dies
    return engine


def play(engine: Engine) -> dict[str, list[Finished]]:
    """Sessions of two turns each."""
    rng = np.random.default_rng(0)
    asked = {key: [prompt(rng, 5, 20), prompt(rng, 2, 6)] for key in SESSIONS}
    told: dict[str, list[Finished]] = {key: [] for key in SESSIONS}
    for key, temperature in SESSIONS.items():
        engine.add(Request(key, asked[key][0], 5, temperature, seed=ord(key)))
    while engine.running:
        for turn in engine.step():
            told[turn.session_key].append(turn)
            if len(told[turn.session_key]) == 1:
                key = turn.session_key
                engine.add(Request(key, asked[key][1], 4, SESSIONS[key], seed=ord(key)))
    return told


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Finished]]:
    return play(mortal())


@pytest.mark.parametrize("number", [1, 3, 5, 6, 8])
@pytest.mark.parametrize("is_before", [True, False])
def test_sessions_of_a_dead_engine_go_on_as_if_it_had_not_died(
    alone: dict[str, list[Finished]], number: int, is_before: bool
) -> None:
    made = [mortal((number, is_before)), mortal()]
    routed = RoutedEngine(lambda index: made[index], 2, is_parallel=number % 2 == 0)
    told = play(routed)
    assert routed.figures()["engine_deaths"] == 1 and made[1].steps > number
    for key, turns in alone.items():
        for expected, turn in zip(turns, told[key], strict=True):
            assert turn.tokens.tolist() == expected.tokens.tolist() and turn.reason == expected.reason
            assert np.allclose(turn.logprobs, expected.logprobs, atol=1e-5) and turn.versions == expected.versions
            assert turn.experts is not None and expected.experts is not None
            assert np.array_equal(turn.experts, expected.experts)


def test_what_was_sampled_before_a_death_keeps_its_version() -> None:
    made = [mortal((3, True)), mortal()]
    routed = RoutedEngine(lambda index: made[index], 2)
    routed.add(Request("a", (8, 9, 10), 6, 0.0, 1))
    routed.step()
    routed.step()
    routed.load_weights(tiny_model("qwen3_moe", seed=1).state_dict(), V1)
    turns = [turn for _ in range(9) for turn in routed.step()]
    assert [turn.versions for turn in turns] == [(V0, V0, V1, V1, V1, V1)]


def test_the_weights_of_an_engine_that_is_closed_are_gone() -> None:
    engine = mortal()
    model = weakref.ref(engine._model)
    engine.close()
    gc.collect()
    assert model() is None


# --- as the role makes them ------------------------------------------------------------------------------------------


def context(folder: Path) -> Any:
    recipe = load_recipe("chain_sum", ('rollout.pools=[{"name": "main", "slots": 5, "engines": 2}]',))
    return SimpleNamespace(recipe=recipe, paths=SimpleNamespace(base_model=folder))


def test_a_pool_of_several_engines_shares_its_slots_among_them(tmp_path: Path) -> None:
    made = context(save_tiny_model(tmp_path, "qwen3", max_position_embeddings=1024))
    fleet = rollout.make_fleet(made, made.recipe.rollout.pools[0], end_id=0)
    assert fleet.free_slots == 5 and fleet.version == Version(-1, 0) and len(fleet.figures()["engine_active"]) == 2
    assert [RolloutPool(slots=5, engines=3).slots_of(index) for index in range(3)] == [2, 2, 1]


@pytest.mark.parametrize(("visible", "names"), [("3,5,7,8", ["3,5", "7,8"]), (None, ["0,1", "2,3"])])
def test_each_engine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pool = RolloutPool.model_validate({"engine": "vllm", "engines": 2, "vllm": {"tensor_parallel": 2}})
    assert [",".join(rollout.gpus_of(pool, index)) for index in range(2)] == names
    wider = RolloutPool.model_validate({"engine": "vllm", "engines": 3, "vllm": {"tensor_parallel": 2}})
    with pytest.raises(RecipeError, match=r"engines=3 of 2 GPUs each, but this job sees 4 GPUs .* gpus=6"):
        rollout.gpus_of(wider, 0)
