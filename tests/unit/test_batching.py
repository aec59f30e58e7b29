"""Trajectories to tensors: what counts, in which order, and that padding is invisible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.learner.batching import Microbatch, contexts, microbatch, split_groups, with_signal
from miles_core.learner.packing import context_length, plan
from miles_core.trajectories.schema import Trajectory

S = 1
"""Marks a sampled token in the patterns below."""


def trajectory(pattern: list[int], group: str = "g", index: int = 0, temperature: float = 1.0) -> Trajectory:
    """Token i of row `index` is 100 * index + i, its logprob -i / 10."""
    mask = np.array(pattern, dtype=np.uint8)
    return Trajectory(
        trajectory_id=f"{group}/{index}@rollout-0.a1",
        sample_id=f"{group}/{index}",
        group_id=group,
        order_id="o",
        producer="rollout-0",
        producer_attempt=1,
        task_seed=0,
        tokens=np.arange(len(pattern), dtype=np.int32) + 100 * index,
        loss_mask=mask,
        logprobs=(-0.1 * np.arange(len(pattern)) * mask).astype(np.float32),
        versions=(),
        turns=(),
        temperature=temperature,
        status="complete",
    )


def microbatches(rows: list[int], trajectories: list[Trajectory], advantages: Any, budget: int = 8192) -> list[Microbatch]:
    """Of one rank, and each row by itself."""
    (stacks,) = plan(rows, trajectories, budget, 1, None)
    return [microbatch(stack, trajectories, advantages) for stack in stacks]


def test_only_sampled_tokens_count_and_nothing_behind_the_last_one_is_computed() -> None:
    rows = [trajectory([0, 0, S, S, 0, S, 0, 0], index=1), trajectory([0, S, 0], index=2, temperature=0.5)]
    (batch,) = microbatches([0, 1], rows, np.array([1.5, -0.5]))
    assert batch.tokens.tolist() == [[100, 101, 102, 103, 104], [200, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [102, 103, 105, 201]
    assert batch.tokens.flatten()[batch.where].tolist() == [101, 102, 104, 200]
    assert batch.advantages.tolist() == [1.5, 1.5, 1.5, -0.5]
    assert batch.temperatures.tolist() == [1, 1, 1, 0.5] and batch.slots.tolist() == [0, 1, 2, 3]
    assert batch.rows.tolist() == [0, 0, 0, 1] and batch.num_rows == 2
    assert batch.attention_mask is None and batch.depths is None
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([-0.2, -0.3, -0.5, -0.1]))
    assert batch.mask.all() and batch.where.dtype == batch.tokens.dtype == torch.int64


def test_longest_first_ties_by_index_and_every_row_once() -> None:
    lengths = [3, 7, 5, 7, 4, 5, 9]
    rows = [trajectory([0] * (length - 1) + [S], index=i) for i, length in enumerate(lengths)]
    batches = microbatches([6, 0, 3, 5, 1, 2, 4], rows, np.ones(7), 24)
    assert [int(row[0]) // 100 for batch in batches for row in batch.tokens] == [6, 1, 3, 2, 5, 4, 0]
    assert [tuple(batch.tokens.shape) for batch in batches] == [(3, 8), (4, 4)]
    alone = microbatches([6, 0, 3, 5, 1, 2, 4], rows, np.ones(7), 7)
    assert [tuple(batch.tokens.shape) for batch in alone] == [(1, 8), (1, 6), (1, 6), (1, 4), (1, 4), (2, 3)]


def test_rows_without_signal_are_dropped() -> None:
    rows = [trajectory([0, S]), trajectory([0, 0]), trajectory([0, S, S]), trajectory([])]
    assert with_signal([0, 1, 2, 3], rows, np.array([0.0, 1.0, -1.0, 1.0])) == [2]
    assert context_length(rows[3]) == context_length(rows[1]) == 0
    assert microbatches([], rows, np.zeros(4)) == []


@pytest.mark.parametrize(
    ("groups", "parts", "expected"),
    [
        ("aabbccdd", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("abab", 2, [[0, 2], [1, 3]]),
        ("aabbcc", 2, [[0, 1, 2, 3], [4, 5]]),
        ("aa", 2, [[], [0, 1]]),
        ("abc", 1, [[0, 1, 2]]),
    ],
)
def test_groups_stay_whole_and_are_dealt_evenly(groups: str, parts: int, expected: list[list[int]]) -> None:
    rows = [trajectory([0, S], group=name, index=i) for i, name in enumerate(groups)]
    assert split_groups(rows, parts) == expected


def test_a_row_that_samples_its_first_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"g/3@rollout-0\.a1"):
        microbatches([0], [trajectory([S, S], index=3)], np.ones(1))


def test_a_filler_computes_the_same_and_counts_nothing() -> None:
    (batch,) = microbatches([0], [trajectory([0, S, S])], np.ones(1))
    filler = batch.as_filler()
    assert torch.equal(filler.tokens, batch.tokens) and not filler.mask.any() and batch.mask.all()


def recorded(pattern: list[int], index: int) -> Trajectory:
    """Position p of row `index` went to experts 16 * index + p and its successor, in both of two layers."""
    row = trajectory(pattern, index=index)
    first = 16 * index + np.arange(len(pattern) - 1, dtype=np.uint8)
    return replace(row, experts=np.repeat(np.stack([first, first + 1], axis=-1)[:, None], 2, axis=1))


def test_records_lie_beside_their_tokens_and_are_padded_with_nothing() -> None:
    rows = [recorded([0, S, S, 0], 1), recorded([0, 0, S, 0, S, 0, 0], 2), trajectory([0, S, S])]
    (batch,) = microbatches([0, 1, 2], rows, np.ones(3))
    assert batch.experts is not None and batch.experts.shape == (batch.tokens.numel(), 2, 2)
    longest, short, bare = batch.experts.view(3, 4, 2, 2)
    assert longest[:, 0, 0].tolist() == [32, 33, 34, 35] and longest[:, 1, 1].tolist() == [33, 34, 35, 36]
    assert short[:, 0, 0].tolist() == [16, 17, -1, -1] and (bare == -1).all()
    assert batch.as_filler().experts is batch.experts and batch.to(torch.device("cpu")).experts is not None
    assert batch.without_record().experts is None and torch.equal(batch.without_record().tokens, batch.tokens)


def test_a_batch_without_any_record_has_none() -> None:
    (batch,) = microbatches([0], [trajectory([0, S, S])], np.ones(1))
    assert batch.experts is None and batch.to(torch.device("cpu")).experts is None
    assert contexts([[5, 6, 7]], 1.0).experts is None


def test_contexts_make_every_token_but_the_first_a_target() -> None:
    batch = contexts([[5, 6, 7], [8, 9]], 0.7)
    assert batch.tokens.tolist() == [[5, 6], [8, 0]]
    assert batch.targets.tolist() == [6, 7, 9]
    assert batch.tokens.flatten()[batch.where].tolist() == [5, 6, 8]
    torch.testing.assert_close(batch.temperatures, torch.full((3,), 0.7))


def test_wide_integers_and_long_rows_keep_their_values() -> None:
    row = replace(trajectory([0] * 9 + [S]), tokens=np.full(10, 2**31 - 1, dtype=np.int32))
    (batch,) = microbatches([0], [row], np.array([0.25], dtype=np.float64))
    assert batch.targets.tolist() == [2**31 - 1] and batch.advantages.dtype == torch.float32
