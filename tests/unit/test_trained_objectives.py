"""Objectives in the real trainer: each makes a tiny model's reward rise, the default trains as ever, forward passes agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.learner.advantages import advantages
from miles_core.learner.batching import Microbatch
from miles_core.learner.losses import PolicyLoss, Totals
from miles_core.learner.moderation import pull_factor, pull_weights
from miles_core.learner.trainer import Trainer
from miles_core.presets import PRESETS, Objective
from miles_core.recipe import LearnerSpec
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_trainer import SPEC, assert_same_bytes, make_batch, train
from tests.unit.tiny_models import save_tiny_model

PROMPTS, SAMPLES, MOST_TOKENS = 8, 8, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base")


# --- a bandit of 1 to 4 tokens: the reward is the share of sampled tokens with an even id


def sample_batch(model: Any, step: int) -> tuple[list[Trajectory], np.ndarray]:
    """Rows of 8 prompts x 8 samples by the model's own policy, and rewards [8, 8]."""
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(64, (PROMPTS, 3), generator=generator).repeat_interleave(SAMPLES, dim=0)
    tokens, logprobs = prompts, torch.zeros(len(prompts), 0)
    with torch.no_grad():
        for _ in range(MOST_TOKENS):
            scores = torch.log_softmax(model(tokens).logits[:, -1], dim=-1)
            chosen = torch.multinomial(scores.exp(), 1, generator=generator)
            tokens, logprobs = torch.cat([tokens, chosen], dim=1), torch.cat([logprobs, scores.gather(1, chosen)], dim=1)
    lengths = torch.randint(1, MOST_TOKENS + 1, (len(prompts),), generator=generator).tolist()
    rows = [make_row(step, index, tokens[index], logprobs[index], length) for index, length in enumerate(lengths)]
    rewards = [float((row.tokens[3:] % 2 == 0).mean()) for row in rows]
    return rows, np.array(rewards).reshape(PROMPTS, SAMPLES)


def make_row(step: int, index: int, tokens: torch.Tensor, logprobs: torch.Tensor, length: int) -> Trajectory:
    group = f"g{step}-{index // SAMPLES}"
    return Trajectory(
        trajectory_id=f"{group}/{index}@rollout-0.a1",
        sample_id=f"{group}/{index}",
        group_id=group,
        order_id="o",
        producer="rollout-0",
        producer_attempt=1,
        task_seed=0,
        tokens=tokens[: 3 + length].numpy().astype(np.int32),
        loss_mask=np.array([0] * 3 + [1] * length, dtype=np.uint8),
        logprobs=np.concatenate([np.zeros(3), logprobs[:length].numpy()]).astype(np.float32),
        versions=(),
        turns=(),
        temperature=1.0,
        status="complete",
    )


def learning_curve(folder: Path, spec: LearnerSpec, steps: int) -> list[float]:
    """Mean reward of each step's samples."""
    trainer, model = Trainer(folder, spec, "float32"), AutoModelForCausalLM.from_pretrained(folder).eval()
    curve = []
    for step in range(1, steps + 1):
        model.load_state_dict(trainer.state_tensors(), strict=False)
        rows, rewards = sample_batch(model, step)
        curve.append(float(rewards.mean()))
        num_sampled = torch.tensor([row.num_sampled for row in rows]).reshape(rewards.shape)
        trainer.train(rows, advantages(torch.from_numpy(rewards), num_sampled, spec.advantage).reshape(-1).numpy(), step)
    return curve


@pytest.mark.parametrize("objective", PRESETS)
def test_every_objective_makes_the_reward_rise(folder: Path, objective: Objective) -> None:
    divisor = MOST_TOKENS if PRESETS[objective].aggregation == "constant" else None
    spec = LearnerSpec(objective=objective, loss_divisor_tokens=divisor, lr=1e-2, ramp_steps=0, minibatches=2)
    curve = learning_curve(folder, spec, steps=16)
    assert np.mean(curve[-4:]) > np.mean(curve[:2]) + 0.2, curve


