"""What a recipe chooses among: how messages are rendered, and who drives the episodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec
from miles_core.rollout.chat import FAMILIES, FamilyRenderer
from miles_core.rollout.sampler import Sampler
from miles_core.rollout.session import ChatRenderer

if TYPE_CHECKING:
    from miles_core.rollout.sessions.agents import AgentSampler


def make_renderer(folder: Path, family: str | None) -> ChatRenderer | FamilyRenderer:
    """The renderer of a model folder; None: by its own template. Raises RecipeError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"model: transformers makes no tokenizer of {folder} ({reason}); put the model's tokenizer.json and "
            f"tokenizer_config.json there"
        ) from error
    return ChatRenderer(tokenizer) if family is None else FamilyRenderer(tokenizer, FAMILIES[family])


def sampler_class(spec: EnvironmentSpec) -> type[Sampler] | type[AgentSampler]:
    """Who drives episodes: the environment's own answers, or the recipe's agent."""
    if spec.agent is None:
        return Sampler
    from miles_core.rollout.sessions.agents import AgentSampler

    return AgentSampler
