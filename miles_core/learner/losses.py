"""The policy loss of a microbatch, made of a preset's pieces: pure functions of tensors, any float dtype.

Three logprobs of a sampled token: `logp` under the weights now (carries the gradient), `logp_old` under the learner's
weights at the start of the step, `logp_rollout` as the engine reported it when sampling. With A the advantage:
- ratio r. token: exp(logp - logp_old), PPO (arXiv 1707.06347, eq. 6). sequence: the geometric mean of a row's token ratios,
  with each token's own gradient, GSPO (arXiv 2507.18071, eq. 7 and 14).
- surrogate. clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO eq. 7 with the two bounds of DAPO (arXiv 2503.14476,
  eq. 10). weight: sg(clip(r, ...)) A logp, CISPO (arXiv 2506.13585, eq. 4 and 5): a clipped token keeps its gradient.
- weight w of corrections.py, a constant factor of each token's loss.
- aggregation over the minibatch. token_mean: sum / its tokens (DAPO, eq. 8). sequence_mean: mean over episodes of the mean over
  an episode's tokens (GRPO, arXiv 2402.03300, eq. 3). constant: sum / (its episodes x loss_divisor_tokens) (Dr. GRPO, arXiv
  2503.20783). An episode is a row, or the rows that share its sample: siblings, whose part of their episode (`episode_parts`)
  is in their advantages and gradient weights, to which every loss is proportional.
With `kl_coef` each token adds kl_coef x g x k3 to its loss: k3 = (q - 1) - log q with q = exp(logp_base - logp) (GRPO, eq. 4),
g the sample's gradient weight (grading/scaler.py); neither ratio nor w touches it.
Divisors count every sampled token, also those that a correction or a value that is not finite takes out of the sum, so that
no token weighs more because another one was left out. Every result is finite for finite advantages of sane size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from miles_core.learner.corrections import LOG_RATIO_BOUND, bounded_exp, correction_weights
from miles_core.learner.segments import Segments
from miles_core.presets import FlatGroups
from miles_core.recipe import LearnerSpec


@dataclass(frozen=True)
class Tokens:
    """N sampled tokens of a microbatch's rows."""

    logp: torch.Tensor
    """[N] with gradient."""
    logp_old: torch.Tensor
    """[N]"""
    logp_rollout: torch.Tensor
    """[N]"""
    advantages: torch.Tensor
    """[N]"""
    mask: torch.Tensor
    """[N] bool: tokens that enter the loss."""
    rows: torch.Tensor
    """[N] int64: the token's row."""
    num_rows: int
    logp_base: torch.Tensor | None = None
    """[N] under the base model; read with kl_coef."""
    kl_weights: torch.Tensor | None = None
    """[N] g of the token's row; None: 1."""


@dataclass(frozen=True)
class Totals:
    """What the losses of a whole minibatch are divided by, so that its microbatches add up."""

    tokens: float
    """Sampled tokens."""
    episodes: float
    """Episodes with a sampled token."""


@dataclass(frozen=True)
class PolicyLoss:
    """What one call of policy_loss found."""

    loss: torch.Tensor
    """Scalar with gradient."""
    clipped: int
    """Tokens outside the clip range: with surrogate `clip` those that therefore give no gradient."""
    ratio_deviation: float
    """Largest |r - 1|."""
    nonfinite: int
    """Masked-in tokens left out because one of their values is not finite."""
    kl_base: float = 0.0
    """Sum of k3 to the base model over counted tokens; 0 without kl_coef."""


def minibatch_totals(rows: Sequence[tuple[str, str, int, float]], flat_groups: FlatGroups) -> Totals:
    """Of a minibatch's rows, each with its group, episode, sampled tokens and advantage; see LearnerSpec.flat_groups."""
    live = {group for group, _, _, advantage in rows if advantage != 0}
    counted = [(episode, size) for group, episode, size, _ in rows if size > 0 and (flat_groups == "counted" or group in live)]
    return Totals(tokens=sum(size for _, size in counted), episodes=len({episode for episode, _ in counted}))


