"""From trajectories to tensors.

A microbatch is the forward pass of some sequences (packing.py), right-padded to the longest. Where each has one row, the
causal mask is enough: no counted position sees the padding. Where rows share positions, `ends` says who sees whom. Only the
positions that predict a sampled token reach the language-model head, each once (`where`), and what follows a row's last
sampled token never enters the forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles_core.learner.packing import Indexes, Stack, plain
from miles_core.trajectories.schema import Trajectory

PIECE_ELEMENTS = 1 << 24
"""Most logits at a time; a few copies of them in float32 (64 MiB each) are alive together."""


@dataclass(frozen=True)
class Microbatch:
    """B sequences of at most T positions for one forward pass, and the N tokens of their rows that count."""

    tokens: torch.Tensor
    """[B, T] int64, right-padded with 0."""
    copies: torch.Tensor
    """[B, T] int64: rows that have the position; 0 at padding."""
    where: torch.Tensor
    """[M] int64 into the flattened [B * T], ascending: positions that predict a token, each once for each temperature."""
    temperatures: torch.Tensor
    """[M] float32."""
    slots: torch.Tensor
    """[N] int64 into [M], ascending: what predicts the token."""
    targets: torch.Tensor
    """[N] int64: the sampled token."""
    rows: torch.Tensor
    """[N] int64: the row of the token, by its number in this microbatch."""
    num_rows: int
    rollout_logprobs: torch.Tensor
    """[N] float32."""
    advantages: torch.Tensor
    """[N] float32."""
    mask: torch.Tensor
    """[N] bool: tokens that enter the loss; all of them, but in a filler, which only keeps the ranks in step."""
    kl_weights: torch.Tensor | None = None
    """[N] float32: gradient weight of the token's row (losses.py); None: 1."""
    experts: torch.Tensor | None = None
    """[B * T, layers, k] int32: the experts that rollout recorded for each position, -1 at padding and in rows without a
    record. None: no row has one."""
    depths: torch.Tensor | None = None
    """[B, T] int64: each position's number in its row. None: every sequence has one row."""
    ends: torch.Tensor | None = None
    """[B, T] int64: position j is seen by the positions j to ends[j] - 1 of its sequence. None: by all behind it."""
    pieces: int = 1
    """In how many the head makes its logits (head.py)."""

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[B, 1, T, T] bool: which positions (last) each one sees. None: causal."""
        if self.ends is None:
            return None
        seen_by = torch.arange(self.ends.shape[1], device=self.ends.device)[:, None]
        return ((seen_by >= seen_by.T) & (seen_by < self.ends[:, None])).unsqueeze(1)

    def to(self, device: torch.device) -> Microbatch:
        """The same on another device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
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


def microbatch(
    stack: Stack,
    trajectories: Sequence[Trajectory],
    advantages: npt.NDArray[np.floating],
    kl_weights: npt.NDArray[np.floating] | None = None,
) -> Microbatch:
    """The tensors of a stack. Raises ValueError for a row that samples its first token."""
    rows = [row for sequence in stack for row in sequence.rows]
    chosen = [trajectories[row] for row in rows]
    sampled = [np.flatnonzero(trajectory.loss_mask) for trajectory in chosen]
    for trajectory, positions in zip(chosen, sampled, strict=True):
        if positions[0] == 0:
            raise ValueError(f"trajectory {trajectory.trajectory_id}: its first token is sampled, but nothing precedes it")
    layout = _lay_out(stack, chosen, [int(positions[-1]) for positions in sampled])
    pairs, counts = list(zip(chosen, sampled, strict=True)), [positions.size for positions in sampled]
    return _with_tokens(
        layout,
        where=np.concatenate([index[positions - 1] for index, positions in zip(layout.indexes, sampled, strict=True)]),
        temperatures=np.repeat([trajectory.temperature for trajectory in chosen], counts),
        targets=np.concatenate([trajectory.tokens[positions] for trajectory, positions in pairs]),
        rows=np.repeat(np.arange(len(rows)), counts),
        rollout_logprobs=np.concatenate([trajectory.logprobs[positions] for trajectory, positions in pairs]),
        advantages=np.repeat(advantages[rows], counts),
        kl_weights=None if kl_weights is None else np.repeat(kl_weights[rows], counts),
    )


def of_rank(
    stacks: list[list[Stack]],
    rank: int,
    trajectories: Sequence[Trajectory],
    advantages: npt.NDArray[np.floating],
    kl_weights: npt.NDArray[np.floating] | None,
    vocabulary: int,
) -> list[Microbatch]:
    """A rank's microbatches of a minibatch that is planned for all ranks, filled up to as many as any rank has."""
    own = [microbatch(stack, trajectories, advantages, kl_weights) for stack in stacks[rank]]
    missing = max(map(len, stacks)) - len(own)
    if missing:
        rows = [row for stack in itertools.chain(*stacks) for sequence in stack for row in sequence.rows]
        own += [microbatch(plain(rows, trajectories)[-1:], trajectories, advantages, kl_weights).as_filler()] * missing
    tokens = [[sum(trajectories[row].num_sampled for each in stack for row in each.rows) for stack in of] for of in stacks]
    most = [max(numbers) for numbers in itertools.zip_longest(*tokens, fillvalue=0)]
    return [in_pieces(batch, number, vocabulary) for batch, number in zip(own, most, strict=True)]


