"""The objective's part of a recipe: presets, what overrides them, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from miles_core.errors import RecipeError
from miles_core.presets import MIS_BOUNDS, PRESETS, Objective, resolve
from miles_core.recipe import LearnerSpec, Recipe, load_recipe


def recipe(*overrides: str) -> Recipe:
    return load_recipe("chain_sum", overrides)


def test_every_name_is_a_preset_and_the_fields_defaults_are_grpos() -> None:
    assert tuple(PRESETS) == get_args(Objective)
    defaults = {name: LearnerSpec.model_fields[name].default for name in PRESETS["grpo"]._fields}
    assert defaults == PRESETS["grpo"]._asdict()


@pytest.mark.parametrize("objective", PRESETS)
def test_run_json_shows_the_resolved_pieces_and_gives_them_back(objective: Objective) -> None:
    resolved = recipe(f"learner.objective={objective}")
    shown = resolved.model_dump(mode="json")["learner"]
    assert {name: shown[name] for name in PRESETS[objective]._fields} == PRESETS[objective]._asdict()
    assert Recipe.model_validate_json(resolved.model_dump_json()) == resolved


def test_explicit_fields_override_the_preset() -> None:
    spec = LearnerSpec(objective="gspo", clip_high=0.01, advantage="group_mean")
    assert (spec.clip_low, spec.clip_high, spec.advantage, spec.ratio) == (3e-4, 0.01, "group_mean", "sequence")
    assert LearnerSpec.model_validate({"objective": "cispo", "clip_low": None}).clip_low == 1.0


def test_what_is_given_stays() -> None:
    assert resolve({"objective": "gspo", "clip_low": 0.1})["clip_low"] == 0.1
    assert resolve({})["clip_low"] == 0.2 and "mis_low" not in resolve({})


@pytest.mark.parametrize("objective", ["dr_grpo", "rloo"])
def test_the_constant_divisor_is_what_an_episode_can_sample(objective: str) -> None:
    assert recipe(f"learner.objective={objective}").learner.loss_divisor_tokens == 3 * 24
    assert recipe(f"learner.objective={objective}", "environment.max_tokens=60").learner.loss_divisor_tokens == 60
    assert recipe(f"learner.objective={objective}", "learner.loss_divisor_tokens=10").learner.loss_divisor_tokens == 10
    assert recipe().learner.loss_divisor_tokens is None


@pytest.mark.parametrize("kind", MIS_BOUNDS)
def test_masks_have_bounds_by_kind_and_take_others(kind: Any) -> None:
    spec = LearnerSpec(correction=kind)
    assert (spec.mis_low, spec.mis_high) == MIS_BOUNDS[kind]
    assert LearnerSpec(correction=kind, mis_high=7.0).mis_high == 7


def test_the_reward_scaler_is_off_until_asked_for() -> None:
    assert recipe().learner.reward_scaler is None and recipe().learner.kl_coef == 0
    scaler = recipe("learner.reward_scaler={}").learner.reward_scaler
    assert scaler is not None and (scaler.short, scaler.long, scaler.gradient_weight) == (1000, 100_000, "none")


def test_asynchronous_data_is_corrected_unless_a_word_says_otherwise() -> None:
    assert recipe().orchestrator.max_staleness > 0 and recipe().learner.correction == "tis"
    with pytest.raises(RecipeError, match=r"correction: none .*allow_uncorrected: true"):
        recipe("learner.correction=none")
    assert recipe("learner.correction=none", "learner.allow_uncorrected=true").learner.correction == "none"
    synchronous = ("orchestrator.max_staleness=0", "orchestrator.capacity_batches=1")
    assert recipe("learner.correction=none", *synchronous).learner.correction == "none"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("learner.objective=gpro",), "learner.objective: Input should be 'grpo'"),
        (("learner.objective=[grpo]",), "learner.objective"),
        (("learner.correction=[tis]",), "learner.correction"),
        (("learner.loss_divisor_tokens=72",), "aggregation is token_mean"),
        (("learner.mis_high=2",), "correction is tis"),
        (("learner.correction=mis_token", "learner.mis_low=6"), "mis_low=6.0 must be under mis_high=5.0"),
        (("learner.clip_low=1.5",), "learner.clip_low"),
        (("learner.veto=1",), "learner.veto"),
        (("learner.tis_cap=0",), "learner.tis_cap"),
        (("learner.staleness_slowdown=-1",), "learner.staleness_slowdown"),
        (("learner.reward_scaler={short: 255}",), "short=255 is under two batches of 128 grades"),
        (("learner.reward_scaler={short: 1000, long: 1000}",), "long=1000 must be over short=1000"),
        (("learner.reward_scaler={gradient_weight: damped}",), "kl_coef is 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)
