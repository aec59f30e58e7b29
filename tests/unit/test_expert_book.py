"""The engine's side of vLLM's record of experts (miles_core/rollout/vllm_experts.py); the other needs vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_core.rollout.vllm_experts import ExpertBook, Rows
from miles_core.routers import Experts

BLOCK = 4


def rows(*values: int) -> Experts:
    """One layer, one expert a token."""
    return np.array(values, np.uint8).reshape(-1, 1, 1)


class Step:
    """What a book is given, and what it tells."""

    def __init__(self) -> None:
        self.book = ExpertBook(9, BLOCK)
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}

    def open(self, request_id: str, *blocks: int) -> None:
        self.book.open(request_id)
        self.blocks[request_id] = [*blocks]

    def take(self, *step: Rows, **tokens: int) -> None:
        self.tokens |= tokens
        self.book.take(step, self.tokens.__getitem__, lambda request_id, first, last: self.blocks[request_id][first:last])

    def told(self, request_id: str, end: int, first: int = 0) -> list[int]:
        found: list[int] = self.book.of(request_id, first, end).ravel().tolist()
        return found


def test_a_prefix_from_the_cache_has_the_rows_of_who_computed_it_also_in_one_step_and_behind_its_end() -> None:
    step = Step()
    step.open("a", 3, 1, 5)
    step.open("b", 3, 1, 7)
    step.take(("b", 8, rows(80)), ("a", 0, rows(*range(9))), ("unknown", 0, rows(7)), a=10, b=10)
    assert step.told("b", 9) == [*range(8), 80] and step.told("a", 9, 3) == [3, 4, 5, 6, 7, 8]
    step.book.close("a")
    step.open("c", 3, 8)
    step.take(("c", 4, rows(40)), c=6)
    assert step.told("c", 5) == [0, 1, 2, 3, 40]


def test_rows_that_nobody_has_are_named() -> None:
    step = Step()
    step.open("a", 0)
    step.take()
    with pytest.raises(MilesError, match=r"a: experts are known up to position 0, asked for \[0, 5\)"):
        step.told("a", 5)


def test_a_block_that_was_given_to_another_session_leaves_the_rows_of_the_first() -> None:
    step = Step()
    step.open("a", 2)
    step.take(("a", 0, rows(0, 1, 2)), a=4)
    step.open("b", 2)
    step.take(("b", 0, rows(9, 8, 7)), b=4)
    assert step.told("a", 3) == [0, 1, 2] and step.told("b", 3) == [9, 8, 7]


def test_rows_of_guesses_that_were_not_kept_give_way_and_a_position_computed_again_keeps_its_row() -> None:
    step = Step()
    step.open("a", 4, 6)
    step.take(("a", 0, rows(0, 1, 2)), a=4)
    step.take(("a", 3, rows(3, 44, 55)), a=5)  # two guesses behind token 3, the first one was wrong
    step.take(("a", 4, rows(4)), a=6)
    step.take(("a", 0, rows(9, 9, 9, 9, 9, 5)), a=7)  # its blocks were taken away
    assert step.told("a", 6) == [0, 1, 2, 3, 4, 5]