def in_pieces(batch: Microbatch, num_tokens: int, vocabulary: int) -> Microbatch:
    """In so many that the logits are small; `num_tokens`: of the rank that has most."""
    return replace(batch, pieces=max(1, -(-num_tokens * vocabulary // PIECE_ELEMENTS)))


def contexts(token_lists: Sequence[Sequence[int]], temperature: float) -> Microbatch:
    """Every token but the first of each list as a target: for logprobs of given tokens, such as a probe."""
    lengths = [len(tokens) - 1 for tokens in token_lists]
    width = max(lengths)
    tokens, copies = np.zeros((2, len(lengths), width), dtype=np.int64)
    for row, ids in enumerate(token_lists):
        copies[row, : len(ids) - 1] = 1
        tokens[row, : len(ids) - 1] = ids[:-1]
    zeros = np.zeros(sum(lengths))
    return _with_tokens(
        _Layout(tokens, copies, []),
        where=np.concatenate([row * width + np.arange(length) for row, length in enumerate(lengths)]),
        temperatures=zeros + temperature,
        targets=np.concatenate([np.asarray(ids[1:]) for ids in token_lists]),
        rows=np.repeat(np.arange(len(lengths)), lengths),
        rollout_logprobs=zeros,
        advantages=zeros,
    )


@dataclass(frozen=True)
class _Layout:
    """Where the positions of a microbatch's rows are; see Microbatch."""

    tokens: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int64]
    indexes: list[npt.NDArray[np.int64]]
    """Of each row its positions, into the flattened [B * T]."""
    depths: npt.NDArray[np.int64] | None = None
    ends: npt.NDArray[np.int64] | None = None
    experts: npt.NDArray[np.int32] | None = None


def _lay_out(stack: Stack, chosen: list[Trajectory], lengths: list[int]) -> _Layout:
    """`chosen`, `lengths`: the rows of all sequences in order, and their positions. What a row shares is written once more."""
    width = max(sequence.width for sequence in stack)
    tokens, depths, copies = np.zeros((3, len(stack), width), dtype=np.int64)
    ends = np.tile(np.arange(1, width + 1), (len(stack), 1))
    shape = next((trajectory.experts.shape[1:] for trajectory in chosen if trajectory.experts is not None), None)
    experts = None if shape is None else np.full((len(stack) * width, *shape), -1, dtype=np.int32)
    indexes: list[npt.NDArray[np.int64]] = []
    rows = iter(zip(chosen, lengths, strict=True))
    for number, sequence in enumerate(stack):
        index, filled = np.zeros(0, dtype=np.int64), 0
        for shared, (trajectory, length) in zip(sequence.shared, rows, strict=False):
            index = np.concatenate([index[:shared], np.arange(filled, filled + length - shared)])
            filled += length - shared
            tokens[number, index] = trajectory.tokens[:length]
            depths[number, index] = np.arange(length)
            copies[number, index] += 1
            ends[number, index] = filled
            indexes.append(number * width + index)
            if experts is not None and trajectory.experts is not None:
                experts[indexes[-1]] = trajectory.experts[:length]
    is_plain = all(len(sequence.rows) == 1 for sequence in stack)
    return _Layout(tokens, copies, indexes, None if is_plain else depths, None if is_plain else ends, experts)


def _with_tokens(
    layout: _Layout,
    *,
    where: npt.NDArray[np.int64],
    temperatures: npt.NDArray[np.floating],
    targets: npt.NDArray[np.integer],
    rows: npt.NDArray[np.int64],
    **columns: npt.NDArray[np.floating] | None,
) -> Microbatch:
    """A microbatch of tokens, in any order, with the position that predicts each."""
    order = np.lexsort((temperatures, where))
    keys = np.stack([where, temperatures])[:, order]
    is_first = np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)])

    def tensor(values: npt.NDArray[Any] | None, dtype: type = np.int64) -> Any:
        return None if values is None else torch.from_numpy(values.astype(dtype))

    floats: dict[str, Any] = {
        name: None if column is None else tensor(column[order], np.float32) for name, column in columns.items()
    }
    return Microbatch(
        tokens=tensor(layout.tokens),
        copies=tensor(layout.copies),
        where=tensor(where[order][is_first]),
        temperatures=tensor(temperatures[order][is_first], np.float32),
        slots=tensor(np.cumsum(is_first) - 1),
        targets=tensor(targets[order]),
        rows=tensor(rows[order]),
        **floats,
        num_rows=int(rows.max()) + 1,
        mask=torch.ones(len(order), dtype=torch.bool),
        experts=tensor(layout.experts, np.int32),
        depths=tensor(layout.depths),
        ends=tensor(layout.ends),
    )
