"""From trajectories to padded tensors.

Rows are right-padded: with causal attention no counted position sees the padding, so no attention mask is needed. Only the
positions that predict a sampled token reach the language-model head (`where`), and what follows a row's last sampled token
never enters the forward pass. Order is a function of the rows alone (longest first, ties by their index), so a replayed
batch is split and summed in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles_core.trajectories.schema import Trajectory

Indexes = list[int]
"""Rows of a batch, by their index in it."""


@dataclass(frozen=True)
class Microbatch:
    """B rows for one forward pass and the N tokens of them that count. T = longest context."""

    tokens: torch.Tensor
    """[B, T] int64, right-padded with 0."""
    where: torch.Tensor
    """[N] int64 into the flattened [B * T]: the position that predicts the token."""
    targets: torch.Tensor
    """[N] int64: the sampled token."""
    rollout_logprobs: torch.Tensor
    """[N] float32."""
    advantages: torch.Tensor
    """[N] float32."""
    temperatures: torch.Tensor
    """[N] float32."""
    mask: torch.Tensor
    """[N] bool: tokens that enter the loss; all of them, but in a filler, which only keeps the ranks in step."""
    kl_weights: torch.Tensor | None = None
    """[N] float32: gradient weight of the token's row (losses.py); None: 1."""
    experts: torch.Tensor | None = None
    """[B * T, layers, k] int32: the experts that rollout recorded for each position, -1 at padding and in rows without a
    record. None: no row has one."""

    @property
    def rows(self) -> torch.Tensor:
        """[N] int64: the row of each token."""
        return self.where // self.tokens.shape[1]

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)

    def as_filler(self) -> Microbatch:
        """The same forward pass with no token that counts."""
        return replace(self, mask=torch.zeros_like(self.mask))

    def without_record(self) -> Microbatch:
        """The same forward pass with the routers' own choices."""
        return replace(self, experts=None)


def split_groups(trajectories: Sequence[Trajectory], parts: int) -> list[Indexes]:
    """Deals whole groups, in order of first appearance, evenly into `parts` minibatches; with fewer groups some are empty."""
    groups: dict[str, Indexes] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    bounds = [round(part * len(groups) / parts) for part in range(parts + 1)]
    rows = list(groups.values())
    return [[index for group in rows[low:high] for index in group] for low, high in itertools.pairwise(bounds)]


def with_signal(rows: Indexes, trajectories: Sequence[Trajectory], advantages: npt.NDArray[np.floating]) -> Indexes:
    """The rows whose reward moves the weights: with a sampled token and an advantage that is not 0."""
    return [row for row in rows if advantages[row] != 0 and trajectories[row].num_sampled > 0]


def in_live_groups(rows: Indexes, trajectories: Sequence[Trajectory], advantages: npt.NDArray[np.floating]) -> Indexes:
    """The rows of groups in which any advantage is not 0."""
    live = {trajectories[row].group_id for row in rows if advantages[row] != 0}
    return [row for row in rows if trajectories[row].group_id in live]


def microbatches(
    rows: Indexes,
    trajectories: Sequence[Trajectory],
    advantages: npt.NDArray[np.floating],
    size: int,
    kl_weights: npt.NDArray[np.floating] | None = None,
) -> list[Microbatch]:
    """At most `size` rows each, longest first. Raises ValueError for a row that samples its first token."""
    order = sorted(rows, key=lambda row: (-context_length(trajectories[row]), row))
    chunks = [order[begin : begin + size] for begin in range(0, len(order), size)]
    weights = [None if kl_weights is None else kl_weights[chunk] for chunk in chunks]
    return [
        _microbatch([trajectories[row] for row in chunk], advantages[chunk], weight)
        for chunk, weight in zip(chunks, weights, strict=True)
    ]


def context_length(trajectory: Trajectory) -> int:
    """Tokens before the last sampled one."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[-1]) if sampled.size else 0


def _microbatch(
    trajectories: list[Trajectory], advantages: npt.NDArray[np.floating], kl_weights: npt.NDArray[np.floating] | None
) -> Microbatch:
    sampled = [np.flatnonzero(trajectory.loss_mask) for trajectory in trajectories]
    for trajectory, positions in zip(trajectories, sampled, strict=True):
        if positions[0] == 0:
            raise ValueError(f"trajectory {trajectory.trajectory_id}: its first token is sampled, but nothing precedes it")
    width = max(int(positions[-1]) for positions in sampled)
    tokens = np.zeros((len(trajectories), width), dtype=np.int64)
    for row, (trajectory, positions) in enumerate(zip(trajectories, sampled, strict=True)):
        tokens[row, : positions[-1]] = trajectory.tokens[: positions[-1]]
    counts = [positions.size for positions in sampled]
    where = [row * width + positions - 1 for row, positions in enumerate(sampled)]
    pairs = list(zip(trajectories, sampled, strict=True))
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        where=torch.from_numpy(np.concatenate(where)),
        targets=torch.from_numpy(np.concatenate([t.tokens[p] for t, p in pairs]).astype(np.int64)),
        rollout_logprobs=torch.from_numpy(np.concatenate([t.logprobs[p] for t, p in pairs]).astype(np.float32)),
        advantages=torch.from_numpy(np.repeat(advantages, counts).astype(np.float32)),
        temperatures=torch.from_numpy(np.repeat([t.temperature for t in trajectories], counts).astype(np.float32)),
        mask=torch.ones(sum(counts), dtype=torch.bool),
        kl_weights=None if kl_weights is None else torch.from_numpy(np.repeat(kl_weights, counts).astype(np.float32)),
        experts=_experts(trajectories, [int(positions[-1]) for positions in sampled], width),
    )


def _experts(trajectories: list[Trajectory], lengths: list[int], width: int) -> torch.Tensor | None:
    """The records of the first `lengths` positions of each row, padded like its tokens."""
    shape = next((trajectory.experts.shape[1:] for trajectory in trajectories if trajectory.experts is not None), None)
    if shape is None:
        return None
    padded = np.full((len(trajectories), width, *shape), -1, dtype=np.int32)
    for row, (trajectory, length) in enumerate(zip(trajectories, lengths, strict=True)):
        if trajectory.experts is not None:
            padded[row, :length] = trajectory.experts[:length]
    return torch.from_numpy(padded).flatten(0, 1)


def contexts(token_lists: Sequence[Sequence[int]], temperature: float) -> Microbatch:
    """Every token but the first of each list as a target: for logprobs of given tokens, such as a probe."""
    lengths = [len(tokens) for tokens in token_lists]
    width = max(lengths) - 1
    tokens = np.zeros((len(lengths), width), dtype=np.int64)
    for row, ids in enumerate(token_lists):
        tokens[row, : len(ids) - 1] = ids[:-1]
    where = np.concatenate([row * width + np.arange(length - 1) for row, length in enumerate(lengths)])
    targets = np.concatenate([np.asarray(ids[1:], dtype=np.int64) for ids in token_lists])
    zeros = torch.zeros(targets.size)
    return Microbatch(
        tokens=torch.from_numpy(tokens),
        where=torch.from_numpy(where),
        targets=torch.from_numpy(targets),
        rollout_logprobs=zeros,
        advantages=zeros,
        temperatures=torch.full((targets.size,), temperature),
        mask=torch.ones(targets.size, dtype=torch.bool),
    )
