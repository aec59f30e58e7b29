"""Every objective a second time: float64 numpy, token by token, each written out from its paper and sharing no piece with the
code under test. A gradient is with respect to the token's own logprob."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """G groups of n rows, group by group."""

    rewards: Array
    """[G, n]"""
    logp: list[Array]
    """Of each row's sampled tokens; so are the next two."""
    old: list[Array]
    rollout: list[Array]

    @property
    def lengths(self) -> Array:
        """[G * n] sampled tokens."""
        return np.array([row.size for row in self.logp])


Result = tuple[float, list[Array]]
"""Loss, and its gradient by row."""
Weights = Callable[[Array], Array]
"""log(pi_old / pi_rollout) of a row's tokens to the factor of each token's loss."""


def random_case(seed: int, *, groups: int = 5, samples: int = 4, drift: float = 0.3, flat: tuple[int, ...] = (1,)) -> Case:
    """Rows of 1 to 12 tokens; `drift`: standard deviation of log(new / old); all rewards of the `flat` groups are equal."""
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 3, (groups, samples)) / 2 + rng.normal(0, 0.01, (groups, samples))
    for group in flat:
        rewards[group] = 0.5
    old = [-rng.exponential(1.5, int(size)) for size in rng.integers(1, 13, groups * samples)]
    logp = [row + rng.normal(0, drift, row.size) for row in old]
    rollout = [row + rng.normal(0, 0.5, row.size) for row in old]
    return Case(rewards, logp, old, rollout)


# Advantages [G * n]


def grpo_advantages(case: Case) -> Array:
    """DeepSeekMath, section 4.1.2; std with n-1, +1e-4."""
    found = []
    for group in case.rewards:
        mean = sum(group) / len(group)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
        found += [0.0 if max(group) == min(group) else (reward - mean) / (std + 1e-4) for reward in group]
    return np.array(found)


def dr_grpo_advantages(case: Case) -> Array:
    """Dr. GRPO, section 3.2: without the standard deviation."""
    return np.array([reward - sum(group) / len(group) for group in case.rewards for reward in group])


def rloo_advantages(case: Case) -> Array:
    """RLOO: R_i - 1/(k-1) sum over j != i of R_j."""
    found = []
    for group in case.rewards:
        for index, reward in enumerate(group):
            others = [other for at, other in enumerate(group) if at != index]
            found.append(reward - sum(others) / len(others))
    return np.array(found)


