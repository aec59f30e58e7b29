"""Objective and optimizer."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from miles_core import presets
from miles_core.recipe.closed import Closed


class RewardScalerSpec(Closed):
    """Rewards scaled by the mean and spread of earlier grades (sources G5, grading/scaler.py)."""

    short: int = Field(default=1000, ge=1)
    """Grades in the short window, which has 0.7 of the say; at least two batches."""
    long: int = Field(default=100_000, ge=1)
    """Grades in the long window, which has 0.3 of it."""
    gradient_weight: Literal["none", "damped", "boosted"] = "none"
    """What multiplies a sample's pull towards the base model (`learner.kl_coef`): less for rewards far from the mean, or more
    for high ones."""

    @model_validator(mode="after")
    def _windows_differ(self) -> Self:
        if self.long <= self.short:
            raise ValueError(f"learner.reward_scaler: long={self.long} must be over short={self.short}")
        return self


class CriticSpec(Closed):
    """The critic of `advantage: gae` (learner/critic.py): a copy of the model that learns values, with its own optimizer."""

    lr: float = Field(default=1e-3, ge=0)
    """Its AdamW learning rate after the ramp; betas, ramp, clipping and ZeRO stage are the learner's."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of one sampled token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """lambda of generalised advantage estimation: 1 trusts the reward alone, 0 the next value alone."""
    value_clip: float = Field(default=0.2, gt=0)
    """A value moves at most so far from that of the start of the step before it stops to gain by it."""


class BalanceSpec(Closed):
    """Experimental: a balance loss for the routers of a mixture of experts (sources L9, learner/balance.py)."""

    coef: float = Field(default=0.01, gt=0)
    """What multiplies it, times beta = exp(-rate x gradient norm)."""
    rate: float = Field(default=1.0, ge=0)
    """lambda: 0 is a plain balance loss, more is looser while the gradient is large."""


