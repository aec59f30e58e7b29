"""Which rows go through the model together, so that what they share is computed once.

A sequence is the trie of its rows' contexts, written depth first: [prefix][rest of row 1][rest of row 2]... with a mask that
lets a position see its own ancestors alone. Rows share a position if everything up to it is equal: the tokens and, of a
mixture of experts, the recorded experts; so each row is replayed as it was recorded, and a row whose record differs from some
position on has its own copy from there. Rows that share a whole prompt stay together while they fit; others, such as groups
under one few-shot prefix, go where they share most. Sequences are stacked to microbatches of at most `budget` positions,
padding included; a row longer than that is alone.

How long a sequence may become is chosen by cost, and rows each in a sequence of its own are among the choices: sharing saves
positions, but each position of a sequence is multiplied with each of it. Everything is a function of the rows alone, ties by
their order, so a replayed batch is split and summed in the same way and every rank makes the plan of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.trajectories.schema import Trajectory

Indexes = list[int]
"""Rows of a batch, by their index in it."""
Counts = npt.NDArray[np.int64]
GROWTH = 1.1
"""Between two lengths of sequences that are tried."""
MASK_ELEMENTS = 1 << 28
"""Most pairs of positions in one microbatch's mask, which is one byte each, and in float32 four more while attention runs."""
WORTH = 0.02
"""Share of the positions that there must be to save, or nothing is tried."""
HOPELESS = 1.5
"""Times the least cost: of longer sequences none will be better."""
PAIRS_PER_HIDDEN = 3
"""Pairs of positions in all heads of a layer that cost as much as a position in the rest of it, over the hidden size."""
FAMILIES = frozenset({"llama", "mistral", "mixtral", "olmo2", "olmoe", "qwen2", "qwen3", "qwen3_moe"})
"""model_type of those whose code takes a mask and positions as they are given (tests/unit/test_packing.py)."""


@dataclass(frozen=True)
class Contexts:
    """Rows of a minibatch in an order in which those with a common prefix are neighbours. n = rows."""

    rows: Indexes
    """[n]"""
    lengths: Counts
    """[n] positions before the last sampled token."""
    shared: Counts
    """[n] positions that a row has in common with the row before it; 0 for the first."""
    prompts: Counts
    """[n] positions before the first sampled token."""

    @property
    def positions(self) -> int:
        """Of their trie."""
        return int((self.lengths - self.shared).sum())


@dataclass(frozen=True)
class Packed:
    """One sequence."""

    rows: Indexes
    shared: Indexes
    """Positions that each row takes from the row before it, from the first on; 0 for the first row."""
    width: int
    """Positions."""


Stack = list[Packed]
"""The sequences of one microbatch, longest first."""


def context_length(trajectory: Trajectory) -> int:
    """Tokens before the last sampled one."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[-1]) if sampled.size else 0


def why_not_shared(config: Any) -> str | None:
    """Why rows of a model with this config cannot share positions; None if they can."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"the model has layers of {', '.join(sorted(kinds - {'full_attention'}))}"
    if getattr(config, "sliding_window", None) is not None:
        return f"the model attends within a sliding window of {config.sliding_window}"
    if config.model_type not in FAMILIES:
        return f"the model's family {config.model_type} is not known to take a mask as it is given"
    if config._attn_implementation != "sdpa":
        return f"the model's attention is computed by {config._attn_implementation}, not by sdpa"
    return None


def pairs_per_token(config: Any) -> float:
    """Of a model, for `plan`."""
    return float(PAIRS_PER_HIDDEN * config.hidden_size)


