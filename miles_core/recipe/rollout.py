"""The rollout pools, and the batches made of what they sample."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_core.recipe.closed import Closed


class NgramSpec(Closed):
    """Speculation without a draft model: what followed the newest tokens when they were last seen in the same session."""

    tokens: int = Field(default=4, ge=1)
    """Tokens guessed per step; the model checks all of them in one pass and keeps those that it would have sampled."""
    match_min: int = Field(default=2, ge=1)
    """Guess only where at least so many of the newest tokens are found again ..."""
    match_max: int = Field(default=4, ge=1)
    """... and look for at most so many."""

    @model_validator(mode="after")
    def _matches_have_a_range(self) -> Self:
        if self.match_min > self.match_max:
            raise ValueError(f"ngram: match_min={self.match_min} is over match_max={self.match_max}; swap them")
        return self


class DraftSpec(Closed):
    """Speculation with a draft model. It is never trained: the more the policy learns, the less of its guesses is kept."""

    model: str = Field(pattern="^/")
    """A model folder that the nodes see, with the policy's tokenizer; its path from the root."""
    tokens: int = Field(default=3, ge=1)
    """As of `ngram`."""


class VllmSpec(Closed):
    """What vLLM is told, per engine."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache in GiB. null: what `memory_fraction` leaves of a GPU; on a CPU, what all slots need at `max_tokens`. With less,
    sessions wait for room and are read again."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Of a GPU's memory, for weights, activations and KV cache together; without meaning on a CPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one engine's model."""
    ngram: NgramSpec | None = None
    """Speculative decoding; `{}` turns it on with its defaults. It pays where answers repeat what was read."""
    draft: DraftSpec | None = None
    """Speculative decoding with a smaller model, in place of `ngram`."""

    @model_validator(mode="after")
    def _guesses_come_from_one(self) -> Self:
        if self.ngram is not None and self.draft is not None:
            raise ValueError("vllm: it has ngram and draft, and guesses come from one of them; remove the other")
        return self


class RolloutPool(Closed):
    """Replicas of one kind. Its partition and resources come from the cluster profile, by the pool's name."""

    name: str = Field(default="main", pattern=r"^[a-z][a-z0-9_]*$")
    """Name the cluster profile may refer to."""
    replicas: int = Field(default=1, ge=1)
    """Jobs of this pool."""
    slots: int = Field(default=64, ge=1)
    """Trajectories sampled at once by one replica; a finished one frees its slot at once."""
    engines: int = Field(default=1, ge=1)
    """Engines of one replica, which share its slots; on GPUs each has its own (docs/vllm.md)."""
    on_engine_death: Literal["hand_on", "fail"] = "hand_on"
    """What becomes of the sessions of an engine that dies while others of its replica live: another engine reads them anew and
    goes on, or they fail as infrastructure and are sampled again."""
    engine: Literal["torch", "vllm"] = "torch"
    """Sampling engine: plain PyTorch, or vLLM with its paged KV cache (`make vllm`; docs/vllm.md)."""
    vllm: VllmSpec | None = None
    """Settings of `engine: vllm`; null: the defaults."""

    @model_validator(mode="after")
    def _settings_have_their_engine(self) -> Self:
        if self.vllm is not None and self.engine != "vllm":
            raise ValueError(f"rollout.pools.{self.name}: it has a section vllm, but engine: {self.engine}; set engine: vllm")
        return self

    @model_validator(mode="after")
    def _engines_have_slots(self) -> Self:
        if self.slots < self.engines:
            raise ValueError(
                f"rollout.pools.{self.name}: slots={self.slots} are fewer than the engines={self.engines} that share them; "
                f"raise slots"
            )
        return self

    def slots_of(self, engine: int) -> int:
        """Slots of one engine of a replica."""
        return self.slots // self.engines + (engine < self.slots % self.engines)


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
