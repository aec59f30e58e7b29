"""What rollout records of a mixture's routers is what the model chose when it first computed each position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from miles_core.environments.base import Message
from miles_core.records import Version
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.session import Session
from miles_core.rollout.torch_engine import TorchEngine
from miles_core.routers import Experts, find_routers
from miles_core.trajectories.schema import Trajectory
from tests.unit.contract_engines import END, V0, V1, V2
from tests.unit.engine_history import prompt
from tests.unit.test_sampler import RENDERER, SPEC, Clock, FakeEnvironment, FakeEpisode, request, run, sampler_of
from tests.unit.tiny_models import tiny_model


def engine_of(model: Any, slots: int = 3, **settings: Any) -> TorchEngine:
    return TorchEngine(model, end_id=END, slots=slots, max_tokens=96, version=V0, record_experts=True, **settings)


def own_choices(model: Any, tokens: torch.Tensor, **inputs: Any) -> Experts:
    """[T, layers, k] from the router logits that the library reports, without this project's hooks."""
    with torch.no_grad():
        logits = model(tokens[None], output_router_logits=True, **inputs).router_logits
    return torch.stack([torch.topk(layer, model.config.num_experts_per_tok).indices for layer in logits], dim=1).numpy()


def play(engine: TorchEngine, keys: int, turns: int, swap: Any = None) -> dict[str, list[tuple[tuple[int, ...], Finished]]]:
    """Sessions of some turns each, a new one into every freed slot: what was appended and what was sampled, turn by turn."""
    rng, steps = np.random.default_rng(0), 0
    waiting = [f"s{number}" for number in range(keys)]
    asked: dict[str, tuple[int, ...]] = {}
    played: dict[str, list[tuple[tuple[int, ...], Finished]]] = {key: [] for key in waiting}

    def ask(key: str) -> None:
        asked[key] = prompt(rng)
        engine.add(Request(key, asked[key], int(rng.integers(1, 9)), 1.0, seed=sum(key.encode())))

    while waiting or engine.running:
        while waiting and engine.free_slots:
            ask(waiting.pop(0))
        for turn in engine.step():
            played[turn.session_key].append((asked[turn.session_key], turn))
            if len(played[turn.session_key]) < turns:
                ask(turn.session_key)
            else:
                engine.release(turn.session_key)
        steps += 1
        if swap is not None:
            swap(steps)
    return played


def joined(turns: list[tuple[tuple[int, ...], Finished]]) -> tuple[list[int], Experts]:
    tokens = [token for asked, turn in turns for token in (*asked, *turn.tokens.tolist())]
    return tokens, np.concatenate([turn.experts for _, turn in turns if turn.experts is not None])


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_record_is_the_models_own_choice_whatever_else_is_in_the_batch(slots: int) -> None:
    played = play(engine_of(tiny_model("qwen3_moe"), slots), keys=8, turns=3)
    reference = tiny_model("qwen3_moe")
    for turns in played.values():
        tokens, experts = joined(turns)
        assert experts.dtype == np.uint8 and experts.shape == (len(tokens) - 1, 2, 2)
        assert np.array_equal(experts, own_choices(reference, torch.tensor(tokens[:-1])))
        assert [len(turn.experts) for _, turn in turns] == [  # type: ignore[arg-type]
            len(asked) + len(turn.tokens) - (number == 0) for number, (asked, turn) in enumerate(turns)
        ]


def test_after_an_exchange_of_weights_the_record_is_of_the_version_that_computed() -> None:
    models = {V0: tiny_model("qwen3_moe"), V1: tiny_model("qwen3_moe", seed=1), V2: tiny_model("qwen3_moe", seed=2)}
    engine = engine_of(tiny_model("qwen3_moe"))

    def swap(steps: int) -> None:
        if steps in (4, 9):
            version = V1 if steps == 4 else V2
            engine.load_weights(models[version].state_dict(), version)

    mixed = 0
    for turns in play(engine, keys=6, turns=2, swap=swap).values():
        tokens, experts = joined(turns)
        readers = readers_of(turns)
        mixed += len(set(readers)) > 1
        cache, read = DynamicCache(), 0
        for position in [at for at in range(1, len(tokens)) if at == len(tokens) - 1 or readers[at] != readers[at - 1]]:
            part = torch.tensor(tokens[read:position])
            expected = own_choices(models[readers[read]], part, past_key_values=cache)
            assert np.array_equal(experts[read:position], expected)
            read = position
    assert mixed > 1, "no session met an exchange in the middle"


def readers_of(turns: list[tuple[tuple[int, ...], Finished]]) -> list[Version]:
    """Which version computed each position: the one that sampled the token behind it, or the first behind a prompt."""
    readers: list[Version] = []
    for asked, turn in turns:
        readers += [turn.versions[0]] * (len(asked) - (not readers))
        readers += turn.versions
    return readers


