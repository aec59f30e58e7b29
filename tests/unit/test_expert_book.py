"""The engine's side of vLLM's record of experts (miles_core/rollout/vllm_experts.py); the other needs vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.errors import MilesError
from miles_core.rollout.vllm_experts import ExpertBook
from miles_core.routers import Experts

BLOCK = 4


def rows(*values: int) -> Experts:
    """One layer, one expert a token."""
    return np.array(values, np.uint8).reshape(-1, 1, 1)


def told(book: ExpertBook, request_id: str, end: int, first: int = 0) -> list[int]:
    found: list[int] = book.of(request_id, first, end).ravel().tolist()
    return found


def test_a_prefix_of_the_cache_has_the_rows_of_who_computed_it_also_in_one_step_and_behind_its_end() -> None:
    book = ExpertBook(BLOCK)
    tokens = {"a": [*range(10)], "b": [*range(8), 99, 98]}
    for request_id in tokens:
        book.open(request_id)
    book.take([("b", 8, rows(80)), ("a", 0, rows(*range(9)))], tokens)
    assert told(book, "b", 9) == [*range(8), 80] and told(book, "a", 9, 3) == [3, 4, 5, 6, 7, 8]
    book.close("a")
    book.open("c")
    book.take([("c", 4, rows(40))], {"c": [*range(4), 97, 96]})
    assert told(book, "c", 5) == [0, 1, 2, 3, 40]


def test_what_nobody_saw_computed_is_named() -> None:
    book = ExpertBook(BLOCK)
    book.open("a")
    with pytest.raises(MilesError, match=r"a: vLLM computed it from position 4 on, .* from 0 on; set learner.routing_replay"):
        book.take([("a", 4, rows(1))], {"a": [*range(6)]})
    with pytest.raises(MilesError, match=r"a: experts are known up to position 0, asked for \[0, 5\)"):
        book.of("a", 0, 5)


def test_an_exchange_of_weights_ends_what_was_shared_and_older_sessions_share_nothing_more() -> None:
    book = ExpertBook(BLOCK)
    book.open("old")
    book.take([("old", 0, rows(*range(4)))], {"old": [*range(5)]})
    book.exchange()
    book.take([("old", 4, rows(4, 5, 6, 7))], {"old": [*range(9)]})
    book.open("new")
    with pytest.raises(MilesError, match="from position 8 on"):
        book.take([("new", 8, rows(1))], {"new": [*range(10)]})


def test_rows_of_guesses_that_were_not_kept_give_way_and_a_position_computed_again_keeps_its_row() -> None:
    book = ExpertBook(BLOCK)
    book.open("a")
    book.take([("a", 0, rows(0, 1, 2))], {"a": [*range(4)]})
    book.take([("a", 3, rows(3, 44, 55))], {"a": [*range(5)]})  # two guesses behind token 3, the first one was wrong
    book.take([("a", 4, rows(4))], {"a": [*range(6)]})
    book.take([("a", 0, rows(9, 9, 9, 9, 9, 5))], {"a": [*range(7)]})  # its blocks were taken away
    assert told(book, "a", 6) == [0, 1, 2, 3, 4, 5]
