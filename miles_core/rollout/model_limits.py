"""What a model asks of a rollout engine, read from its config alone: refused at submit and again by the engine itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.errors import RecipeError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where families say how many experts a layer has."""


def check_no_record(config: Mapping[str, Any], *, record_experts: bool) -> None:
    """Raises RecipeError where vLLM would have to say which experts it chose: it cannot (on a CPU it never could)."""
    found = next((name for name in _EXPERTS if config.get(name)), None)
    if record_experts and found is not None:
        raise RecipeError(
            f"learner.routing_replay: the model has experts ({found}={config[found]}), and engine vllm does not record which "
            f"of them it chose, so the learner has nothing to replay; set learner.routing_replay: false, or engine: torch"
        )
