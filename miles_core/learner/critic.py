"""PPO's critic: a value of every state from which a token was sampled, and advantages made of rewards and values.

The critic is a copy of the base model with a linear head in place of its language-model head, and an optimizer of its own:
a second DeepSpeed engine with the learner's ZeRO stage, saved and loaded with the policy. The head begins at 0, so the first
step's advantages are those without a critic.

Generalised advantage estimation (arXiv 1506.02438, eq. 11, 16) runs over a row's sampled tokens alone: what stands between
two of them (a tool's answer) is no step of the policy, so a gap of any length costs one gamma x lambda. The row's reward is
on its last sampled token and nothing follows it: an episode that was cut off is worth 0 from there on, too.
    delta_t = r_t + gamma V_t+1 - V_t        A_t = delta_t + gamma lambda A_t+1        R_t = A_t + V_t
Advantages are then whitened over the batch's sampled tokens (variance with one token less, 1e-8 in the root); where all
are equal they are exactly 0. Loss of the critic (arXiv 1707.06347 as usually built): the mean over the minibatch's tokens
of 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-value_clip) - R)^2).

Values are of the weights at the start of the step. They are learned from rewards of the policies that sampled, which may be
up to `max_staleness` old; the correction applies to the policy's loss, as with every other objective.
Invariants: the same state and rows give the same bytes; every rank calls every method; a reward, value or return that is not
finite is left out and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles_core.learner.batching import Microbatch
from miles_core.learner.head import hidden_states
from miles_core.recipe import CriticSpec

CHECKPOINT_TAG = "critic"
VARIANCE_EPSILON = 1e-8
Array = npt.NDArray[np.float64]
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Rows of this rank to the rows of all, in rank order."""


class ValueModel(torch.nn.Module):
    """Values of the positions that predict a sampled token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.base_model
        self.head = ValueHead(model.config.hidden_size)

    def forward(self, batch: Microbatch) -> torch.Tensor:
        """[N] float32."""
        values: torch.Tensor = self.head(hidden_states(self.model, batch))[batch.slots]
        return values


class ValueHead(torch.nn.Module):
    """A linear map to one number that begins as 0; computes in float32 whatever its dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, size] to [N] float32."""
        return hidden.float() @ self.weight.float() + self.bias.float()


@dataclass(frozen=True)
class Targets:
    """What the critic learns of one microbatch's N tokens."""

    values: torch.Tensor
    """[N] float32 at the start of the step."""
    returns: torch.Tensor
    """[N] float32; not finite where a token is left out."""


