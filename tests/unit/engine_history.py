"""What a test asked an engine for and got, and the reference that it is compared with: Hugging Face's own forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from miles_core.records import Version
from miles_core.rollout.engine import Engine, Finished, Request


def prompt(rng: np.random.Generator, low: int = 1, high: int = 20) -> tuple[int, ...]:
    """A few ordinary tokens."""
    return tuple(rng.integers(7, 300, rng.integers(low, high)).tolist())


class History:
    """Per session: its tokens, and position, logprob and version of each sampled one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.sampled: dict[str, list[tuple[int, float, Version]]] = {}
        self.temperature: dict[str, float] = {}
        self.turns: dict[str, int] = {}

    def ask(self, key: str, tokens: tuple[int, ...], limit: int, temperature: float = 1.0) -> None:
        self.engine.add(Request(key, tokens, limit, temperature, seed=sum(key.encode())))
        self.tokens.setdefault(key, []).extend(tokens)
        self.temperature[key] = temperature

    def take(self, turn: Finished) -> None:
        tokens, sampled = self.tokens[turn.session_key], self.sampled.setdefault(turn.session_key, [])
        for token, logprob, version in zip(turn.tokens.tolist(), turn.logprobs.tolist(), turn.versions, strict=True):
            sampled.append((len(tokens), logprob, version))
            tokens.append(token)
        self.turns[turn.session_key] = self.turns.get(turn.session_key, 0) + 1

    def finish(self) -> None:
        """Steps until no turn runs."""
        while self.engine.running:
            for turn in self.engine.step():
                self.take(turn)

    def worst(self, models: dict[Version, Any]) -> float:
        """Largest difference to a forward pass that feeds each stretch of tokens to the version that read it."""
        return max(self._worst(key, models) for key in self.sampled)

    @torch.no_grad()
    def _worst(self, key: str, models: dict[Version, Any]) -> float:
        tokens, temperature = torch.tensor([self.tokens[key]]), self.temperature[key] or 1.0
        cache, read, worst = DynamicCache(), 0, 0.0
        for position, logprob, version in self.sampled[key]:
            logits = models[version](tokens[:, read:position], past_key_values=cache).logits[0, -1]
            expected = torch.log_softmax(logits.float() / temperature, dim=-1)[tokens[0, position]]
            worst, read = max(worst, abs(float(expected) - logprob)), position
        return worst


def drain(history: History, waiting: list[str], rng: np.random.Generator, turns: int, swap: Any = None) -> int:
    """Runs all waiting sessions of `turns` turns through the engine, a new one into every freed slot; returns the steps."""
    engine, steps = history.engine, 0
    while waiting or engine.running:
        while waiting and engine.free_slots:
            key = waiting.pop(0)
            history.ask(key, prompt(rng), int(rng.integers(1, 12)), float(rng.choice([0.0, 0.7, 1.0, 1.3])))
        for turn in engine.step():
            history.take(turn)
            if history.turns[turn.session_key] < turns:
                history.ask(turn.session_key, prompt(rng, 1, 6), int(rng.integers(1, 8)), history.temperature[turn.session_key])
            else:
                engine.release(turn.session_key)
        steps += 1
        if swap:
            swap(steps)
    return steps
