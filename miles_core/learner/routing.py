"""Routing replay (sources R6, L3): the learner's routers take the experts that rollout recorded, and what that changes.

A low-precision sampler and the learner disagree at routers whose k-th and next experts are nearly as likely; a token then
runs through other weights, and its logprob jumps. With the recorded experts both compute the same function of the weights,
and gradients flow through the router's probabilities of those experts. Positions without a record take the router's own.

Invariants: with the router's own choice as the record the forward pass is the same bit for bit; nothing here adds a
parameter or touches one; what `begin` was given holds until the next forward pass, so also where a backward pass computes
activations again. Failure: a record that is not of this model is refused with the name of its trajectory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from miles_core.errors import MilesError
from miles_core.learner.packing import context_length
from miles_core.routers import FAMILIES, Routers, find_routers
from miles_core.trajectories.schema import Trajectory

COLD = 0.1
"""An expert with less than this share of an even load is cold."""


def freeze_routers(model: Any) -> None:
    """Their weights stay those of the base model. Nothing happens to a dense model; a mixture whose routers are not known is
    refused (MilesError): they would be trained in silence."""
    routers = find_routers(model)
    if routers is not None:
        for module in routers.modules:
            module.requires_grad_(False)
    elif getattr(model.config, "num_experts_per_tok", None) is not None:
        raise MilesError(
            f"learner.freeze_router: the routers of the family {model.config.model_type} are not known here (there are "
            f"{', '.join(FAMILIES)}); set freeze_router: false to train them, or add an adapter in miles_core/routers.py"
        )


class RoutingReplay:
    """Hooks a model's routers for its life; every forward pass needs a `begin`."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._recorded: torch.Tensor | None = None
        self._changed: torch.Tensor | int = 0
        self._counted: torch.Tensor | int = 0
        for layer, module in enumerate(routers.modules):
            module.register_forward_hook(functools.partial(self._route, layer))

    def begin(self, recorded: torch.Tensor | None) -> None:
        """What the next forward pass replays: [positions, layers, k] ids, -1 for the router's own choice; None: all its own."""
        self._recorded, self._changed, self._counted = recorded, 0, 0

    def _route(self, layer: int, router: Any, arguments: Any, output: Any) -> Any:
        if self._recorded is None:
            return output
        family, recorded = self.routers.family, self._recorded[:, layer].long()
        own, known = family.chosen(output), recorded[:, 0] >= 0
        other = (own.sort(dim=-1).values != recorded.sort(dim=-1).values).any(dim=-1)
        self._changed = self._changed + (other & known).sum()
        self._counted = self._counted + known.sum()
        return family.choose(router, output, torch.where(known[:, None], recorded, own))

    @property
    def changed(self) -> tuple[int, int]:
        """Of the last forward pass: (position, layer) pairs whose own choice was another set of experts; pairs replayed."""
        return int(self._changed), int(self._counted)

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises MilesError for a record that this model cannot have made."""
        layers, top_k, num_experts = len(self.routers.modules), self.routers.top_k, self.routers.num_experts
        for trajectory in trajectories:
            experts = trajectory.experts
            if experts is None or (experts.shape[1:] == (layers, top_k) and experts.max(initial=0) < num_experts):
                continue
            raise MilesError(
                f"trajectory {trajectory.trajectory_id} was sampled by another model: its record names experts up to "
                f"{experts.max(initial=0)} in {experts.shape[1]} layers x {experts.shape[2]}, this model has experts "
                f"0-{num_experts - 1} in {layers} layers x {top_k}"
            )


def changed_metric(counts: torch.Tensor) -> dict[str, float]:
    """From rows of `changed`: the share of (position, layer) pairs whose experts replay changed, as a set."""
    changed, replayed = counts.sum(dim=0).tolist()
    return {"routing_changed_frac": changed / replayed if replayed else 0.0}


def without_replay(mismatch: dict[str, float]) -> dict[str, float]:
    """Of the mismatch measured with the learner's own choices, what replay is there to remove: the tail of the gaps."""
    return {f"{name}_no_replay": mismatch[name] for name in ("k3", "logprob_gap_max")}


def load_metrics(trajectories: Sequence[Trajectory], routers: Routers) -> dict[str, float]:
    """How evenly the recorded positions of a batch, up to each row's last sampled token, fall on the experts.

    `routing_load_cv`: standard deviation of the experts' loads over their mean, mean over layers. `routing_load_peak`: load
    of the busiest expert of any layer over the mean. `routing_cold_frac`: share of (layer, expert) under COLD of the mean.
    `routing_missing_tokens`: positions without a record, where the router's own choice is taken. All 0 without any record.
    """
    layers, num_experts = len(routers.modules), routers.num_experts
    counts = np.zeros(layers * num_experts)
    missing = 0
    for trajectory in trajectories:
        length = context_length(trajectory)
        if trajectory.experts is None:
            missing += length
        else:
            ids = trajectory.experts[:length].astype(np.int64) + np.arange(layers)[:, None] * num_experts
            counts += np.bincount(ids.ravel(), minlength=counts.size)
    load = counts.reshape(layers, num_experts) / max(1.0, counts.sum() / counts.size)
    return {
        "routing_load_cv": float(load.std(axis=1).mean()),
        "routing_load_peak": float(load.max()),
        "routing_cold_frac": float((load < COLD).mean()) if counts.any() else 0.0,
        "routing_missing_tokens": float(missing),
    }
