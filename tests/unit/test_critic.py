"""PPO's critic against float64 numpy (objective_reference.py), and in the trainer: bit-exact, learning, finite at the edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from miles_core.errors import RecipeError
from miles_core.learner.batching import Microbatch
from miles_core.learner.critic import Critic, Targets, estimate, gae, value_loss, whitening
from miles_core.learner.losses import Tokens, Totals, policy_loss
from miles_core.learner.trainer import Trainer
from miles_core.recipe import CriticSpec, LearnerSpec, load_recipe
from miles_core.trajectories.schema import Trajectory
from tests.unit.objective_reference import gae_advantages, ppo_term, value_term
from tests.unit.test_batching import microbatches, trajectory
from tests.unit.test_trainer import GROUPS, SAMPLES, assert_same_bytes, make_batch, sealed
from tests.unit.tiny_models import save_tiny_model

SPEC = LearnerSpec.model_validate({"objective": "ppo", "lr": 1e-2, "microbatch_tokens": 72, "critic": {"gae_lambda": 0.9}})
Array = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base")


def rows_of(masks: Sequence[Sequence[int]]) -> list[Trajectory]:
    return [trajectory(list(mask)) for mask in masks]


class KnownValues:
    """An engine whose values are given, by microbatch."""

    def __init__(self, values: Sequence[Array]) -> None:
        self._values = iter(values)

    def __call__(self, micro: Microbatch) -> torch.Tensor:
        return torch.from_numpy(next(self._values)).float()


def critic_of(values: Sequence[Array], **spec: float) -> Critic:
    return Critic(KnownValues(values), CriticSpec.model_validate(spec), lambda rows: rows, ranks=1)


def judged(
    rows: list[Trajectory], rewards: Array, values: Array, **spec: float
) -> tuple[Microbatch, Targets, dict[str, float]]:
    """All rows as one microbatch."""
    batch = microbatches(list(range(len(rows))), rows, rewards)
    ((micro,),), ((target,),), figures = critic_of([values], **spec).judge([batch])
    return micro, target, figures


# --- generalised advantage estimation


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_gae_equals_its_definition(gamma: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 13):
        values, reward = rng.normal(size=size), float(rng.normal())
        found, expected = gae(values, reward, gamma, gae_lambda), gae_advantages(values, reward, gamma, gae_lambda)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_a_gap_costs_one_gamma_lambda_however_long_it_is() -> None:
    spec = CriticSpec(gamma=0.9, gae_lambda=0.8)
    found = []
    for gap in (0, 1, 50):
        (micro,) = microbatches([0], rows_of([[0, 0, 1, 1, *[0] * gap, 1]]), np.array([1.0]))
        found.append(estimate(micro, np.zeros(3), spec)[0])
    np.testing.assert_allclose(found[0], [0.72**2, 0.72, 1.0], rtol=1e-15)
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


def test_the_reward_is_on_the_last_sampled_token_and_nothing_follows_it() -> None:
    """Also where a tool's answer comes behind it: an episode that was cut off."""
    spec = CriticSpec(gamma=0.9, gae_lambda=0.5)
    (micro,) = microbatches([0], rows_of([[0, 1, 1, 0, 0, 0]]), np.array([2.0]))
    advantages, returns = estimate(micro, np.array([0.25, 0.5]), spec)
    np.testing.assert_allclose(advantages, [0.9 * 0.5 - 0.25 + 0.45 * 1.5, 1.5], rtol=1e-15)
    np.testing.assert_allclose(returns, advantages + np.array([0.25, 0.5]), rtol=1e-15)