# --- the default trains as before there were objectives


def frozen_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Group advantages as the first release had them."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    scaled = centred / (rewards.std(dim=1, keepdim=True) + 1e-4)
    return torch.where(spread, scaled, torch.zeros_like(scaled))


class FrozenTrainer(Trainer):
    """The loss as the first release had it: clip 0.2 / 0.28, weights cut at 2, token mean."""

    def _loss(self, micro: Microbatch, logp_old: torch.Tensor, totals: Totals) -> PolicyLoss:
        logp, _ = self._engine(micro)
        ratio = (logp - logp_old.detach()).clamp(-20, 20).exp()
        plain, clipped = ratio * micro.advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * micro.advantages
        weight = (logp_old - micro.rollout_logprobs).clamp(-20, 20).exp().clamp(max=2.0)
        per_token = -weight * torch.minimum(plain, clipped)
        loss = per_token.where(micro.mask, per_token.new_zeros(())).sum() / totals.tokens
        return PolicyLoss(loss=loss, clipped=0, ratio_deviation=0.0, nonfinite=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_trains_as_ever_to_the_last_bit(folder: Path, dtype: Any) -> None:
    now, then = Trainer(folder, SPEC, dtype), FrozenTrainer(folder, SPEC, dtype)
    before = now.state_tensors()
    train(now, range(1, 4))
    train(then, range(1, 4))
    first, second = now.state_tensors(), then.state_tensors()
    assert_same_bytes({k: v.float() for k, v in first.items()}, {k: v.float() for k, v in second.items()})
    assert any(not torch.equal(before[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_advantages_are_as_ever_to_the_last_bit(dtype: torch.dtype) -> None:
    rewards = torch.from_numpy(np.random.default_rng(0).random((16, 8))).to(dtype)
    rewards[3], rewards[4] = 0.1, (rewards[4] > 0.5).to(dtype)
    assert torch.equal(advantages(rewards, torch.ones(16, 8), LearnerSpec().advantage), frozen_advantages(rewards))


# --- the two forward passes of a step agree before a weight has moved


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("tokens", [1, 72, 8192])
def test_before_a_weight_has_moved_every_ratio_is_one(tmp_path: Path, kind: Any, tokens: int) -> None:
    """Rows of 10 to 24 tokens in one microbatch: the padding differs from row to row."""
    trainer = Trainer(save_tiny_model(tmp_path / kind, kind), SPEC.model_copy(update={"microbatch_tokens": tokens}), "float32")
    assert trainer.train(*make_batch(1), 1)["ratio_deviation_start"] < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("objective", ["grpo", "gspo"])
def test_so_it_is_with_every_zero_stage_and_while_weights_move(folder: Path, stage: int, objective: str) -> None:
    spec = LearnerSpec.model_validate(
        {"lr": 1e-2, "minibatches": 2, "microbatch_tokens": 72, "zero_stage": stage, "objective": objective}
    )
    trainer = Trainer(folder, spec, "float32")
    for step in (1, 2, 3):
        metrics = trainer.train(*make_batch(step), step)
        assert metrics["ratio_deviation_start"] < 1e-6 < metrics["ratio_deviation_max"]


def test_passes_that_disagree_show(tmp_path: Path) -> None:
    trainer = Trainer(save_tiny_model(tmp_path / "base", attention_dropout=0.5), SPEC, "float32")
    trainer._module.train()
    assert trainer.train(*make_batch(1), 1)["ratio_deviation_start"] > 1e-3


# --- siblings


def test_siblings_of_an_episode_weigh_as_the_row_that_they_were_cut_from(folder: Path) -> None:
    """In a mean over episodes: a row of two turns, and the same as two rows, each with one of them."""
    spec = SPEC.model_copy(update={"aggregation": "sequence_mean", "minibatches": 1, "ramp_steps": 0, "lr": 1e-3})
    rows, advantages = make_batch(1)
    halves = []
    for row in rows:
        sampled = np.flatnonzero(row.loss_mask)
        for own in (sampled[:2], sampled[2:]):
            mask = np.zeros_like(row.loss_mask)
            mask[own] = 1
            halves.append(replace(row, loss_mask=mask, logprobs=row.logprobs * mask))
    whole, cut = Trainer(folder, spec, "float32"), Trainer(folder, spec, "float32")
    expected, found = whole.train(rows, advantages, 1), cut.train(halves, advantages.repeat(2), 1)
    for name in ("loss", "grad_norm", "tokens"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


# --- staleness


def test_a_stale_batch_is_trained_at_the_lower_rate(folder: Path) -> None:
    spec = SPEC.model_copy(update={"staleness_slowdown": 0.5, "ramp_steps": 0})
    slowed, fresh = Trainer(folder, spec, "float32"), Trainer(folder, spec.model_copy(update={"lr": spec.lr / 2}), "float32")
    assert slowed.train(*make_batch(1), 1, staleness=2)["lr"] == spec.lr / 2
    fresh.train(*make_batch(1), 1, staleness=0)
    assert_same_bytes(slowed.state_tensors(), fresh.state_tensors())


def test_a_stale_batch_is_pulled_harder_to_the_base_model() -> None:
    plain, stale = LearnerSpec(kl_coef=0.1), LearnerSpec(kl_coef=0.1, staleness_pull=0.5)
    weights = np.array([0.5, 1.0])
    assert (pull_factor(stale, 0), pull_factor(stale, 1), pull_factor(stale, 4), pull_factor(plain, 4)) == (1, 1.5, 3, 1)
    assert pull_weights(stale, 0, None, 2) is None and pull_weights(plain, 4, None, 2) is None
    assert pull_weights(plain, 4, weights, 2) is weights
    assert pull_weights(stale, 4, None, 2).tolist() == [3, 3] and pull_weights(stale, 4, weights, 2).tolist() == [1.5, 3]
    with pytest.raises(ValueError, match=r"staleness_pull=0.5 strengthens the pull .* kl_coef is 0"):
        LearnerSpec(staleness_pull=0.5)


# --- the pull towards the base model


def test_the_pull_holds_the_policy_near_the_base_model(folder: Path) -> None:
    def distances(kl_coef: float) -> list[float]:
        trainer = Trainer(folder, SPEC.model_copy(update={"kl_coef": kl_coef, "minibatches": 1}), "float32")
        return [trainer.train(*make_batch(step), step)["kl_base"] for step in range(1, 5)]

    loose, tight = distances(1e-6), distances(10.0)
    assert loose[0] == tight[0] == 0
    assert 0 < tight[3] < 0.75 * loose[3]


def test_rows_without_signal_are_pulled_too_and_a_weight_of_0_lets_them_go(folder: Path) -> None:
    trainer = Trainer(folder, SPEC.model_copy(update={"kl_coef": 1.0}), "float32")
    train(trainer, range(1, 3))
    rows, _ = make_batch(3)
    nothing, ones = np.zeros(len(rows)), np.ones(len(rows))
    before = trainer.train(rows, nothing, 3, 0, ones)
    after = trainer.train(rows, nothing, 4, 0, ones)
    assert before["updates"] == 2 and 0 < after["kl_base"] < before["kl_base"]
    assert trainer.train(rows, nothing, 5, 0, nothing)["grad_norm"] == 0 < after["grad_norm"]


def test_left_out_groups_are_not_pulled(folder: Path) -> None:
    """make_batch's second group has no signal."""
    changes = {"kl_coef": 1.0, "flat_groups": "left_out", "minibatches": 1}
    rows, advantages = make_batch(1)
    metrics = Trainer(folder, SPEC.model_copy(update=changes), "float32").train(rows, advantages, 1)
    assert metrics["tokens"] == sum(row.num_sampled for index, row in enumerate(rows) if index // 4 != 1)
