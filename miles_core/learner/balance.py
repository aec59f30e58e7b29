"""Experimental, off by default: a loss that keeps the experts evenly loaded, for routers that are trained (sources L9).

Per position and layer E x sum_e f_e p_e (Switch transformers, arXiv 2101.03961, eq. 4): p_e the router's probability of expert
e, with gradient, f_e the share of the minibatch's choices that went to e at the start of the step, without. 1 where either is
even, up to E where all falls on one expert. The mean over positions and layers is added to the policy's loss, times
    coef x beta,    beta = exp(-lambda x |grad J|)
so that it is loose while the policy moves and tight as it settles. |grad J| is the gradient norm of the update before, the
balance loss's own part in it included; before the first update it counts as infinite, so beta is 0. It is saved with the
checkpoint.

f is of the whole minibatch over all ranks, so the gradient does not depend on how rows lie in microbatches. With routing
replay f counts the recorded experts. Of one step: `begin`, `count` behind each forward pass at its start, `share`, then
`part` behind each forward pass of an update.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from miles_core.errors import MilesError
from miles_core.learner.batching import Microbatch
from miles_core.recipe import BalanceSpec
from miles_core.routers import Routers, find_routers


class RouterBalance:
    """Hooks a model's routers for its life, behind those of the replay."""

    def __init__(self, routers: Routers, spec: BalanceSpec) -> None:
        self._routers, self._spec = routers, spec
        self._logits: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, torch.Tensor] = {}
        self._counts = torch.zeros(0)
        self.grad_norm = math.inf
        """Of the newest update."""
        for layer, module in enumerate(routers.modules):
            module.register_forward_hook(functools.partial(self._note, layer))

    @property
    def beta(self) -> float:
        """Of the next update."""
        return math.exp(-self._spec.rate * self.grad_norm) if self._spec.rate > 0 else 1.0

    def begin(self, minibatches: int) -> None:
        """A step: nothing is counted yet."""
        self._counts = torch.zeros(minibatches, len(self._routers.modules), self._routers.num_experts, dtype=torch.float64)

    def count(self, minibatch: int, micro: Microbatch) -> None:
        """Takes in which experts the positions of the last forward pass went to; a filler's to none."""
        copies = _copies(micro)
        for layer, chosen in self._chosen.items():
            weights = copies[:, None].expand_as(chosen).flatten()
            self._counts[minibatch, layer] += torch.bincount(chosen.flatten(), weights, self._routers.num_experts).cpu()

    def share(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The counts of all ranks; `gather`: rows of this rank to those of all."""
        self._counts = gather(self._counts[None]).sum(dim=0)

    def part(self, minibatch: int, micro: Microbatch) -> torch.Tensor:
        """The last forward pass's part of the minibatch's balance loss, without a factor: the parts add up over all ranks."""
        counts = self._counts[minibatch]
        copies = _copies(micro)
        shares = (counts / counts.sum(dim=1, keepdim=True)).float().to(copies.device)
        total = torch.zeros((), device=copies.device)
        for layer, logits in sorted(self._logits.items()):
            evenness = (logits.float().softmax(dim=-1) * shares[layer]).sum(dim=-1)
            total = total + (evenness * copies.to(evenness)).sum()
        # A position makes k choices in each layer: this is the number of (position, layer) pairs.
        return self._routers.num_experts * total / (float(counts.sum()) / self._routers.top_k)

    @property
    def factor(self) -> float:
        """coef x beta of the next update."""
        return self._spec.coef * self.beta

    def _note(self, layer: int, router: Any, arguments: Any, output: Any) -> None:
        self._logits[layer], self._chosen[layer] = output[0], self._routers.family.chosen(output).detach()


def make_balance(model: Any, spec: BalanceSpec | None) -> RouterBalance | None:
    """None without a spec. Raises MilesError for a model without routers."""
    if spec is None:
        return None
    routers = find_routers(model)
    if routers is None:
        raise MilesError("learner.balance: the model has no routers that are known here; set balance: null")
    return RouterBalance(routers, spec)


def _copies(micro: Microbatch) -> torch.Tensor:
    """[B * T] rows that have the position, of a filler none: a position that rows share counts for each."""
    return micro.copies.flatten().double() * micro.mask.any()