def test_policy_and_critic_losses_equal_the_reference() -> None:
    """Of rows of several lengths with gaps: advantages, their whitening, both losses and both gradients."""
    rng = np.random.default_rng(1)
    masks = [[0, *rng.integers(0, 2, 9), 1] for _ in range(6)]
    rows, rewards = rows_of(masks), rng.normal(size=6)
    order = sorted(range(6), key=lambda row: (-int(np.flatnonzero(masks[row])[-1]), row))
    counts = [sum(masks[row]) for row in order]
    total = sum(counts)
    old_values, logp_old = rng.normal(size=total).astype(np.float32), -rng.exponential(1.0, total)
    values, logp = old_values + rng.normal(0, 0.3, total), logp_old + rng.normal(0, 0.3, total)
    micro, target, figures = judged(rows, rewards, old_values.astype(np.float64), gamma=0.97, gae_lambda=0.9)

    parts = np.split(old_values.astype(np.float64), np.cumsum(counts)[:-1])
    reward_of = micro.advantages.new_tensor(rewards).float().double().numpy()
    raw = np.concatenate([gae_advantages(part, reward_of[row], 0.97, 0.9) for part, row in zip(parts, order, strict=True)])
    white = (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(micro.advantages.numpy(), white, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(target.returns.numpy(), raw + old_values, rtol=2e-6, atol=1e-6)
    assert figures["return_mean"] == pytest.approx(float((raw + old_values).mean()), rel=1e-6)
    assert figures["value_explained"] == pytest.approx(1 - raw.var() / (raw + old_values).var(), rel=1e-6)

    exact = Targets(torch.from_numpy(old_values).double(), torch.from_numpy(raw + old_values))
    moved = torch.from_numpy(values).requires_grad_()
    loss, clipped, counted = value_loss(moved, exact, micro.mask, 0.2)
    (loss / total).backward()
    terms = [value_term(*each, 0.2) for each in zip(values, old_values.astype(np.float64), raw + old_values, strict=True)]
    assert moved.grad is not None and counted == total and 0 < clipped < total
    assert float(loss.detach()) == pytest.approx(sum(value for value, _ in terms), rel=1e-12)
    np.testing.assert_allclose(moved.grad.numpy() * total, [slope for _, slope in terms], rtol=1e-12, atol=1e-15)

    policy = torch.from_numpy(logp).requires_grad_()
    old = torch.from_numpy(logp_old)
    tokens = Tokens(policy, old, old, torch.from_numpy(white), micro.mask, micro.rows, 6)
    found = policy_loss(tokens, Totals(total, 6), SPEC)
    found.loss.backward()
    terms = [ppo_term(math.exp(new - before), a, 0.8, 1.2) for new, before, a in zip(logp, logp_old, white, strict=True)]
    assert policy.grad is not None
    assert float(found.loss.detach()) == pytest.approx(-sum(value for value, _ in terms) / total, rel=1e-12)
    np.testing.assert_allclose(policy.grad.numpy() * total, [-slope for _, slope in terms], rtol=1e-11, atol=1e-15)


# --- the edge


def test_equal_advantages_are_exactly_none() -> None:
    assert whitening(np.full(5, 0.1)) == (0.0, 0.0) == whitening(np.array([3.0])) == whitening(np.zeros(0))
    micro, _, _ = judged(rows_of([[0, 1], [0, 1]]), np.array([0.1, 0.1]), np.zeros(2))
    assert not micro.advantages.any()


@pytest.mark.parametrize("extreme", [1000.0, -1000.0, math.inf, -math.inf, math.nan])
def test_an_extreme_value_is_finite_or_left_out_with_its_row(extreme: float) -> None:
    values = np.array([0.1, extreme, 0.3, 0.4])
    micro, target, figures = judged(rows_of([[0, 1, 1], [0, 1, 1]]), np.array([1.0, 0.0]), values)
    assert all(math.isfinite(value) for value in figures.values())
    finite = math.isfinite(extreme)
    assert torch.isfinite(micro.advantages).tolist() == [finite, finite, True, True]
    now = torch.zeros(4, requires_grad=True)
    loss, _, counted = value_loss(now, target, micro.mask, 0.2)
    loss.backward()
    assert counted == (4 if finite else 2) and torch.isfinite(loss)
    assert now.grad is not None and torch.isfinite(now.grad).all()


def test_a_filler_teaches_nothing() -> None:
    (micro,) = microbatches([0], rows_of([[0, 1, 1]]), np.array([1.0]))
    ((filler,),), ((target,),), figures = critic_of([np.array([5.0, 7.0])]).judge([[micro.as_filler()]])
    assert figures == {"value_mean": 0.0, "return_mean": 0.0, "value_explained": 0.0}
    loss, clipped, counted = value_loss(torch.ones(2), target, filler.mask, 0.2)
    assert (float(loss), clipped, counted) == (0.0, 0, 0)


# --- in the trainer


def rewards_of(seed: int) -> Array:
    """By token ids, so that there is something to be learned; the second group's are all alike."""
    rows, _ = make_batch(seed)
    rewards = np.array([float((row.tokens[row.loss_mask == 1] % 2 == 0).mean()) for row in rows])
    rewards[SAMPLES : 2 * SAMPLES] = 0.5
    return rewards


def train(trainer: Trainer, steps: range) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in steps:
        metrics = trainer.train(make_batch(step)[0], rewards_of(step), step)
    return metrics


def critic_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert trainer._critic is not None
    return {name: tensor.detach().clone() for name, tensor in trainer._critic.engine.module.state_dict().items()}


def test_a_new_trainer_goes_on_bit_exactly_with_its_critic(folder: Path, tmp_path: Path) -> None:
    straight = Trainer(folder, SPEC, "float32")
    train(straight, range(1, 3))
    straight.save(tmp_path)
    expected = train(straight, range(3, 5))
    resumed = Trainer(folder, SPEC, "float32")
    resumed.load(tmp_path, sealed(tmp_path))
    assert train(resumed, range(3, 5)) == expected
    assert_same_bytes(straight.state_tensors(), resumed.state_tensors())
    assert_same_bytes(critic_weights(straight), critic_weights(resumed))
    assert {name.partition("/")[0] for name in (file.name for file in sealed(tmp_path))} == {"engine", "critic"}


def test_the_critic_learns_what_rewards_are_and_all_rows_are_trained(folder: Path) -> None:
    trainer = Trainer(folder, SPEC.model_copy(update={"lr": 0.0, "ramp_steps": 0, "critic": CriticSpec(lr=3e-3)}), "float32")
    rows = make_batch(1)[0]
    first = trainer.train(rows, rewards_of(1), 1)
    assert first["value_mean"] == 0 and first["value_explained"] == pytest.approx(0, abs=1e-12)
    assert first["tokens"] == sum(row.num_sampled for row in rows) and first["updates"] == 2
    for step in range(2, 40):
        last = trainer.train(rows, rewards_of(1), step)
    assert last["value_explained"] > 0.5 and last["critic_loss"] < first["critic_loss"] / 4
    assert last.keys() == first.keys() and all(math.isfinite(value) for value in last.values())


def test_rewards_that_are_all_alike_move_the_critic_alone(folder: Path) -> None:
    trainer = Trainer(folder, SPEC.model_copy(update={"critic": CriticSpec()}), "float32")
    before, values = trainer.state_tensors(), critic_weights(trainer)
    metrics = trainer.train(make_batch(1)[0], np.full(GROUPS * SAMPLES, 1.0), 1)
    assert metrics["grad_norm"] == 0 < metrics["critic_grad_norm"]
    assert_same_bytes(before, trainer.state_tensors())
    assert any(not torch.equal(values[name], tensor) for name, tensor in critic_weights(trainer).items())


def test_rows_without_a_sampled_token_are_no_update_and_have_the_same_metrics(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    rows, rewards = make_batch(1)[0], rewards_of(1)
    before = critic_weights(trainer)
    nothing = trainer.train([replace(row, loss_mask=row.loss_mask * 0) for row in rows], rewards, 1)
    assert nothing["updates"] == nothing["tokens"] == nothing["critic_loss"] == 0
    assert_same_bytes(before, critic_weights(trainer))
    assert trainer.train(rows, rewards, 2).keys() == nothing.keys()


# --- the recipe


def test_ppo_has_a_critic_and_nobody_else() -> None:
    assert load_recipe("chain_sum", ("learner.objective=ppo",)).learner.critic == CriticSpec()
    assert load_recipe(
        "chain_sum",
        (
            "learner.objective=ppo",
            "learner.critic={gamma: 0.9}",
        ),
    ).learner.critic == CriticSpec(gamma=0.9)
    assert load_recipe("chain_sum", ("learner.advantage=gae",)).learner.critic == CriticSpec()
    assert load_recipe("chain_sum").learner.critic is None
    with pytest.raises(RecipeError, match=r"learner.critic belongs to advantage: gae, but advantage is group_std"):
        load_recipe("chain_sum", ("learner.critic={}",))
    with pytest.raises(RecipeError, match=r"flat_groups: left_out needs an advantage that compares"):
        load_recipe(
            "chain_sum",
            (
                "learner.objective=ppo",
                "learner.flat_groups=left_out",
            ),
        )
    with pytest.raises(RecipeError, match=r"aggregation: sequence_mean is a mean over samples"):
        load_recipe("chain_sum", ("learner.objective=ppo", "learner.aggregation=sequence_mean"))


def test_one_sample_a_prompt_is_for_objectives_that_compare_no_group() -> None:
    assert (
        load_recipe(
            "chain_sum",
            (
                "learner.objective=ppo",
                "orchestrator.samples=1",
            ),
        ).orchestrator.samples
        == 1
    )
    with pytest.raises(RecipeError, match=r"samples=1: learner.advantage group_std compares"):
        load_recipe("chain_sum", ("orchestrator.samples=1",))
