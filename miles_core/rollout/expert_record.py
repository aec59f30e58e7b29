"""Which experts each position of each slot went to, kept as the engine computes them (sources R6).

A position is computed once: its keys and values stay in the slot, over turns and over exchanges of weights. So the ids kept
here are those of the pass that sampled with the position, which the learner replays. Layers x k bytes a position, twice that
with more than 256 experts.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from miles_core.rollout.slots import Ints
from miles_core.routers import Experts, Routers


class ExpertRecord:
    """[slots, positions, layers, k] expert ids. Hooks the routers for the life of the model."""

    def __init__(self, routers: Routers, *, slots: int, positions: int) -> None:
        self._routers = routers
        self._seen: list[torch.Tensor] = [torch.empty(0)] * len(routers.modules)
        self._ids = np.zeros((slots, positions, len(routers.modules), routers.top_k), dtype=routers.dtype)
        for layer, module in enumerate(routers.modules):
            module.register_forward_hook(functools.partial(self._see, layer))

    def _see(self, layer: int, router: Any, arguments: Any, output: Any) -> None:
        self._seen[layer] = self._routers.family.chosen(output)

    def keep(self, slots: Ints, positions: Ints) -> None:
        """Takes what the forward pass that just ended chose for its N tokens; slots and positions [N]."""
        self._ids[slots, positions] = torch.stack(self._seen, dim=1).cpu().numpy()

    def copy(self, source: int, target: int, positions: int) -> None:
        """Gives slot `target` the first positions of slot `source`, whose keys and values it takes as well."""
        self._ids[target, :positions] = self._ids[source, :positions]

    def of(self, slot: int, first: int, end: int) -> Experts:
        """A copy of [first, end) of a slot."""
        return self._ids[slot, first:end].copy()