class LearnerSpec(Closed):
    """Objective and optimizer, on DeepSpeed. docs/objectives.md has the objectives' formulas."""

    lr: float = Field(default=3e-4, ge=0)
    """AdamW learning rate after the ramp."""
    ramp_steps: int = Field(default=3, ge=0)
    """Training steps of linear warm-up."""
    decay_steps: int = Field(default=0, ge=0)
    """Training steps behind it in which the rate falls linearly to a tenth, where it stays. 0: it does not fall."""
    staleness_slowdown: float = Field(default=0.0, ge=0)
    """a: a batch of staleness s is trained at lr / (1 + a s) (sources O17). 0: at lr."""
    staleness_pull: float = Field(default=0.0, ge=0)
    """b: a batch of staleness s is pulled to the base model with kl_coef x (1 + b s) (sources O17). Needs `kl_coef`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW beta1."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW beta2."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global gradient norm bound."""
    objective: presets.Objective = "grpo"
    """Preset: gives the seven fields below their values where the recipe gives none (presets.py)."""
    advantage: presets.Advantage = "group_std"
    """What a sample's reward is compared with (learner/advantages.py)."""
    ratio: presets.Ratio = "token"
    """Ratio of new to old policy of a token, or the geometric mean over its row."""
    surrogate: presets.Surrogate = "clip"
    """`clip`: PPO, a clipped token gives no gradient. `weight`: CISPO, it does, with the clipped ratio as its weight."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1: not at all."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: presets.Aggregation = "token_mean"
    """How the tokens' losses become the loss of a minibatch."""
    flat_groups: presets.FlatGroups = "counted"
    """Groups without signal (all rewards equal) count in the mean's divisor, or are left out as if they had not been there."""
    loss_divisor_tokens: int | None = Field(default=None, ge=1)
    """Divisor of `aggregation: constant`. Default: the most tokens an episode of the recipe's environment can sample."""
    correction: presets.Correction = "tis"
    """How much a token sampled by an older policy counts (learner/corrections.py)."""
    allow_uncorrected: bool = False
    """Allows `correction: none` with asynchronous data, whose gradient is then biased."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of `correction: tis`."""
    mis_low: float | None = Field(default=None, ge=0)
    """`correction: mis_*`: weights under this become 0. Default by kind (presets.py)."""
    mis_high: float | None = Field(default=None, gt=0)
    """`correction: mis_*`: weights over this become 0. Default by kind (presets.py)."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A row with a token whose weight is under this counts for nothing; 1e-4 is usual. Default: off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """beta of the k3 estimate of KL(policy || base model) in a token's loss. Over 0: every rank keeps the base model in memory
    (with `model.lora` it has it anyway) and asks it for the logprobs of every row, also of those without signal."""
    critic: CriticSpec | None = None
    """Settings of the critic that `advantage: gae` (objective `ppo`) has; null: its defaults, and no critic elsewhere."""
    reward_scaler: RewardScalerSpec | None = None
    """Scales rewards before advantages are made of them; `{}` turns it on with its defaults. null: rewards as graded."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer updates per batch; groups are split evenly."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Most positions per forward pass of a rank, padding included; a longer trajectory is alone in its pass. What rows share is
    computed once (learner/packing.py) and counts once. Memory of the activations grows with it, results do not depend on it."""
    gradient_checkpointing: bool = False
    """Each layer's activations are computed again in the backward pass: a fraction of the memory for a third more time."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    routing_replay: bool = True
    """For a mixture of experts: rollout records the experts of each token, the learner's forward pass takes the same ones
    (sources R6, L3). Without effect on a dense model, which has no experts; so it is one switch for all recipes, and a
    recipe need not know what is in `model.path`. False: the learner's routers choose anew, nothing is recorded. While it is on
    vLLM samples a mixture without CUDA graphs, which is slower."""
    freeze_router: bool = True
    """For a mixture of experts: its routers keep the base model's weights (sources L9; the MiMo report's cure for routers that
    collapse). Without effect on a dense model."""
    balance: BalanceSpec | None = None
    """Experimental: with `freeze_router: false`, a loss that keeps the experts evenly loaded. null: none."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO stage; without one, it neither sums bfloat16 gradients in float32 nor reports the gradient norm."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_pieces(cls, fields: Any) -> Any:
        return presets.resolve(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _pieces_agree(self) -> Self:
        if self.loss_divisor_tokens is not None and self.aggregation != "constant":
            raise ValueError(
                f"learner.loss_divisor_tokens is the divisor of aggregation: constant, but aggregation is {self.aggregation}; "
                f"remove one of the two"
            )
        if self.advantage == "gae" and self.aggregation == "sequence_mean":
            raise ValueError(
                "learner.aggregation: sequence_mean is a mean over samples, but with advantage gae each token has its own; set "
                "aggregation: token_mean or constant"
            )
        if self.balance is not None and self.freeze_router:
            raise ValueError(
                "learner.balance moves the routers, but freeze_router keeps them; set freeze_router: false or balance: null"
            )
        if self.staleness_pull > 0 and self.kl_coef == 0:
            raise ValueError(
                f"learner.staleness_pull={self.staleness_pull} strengthens the pull towards the base model, but kl_coef is 0; "
                f"set kl_coef or staleness_pull: 0"
            )
        if self.critic is not None and self.advantage != "gae":
            raise ValueError(
                f"learner.critic belongs to advantage: gae, but advantage is {self.advantage}; remove it, or set objective: ppo"
            )
        if self.advantage == "gae" and self.flat_groups == "left_out":
            raise ValueError(
                "learner.flat_groups: left_out needs an advantage that compares the samples of a group, but advantage is gae; "
                "set flat_groups: counted"
            )
        if self.reward_scaler is not None and self.reward_scaler.gradient_weight != "none" and self.kl_coef == 0:
            raise ValueError(
                f"learner.reward_scaler.gradient_weight={self.reward_scaler.gradient_weight} multiplies the pull towards the "
                f"base model, but kl_coef is 0; set kl_coef or gradient_weight: none"
            )
        if self.correction not in presets.MIS_BOUNDS and (self.mis_low, self.mis_high) != (None, None):
            raise ValueError(
                f"learner.mis_low and mis_high are bounds of masked importance sampling, but correction is {self.correction}; "
                f"set correction to mis_token, mis_sequence or mis_geometric, or remove them"
            )
        if self.mis_low is not None and self.mis_high is not None and self.mis_low >= self.mis_high:
            raise ValueError(f"learner: mis_low={self.mis_low} must be under mis_high={self.mis_high}")
        return self
