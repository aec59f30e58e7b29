"""Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha / rank) B A in linear layers of a base model that stays as it is.

A layer computes with the merged weight, made in at least float32 and rounded to the model's dtype, in the learner as in an
engine: so the two differ no more than they do without an adapter, also in bfloat16, where W x + B A x is another function.
The gradient of A and B is that of the unrounded sum; no gradient of a whole weight is ever made, and no merged weight kept.

A policy's tensors are A and B alone: `<layer>.lora_A.weight` [rank, in] and `<layer>.lora_B.weight` [out, rank], where <layer>
is the layer's name in the model (PEFT's names behind PEFT_PREFIX). B begins at 0, so version 0 is the base model; A is a
function of the recipe's seed and the layer's name. Failure: targets or a rank that the model does not have are a RecipeError
with the names there are; tensors that do not fit are a ValueError with the names at fault, before anything is changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from miles_core.errors import RecipeError
from miles_core.recipe import LoraSpec

PEFT_PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[out, in] weight + scale x b a, in the weight's dtype; [rank, in], [out, rank]."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(exact), b.to(exact), a.to(exact), alpha=scale).to(weight.dtype)


class _MergedLinear(torch.autograd.Function):
    """x [.., in] -> [.., out] by the merged weight, which backward() makes again instead of keeping it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return torch.nn.functional.linear(x, merge(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        x, weight, a, b = ctx.saved_tensors
        rows, flat = gradient.flatten(0, -2), x.flatten(0, -2)
        to_x = gradient @ merge(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        to_a = ctx.scale * (rows @ b).T @ flat
        to_b = ctx.scale * rows.T @ (flat @ a.T)
        return to_x, None, None, to_a, to_b, None


class LoraLinear(torch.nn.Module):
    """A linear layer with an adapter; its own weight is taken over and frozen."""

    def __init__(self, layer: torch.nn.Linear, name: str, spec: LoraSpec, seed: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.requires_grad_(False), layer.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scale, self.is_on = spec.scale, True
        out, size = layer.weight.shape
        draw = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
        # Kaiming's uniform distribution for a slope of sqrt(5), as PEFT and torch's own layers begin.
        start = (2 * torch.rand(spec.rank, size, generator=draw) - 1) / math.sqrt(size)
        self.lora_A = torch.nn.Parameter(start.to(self.weight))
        self.lora_B = torch.nn.Parameter(torch.zeros(out, spec.rank).to(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out]."""
        if not self.is_on:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        result: torch.Tensor = _MergedLinear.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        return result


# --- names -----------------------------------------------------------------------------------------------------------


def target_layers(model: Any, spec: LoraSpec) -> dict[str, torch.nn.Linear]:
    """The layers that get an adapter, by name. Raises RecipeError with the names and sizes there are."""
    head = model.get_output_embeddings()
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is torch.nn.Linear and layer is not head}
    kinds = dict.fromkeys(_kind(name) for name in layers)
    unknown = [target for target in spec.targets or () if target not in kinds]
    if unknown or not kinds:
        raise RecipeError(
            f"model.lora.targets: {', '.join(unknown) or 'null'} names no linear layer of this {model.config.model_type} "
            f"model; there are {', '.join(kinds) or 'none'} (null: all of them)"
        )
    chosen = {name: layer for name, layer in layers.items() if spec.targets is None or _kind(name) in spec.targets}
    smallest = min(chosen, key=lambda name: min(chosen[name].weight.shape))
    if spec.rank > min(chosen[smallest].weight.shape):
        out, size = chosen[smallest].weight.shape
        raise RecipeError(
            f"model.lora.rank={spec.rank} is more than {smallest} can have, which is {out} x {size}; at most "
            f"{min(out, size)}, or leave {_kind(smallest)} out of model.lora.targets"
        )
    return chosen


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def check_lora(folder: Path, spec: LoraSpec) -> None:
    """Raises RecipeError where the model of a folder cannot have such an adapter; reads its config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"model: {folder} has no config of a causal language model: {error}") from error
    target_layers(model, spec)


# --- learner ---------------------------------------------------------------------------------------------------------


def add_adapter(model: Any, spec: LoraSpec, seed: int) -> None:
    """Freezes a model and gives it an adapter, which is all that is trained of it then. Raises RecipeError."""
    layers = target_layers(model, spec)
    model.requires_grad_(False)
    for name, layer in layers.items():
        model.set_submodule(name, LoraLinear(layer, name, spec, seed))


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The parameters of a model's adapter under their published names; empty without one."""
    found: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            found |= {name + A: layer.lora_A, name + B: layer.lora_B}
    return found


@contextmanager
def base_only(model: Any) -> Iterator[None]:
    """The base model while inside: the adapter is switched off."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


# --- engines and export ----------------------------------------------------------------------------------------------


class Merger:
    """The base weights of an adapter's layers, copied to CPU memory, and what they become with a version's adapter.

    `model`: the base model in the dtype of the published weights.
    """

    def __init__(self, model: Any, spec: LoraSpec) -> None:
        self._spec = spec
        layers = target_layers(model, spec)
        self._base = {name: layer.weight.detach().to("cpu", copy=True) for name, layer in layers.items()}

    def merged(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, merged weight on `device`) of each layer, one at a time. Raises ValueError before the first one."""
        self._check(tensors)
        for name, weight in self._base.items():
            a, b = tensors[name + A].to(device), tensors[name + B].to(device)
            yield f"{name}.weight", merge(weight.to(device), a, b, self._spec.scale)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, weight in self._base.items():
            out, size = weight.shape
            expected[name + A] = ((self._spec.rank, size), weight.dtype)
            expected[name + B] = ((out, self._spec.rank), weight.dtype)
        faults = [f"unknown: {name}" for name in tensors if name not in expected]
        faults += [f"missing: {name}" for name in expected if name not in tensors]
        for name, (shape, dtype) in expected.items():
            given = tensors.get(name)
            if given is not None and (tuple(given.shape), given.dtype) != (shape, dtype):
                faults.append(f"{name}: {given.dtype} {tuple(given.shape)}, expected {dtype} {shape}")
        if faults:
            raise ValueError(f"adapter refused, nothing was changed ({len(faults)} faults): " + "; ".join(faults[:12]))


def merged_model(folder: Path, spec: LoraSpec, dtype: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All weights of the base model in `folder` with an adapter merged into them, tied ones once. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    unique = {id(tensor): (name, tensor.detach()) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    weights = dict(unique.values())
    return weights | dict(Merger(model, spec).merged(tensors))


def peft_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter's tensors under the names that PEFT and vLLM read."""
    return {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}


def peft_config(spec: LoraSpec, names: Mapping[str, Any], base_model: str) -> str:
    """The `adapter_config.json` of an adapter with tensors of these `names`."""
    kinds = sorted({_kind(name.removesuffix(A)) for name in names if name.endswith(A)})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "r": spec.rank,
        "lora_alpha": spec.alpha, "target_modules": kinds, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True,
    }  # fmt: skip
    return json.dumps(config, indent=2) + "\n"