def reinforce_pp_advantages(case: Case) -> Array:
    """REINFORCE++: normalised over the global batch, in which every token has its row's reward."""
    tokens = np.concatenate([np.full(row.size, reward) for row, reward in zip(case.logp, case.rewards.ravel(), strict=True)])
    return (case.rewards.ravel() - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


# Token terms: (what is maximised, its derivative by logp)


def ppo_term(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO, eq. 7: min(r A, clip(r) A); r A has derivative r A."""
    plain, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    return (plain, plain) if plain <= clipped else (clipped, 0.0)


# Losses


def token_ppo(
    case: Case, advantages: Array, low: float, high: float, weights: Weights, divisor: Callable[[int], float]
) -> Result:
    """Token ratios; row i's tokens are divided by divisor(i)."""
    loss, gradients = 0.0, []
    for i, (logp, old, rollout) in enumerate(zip(case.logp, case.old, case.rollout, strict=True)):
        factors = weights(old - rollout)
        gradient = np.zeros(logp.size)
        for t in range(logp.size):
            value, slope = ppo_term(math.exp(logp[t] - old[t]), advantages[i], low, high)
            loss -= factors[t] * value / divisor(i)
            gradient[t] = -factors[t] * slope / divisor(i)
        gradients.append(gradient)
    return loss, gradients


def grpo(case: Case, weights: Weights) -> Result:
    """GRPO's advantage with DAPO's clip-higher and token-level loss: the default of this project."""
    total = sum(case.lengths)
    return token_ppo(case, grpo_advantages(case), 0.8, 1.28, weights, lambda i: total)


def grpo_paper(case: Case, weights: Weights) -> Result:
    """DeepSeekMath, eq. 3 without KL: 1/G sum_i 1/|o_i| sum_t."""
    rows = len(case.logp)
    return token_ppo(case, grpo_advantages(case), 0.8, 1.2, weights, lambda i: rows * case.lengths[i])


def dr_grpo(case: Case, weights: Weights, horizon: int = 72) -> Result:
    """Dr. GRPO, section 3.2: a constant in place of 1/|o_i|."""
    return token_ppo(case, dr_grpo_advantages(case), 0.8, 1.2, weights, lambda i: len(case.logp) * horizon)


def dapo(case: Case, weights: Weights) -> Result:
    """DAPO, eq. 8: clip-higher, 1 / sum |o_i|, only over groups whose answers are not all equally good."""
    advantages = grpo_advantages(case)
    samples = case.rewards.shape[1]
    mixed = [group.max() > group.min() for group in case.rewards]
    total = sum(size for i, size in enumerate(case.lengths) if mixed[i // samples])
    return token_ppo(case, advantages, 0.8, 1.28, weights, lambda i: total)


def rloo(case: Case, weights: Weights, horizon: int = 72) -> Result:
    """RLOO: log pi of a whole answer is the sum over its tokens; with PPO's ratio, over a constant."""
    return token_ppo(case, rloo_advantages(case), 0.8, 1.2, weights, lambda i: len(case.logp) * horizon)


def reinforce_pp(case: Case, weights: Weights) -> Result:
    """REINFORCE++: PPO's clipped token loss with globally normalised advantages, without a critic; token mean."""
    total = sum(case.lengths)
    return token_ppo(case, reinforce_pp_advantages(case), 0.8, 1.2, weights, lambda i: total)


def ppo(case: Case, weights: Weights) -> Result:
    """PPO, eq. 7, token mean, with the rows' rewards for advantages: those of a critic are in test_critic.py."""
    total = sum(case.lengths)
    return token_ppo(case, case.rewards.ravel(), 0.8, 1.2, weights, lambda i: total)


def gspo(case: Case, weights: Weights) -> Result:
    """GSPO, eq. 5 and 7: s_i = (pi / pi_old)^(1/|y_i|), one clip a row; gradient by eq. 10: s_i A_i / |y_i| for every token."""
    advantages, rows = grpo_advantages(case), len(case.logp)
    loss, gradients = 0.0, []
    for i, (logp, old, rollout) in enumerate(zip(case.logp, case.old, case.rollout, strict=True)):
        value, slope = ppo_term(math.exp((logp - old).mean()), advantages[i], 1 - 3e-4, 1 + 4e-4)
        factors = weights(old - rollout)
        loss -= value * factors.mean() / rows
        gradients.append(-slope * factors / (rows * logp.size))
    return loss, gradients


def cispo(case: Case, weights: Weights) -> Result:
    """CISPO, eq. 4 and 5: sg(clip(r)) A log pi / sum |o_i|; no lower bound, weights up to 5."""
    advantages, total = grpo_advantages(case), sum(case.lengths)
    loss, gradients = 0.0, []
    for i, (logp, old, rollout) in enumerate(zip(case.logp, case.old, case.rollout, strict=True)):
        scale = weights(old - rollout) * np.minimum(np.exp(logp - old), 5.0) * advantages[i] / total
        loss -= float((scale * logp).sum())
        gradients.append(-scale)
    return loss, gradients


LOSSES: dict[str, Callable[[Case, Weights], Result]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "ppo": ppo,
}
ADVANTAGES: dict[str, Callable[[Case], Array]] = {
    "group_std": grpo_advantages,
    "group_mean": dr_grpo_advantages,
    "leave_one_out": rloo_advantages,
    "batch_whitened": reinforce_pp_advantages,
}


# A critic


def gae_advantages(values: Array, reward: float, gamma: float, gae_lambda: float) -> Array:
    """Schulman et al. 2016, eq. 11 and 16, as the sum it is: A_t = sum_l (gamma lambda)^l delta_t+l over a row's tokens."""
    n = len(values)
    rewards = [0.0] * (n - 1) + [reward]
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return np.array([sum((gamma * gae_lambda) ** ahead * deltas[t + ahead] for ahead in range(n - t)) for t in range(n)])


def value_term(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """1/2 max((V - R)^2, (clip(V) - R)^2) and its derivative by V."""
    bounded = min(max(value, old - clip), old + clip)
    plain, clipped = (value - target) ** 2, (bounded - target) ** 2
    inside = bounded == value
    return (0.5 * plain, value - target) if plain >= clipped else (0.5 * clipped, (bounded - target) if inside else 0.0)


# Corrections, of one row


def no_correction(log_weight: Array) -> Array:
    """1."""
    return np.ones(log_weight.size)


def tis(log_weight: Array) -> Array:
    """Truncated importance sampling: min(w, 2)."""
    return np.array([min(math.exp(value), 2.0) for value in log_weight])


def mis_token(log_weight: Array) -> Array:
    """IcePop: w where 0.5 <= w <= 5, else 0."""
    return np.array([math.exp(value) if 0.5 <= math.exp(value) <= 5 else 0.0 for value in log_weight])


def mis_sequence(log_weight: Array) -> Array:
    """The row's product where 0.5 <= it <= 2, else 0."""
    product = math.prod(math.exp(value) for value in log_weight)
    return np.full(log_weight.size, product if 0.5 <= product <= 2 else 0.0)


def mis_geometric(log_weight: Array) -> Array:
    """The row's geometric mean where 0.99 <= it <= 1.01, else 0."""
    root = math.prod(math.exp(value) for value in log_weight) ** (1 / log_weight.size)
    return np.full(log_weight.size, root if 0.99 <= root <= 1.01 else 0.0)


CORRECTIONS: dict[str, Weights] = {
    "none": no_correction,
    "tis": tis,
    "mis_token": mis_token,
    "mis_sequence": mis_sequence,
    "mis_geometric": mis_geometric,
}
