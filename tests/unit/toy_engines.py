"""Engines without a model, for tests of what stands in front of them: a token is a hash of seed and position, and an engine
dies where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from miles_core.records import Version
from miles_core.rollout.engine import Counts, Finished, Request

END = 0
POINTS = ("add", "added", "step", "half", "stepped", "release", "load", "probe")
"""Where a Toy dies: before and behind each change, and `half`way through a step."""


class ToyDied(RuntimeError):
    """What a Toy raises when it dies."""


def toy_token(seed: int, position: int) -> int:
    """What is sampled at a position; one of nine is END."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{position}".encode()) % 9


def toy_turn(request: Request, used: int) -> list[int]:
    """The tokens of a turn behind `used` ones."""
    start, tokens = used + len(request.tokens), list[int]()
    while len(tokens) < request.max_new_tokens and tokens[-1:] != [END]:
        tokens.append(toy_token(request.seed, start + len(tokens)))
    return tokens


@dataclass
class _Held:
    total: int = 0
    told: int = 0
    """Positions whose experts were told."""
    turn: Request | None = None
    tokens: list[int] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)


class Toy:
    """A Member. `dies_at`: one of POINTS; `is_mute`: it does not tell of its turns once it died."""

    def __init__(self, slots: int, version: Version, name: str = "") -> None:
        self.name, self.version, self.counts = name, version, Counts()
        self.weights = 0.0
        self.held: dict[str, _Held] = {}
        self.dies_at: str | None = None
        self.is_mute = self.is_dead = self.is_closed = False
        self.misused: list[str] = []
        """What was asked of it after its end."""
        self._slots = slots

    def _reach(self, point: str) -> None:
        if self.is_dead:
            self.misused.append(point)
        if point == self.dies_at:
            self.is_dead = True
            raise ToyDied(f"{self.name} died at {point}")

    @property
    def free_slots(self) -> int:
        return self._slots - len(self.held)

    @property
    def running(self) -> int:
        return sum(held.turn is not None for held in self.held.values())

    def add(self, request: Request) -> None:
        held = self.held.get(request.session_key, _Held())
        if held.turn is not None or (request.session_key not in self.held and not self.free_slots) or not request.tokens:
            raise ValueError(f"{self.name} refuses {request}")
        self._reach("add")
        self.held[request.session_key] = held
        held.total += len(request.tokens)
        held.turn, held.tokens, held.versions = request, [], []
        self.counts += Counts(prompt_tokens=held.total)
        self._reach("added")

    def step(self) -> list[Finished]:
        self._reach("step")
        running = [key for key, held in self.held.items() if held.turn is not None]
        for number, key in enumerate(running):
            if number == len(running) // 2:
                self._reach("half")
            held = self.held[key]
            assert held.turn is not None
            held.tokens.append(toy_token(held.turn.seed, held.total + len(held.tokens)))
            held.versions.append(self.version)
        self._reach("stepped")
        turns = [turn for turn in map(self._turn, running) if turn.reason != "broken"]
        for turn in turns:
            held = self.held[turn.session_key]
            held.total, held.turn = held.total + len(turn.tokens), None
            held.told = held.total - 1
        return turns

    def so_far(self, session_key: str) -> Finished:
        if self.is_mute:
            raise ToyDied("says nothing")
        return self._turn(session_key)

    def _turn(self, key: str) -> Finished:
        held = self.held[key]
        assert held.turn is not None
        total = held.total + len(held.tokens)
        is_cut = len(held.tokens) == held.turn.max_new_tokens
        rows = range(held.told, max(held.told, total - 1))
        return Finished(
            key, np.array(held.tokens, np.int32), -np.arange(held.total, total, dtype=np.float32), tuple(held.versions),
            "end" if held.tokens[-1:] == [END] else "length" if is_cut else "broken",
            experts=np.array(rows, np.uint16).reshape(-1, 1, 1),
        )  # fmt: skip

    def release(self, session_key: str) -> None:
        self._reach("release")
        del self.held[session_key]

    def load_weights(self, tensors: dict[str, Any], version: Version) -> None:
        self._reach("load")
        if "weights" not in tensors:
            raise ValueError("weights refused")
        self.weights, self.version = tensors["weights"], version

    def logprobs(self, token_lists: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Any]:
        self._reach("probe")
        return [np.full(len(tokens) - 1, self.weights, np.float32) for tokens in token_lists]

    def close(self) -> None:
        self.is_closed = True
