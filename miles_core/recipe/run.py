"""One run: all sections, and the rules between them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_core.presets import DAPO_REPLACEMENT, GROUP_ADVANTAGES
from miles_core.recipe.closed import Closed
from miles_core.recipe.environment import EnvironmentSpec, GraderSpec
from miles_core.recipe.learner import LearnerSpec
from miles_core.recipe.model import EvaluationSpec, ModelSpec, PolicySpec, RetentionSpec
from miles_core.recipe.rollout import OrchestratorSpec, RolloutSpec


class TrackingSpec(Closed):
    """Who is told of a run, besides its own metric shards, which are always written."""

    wandb: bool = False
    """Log to Weights & Biases: offline unless WANDB_MODE=online is set where the supervisor runs and there is a key."""
    project: str = Field(default="miles", min_length=1)
    """W&B project."""


class Recipe(Closed):
    """One run, resolved."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The recipe's name; run ids begin with it."""
    steps: int = Field(ge=1)
    """Training steps K; step k trains batch k and gives version k."""
    seed: int = 0
    """Seed of tasks and sampling."""
    model: ModelSpec
    """Base model."""
    environment: EnvironmentSpec
    """Tasks and episodes."""
    rollout: RolloutSpec = RolloutSpec()
    """Pools and sampling."""
    grader: GraderSpec = GraderSpec()
    """Grader tier."""
    orchestrator: OrchestratorSpec = OrchestratorSpec()
    """Batches, buffer, staleness."""
    learner: LearnerSpec = LearnerSpec()
    """Objective and optimizer."""
    policy: PolicySpec = PolicySpec()
    """Published versions."""
    retention: RetentionSpec = RetentionSpec()
    """What is deleted while the run goes on."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Greedy evaluation."""
    tracking: TrackingSpec = TrackingSpec()
    """W&B."""

    @property
    def rollout_dtype(self) -> Literal["float32", "bfloat16"]:
        """In which rollout and evaluation compute."""
        return self.rollout.dtype or self.model.dtype

    @model_validator(mode="after")
    def _fill_in_divisor(self) -> Self:
        if self.learner.aggregation == "constant" and self.learner.loss_divisor_tokens is None:
            most = min(self.environment.max_turns * self.environment.max_new_tokens, self.environment.max_tokens)
            object.__setattr__(self, "learner", self.learner.model_copy(update={"loss_divisor_tokens": most}))
        return self

    @model_validator(mode="after")
    def _fill_in_replacement(self) -> Self:
        if self.orchestrator.replace_flat is None:
            wanted = self.learner.objective == "dapo" and self.learner.advantage in GROUP_ADVANTAGES
            spec = self.orchestrator.model_copy(update={"replace_flat": DAPO_REPLACEMENT if wanted else 0})
            object.__setattr__(self, "orchestrator", spec)
        return self

    @model_validator(mode="after")
    def _cross_rules(self) -> Self:
        asynchronous = self.orchestrator.max_staleness > 0
        if self.learner.correction == "none" and asynchronous and not self.learner.allow_uncorrected:
            raise ValueError(
                "learner.correction: none needs orchestrator.max_staleness: 0; asynchronous data without correction is biased. "
                "Set correction (tis is usual) or max_staleness: 0, or say allow_uncorrected: true"
            )
        if self.orchestrator.samples < 2 and self.learner.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"orchestrator.samples={self.orchestrator.samples}: learner.advantage {self.learner.advantage} compares the "
                f"samples of a group and needs at least 2; raise samples, or set learner.objective: ppo or reinforce_pp"
            )
        if self.orchestrator.replace_flat and self.learner.advantage not in GROUP_ADVANTAGES:
            raise ValueError(
                f"orchestrator.replace_flat={self.orchestrator.replace_flat} drops groups of equal rewards, but with "
                f"learner.advantage {self.learner.advantage} they have signal; set it to 0"
            )
        if self.grader.ranking is not None and self.learner.advantage not in GROUP_ADVANTAGES:
            raise ValueError(
                f"grader.ranking={self.grader.ranking} moves advantage within a group, but learner.advantage "
                f"{self.learner.advantage} is of no group; set ranking: null or an advantage of {', '.join(GROUP_ADVANTAGES)}"
            )
        if self.grader.weights is not None and self.learner.advantage == "gae":
            raise ValueError(
                "grader.weights multiplies the advantage of a sample, but with learner.advantage gae each token has its own; "
                "set weights: null or another objective"
            )
        if self.orchestrator.prompts < self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} is more than orchestrator.prompts="
                f"{self.orchestrator.prompts}: every optimizer update needs at least one group"
            )
        if self.model.bootstrap is not None and self.environment.prompt is not None:
            raise ValueError(
                f"model.bootstrap={self.model.bootstrap!r} makes a model that knows bare questions only; remove "
                f"environment.prompt, or give model.path or model.package"
            )
        grades = self.orchestrator.prompts * self.orchestrator.samples
        if self.learner.reward_scaler is not None and self.learner.reward_scaler.short < 2 * grades:
            raise ValueError(
                f"learner.reward_scaler.short={self.learner.reward_scaler.short} is under two batches of {grades} grades: mean "
                f"and spread would follow every batch; set it to at least {2 * grades}"
            )
        most = self.orchestrator.max_staleness + 1
        if self.orchestrator.capacity_batches > most:
            raise ValueError(
                f"orchestrator.capacity_batches={self.orchestrator.capacity_batches} is more than max_staleness + 1 = {most}: "
                f"what is buffered beyond that would be stale before it is trained; lower it or raise max_staleness"
            )
        return self
