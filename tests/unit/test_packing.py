"""The plan: every row once, within the budget, seeing its own context alone; and what it saves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.learner.batching import microbatch
from miles_core.learner.packing import (
    Packed,
    Stack,
    computed_frac,
    context_length,
    cost,
    pack,
    plan,
    sort_contexts,
    why_not_shared,
)
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_batching import trajectory
from tests.unit.tiny_models import tiny_config

PAIRS = 96.0


def row(tokens: list[int], prompt: int, group: str = "g") -> Trajectory:
    """All tokens from `prompt` on are sampled."""
    made = trajectory([0] * prompt + [1] * (len(tokens) - prompt), group)
    return replace(made, tokens=np.array(tokens, dtype=np.int32))


def group_of(prompt: list[int], lengths: list[int], seed: int = 0) -> list[Trajectory]:
    """Siblings with completions of these lengths that do not begin alike."""
    draw = np.random.default_rng(seed)
    return [
        row([*prompt, 1000 + index, *draw.integers(0, 50, length - 1).tolist()], len(prompt), str(prompt))
        for index, length in enumerate(lengths)
    ]


def sequences(stacks: list[list[Stack]]) -> list[Packed]:
    return [sequence for rank in stacks for stack in rank for sequence in stack]


def planned(rows: list[Trajectory], budget: int = 8192, ranks: int = 1, pairs: float | None = PAIRS) -> list[list[Stack]]:
    return plan(list(range(len(rows))), rows, budget, ranks, pairs)


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Few tokens, so that much is shared: prompts, beginnings of answers, whole rows."""
    token = st.integers(0, 2)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4))
    rows = []
    for prompt in draw(st.lists(st.sampled_from(prompts), min_size=1, max_size=12)):
        rest = draw(st.lists(token, min_size=1, max_size=6))
        mask = draw(st.lists(st.integers(0, 1), min_size=len(rest) - 1, max_size=len(rest) - 1))
        made = row([*prompt, *rest], len(prompt))
        rows.append(replace(made, loss_mask=np.array([0] * len(prompt) + [1] + mask, dtype=np.uint8)))
    return rows


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 40), st.integers(1, 3), st.sampled_from([1.0, 20.0, 1e9, None]))
def test_every_sampled_token_is_predicted_from_its_own_context_alone(
    rows: list[Trajectory], budget: int, ranks: int, pairs: float | None
) -> None:
    stacks = planned(rows, budget, ranks, pairs)
    assert len(stacks) == ranks
    assert sorted(index for each in sequences(stacks) for index in each.rows) == list(range(len(rows)))
    for stack in itertools.chain(*stacks):
        alone = sum(len(each.rows) for each in stack) == 1
        assert alone or len(stack) * max(each.width for each in stack) <= budget
        batch = microbatch(stack, rows, np.arange(len(rows), dtype=float))
        assert batch.tokens.shape == (len(stack), stack[0].width)
        _assert_contexts([index for each in stack for index in each.rows], rows, batch)


def _assert_contexts(inside: list[int], rows: list[Trajectory], batch: Any) -> None:
    width = batch.tokens.shape[1]
    mask = None if batch.attention_mask is None else batch.attention_mask.numpy()
    found: dict[int, list[int]] = {number: [] for number in range(batch.num_rows)}
    for number, slot, target, advantage in zip(
        batch.rows.tolist(), batch.slots.tolist(), batch.targets.tolist(), batch.advantages.tolist(), strict=True
    ):
        trajectory = rows[inside[number]]
        line, position = divmod(int(batch.where[slot]), width)
        seen = np.arange(position + 1) if mask is None else np.flatnonzero(mask[line, 0, position])
        assert batch.depths is None or batch.depths[line, seen].tolist() == list(range(len(seen)))
        assert batch.tokens[line, seen].tolist() == trajectory.tokens[: len(seen)].tolist()
        assert target == trajectory.tokens[len(seen)] and advantage == inside[number]
        found[number].append(len(seen))
    assert found == {number: np.flatnonzero(rows[index].loss_mask).tolist() for number, index in enumerate(inside)}
    assert batch.where.tolist() == sorted(set(batch.where.tolist())), "the head sees a position once"
    assert mask is None or mask.any(axis=-1).all(), "padding sees itself: a softmax of nothing is not a number"


