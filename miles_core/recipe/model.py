"""The model and how its versions are published, evaluated and kept."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from miles_core.recipe.closed import Closed


class LoraSpec(Closed):
    """A low-rank adapter, which is trained and published instead of the whole model (miles_core/adapters.py)."""

    rank: int = Field(default=16, ge=1)
    """Columns of B and rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter counts alpha / rank times."""
    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Linear layers that get one, by the last part of their names, for example [q_proj, v_proj]; null: all but the head."""

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank


class ModelSpec(Closed):
    """The base model: a folder or hub id, a warm-up that makes one from scratch, or an installed package that holds one.

    Exactly one of `path`, `bootstrap` and `package` is given.
    """

    path: str | None = None
    """Folder in Hugging Face layout, or a hub id."""
    bootstrap: str | None = None
    """Name of a warm-up in miles_core/bootstrap that makes the base model; cached by content."""
    package: str | None = None
    """Name of an installed Python distribution with one GGUF file in it, which is read into bfloat16; cached by content."""
    chat: Literal["qwen3", "chatml", "llama3", "plain"] | None = None
    """How messages become tokens, by the model's family (miles_core/rollout/chat.py); an agent with tools needs one, for it
    says how calls are written. null: by the template in the model's folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the learner's forward pass and of the published weights."""
    lora: LoraSpec | None = None
    """Trains an adapter and leaves the base model as it is; `{}` turns it on with its defaults. null: all weights are trained.
    An adapter wants a learning rate about ten times higher (3e-4)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.path, self.bootstrap, self.package)) != 1:
            raise ValueError(
                "model: give exactly one of `path` (a folder or hub id), `bootstrap` (a warm-up's name) and `package` (an "
                "installed Python package with a model in it)"
            )
        return self


class PolicySpec(Closed):
    """How versions are published: full (an anchor) or as the change from the version before (a delta)."""

    deltas: bool = True
    """False: every version is a full anchor."""
    anchor_every: int = Field(default=10, ge=1)
    """A full anchor every so many versions, so that a new reader never applies more than the deltas in between ..."""
    anchor_ratio: float = Field(default=1.0, gt=0)
    """... and as soon as the deltas since the last anchor would take more than this many times its size."""


class RetentionSpec(Closed):
    """What the collector deletes while the run goes on. Every deletion is recorded, and `miles verify` accepts no other."""

    versions: bool = True
    """Delete policy versions that nobody can need: those behind the two newest full ones, once they are evaluated."""
    checkpoints: int = Field(default=2, ge=2)
    """This many of the newest checkpoints stay; older ones are deleted."""
    trajectories: Literal["keep", "after_two_checkpoints"] = "keep"
    """Shards are what `miles verify` proves trained rows with, and what the report shows: `keep`. Otherwise those that no
    recovery from a kept checkpoint needs are deleted."""


class EvaluationSpec(Closed):
    """Greedy evaluation of versions on held-out tasks: of the first and the last one, and of some between them."""

    problems: int = Field(default=256, ge=1)
    """Held-out tasks, from a seed range that training never draws."""
    every: int | None = Field(default=None, ge=1)
    """Also every so many steps. Training never waits: an evaluator that falls behind takes the newest of these that is
    there and passes over the older ones, as over one that breaks. null: only the first and the last."""
