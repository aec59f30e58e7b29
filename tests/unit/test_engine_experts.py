"""What every engine records of a mixture's experts: those of the pass that computed a position, over turns, shared prompts,
released sessions and exchanges of weights. The k experts of a position come in the order of the engine's kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from miles_core.records import Version
from miles_core.rollout.engine import Engine, Finished, Request
from miles_core.routers import Experts
from tests.unit.contract_engines import ENGINES, V0, V1, V2, contract_model, make_engine
from tests.unit.engine_history import prompt
from tests.unit.tiny_models import MIXTURES, Kind

Make = Callable[[Kind], Engine]
Turns = list[tuple[tuple[int, ...], Finished]]


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes engines of one sort."""
    return functools.partial(make_engine, request.param, tmp_path_factory.getbasetemp(), end_id=-1)


def models_of(kind: Kind, *versions: Version) -> dict[Version, Any]:
    return {version: contract_model(kind, seed) for seed, version in enumerate(versions)}


class Play:
    """Sessions of an engine: what was appended and what was sampled, turn by turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[str, tuple[int, ...]] = {}
        self.turns: dict[str, Turns] = {}

    def ask(self, key: str, tokens: tuple[int, ...], limit: int, temperature: float = 1.0) -> None:
        self.asked[key] = tokens
        self.engine.add(Request(key, tokens, limit, temperature, seed=sum(key.encode())))

    def step(self) -> Iterator[str]:
        for turn in self.engine.step():
            self.turns.setdefault(turn.session_key, []).append((self.asked[turn.session_key], turn))
            yield turn.session_key

    def finish(self) -> None:
        while self.engine.running:
            for _ in self.step():
                pass

    def check(self, models: dict[Version, Any]) -> None:
        for turns in self.turns.values():
            tokens = [token for asked, turn in turns for token in (*asked, *turn.tokens.tolist())]
            parts = [turn.experts for _, turn in turns if turn.experts is not None]
            experts = np.concatenate(parts)
            assert experts.dtype == np.uint8 and experts.shape == (len(tokens) - 1, 2, 2)
            assert [len(part) for part in parts] == [
                len(asked) + len(turn.tokens) - (number == 0) for number, (asked, turn) in enumerate(turns)
            ]
            assert np.array_equal(np.sort(experts), np.sort(chosen(models, tokens, readers_of(turns))))


def readers_of(turns: Turns) -> list[Version]:
    """Which version computed each position: the one that sampled the token behind it, or the first behind a prompt."""
    readers: list[Version] = []
    for asked, turn in turns:
        readers += [turn.versions[0]] * (len(asked) - (not readers))
        readers += turn.versions
    return readers


@torch.no_grad()
def chosen(models: dict[Version, Any], tokens: list[int], readers: list[Version]) -> Experts:
    """[T - 1, layers, k] from the router logits that the library reports; each stretch by the version that read it."""
    cache, read, found = DynamicCache(), 0, []
    ends = [at for at in range(1, len(tokens)) if at == len(tokens) - 1 or readers[at] != readers[at - 1]]
    for end in ends:
        model = models[readers[read]]
        given = torch.tensor([tokens[read:end]])
        logits = model(given, past_key_values=cache, output_router_logits=True).router_logits
        found.append(torch.stack([torch.topk(layer, model.config.num_experts_per_tok).indices for layer in logits], dim=1))
        read = end
    return torch.cat(found).numpy()


def test_turns_of_a_full_batch(make: Make) -> None:
    play, rng = Play(make("qwen3_moe")), np.random.default_rng(0)
    waiting = [f"s{number}" for number in range(9)]
    while waiting or play.engine.running:
        while waiting and play.engine.free_slots:
            play.ask(waiting.pop(0), prompt(rng), int(rng.integers(1, 9)))
        for key in play.step():
            if len(play.turns[key]) < 3:
                play.ask(key, prompt(rng), int(rng.integers(1, 9)))
            else:
                play.engine.release(key)
    assert len(play.turns) == 9
    play.check(models_of("qwen3_moe", V0))


def test_prompts_that_others_have_read_and_conversations_that_branch(make: Make) -> None:
    """In one step, later, from a released session, and with what was sampled; prompts longer than blocks of a cache."""
    play, rng = Play(make("qwen3_moe")), np.random.default_rng(1)
    same = prompt(rng, 70, 71)
    for key in ("a", "b"):
        play.ask(key, same, 6)
    play.finish()
    play.ask("c", (*same[:40], 9, 9, 9), 6)
    play.finish()
    conversation = (*same, *play.turns["a"][0][1].tokens.tolist())
    for key in ("a", "c"):
        play.engine.release(key)
    play.ask("d", (*conversation, 8, 8), 10)
    play.ask("e", (*conversation, 7), 10)
    play.ask("b", (11, 12), 8)
    play.finish()
    assert play.engine.counts.reused_tokens > len(same), "prompts were read anew"
    play.check(models_of("qwen3_moe", V0))


def test_a_prompt_that_was_probed_before(make: Make) -> None:
    play = Play(make("qwen3_moe"))
    probed = prompt(np.random.default_rng(3), 70, 71)
    play.engine.logprobs([list(probed)])
    play.ask("a", (*probed, 7), 4)
    play.finish()
    play.check(models_of("qwen3_moe", V0))


@pytest.mark.parametrize("kind", MIXTURES)
def test_exchanges_in_the_middle_of_turns_and_what_is_read_anew_behind_them(make: Make, kind: Kind) -> None:
    """Behind each exchange two sessions read what was read before; of such twins the second may take it from the first."""
    play, rng, models = Play(make(kind)), np.random.default_rng(2), models_of(kind, V0, V1, V2)
    same = prompt(rng, 40, 41)

    def twins(name: str, tokens: tuple[int, ...]) -> None:
        for key in (f"{name}a", f"{name}b"):
            play.ask(key, tokens, 2)
            while key not in play.turns:
                list(play.step())
        for key in (f"{name}a", f"{name}b"):
            play.engine.release(key)

    play.ask("old", same, 30)
    for version in (V1, V2):
        twins(f"before{version.step}", same)
        play.engine.load_weights(models[version].state_dict(), version)
        twins(f"behind{version.step}", same)
    play.finish()
    ((_, turn),) = play.turns["old"]
    assert set(turn.versions) == {V0, V1, V2}
    twins("whole", (*same, *turn.tokens.tolist()))
    play.ask("old", (8, 9, 10), 4)
    play.finish()
    play.check(models)