class Critic:
    """The critic's part of a step, on this rank."""

    def __init__(self, engine: Any, spec: CriticSpec, gather: Gather, ranks: int) -> None:
        """`engine`: DeepSpeed's, around a ValueModel."""
        self.engine, self._spec, self._gather, self._ranks = engine, spec, gather, ranks

    def judge(
        self, batches: Sequence[Sequence[Microbatch]]
    ) -> tuple[list[list[Microbatch]], list[list[Targets]], dict[str, float]]:
        """By minibatch and microbatch: the same with advantages in the rewards' place, and the critic's targets.

        Taken are microbatches whose `advantages` are the rewards of their tokens' rows.
        """
        found: list[tuple[Microbatch, torch.Tensor, Array, Array]] = []
        for micro in (micro for batch in batches for micro in batch):
            with torch.no_grad():
                values = self.engine(micro)
            advantages, returns = estimate(micro, values.double().cpu().numpy(), self._spec)
            found.append((micro, values, advantages, returns))
        seen = [
            np.stack([advantages, returns, values.double().cpu().numpy()], axis=1)[micro.mask.cpu().numpy()]
            for micro, values, advantages, returns in found
        ]
        everywhere = self._gather(torch.from_numpy(np.concatenate([np.zeros((0, 3)), *seen]))).numpy()
        mean, scale = whitening(everywhere[:, 0])
        micros = [
            replace(micro, advantages=torch.from_numpy((advantages - mean) * scale).to(values))
            for micro, values, advantages, _ in found
        ]
        targets = [Targets(values, torch.from_numpy(returns).to(values)) for _, values, _, returns in found]
        return _by_minibatch(micros, batches), _by_minibatch(targets, batches), _figures(everywhere)

    def train(
        self,
        batches: Sequence[Sequence[Microbatch]],
        targets: Sequence[Sequence[Targets]],
        tokens: Sequence[float],
        factor: float,
    ) -> dict[str, float]:
        """One optimizer update a minibatch that has rows; metrics are means over them, zeros if there was none.

        `tokens`: sampled tokens of each minibatch over all ranks, divided by the ranks. `factor`: of the learning rate.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self._spec.lr * factor
        parts = zip(batches, targets, tokens, strict=True)
        updates = [self._update(batch, target, divisor) for batch, target, divisor in parts if batch]
        columns = np.array(updates or [(0.0, 0.0, 0.0)])
        names = ("critic_loss", "critic_clip_frac", "critic_grad_norm")
        return dict(zip(names, columns.mean(axis=0).tolist(), strict=True))

    def _update(self, batch: Sequence[Microbatch], targets: Sequence[Targets], tokens: float) -> tuple[float, float, float]:
        row = torch.zeros(3, dtype=torch.float64)
        for micro, target in zip(batch, targets, strict=True):
            loss, clipped, counted = value_loss(self.engine(micro), target, micro.mask, self._spec.value_clip)
            self.engine.backward(loss / tokens)
            row += torch.tensor([float(loss.detach()) / tokens / self._ranks, clipped, counted], dtype=torch.float64)
        self.engine.step()
        total, clipped, counted = self._gather(row[None]).sum(dim=0).tolist()
        return total, clipped / max(1.0, counted), float(self.engine.get_global_grad_norm())


def estimate(micro: Microbatch, values: Array, spec: CriticSpec) -> tuple[Array, Array]:
    """Advantages and returns [N] of a microbatch whose `advantages` are rewards; see module."""
    rows, rewards = micro.rows.cpu().numpy(), micro.advantages.double().cpu().numpy()
    order = np.argsort(rows, kind="stable")
    advantages = np.zeros_like(values)
    for tokens in np.split(order, np.flatnonzero(np.diff(rows[order])) + 1):
        advantages[tokens] = gae(values[tokens], float(rewards[tokens[-1]]), spec.gamma, spec.gae_lambda)
    with np.errstate(invalid="ignore"):  # Infinite values of both signs: left out later.
        return advantages, advantages + values


def gae(values: Array, reward: float, gamma: float, gae_lambda: float) -> Array:
    """Advantages of one row's sampled tokens, in their order: values [n], the reward behind the last one."""
    advantages, following, carry = [], 0.0, 0.0
    gained = reward
    for value in reversed(values.tolist()):
        carry = gained + gamma * following - value + gamma * gae_lambda * carry
        advantages.append(carry)
        following, gained = value, 0.0
    return np.array(advantages[::-1])


def whitening(advantages: Array) -> tuple[float, float]:
    """(mean, 1 / standard deviation) over the batch's finite advantages; the factor is 0 where all are equal."""
    finite = advantages[np.isfinite(advantages)]
    if finite.size < 2 or finite.max() == finite.min():
        return 0.0, 0.0
    return float(finite.mean()), float(1 / np.sqrt(finite.var(ddof=1) + VARIANCE_EPSILON))


def value_loss(values: torch.Tensor, targets: Targets, mask: torch.Tensor, clip: float) -> tuple[torch.Tensor, int, int]:
    """The sum of the tokens' losses, how many the clip decided, and how many were counted: see module."""
    counted = mask & torch.isfinite(targets.returns) & torch.isfinite(targets.values) & torch.isfinite(values)
    zero = values.new_zeros(())
    old, returns, values = (each.where(counted, zero) for each in (targets.values, targets.returns, values))
    plain = (values - returns) ** 2
    clipped = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    decided = (clipped > plain) & ((values - old).abs() > clip)
    return 0.5 * torch.maximum(plain, clipped).sum(), int(decided.sum()), int(counted.sum())


def _figures(tokens: Array) -> dict[str, float]:
    """From rows of advantage, return and value of all ranks' tokens. Explained variance: 1 - Var(R - V) / Var(R)."""
    finite = tokens[np.isfinite(tokens).all(axis=1)]
    if not len(finite):
        return {"value_mean": 0.0, "return_mean": 0.0, "value_explained": 0.0}
    spread = float(finite[:, 1].var())
    explained = 1 - float((finite[:, 1] - finite[:, 2]).var()) / spread if spread > 0 else 0.0
    return {"value_mean": float(finite[:, 2].mean()), "return_mean": float(finite[:, 1].mean()), "value_explained": explained}


def _by_minibatch(items: list[Any], batches: Sequence[Sequence[Microbatch]]) -> list[list[Any]]:
    """The flat list cut as `batches` are."""
    ends = np.cumsum([len(batch) for batch in batches])
    return [items[end - len(batch) : end] for end, batch in zip(ends, batches, strict=True)]
