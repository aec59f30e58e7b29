"""Off-policy corrections: how much a token sampled by an older or numerically different policy counts. Constants of the loss.

w = exp(logp_old - logp_rollout) of a token: the learner's policy at the start of the step over the one that sampled it.
- tis: min(w, C), truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy
  RL training", 2025).
- mis_token: w within [low, high], else 0 (IcePop, arXiv 2510.18855).
- mis_sequence: the product of a row's w within [low, high], else 0; mis_geometric: their geometric mean likewise (Liu et al.,
  "When speed kills stability", 2025).
- veto: a row in which any token's w is under the threshold counts for nothing, whatever else is set (same source).
A weight of 0 takes a token out of the loss, not out of the mean's divisor. Log ratios are held within +-LOG_RATIO_BOUND, so
every weight is finite.
"""

from __future__ import annotations

import math

import torch

from miles_core.learner.segments import Segments
from miles_core.recipe import LearnerSpec

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: finite in every dtype used here and far outside any clip range."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio held within +-LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def correction_weights(log_weight: torch.Tensor, segments: Segments, spec: LearnerSpec) -> torch.Tensor:
    """[N] what each token's loss is multiplied by; `log_weight` [N] is logp_old - logp_rollout, finite where counted."""
    weights = _importance_weights(log_weight, segments, spec)
    if spec.veto is None:
        return weights
    catastrophic = (log_weight < math.log(spec.veto)).to(weights.dtype)
    return weights.where(segments.total(catastrophic) == 0, weights.new_zeros(()))


def _importance_weights(log_weight: torch.Tensor, segments: Segments, spec: LearnerSpec) -> torch.Tensor:
    if spec.correction == "none":
        return torch.ones_like(log_weight)
    if spec.correction == "tis":
        return bounded_exp(log_weight).clamp(max=spec.tis_cap)
    if spec.correction == "mis_sequence":
        log_weight = segments.total(log_weight)
    elif spec.correction == "mis_geometric":
        log_weight = segments.mean(log_weight)
    weights = bounded_exp(log_weight)
    low, high = spec.mis_low or 0.0, math.inf if spec.mis_high is None else spec.mis_high
    return weights.where((weights >= low) & (weights <= high), weights.new_zeros(()))


def cut_tokens(log_weight: torch.Tensor, segments: Segments, spec: LearnerSpec) -> torch.Tensor:
    """[N] bool: counted tokens whose weight was cut at C, or set to 0 by a mask or the veto."""
    cut = correction_weights(log_weight, segments, spec) == 0
    if spec.correction == "tis":
        cut = cut | (bounded_exp(log_weight) > spec.tis_cap)
    return cut & segments.counted


def mismatch_metrics(logp_old: torch.Tensor, logp_rollout: torch.Tensor, cut: torch.Tensor | None = None) -> dict[str, float]:
    """How far rollout and learner are apart, over tokens [N] whose values are finite; all 0 if there are none.

    `logprob_gap_mean`, `logprob_gap_max`: |logp_old - logp_rollout|. `k3`: mean of (w - 1) - log w, Schulman's low-variance
    estimator of KL(rollout || learner at the start of the step). `tis_clip_frac`: share of `cut`.
    `ess`: (sum w)^2 / (N sum w^2) of the tokens' own uncut weights, 1 when all are equal.
    """
    gap = logp_old.double() - logp_rollout.double()
    finite = torch.isfinite(gap)
    gap = gap[finite]
    if gap.numel() == 0:
        return dict.fromkeys(("logprob_gap_mean", "logprob_gap_max", "k3", "tis_clip_frac", "ess"), 0.0)
    bounded = gap.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = bounded.exp()
    return {
        "logprob_gap_mean": float(gap.abs().mean()),
        "logprob_gap_max": float(gap.abs().max()),
        "k3": float((weights - 1 - bounded).mean()),
        "tis_clip_frac": 0.0 if cut is None else float(cut[finite].double().mean()),
        "ess": float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum())),
    }