def episode_parts(sizes: Sequence[tuple[str, int]]) -> npt.NDArray[np.float64] | None:
    """[rows] a row's share of its episode's sampled tokens, from each row's episode and number of them; None: all are 1."""
    whole = Counter[str]()
    for episode, size in sizes:
        whole[episode] += size
    if len(whole) == len(sizes):
        return None
    return np.array([size / max(1, whole[episode]) for episode, size in sizes])


def policy_loss(tokens: Tokens, totals: Totals, spec: LearnerSpec) -> PolicyLoss:
    """See module. The losses of a minibatch's microbatches add up to the loss of the minibatch."""
    wanted = tokens.mask.bool()
    values = [tokens.logp, tokens.logp_old, tokens.logp_rollout, tokens.advantages]
    values += [tokens.logp_base] if spec.kl_coef > 0 and tokens.logp_base is not None else []
    counted = wanted & torch.stack([torch.isfinite(value) for value in values]).all(dim=0)
    logp, logp_old, logp_rollout, advantages = (value.where(counted, value.new_zeros(())) for value in values[:4])
    logp_old = logp_old.detach()
    segments = Segments(tokens.rows, tokens.num_rows, counted)
    ratio = _ratio(logp, logp_old, segments, spec)
    gain, clipped = _surrogate(ratio, logp, advantages, spec)
    weight = correction_weights(logp_old - logp_rollout, segments, spec).detach()
    per_token = -weight * gain
    k3 = _k3_to_base(logp, tokens, counted) if spec.kl_coef > 0 else None
    if k3 is not None:
        per_token = per_token + spec.kl_coef * (k3 if tokens.kl_weights is None else tokens.kl_weights * k3)
    if spec.aggregation == "sequence_mean":
        lengths = Segments(tokens.rows, tokens.num_rows, wanted).total(torch.ones_like(per_token))
        per_token = per_token / lengths.clamp(min=1)
    loss = per_token.where(counted, per_token.new_zeros(())).sum() / _divisor(totals, spec)
    deviation = (ratio.detach() - 1).abs().where(counted, ratio.new_zeros(()))
    return PolicyLoss(
        loss=loss,
        clipped=int((clipped & counted).sum()),
        ratio_deviation=float(deviation.max()) if deviation.numel() else 0.0,
        nonfinite=int((wanted & ~counted).sum()),
        kl_base=0.0 if k3 is None else float(k3.detach().sum()),
    )


def _ratio(logp: torch.Tensor, logp_old: torch.Tensor, segments: Segments, spec: LearnerSpec) -> torch.Tensor:
    log_ratio = logp - logp_old
    if spec.ratio == "sequence":
        log_ratio = segments.mean(log_ratio.detach()) + logp - logp.detach()
    return bounded_exp(log_ratio)


def _surrogate(
    ratio: torch.Tensor, logp: torch.Tensor, advantages: torch.Tensor, spec: LearnerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] what is to be maximised, and [N] bool: outside the clip range."""
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.surrogate == "weight":
        return bounded.detach() * advantages * logp, bounded != ratio
    plain, clipped = ratio * advantages, bounded * advantages
    return torch.minimum(plain, clipped), clipped < plain


def _k3_to_base(logp: torch.Tensor, tokens: Tokens, counted: torch.Tensor) -> torch.Tensor:
    """[N], 0 where not counted."""
    if tokens.logp_base is None:
        raise ValueError("learner.kl_coef needs the logprobs of the base model, and there are none")
    log_ratio = (tokens.logp_base.where(counted, logp.new_zeros(())) - logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio


def _divisor(totals: Totals, spec: LearnerSpec) -> float:
    if spec.aggregation == "token_mean":
        return totals.tokens
    if spec.aggregation == "sequence_mean":
        return totals.episodes
    if spec.loss_divisor_tokens is None:
        raise ValueError(
            "learner.aggregation: constant needs learner.loss_divisor_tokens; a recipe fills it in from its environment"
        )
    return totals.episodes * spec.loss_divisor_tokens
