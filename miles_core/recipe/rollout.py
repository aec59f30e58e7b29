"""The rollout pools, and the batches made of what they sample."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_core.recipe.closed import Closed


class RolloutPool(Closed):
    """Replicas of one kind. Its partition and resources come from the cluster profile, by the pool's name."""

    name: str = Field(default="main", pattern=r"^[a-z][a-z0-9_]*$")
    """Name the cluster profile may refer to."""
    replicas: int = Field(default=1, ge=1)
    """Jobs of this pool."""
    slots: int = Field(default=64, ge=1)
    """Trajectories sampled at once by one replica; a finished one frees its slot at once."""
    engine: Literal["torch"] = "torch"
    """Sampling engine."""


class RolloutSpec(Closed):
    """The rollout pools and how they sample."""

    pools: tuple[RolloutPool, ...] = (RolloutPool(),)
    """One or more pools."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which rollout and evaluation compute: the engine casts the published weights. null: `model.dtype`."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training samples; evaluation is greedy."""
    shard_rows: int = Field(default=32, ge=1)
    """A shard is sealed at this many rows ..."""
    shard_age_s: float = Field(default=0.5, gt=0)
    """... or when its oldest row is this old."""
    sample_attempts: int = Field(default=3, ge=1)
    """A sample whose owner died is given out again at most this often in all; then its group is dropped."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise ValueError("rollout.pools: at least one pool is needed")
        if len(set(names)) != len(names):
            raise ValueError(f"rollout.pools: names must differ, got {names}")
        return self


class OrchestratorSpec(Closed):
    """Batch shape, buffer and staleness."""

    prompts: int = Field(default=16, ge=1)
    """Groups (prompts) per batch."""
    samples: int = Field(default=8, ge=1)
    """Samples per group; an advantage that compares them needs at least two."""
    capacity_batches: float = Field(default=3.0, ge=1.0)
    """Work is issued only while buffered + in-flight groups are under capacity_batches x prompts."""
    max_staleness: int = Field(default=4, ge=0)
    """Bound of (k-1) - oldest version that sampled a trained token (I7). 0 = synchronous."""
    replace_flat: int | None = Field(default=None, ge=0)
    """Dynamic sampling (DAPO): a group whose samples all got one reward is dropped as `no_spread` and another one is sampled,
    for each batch at most this many times `prompts`; what is flat beyond that is trained. 0: none is. Default: 3 with
    `learner.objective: dapo`, else 0."""
    version_wait_s: float = Field(default=30.0, gt=0)
    """A trajectory that names a version not yet known waits this long, then it is rejected."""