def sort_contexts(rows: Indexes, trajectories: Sequence[Trajectory]) -> Contexts:
    """The rows' contexts, sorted; equal ones by index."""
    keys, width = _keys([trajectories[row] for row in rows])
    order = sorted(range(len(rows)), key=lambda index: (keys[index], rows[index]))
    shared = [0, *(_common([keys[order[i - 1]], keys[order[i]]], width) for i in range(1, len(order)))]
    return Contexts(
        rows=[rows[index] for index in order],
        lengths=np.array([len(keys[index]) // width for index in order], dtype=np.int64),
        shared=np.array(shared[: len(order)], dtype=np.int64),
        prompts=np.array([int(np.argmax(trajectories[rows[index]].loss_mask)) for index in order], dtype=np.int64),
    )


def _keys(trajectories: Sequence[Trajectory]) -> tuple[list[bytes], int]:
    """Each context as bytes, and how many of them a position has: its token and, if any row has a record, its experts."""
    record = next((each.experts for each in trajectories if each.experts is not None), None)
    size = 0 if record is None else record.dtype.itemsize * math.prod(record.shape[1:])
    keys = []
    for each in trajectories:
        length = context_length(each)
        columns = [np.ascontiguousarray(each.tokens[:length], dtype=np.int32).view(np.uint8).reshape(length, 4)]
        if record is not None:
            known = each.experts is not None
            columns.append(np.full((length, 1), known, dtype=np.uint8))
            experts = np.zeros((length, size), np.uint8) if each.experts is None else each.experts[:length]
            columns.append(np.ascontiguousarray(experts).reshape(length, -1).view(np.uint8))
        keys.append(np.concatenate(columns, axis=1).tobytes())
    return keys, 4 + (1 + size if record is not None else 0)


def _common(keys: list[bytes], width: int) -> int:
    length = min(map(len, keys))
    first, second = (np.frombuffer(key, dtype=np.uint8, count=length) for key in keys)
    differs = np.flatnonzero(first != second)
    return (int(differs[0]) if differs.size else length) // width


def plan(
    rows: Indexes, trajectories: Sequence[Trajectory], budget: int, ranks: int, pairs_per_token: float | None
) -> list[list[Stack]]:
    """The microbatches of each rank, of all ways that are tried the one of least cost (see `cost`). None: no row shares."""
    if pairs_per_token is None or not rows:
        return deal(plain(rows, trajectories), budget, ranks, math.inf)
    best = deal(plain(rows, trajectories), budget, ranks, pairs_per_token)
    least, contexts = cost(best, pairs_per_token), sort_contexts(rows, trajectories)
    if contexts.positions > (1 - WORTH) * _positions(best):
        return best
    for way in _packings(contexts, budget):
        stacks = deal(way, budget, ranks, pairs_per_token)
        found = cost(stacks, pairs_per_token)
        if found > HOPELESS * least:
            break
        if found < least:
            best, least = stacks, found
    return best


def plain(rows: Indexes, trajectories: Sequence[Trajectory]) -> list[Packed]:
    """Every row in a sequence of its own, longest first."""
    lengths = {row: context_length(trajectories[row]) for row in rows}
    return [Packed([row], [0], lengths[row]) for row in sorted(rows, key=lambda row: (-lengths[row], row))]


def _packings(contexts: Contexts, budget: int) -> Iterator[list[Packed]]:
    """With longer and longer sequences."""
    longest = min(budget, math.isqrt(MASK_ELEMENTS))
    capacity = min(int(contexts.lengths.max()), longest)
    while True:
        yield pack(contexts, capacity)
        if capacity >= min(longest, contexts.positions):
            return
        capacity = min(max(capacity + 1, int(capacity * GROWTH)), longest)


def cost(stacks: list[list[Stack]], pairs_per_token: float) -> float:
    """Positions that the slowest ranks compute, microbatch by microbatch; `pairs_per_token` pairs of positions that attention
    multiplies count as one more position. Plain rows have a causal mask, by which attention leaves half of the pairs out."""
    by_number = [[rank[number] for rank in stacks if number < len(rank)] for number in range(max(map(len, stacks)))]
    return sum(max(_stack_cost(stack, pairs_per_token) for stack in stacks) for stacks in by_number)


def _stack_cost(stack: Stack, pairs_per_token: float) -> float:
    width, whole = stack[0].width, any(len(sequence.rows) > 1 for sequence in stack)
    return len(stack) * width * (1 + width / pairs_per_token / (1 if whole else 2))


def computed_frac(plans: Sequence[list[list[Stack]]], trajectories: Sequence[Trajectory]) -> float:
    """Positions that are computed, padding included, over those of the rows' contexts; 0 without rows."""
    stacks = [stack for ranks in plans for rank in ranks for stack in rank]
    rows = [row for stack in stacks for sequence in stack for row in sequence.rows]
    return sum(map(_positions, plans)) / sum(context_length(trajectories[row]) for row in rows) if rows else 0.0


def _positions(stacks: list[list[Stack]]) -> int:
    """Of all ranks, padding included."""
    return sum(len(stack) * stack[0].width for stack in itertools.chain(*stacks))


def deal(sequences: list[Packed], budget: int, ranks: int, pairs_per_token: float) -> list[list[Stack]]:
    """Each sequence, longest first, to the rank that has least to do; then each rank's to microbatches."""
    loads, dealt = [0.0] * ranks, [list[Packed]() for _ in range(ranks)]
    for sequence in sorted(sequences, key=lambda each: -each.width):
        rank = loads.index(min(loads))
        dealt[rank].append(sequence)
        loads[rank] += _stack_cost([sequence], pairs_per_token)
    return [_stacks(each, budget) for each in dealt]


def _stacks(sequences: list[Packed], budget: int) -> list[Stack]:
    stacks: list[Stack] = []
    for sequence in sequences:
        if stacks and _has_room([*stacks[-1], sequence], budget):
            stacks[-1].append(sequence)
        else:
            stacks.append([sequence])
    return stacks


def _has_room(stack: Stack, budget: int) -> bool:
    width, is_plain = stack[0].width, all(len(sequence.rows) == 1 for sequence in stack)
    return len(stack) * width <= budget and (is_plain or len(stack) * width**2 <= MASK_ELEMENTS)


def pack(contexts: Contexts, capacity: int) -> list[Packed]:
    """Sequences of at most `capacity` positions (or of one row): first fit decreasing of blocks of rows that share a prompt,
    each where it shares most of those with room."""
    blocks = _blocks(contexts, capacity)
    sizes = np.array([_trie_size(contexts, block) for block in blocks], dtype=np.int64)
    common = _block_sharing(contexts, blocks)
    members: list[list[int]] = []
    filled = np.zeros(len(blocks), dtype=np.int64)
    sharing = np.zeros((len(blocks), len(blocks)), dtype=np.int64)
    """[sequence, block]: most that the block has in common with one that is in the sequence."""
    for block in np.argsort(-sizes, kind="stable"):
        count = len(members)
        gain = np.where(filled[:count] + sizes[block] - sharing[:count, block] <= capacity, sharing[:count, block], -1)
        chosen = int(gain.argmax()) if count and gain.max() >= 0 else count
        if chosen == count:
            members.append([])
        filled[chosen] += sizes[block] - sharing[chosen, block]
        np.maximum(sharing[chosen], common[block], out=sharing[chosen])
        members[chosen].append(int(block))
    return [_packed(contexts, [index for block in sorted(inside) for index in blocks[block]]) for inside in members]


def _packed(contexts: Contexts, inside: Indexes) -> Packed:
    """`inside`: of the contexts, ascending."""
    shared = [0, *(int(contexts.shared[one + 1 : other + 1].min()) for one, other in itertools.pairwise(inside))]
    return Packed([contexts.rows[index] for index in inside], shared, int(contexts.lengths[inside].sum()) - sum(shared))


def _blocks(contexts: Contexts, capacity: int) -> list[range]:
    """Neighbours that share a whole prompt, cut where their trie outgrows the capacity."""
    blocks: list[range] = []
    begin = filled = 0
    for index, length in enumerate(contexts.lengths.tolist()):
        shared = int(contexts.shared[index])
        related = index > 0 and shared >= max(contexts.prompts[index - 1 : index + 1])
        if index > begin and not (related and filled + length - shared <= capacity):
            blocks.append(range(begin, index))
            begin, filled = index, 0
        filled += length - (shared if index > begin else 0)
    return [*blocks, range(begin, len(contexts.rows))]


def _trie_size(contexts: Contexts, block: range) -> int:
    inside = slice(block.start, block.stop)
    return int(contexts.lengths[inside].sum() - contexts.shared[inside][1:].sum())


def _block_sharing(contexts: Contexts, blocks: list[range]) -> Counts:
    """[blocks, blocks] positions that two blocks have in common; a block with itself: 0."""
    most = np.iinfo(np.int64).max
    between = contexts.shared[[block.start for block in blocks[1:]]]
    inner = [int(contexts.shared[block.start + 1 : block.stop].min(initial=most)) for block in blocks]
    common = np.zeros((len(blocks), len(blocks)), dtype=np.int64)
    for index in range(len(blocks) - 1):
        through = np.minimum(between[index:], np.array([most, *inner[index + 1 : -1]]))
        common[index, index + 1 :] = np.minimum.accumulate(through)
    return common + common.T
