"""What a model asks of a rollout engine, read from its config alone: refused at submit, or by vLLM's engine as it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.errors import RecipeError
from miles_core.recipe import VllmSpec

CPU_EXPERT_WIDTH = 32
"""vLLM's kernel for CPUs pads experts of other widths, and its reload does not."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Where families say how many experts a layer has."""


def experts_of(config: Mapping[str, Any]) -> str | None:
    """How a mixture says how many experts a layer has, `name=count`; None for a dense model."""
    return next((f"{name}={count}" for name in _EXPERTS if isinstance(count := config.get(name), int) and count > 1), None)


def check_mixture(config: Mapping[str, Any], *, replay: bool, freeze: bool) -> None:
    """Raises RecipeError for a mixture whose routers nobody here knows: its choices can be neither replayed nor frozen."""
    asked = [f"learner.{name}" for name, is_on in (("routing_replay", replay), ("freeze_router", freeze)) if is_on]
    found = experts_of(config)
    if not asked or found is None:
        return
    from miles_core.routers import FAMILIES  # with torch, for which a command of a dense model need not wait

    family = config.get("model_type")
    if family not in FAMILIES:
        raise RecipeError(
            f"{' and '.join(asked)}: the model has experts ({found}), and routers of the family {family} are not known here, "
            f"only those of {', '.join(FAMILIES)}; set {' and '.join(f'{name}: false' for name in asked)}"
        )


def check_model(config: Any, max_tokens: int, *, record_experts: bool) -> None:
    """Raises RecipeError for what vLLM would not run, in the words of the recipe."""
    check_mixture(config.to_dict(), replay=record_experts, freeze=False)
    if config.model_type == "olmoe" and config.tie_word_embeddings:
        raise RecipeError(
            "model: vLLM 0.32 does not tie the output head of the family olmoe to the embedding, as this model does, and would "
            "compute something else; set engine: torch"
        )
    if max_tokens > config.max_position_embeddings:
        raise RecipeError(
            f"environment.max_tokens={max_tokens} is more than the model's max_position_embeddings="
            f"{config.max_position_embeddings}; lower it"
        )


def check_kernels(config: Any, spec: VllmSpec) -> None:
    """Raises RecipeError for what vLLM's kernels for CPUs do not compute, or compute wrongly."""
    if spec.ngram is not None or spec.draft is not None:
        name = "ngram" if spec.draft is None else "draft"
        raise RecipeError(
            f"rollout.pools.vllm.{name}: vLLM 0.32 on a CPU checks guessed tokens at a wrong temperature (greedy is right), so "
            f"samples and their logprobs would be wrong; remove it"
        )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size(config) not in sizes:
        raise RecipeError(
            f"model: vLLM on a CPU computes attention heads of {', '.join(map(str, sizes))}, this model has head_dim="
            f"{head_size(config)}; set engine: torch"
        )
    if experts_of(config.to_dict()) is None:
        return
    name = "moe_intermediate_size" if hasattr(config, "moe_intermediate_size") else "intermediate_size"
    width = getattr(config, name)
    if width % (CPU_EXPERT_WIDTH * spec.tensor_parallel):
        raise RecipeError(
            f"model: vLLM on a CPU exchanges experts of a width that {CPU_EXPERT_WIDTH} x tensor_parallel="
            f"{spec.tensor_parallel} divides, this model has {name}={width}; set engine: torch"
        )


def head_size(config: Any) -> int:
    """Dimensions of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
