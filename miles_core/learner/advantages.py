"""Advantages: how much better a sample was than what it is compared with. Pure functions of rewards, any float dtype.

R is [G, n]: n samples of each of G groups (one prompt each).
- group_std: (R - mean) / (std + 1e-4), GRPO (arXiv 2402.03300, section 4.1.2), std with n-1. The 1e-4 keep grading noise in
  a group that all but agrees from being blown up to unit variance.
- group_mean: R - mean, Dr. GRPO (arXiv 2503.20783, section 3.2).
- leave_one_out: R_i - mean of the group's others, RLOO (arXiv 2402.14740) = n / (n-1) x group_mean.
- batch_whitened: (R - mean) / std over the batch's sampled tokens, each with its row's reward, REINFORCE++ (arXiv
  2501.03262); std with one token less and 1e-8 in its square, as the usual implementations have it.
- gae: R itself; the critic makes the tokens' advantages of it (critic.py).

Where all that are compared got one reward every advantage is exactly 0, also after rounding. A reward that is not finite is
a named error: a sample without a grade must not reach the learner.
"""

from __future__ import annotations

import torch

from miles_core.presets import Advantage

STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8


def advantages(rewards: torch.Tensor, num_sampled: torch.Tensor, how: Advantage) -> torch.Tensor:
    """Rewards [G, n] and sampled tokens of each row [G, n] to advantages [G, n]. Raises ValueError."""
    if rewards.ndim != 2 or rewards.numel() == 0:
        raise ValueError(f"rewards must be [groups, samples] with at least one of each, got shape {tuple(rewards.shape)}")
    if not torch.isfinite(rewards).all():
        bad = sorted({int(group) for group in torch.nonzero(~torch.isfinite(rewards))[:, 0]})
        raise ValueError(f"rewards of groups {bad[:8]} are not finite; a sample without a grade must not reach the learner")
    if how == "gae":
        return rewards
    if how == "batch_whitened":
        return _batch_whitened(rewards, num_sampled)
    samples = rewards.shape[1]
    if samples < 2:
        raise ValueError(
            f"advantage {how} compares a sample with its group: it needs at least 2 samples a group, got {samples}; "
            f"raise orchestrator.samples or set learner.advantage: batch_whitened"
        )
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if how == "group_std":
        scaled = centred / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    else:
        scaled = centred * (samples / (samples - 1)) if how == "leave_one_out" else centred
    spread = rewards.amax(dim=1, keepdim=True) > rewards.amin(dim=1, keepdim=True)
    return scaled.where(spread, scaled.new_zeros(()))


def _batch_whitened(rewards: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
    """See module. Rows without a sampled token count for nothing."""
    tokens = num_sampled.to(rewards.dtype)
    seen = rewards[num_sampled > 0]
    if seen.numel() == 0 or seen.amax() == seen.amin():
        return torch.zeros_like(rewards)
    centred = rewards - (tokens * rewards).sum() / tokens.sum()
    variance = (tokens * centred**2).sum() / (tokens.sum() - 1)
    return centred * torch.rsqrt(variance + VARIANCE_EPSILON)