def test_a_position_is_predicted_once_for_each_temperature() -> None:
    rows = [row([1, 2, 3], 2), row([1, 2, 3], 2), replace(row([1, 2, 4], 2), temperature=0.5)]
    (((stack,),),) = [planned(rows, pairs=1e9)]
    batch = microbatch(stack, rows, np.ones(3))
    assert batch.where.tolist() == [1, 1] and batch.temperatures.tolist() == [0.5, 1.0]
    assert batch.tokens.tolist() == [[1, 2]] and batch.slots.tolist() == [0, 1, 1] and batch.targets.tolist() == [4, 3, 3]


def test_a_plan_is_a_function_of_the_rows_alone() -> None:
    rows = [each for number in range(5) for each in group_of([7, 7, number], [3, 9, 4, 6], number)]
    shuffled = np.random.default_rng(0).permutation(len(rows)).tolist()
    assert plan(shuffled, rows, 100, 2, PAIRS) == planned(rows, 100, 2)


# --- what it saves


def test_a_shared_prompt_is_computed_once() -> None:
    rows = group_of(list(range(40)), [5, 8, 3, 6])
    (((stack,),),) = [planned(rows)]
    assert [each.width for each in stack] == [40 + (5 + 8 + 3 + 6 - 4)]
    assert computed_frac([[[stack]]], rows) == pytest.approx(58 / (4 * 39 + 5 + 8 + 3 + 6))
    assert computed_frac([[[]]], rows) == 0


def test_groups_under_one_prefix_and_turns_after_one_answer_share_it() -> None:
    shots, answer = list(range(100, 130)), [5, 6, 7]
    first, second = [*shots, 1], [*shots, 2]
    rows = [
        row([*first, *answer, 8, 9, 1], 31), row([*first, *answer, 8, 9, 2, 3], 31), row([*first, 4, 4], 31),
        row([*second, *answer, 1], 31), row([*second, 4, 4], 31),
    ]  # fmt: skip
    (((stack,),),) = [planned(rows)]
    widths = [each.width for each in stack]
    assert widths == [30 + (1 + 3 + 2 + 1) + 1 + (1 + 3) + 1], (
        "shots, first with all its turns, its third row, second, its third"
    )


def test_equal_rows_are_computed_once() -> None:
    rows = group_of(list(range(20)), [4]) * 8
    assert [each.width for each in sequences(planned(rows))] == [23]


@pytest.mark.parametrize("seed", range(3))
def test_first_fit_decreasing_needs_fewer_sequences_than_first_fit(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2000, 6001, 60).tolist()
    rows = [
        replace(trajectory([0] * length + [1]), tokens=np.full(length + 1, index, dtype=np.int32))
        for index, length in enumerate(lengths)
    ]
    packed = pack(sort_contexts(list(range(60)), rows), 9216)
    assert sorted(index for each in packed for index in each.rows) == list(range(60))
    assert all(each.width == sum(lengths[index] for index in each.rows) <= 9216 for each in packed)
    bins: list[int] = []
    for length in lengths:
        chosen = next((number for number, filled in enumerate(bins) if filled + length <= 9216), len(bins))
        bins[chosen : chosen + 1] = [(bins[chosen] if chosen < len(bins) else 0) + length]
    assert len(packed) <= 0.96 * len(bins)


def test_siblings_stay_together_and_groups_go_where_they_share_most() -> None:
    rows = [
        each
        for number in range(12)
        for each in group_of([number % 2] * 20 + [number], [5, 6, 4, 7], number)
    ]  # fmt: skip
    for capacity in (45, 70):
        packed = pack(sort_contexts(list(range(48)), rows), capacity)
        homes = {index: number for number, each in enumerate(packed) for index in each.rows}
        for first in range(0, 48, 4):
            assert len({homes[first + index] for index in range(4)}) == 1
        for each in packed:
            assert each.width <= capacity and len({rows[index].tokens[0] for index in each.rows}) == 1


def test_a_group_larger_than_a_sequence_is_cut_and_a_row_larger_is_alone() -> None:
    rows = group_of(list(range(10)), [20, 30, 25, 90])
    packed = pack(sort_contexts([0, 1, 2, 3], rows), 60)
    assert sorted((each.rows, each.width) for each in packed) == [([0, 1], 58), ([2], 34), ([3], 99)]


