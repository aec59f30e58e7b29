"""The GRPO objective with clip-higher and truncated importance sampling: pure functions of tensors, any float dtype.

Sources of the formulas:
- group advantage: GRPO (DeepSeekMath, eq. 3 with outcome supervision), std with n-1, plus 1e-4 so that grading noise in a
  group that all but agrees is not blown up to unit variance;
- clipped surrogate: PPO, eq. 7; two-sided bounds and the token mean: DAPO (clip-higher, token-level loss);
- w = min(exp(logp_old - logp_rollout), C): truncated importance sampling, a constant factor of each token's loss;
- k3 = (r - 1) - log r: Schulman's low-variance estimator, here of KL(rollout || learner at the start of the step).

Three logprobs of a sampled token: `logp` under the weights now (carries the gradient), `logp_old` under the learner's
weights at the start of the step, `logp_rollout` as the engine reported it when sampling. Log ratios are held within
+-LOG_RATIO_BOUND and tokens with a value that is not finite are left out and counted, so every result is finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STD_EPSILON = 1e-4
LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: finite in every dtype used here and far outside any clip range."""


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G, n] of G groups to advantages [G, n]: (R - mean) / (std + 1e-4), and 0 where all of a group are equal.

    Raises ValueError for n < 2 or a reward that is not finite.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, samples] with at least 2 samples, got shape {tuple(rewards.shape)}")
    if not torch.isfinite(rewards).all():
        bad = sorted({int(group) for group in torch.nonzero(~torch.isfinite(rewards))[:, 0]})
        raise ValueError(f"rewards of groups {bad[:8]} are not finite; a sample without a grade must not reach the learner")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    scaled = centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    return torch.where(spread, scaled, torch.zeros_like(scaled))


@dataclass(frozen=True)
class PolicyLoss:
    """What one call of ppo_clip_loss found."""

    loss: torch.Tensor
    """Scalar with gradient: the sum over counted tokens, divided by `num_tokens`."""
    clipped: int
    """Tokens whose clipped branch was the smaller one: they give no gradient."""
    ratio_deviation: float
    """Largest |exp(logp - logp_old) - 1|."""
    nonfinite: int
    """Masked-in tokens left out because one of their values is not finite."""


def ppo_clip_loss(
    logp: torch.Tensor,
    logp_old: torch.Tensor,
    logp_rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float | None,
    num_tokens: float,
) -> PolicyLoss:
    """-sum(w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)) / num_tokens over tokens with mask; all tensors of one shape.

    `num_tokens` is the token count of the whole optimizer update, so that the losses of its microbatches add up to the
    token mean. `tis_cap=None` means w = 1.
    """
    values = (logp, logp_old, logp_rollout, advantages)
    wanted = mask.bool()
    counted = wanted & torch.stack([torch.isfinite(value) for value in values]).all(dim=0)
    logp, logp_old, logp_rollout, advantages = (value.where(counted, value.new_zeros(())) for value in values)
    ratio = bounded_exp(logp - logp_old.detach())
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    weight = importance_weights(logp_old, logp_rollout, tis_cap).detach()
    per_token = -weight * torch.minimum(plain, clipped)
    loss = per_token.where(counted, per_token.new_zeros(())).sum() / num_tokens
    deviation = (ratio.detach() - 1).abs().where(counted, ratio.new_zeros(()))
    return PolicyLoss(
        loss=loss,
        clipped=int(((clipped < plain) & counted).sum()),
        ratio_deviation=float(deviation.max()) if deviation.numel() else 0.0,
        nonfinite=int((wanted & ~counted).sum()),
    )


def importance_weights(logp_old: torch.Tensor, logp_rollout: torch.Tensor, cap: float | None) -> torch.Tensor:
    """min(exp(logp_old - logp_rollout), cap) of each token; 1 without a cap."""
    if cap is None:
        return torch.ones_like(logp_old)
    return bounded_exp(logp_old - logp_rollout).clamp(max=cap)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio held within +-LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def mismatch_metrics(logp_old: torch.Tensor, logp_rollout: torch.Tensor, tis_cap: float | None) -> dict[str, float]:
    """How far rollout and learner are apart, over tokens [N] whose values are finite; all 0 if there are none.

    `logprob_gap_mean`, `logprob_gap_max`: |logp_old - logp_rollout|. `k3`: see module. `tis_clip_frac`: share of tokens whose
    weight the cap cut. `ess`: (sum w)^2 / (N sum w^2) of the uncut weights, 1 when all are equal.
    """
    gap = logp_old.double() - logp_rollout.double()
    gap = gap[torch.isfinite(gap)]
    if gap.numel() == 0:
        return dict.fromkeys(("logprob_gap_mean", "logprob_gap_max", "k3", "tis_clip_frac", "ess"), 0.0)
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = bounded.exp()
    return {
        "logprob_gap_mean": float(gap.abs().mean()),
        "logprob_gap_max": float(gap.abs().max()),
        "k3": float((weights - 1 - bounded).mean()),
        "tis_clip_frac": 0.0 if tis_cap is None else float((weights > tis_cap).double().mean()),
        "ess": float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum())),
    }
