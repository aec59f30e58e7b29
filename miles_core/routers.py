"""The routers of a mixture-of-experts model: which modules they are, what they chose, and how to let them choose otherwise.

An engine reads their choices and the learner replays them, both by forward hooks on the library's own modules, so that the
forward pass stays the library's (and ZeRO may part the weights: a hook touches outputs alone). Another family is one more
adapter in FAMILIES. A dense model, or a mixture of a family without an adapter, has no routers here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Experts = npt.NDArray[np.uint8 | np.uint16]
"""[positions, layers, k] expert ids: layers are those with experts, by depth; k in the order of the router's answer."""


class Family(Protocol):
    """One model family's routers. N = tokens of a forward pass, k = experts a token."""

    def find(self, model: Any) -> tuple[torch.nn.Module, ...]:
        """The router modules, by depth."""
        ...

    def chosen(self, output: Any) -> torch.Tensor:
        """A router's answer -> [N, k] int64 expert ids."""
        ...

    def choose(self, router: Any, output: Any, ids: torch.Tensor) -> Any:
        """A router's answer, with the experts `ids` [N, k] int64 in place of its own, weighed as the router weighs its own."""
        ...


class Softmax:
    """Softmax over all experts in float32, the k largest, scaled to sum 1 where the family or its config says so."""

    def __init__(self, module: str, name: str) -> None:
        """The router's class, by the module it is in."""
        self._module, self._name = module, name

    def find(self, model: Any) -> tuple[torch.nn.Module, ...]:
        """See Family."""
        kind = getattr(importlib.import_module(f"transformers.models.{self._module}"), self._name)
        return tuple(module for module in model.modules() if isinstance(module, kind))

    def chosen(self, output: Any) -> torch.Tensor:
        """See Family."""
        ids: torch.Tensor = output[2]
        return ids

    def choose(self, router: Any, output: Any, ids: torch.Tensor) -> Any:
        """See Family. With the router's own ids the answer is the router's own, bit for bit."""
        logits, own = output[:2]
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(own.dtype), ids


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Softmax("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeTopKRouter"),
    "olmoe": Softmax("olmoe.modeling_olmoe", "OlmoeTopKRouter"),
    "mixtral": Softmax("mixtral.modeling_mixtral", "MixtralTopKRouter"),
}
"""Adapters by the config's model_type. Mixtral has no switch for the scaling: it always scales."""


@dataclass(frozen=True)
class Routers:
    """The routers of one model."""

    family: Family
    modules: tuple[torch.nn.Module, ...]
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """Of recorded ids: the smallest that holds them."""
        return np.uint8 if self.num_experts <= 256 else np.uint16


def find_routers(model: Any) -> Routers | None:
    """None for a model without experts, or of a family that has no adapter."""
    family = FAMILIES.get(model.config.model_type)
    modules = () if family is None else family.find(model)
    if family is None or not modules:
        return None
    return Routers(family, modules, model.config.num_experts, model.config.num_experts_per_tok)
