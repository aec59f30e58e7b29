"""What a model asks of a rollout engine, read from its config alone: refused at submit and again by the engine itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.errors import RecipeError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where families say how many experts a layer has."""


def check_replay(config: Mapping[str, Any], *, record_experts: bool) -> None:
    """Raises RecipeError for a mixture of experts whose routers nobody here knows: the learner could not replay its choices."""
    found = next((name for name in _EXPERTS if config.get(name)), None)
    if not record_experts or found is None:
        return
    from miles_core.routers import FAMILIES  # with torch, for which a command of a dense model need not wait

    family = config.get("model_type")
    if family not in FAMILIES:
        raise RecipeError(
            f"learner.routing_replay: the model has experts ({found}={config[found]}), and routers of the family {family} are "
            f"not known, only those of {', '.join(FAMILIES)}: nothing can be replayed; set learner.routing_replay: false"
        )