# --- how it chooses


def test_without_anything_to_share_every_row_is_by_itself() -> None:
    rows = [row([100 * number + index for index in range(30)], 20) for number in range(16)]
    assert all(len(each.rows) == 1 for each in sequences(planned(rows)))


def test_what_attention_costs_more_is_weighed_against_what_is_shared() -> None:
    """Long answers after a short prompt: worth it only where a position is dear."""
    rows = [each for number in range(4) for each in group_of([number] * 8, [60] * 4)]
    assert all(len(each.rows) == 1 for each in sequences(planned(rows, pairs=100.0)))
    assert any(len(each.rows) > 1 for each in sequences(planned(rows, pairs=1e6)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_equally_much_to_do(ranks: int) -> None:
    draw = np.random.default_rng(ranks)
    rows = [each for number in range(16) for each in group_of([number] * 30, draw.integers(5, 40, 8).tolist(), number)]
    together, dealt = planned(rows, 2048, 1, 1000.0), planned(rows, 2048, ranks, 1000.0)
    assert cost(dealt, 1000.0) * ranks < 1.1 * cost(together, 1000.0)
    assert computed_frac([dealt], rows) < 0.6


def test_one_group_is_shared_out_when_there_are_more_ranks() -> None:
    rows = group_of(list(range(10)), [40] * 4)
    assert [sum(len(each.rows) for stack in rank for each in stack) for rank in planned(rows, ranks=2)] == [2, 2]


def test_less_rows_than_ranks_leave_some_without() -> None:
    assert [len(rank) for rank in planned(group_of([1, 2], [3]), ranks=3)] == [1, 0, 0]
    assert plan([], [], 10, 2, PAIRS) == [[], []]


# --- records and families


def recorded(made: Trajectory, changes: dict[int, int]) -> Trajectory:
    experts = np.zeros((len(made.tokens) - 1, 2, 2), dtype=np.uint8)
    for position, expert in changes.items():
        experts[position, 1, 0] = expert
    return replace(made, experts=experts)


def test_rows_share_a_position_only_up_to_where_their_records_differ() -> None:
    rows = group_of(list(range(10)), [3, 3, 3, 3])
    rows = [recorded(rows[0], {}), recorded(rows[1], {6: 1}), recorded(rows[2], {}), rows[3]]
    contexts = sort_contexts([0, 1, 2, 3], rows)
    assert dict(zip(contexts.rows, contexts.shared.tolist(), strict=True)) == {3: 0, 0: 0, 2: 10, 1: 6}
    ((stack,),) = planned(rows, pairs=1e9)
    batch = microbatch(stack, rows, np.ones(4))
    assert batch.experts is not None and batch.attention_mask is not None
    inside = [index for each in stack for index in each.rows]
    for number, slot in zip(batch.rows.tolist(), batch.slots.tolist(), strict=True):
        line, position = divmod(int(batch.where[slot]), batch.tokens.shape[1])
        seen = np.flatnonzero(batch.attention_mask[line, 0, position].numpy())
        expected = rows[inside[number]].experts
        found = batch.experts.view(*batch.tokens.shape, 2, 2)[line, seen].numpy()
        assert (found == (-1 if expected is None else expected[: len(seen)])).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layers of sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"model_type": "new"}, "family new is not known"),
        ({"_attn_implementation": "eager"}, "computed by eager, not by sdpa"),
    ],
)
def test_a_config_says_whether_rows_can_share(changes: dict[str, Any], reason: str | None) -> None:
    model_type = changes.pop("model_type", "qwen3")
    implementation = changes.pop("_attn_implementation", "sdpa")
    config = tiny_config("qwen3", **changes)
    config.model_type, config._attn_implementation = model_type, implementation
    found = why_not_shared(config)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


def test_a_sliding_window_without_kinds_of_layers_is_seen() -> None:
    config = tiny_config("qwen3_moe", use_sliding_window=True, sliding_window=8)
    assert "sliding window of 8" in (why_not_shared(config) or "")


def test_long_contexts_are_the_positions_before_the_last_sampled_token() -> None:
    assert context_length(trajectory([0, 1, 0, 1, 0])) == 3 and context_length(trajectory([0, 0])) == 0