def test_dense_models_and_engines_that_are_not_asked_record_nothing() -> None:
    mixture = tiny_model("qwen3_moe")
    silent = TorchEngine(mixture, end_id=END, slots=1, max_tokens=96, version=V0)
    for engine in (engine_of(tiny_model("qwen3")), silent):
        assert all(turn.experts is None for turns in play(engine, keys=1, turns=2).values() for _, turn in turns)
    routers = find_routers(mixture)
    assert routers is not None and not any(module._forward_hooks for module in routers.modules)


def test_more_than_256_experts_take_two_bytes() -> None:
    model = tiny_model("qwen3_moe", num_experts=300, num_experts_per_tok=3)
    tokens, experts = joined(play(engine_of(model), keys=1, turns=2)["s0"])
    reference = tiny_model("qwen3_moe", num_experts=300, num_experts_per_tok=3)
    assert experts.dtype == np.uint16 and experts.max() > 255
    assert np.array_equal(experts, own_choices(reference, torch.tensor(tokens[:-1])))


def test_layers_without_experts_are_not_in_the_record() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    tokens, experts = joined(play(engine_of(model), keys=1, turns=1)["s0"])
    assert experts.shape == (len(tokens) - 1, 2, 2)


def talkative(bias: float) -> Any:
    """A mixture whose turns end by themselves now and then: its end token has a bias."""
    model = tiny_model("qwen3_moe", tie_word_embeddings=False)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[RENDERER.end_id] = bias
    model.lm_head = head
    return model


async def talk(episode: FakeEpisode, content: str) -> tuple[Message, ...]:
    return (Message("tool", "12 + 7"),) if len(episode.contents) < 3 else ()


async def test_trajectories_of_several_turns_and_cut_ones_have_a_row_for_each_token_but_the_last() -> None:
    sampler = sampler_of(
        engine_of(talkative(6.0), slots=6), FakeEnvironment({seed: FakeEpisode(talk) for seed in range(6)}),
        spec=SPEC.model_copy(update={"max_tokens": 96, "max_new_tokens": 12}),
    )  # fmt: skip
    for seed in range(6):
        sampler.submit(replace(request(f"{seed}/0", task_seed=seed), seed=seed))
    rows = await run(sampler)
    check_records(rows)
    assert {row.status for row in rows.values()} == {"complete", "truncated"}
    assert max(len([turn for turn in row.turns if turn.role == "assistant"]) for row in rows.values()) == 3


def check_records(rows: dict[str, Trajectory]) -> None:
    for row in rows.values():
        assert row.experts is not None
        assert np.array_equal(row.experts, own_choices(talkative(6.0), torch.from_numpy(row.tokens[:-1]).long()))


async def test_an_episode_that_breaks_off_before_its_last_tokens_were_read_has_no_record() -> None:
    clock = Clock()
    sampler = sampler_of(engine_of(talkative(9.0)), FakeEnvironment({1: FakeEpisode(talk)}), clock)
    sampler.submit(request("1/0", task_seed=1))
    while not (live := sampler._live["1/0"]).session.turns[1:] or live.session.ended or live.answer:
        assert not await sampler.tick()
    clock.now += SPEC.episode_deadline_s + 1
    (row,) = (await run(sampler)).values()
    assert row.status == "failed" and row.loss_mask[-1] == 0 and row.loss_mask.any() and row.experts is None


def test_a_record_of_other_positions_than_those_computed_is_refused() -> None:
    session = Session(RENDERER, (Message("user", "12 + 7 - 3 ="),), 200)
    opening = len(session.tokens)
    rows = np.zeros((opening + 2, 2, 2), np.uint8)
    for wrong in (rows[:-2], np.zeros((opening + 3, 2, 2), np.uint8)):
        with pytest.raises(ValueError, match=f"computed {opening + 1}"):
            session.record([20, RENDERER.end_id], [-1.0] * 2, [V0] * 2, wrong)
    assert len(session.tokens) == opening and session.columns()["experts"] is None
    session.record([20, RENDERER.end_id], [-1.0] * 2, [V0] * 2, rows[:-1])
    assert np.array_equal(session.columns()["experts"], rows[:-1])
    session.append((Message("tool", "1"),))
    assert session.columns()["experts"] is None, "nobody has read the answer yet"
    added = len(session.tokens) - opening - 2
    session.record([20], [-1.0], [V0], np.ones((added + 1, 2, 2), np.uint8))
    assert session.columns()["experts"].shape == (len(session.tokens) - 1, 2, 2)
