"""Explicit-state exploration: every state that a model can reach, breadth first, and from which of them it cannot end well.

A model's moves ask the code's own decision functions. Its records are the real ones, each interned as a small number, so that
a state is a few tuples of numbers; and what one attempt decides depends only on what it knows, so it is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from miles_core.records import digest_record
from miles_core.store.follow import Delivered

S = TypeVar("S", bound=Hashable)
A = TypeVar("A")


class Words:
    """Records of attempts, as numbers. A stream's bytes are its records: each is one long."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}
        self._items: list[Delivered] = []

    def number(self, attempt: int, record: Any) -> int:
        """The same for an equal record of the same attempt."""
        key = (attempt, digest_record(record))
        if key not in self._numbers:
            self._numbers[key] = len(self._items)
            self._items.append(Delivered(attempt, 0, record))
        return self._numbers[key]

    def record(self, number: int) -> Any:
        return self._items[number].record

    def items(self, numbers: Iterable[int]) -> list[Delivered]:
        """As a reader delivers them."""
        return [self._items[number] for number in numbers]


@dataclass
class Explored(Generic[S, A]):
    """All reachable states, with the action that first led there."""

    came_by: dict[S, tuple[S, A] | None]
    broken: dict[str, S]
    trapped: list[S]

    def path(self, state: S) -> list[A]:
        """A shortest way to a state."""
        found: list[A] = []
        while (step := self.came_by[state]) is not None:
            state, action = step
            found.append(action)
        return found[::-1]

    def check(self) -> None:
        """Nothing is broken, and there is no dead end."""
        assert {what: self.path(state) for what, state in self.broken.items()} == {}
        assert [self.path(state) for state in self.trapped[:1]] == []


def explore(
    start: S,
    moves: Callable[[S], Iterable[tuple[A, S, bool]]],
    violations: Callable[[S], Iterable[str]],
    is_complete: Callable[[S], bool],
    *,
    until_broken: bool = False,
) -> Explored[S, A]:
    """Breadth first. `moves`: (action, the state behind it, whether somebody will surely do it if nothing else happens).

    Trapped: states from which the moves that surely come cannot complete the run.
    """
    came_by: dict[S, tuple[S, A] | None] = {start: None}
    queue, broken = [start], dict[str, S]()
    alive_from: dict[S, list[S]] = {}
    for state in queue:
        for violation in violations(state):
            broken.setdefault(violation, state)
        if broken and until_broken:
            return Explored(came_by, broken, [])
        for action, following, is_sure in moves(state):
            if following not in came_by:
                came_by[following] = (state, action)
                queue.append(following)
            if is_sure:
                alive_from.setdefault(following, []).append(state)
    live = {state for state in queue if is_complete(state)}
    spread = list(live)
    for state in spread:
        for before in alive_from.get(state, ()):
            if before not in live:
                live.add(before)
                spread.append(before)
    return Explored(came_by, broken, [state for state in queue if state not in live])
