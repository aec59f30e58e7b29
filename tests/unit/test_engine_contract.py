"""What every engine promises (miles_core/rollout/engine.py), one suite for all of them: the cached, batched, exchanged and
resumed computation gives the tokens and logprobs of Hugging Face's own forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import MilesError
from miles_core.rollout.engine import Engine, Request
from tests.unit.contract_engines import END, ENGINES, MAX_TOKENS, SLOTS, V0, V1, V2, contract_model, make_engine
from tests.unit.engine_history import History, drain, prompt
from tests.unit.tiny_models import Kind

KINDS = ("qwen3_moe", "qwen3", "llama")
"""The mixture first: in one process vLLM makes the groups of experts with its first engine or never."""
EXACT = 1e-5
Make = Callable[..., Engine]


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes engines of one sort."""
    return functools.partial(make_engine, request.param, tmp_path_factory.getbasetemp())


@pytest.fixture(params=[name for name in ENGINES if name != "routed"])
def make_one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes engines that stand alone: behind the router one that raises is dead (test_router.py)."""
    return functools.partial(make_engine, request.param, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_forward_pass_over_turns_lengths_and_refills(make: Make, kind: Kind) -> None:
    history = History(make(kind))
    drain(history, [f"s{i}" for i in range(9)], np.random.default_rng(0), turns=3)
    assert len(history.sampled) == 9 and all(count == 3 for count in history.turns.values())
    reference = contract_model(kind)
    assert history.worst({V0: reference}) < EXACT
    for key, tokens in history.tokens.items():
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0].float() / (history.temperature[key] or 1.0)
        full = torch.log_softmax(logits, dim=-1)
        assert max(abs(float(full[at - 1, tokens[at]]) - logprob) for at, logprob, _ in history.sampled[key]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_weights_change_between_steps_and_every_token_names_its_version(make: Make, kind: Kind) -> None:
    history = History(make(kind))
    models = {V0: contract_model(kind), V1: contract_model(kind, seed=1), V2: contract_model(kind, seed=2)}

    def swap(steps: int) -> None:
        if steps in (4, 9):
            version = V1 if steps == 4 else V2
            history.engine.load_weights(models[version].state_dict(), version)
            assert history.engine.running, "the swap must meet turns in the middle"

    drain(history, [f"s{i}" for i in range(5)], np.random.default_rng(3), turns=2, swap=swap)
    assert history.worst(models) < EXACT
    versions = [[version for _, _, version in sampled] for sampled in history.sampled.values()]
    assert any(len(set(inside)) > 1 for inside in versions)
    assert all(inside == sorted(inside) for inside in versions)
    wrong = {version: models[V0] for version in models}
    assert history.worst(wrong) > 100 * EXACT, "the check must notice a version that did not sample"


def test_a_new_session_reads_nothing_that_older_weights_have_computed(make: Make) -> None:
    """One long prompt under three versions, by sessions begun before an exchange and behind it; one that was read under the
    first goes on under the last, with the keys it has."""
    history, models = (
        History(make()),
        {V0: contract_model("qwen3"), V1: contract_model("qwen3", 1), V2: contract_model("qwen3", 2)},
    )
    same = prompt(np.random.default_rng(7), 60, 61)
    history.ask("old", same, 4)
    for number, version in enumerate((V0, V1, V2)):
        if number:
            history.ask(f"early{number}", same, 3)
            history.engine.load_weights(models[version].state_dict(), version)
            history.finish()
            history.engine.release(f"early{number}")
        for twin in "ab":
            history.ask(f"{twin}{number}", same, 3)
            history.finish()
            history.engine.release(f"{twin}{number}")
    history.ask("old", (8, 9, 10), 4)
    history.finish()
    assert {version for _, _, version in history.sampled["old"]} == {V0, V2}
    assert history.worst(models) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_hugging_face_generate(make: Make, kind: Kind) -> None:
    history, reference, rng = History(make(kind)), contract_model(kind), np.random.default_rng(1)
    for key in "abc":
        history.ask(key, prompt(rng, 2), 16, temperature=0.0)
    prompts = {key: torch.tensor([tokens]) for key, tokens in history.tokens.items()}
    history.finish()
    for key, ids in prompts.items():
        mask = torch.ones_like(ids)
        expected = reference.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=END, pad_token_id=0
        )
        assert history.tokens[key] == expected[0].tolist()


def test_a_sample_does_not_depend_on_its_neighbours(make: Make) -> None:
    def run(crowd: int) -> list[int]:
        history, rng = History(make()), np.random.default_rng(2)
        own = prompt(rng, 5)
        for number in range(crowd):
            history.ask(f"n{number}", prompt(rng), 30)
            history.engine.step()
        history.ask("own", own, 30)
        while "own" not in history.turns:
            for turn in history.engine.step():
                history.take(turn)
        return history.tokens["own"]

    assert run(0) == run(3)


def test_prompts_that_do_not_fit_into_one_step_are_sampled_as_each_alone(make: Make) -> None:
    prompts = {key: prompt(np.random.default_rng(index), 70, 80) for index, key in enumerate("abcd")}

    def run(keys: str) -> History:
        history = History(make(end_id=-1))
        for key in keys:
            history.ask(key, prompts[key], 8)
        history.finish()
        return history

    crowd = run("abcd")
    assert crowd.worst({V0: contract_model("qwen3")}) < EXACT
    assert {key: run(key).tokens[key] for key in "abcd"} == crowd.tokens


def sampled_turns(engine: Engine, seeds: dict[str, int], temperatures: tuple[float, ...]) -> dict[str, list[list[int]]]:
    """The turns of sessions that differ by seed alone; one turn for each temperature."""
    turns: dict[str, list[list[int]]] = {key: [] for key in seeds}
    for temperature in temperatures:
        for key, seed in seeds.items():
            engine.add(Request(key, (8, 9, 10), 12, temperature, seed))
        while engine.running:
            for turn in engine.step():
                turns[turn.session_key].append(turn.tokens.tolist())
    return turns


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_samples_of_one_prompt_differ_by_seed_alone_and_a_later_turn_draws_anew(make: Make, first: float) -> None:
    turns = sampled_turns(make(end_id=6), {"a": 1, "b": 1, "c": 2, "d": -1}, (first, 1.0, 1.0))
    assert turns["a"] == turns["b"]
    assert len({tuple(found[1]) for found in turns.values()}) == 3
    assert len({tuple(found[0]) for found in turns.values()}) == (3 if first else 1)
    assert all(found[1] != found[2] for found in turns.values())


def test_a_turn_ends_at_its_limit_at_the_end_of_the_context_and_at_the_end_token(make: Make) -> None:
    engine = make(end_id=6)
    engine.add(Request("limit", (8, 9), 3, 1.0, 0))
    engine.add(Request("context", (8,) * (MAX_TOKENS - 4), 100, 1.0, 0))
    turns = {turn.session_key: turn for _ in range(6) for turn in engine.step()}
    assert {key: (len(turn.tokens), turn.reason) for key, turn in turns.items()} == {
        "limit": (3, "length"),
        "context": (4, "length"),
    }
    assert turns["limit"].tokens.dtype == np.int32 and turns["limit"].logprobs.dtype == np.float32
    ending = make(end_id=int(turns["limit"].tokens[1]))
    ending.add(Request("end", (8, 9), 3, 1.0, 0))
    (turn,) = [turn for _ in range(3) for turn in ending.step()]
    assert (len(turn.tokens), turn.reason) == (2, "end") and turn.tokens.tolist() == turns["limit"].tokens[:2].tolist()


def test_slots_are_counted_and_misuse_is_named(make: Make) -> None:
    engine = make()
    engine.add(Request("a", (8,), 8, 1.0, 0))
    assert (engine.free_slots, engine.running) == (SLOTS - 1, 1)
    with pytest.raises(ValueError, match="session a: its turn is still being sampled"):
        engine.add(Request("a", (8,), 8, 1.0, 0))
    for tokens, limit in (((), 4), ((8,) * MAX_TOKENS, 4), ((8,), 0)):
        with pytest.raises(ValueError, match="session b: cannot append"):
            engine.add(Request("b", tokens, limit, 1.0, 0))
    assert engine.free_slots == SLOTS - 1
    for number in range(1, SLOTS):
        engine.add(Request(f"b{number}", (8,), 8, 1.0, 0))
    with pytest.raises(ValueError, match=f"session c: all {SLOTS} slots are taken"):
        engine.add(Request("c", (8,), 8, 1.0, 0))
    engine.step()
    engine.release("a")
    assert (engine.free_slots, engine.running) == (1, SLOTS - 1)
    with pytest.raises(KeyError):
        engine.release("a")


def test_a_released_turn_is_never_heard_of_and_its_key_and_slot_serve_again(make: Make) -> None:
    history = History(make(end_id=6))
    for key in "abcd":
        history.ask(key, (8, 9, 10), 12)
    for _ in range(3):
        assert history.engine.step() == []
    history.engine.release("b")
    del history.tokens["b"]
    history.ask("b", (11, 12), 5)
    history.finish()
    assert {key: len(sampled) for key, sampled in history.sampled.items()} == {"a": 12, "b": 5, "c": 12, "d": 12}
    for key in "abcd":
        history.engine.release(key)
    assert history.engine.free_slots == SLOTS and history.engine.running == 0
    assert history.worst({V0: contract_model("qwen3")}) < EXACT


def test_an_idle_engine_steps_to_nothing(make: Make) -> None:
    engine = make()
    assert engine.step() == []
    engine.add(Request("a", (8,), 1, 1.0, 0))
    assert [turn.session_key for turn in engine.step()] == ["a"] and engine.step() == []


def test_weights_that_do_not_fit_are_named_and_change_nothing(make: Make) -> None:
    engine, weights = make(), contract_model("qwen3", seed=1).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    broken = {key: value for key, value in weights.items() if key != "model.norm.weight"}
    broken |= {"model.extra": torch.zeros(1), name: weights[name].bfloat16(), "lm_head.weight": weights["lm_head.weight"] + 1}
    before = engine.logprobs([[8, 9, 10]])[0]
    with pytest.raises(ValueError, match="nothing was changed") as refused:
        engine.load_weights(broken, V1)
    for part in (
        "missing: model.norm.weight",
        "unknown: model.extra",
        f"{name}: torch.bfloat16",
        "lm_head.weight: is tied",
        "4 faults",
    ):
        assert part in str(refused.value)
    assert engine.version == V0 and np.array_equal(engine.logprobs([[8, 9, 10]])[0], before)


@pytest.mark.parametrize("dropped", [(), ("lm_head.weight",), ("model.embed_tokens.weight",)])
def test_one_name_of_tied_weights_is_enough(make: Make, dropped: tuple[str, ...]) -> None:
    engine, model = make(), contract_model("qwen3", seed=1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
    engine.load_weights(weights, V1)
    assert engine.version == V1 and np.allclose(engine.logprobs([[8, 9, 10, 11]])[0], full(model, [8, 9, 10, 11]), atol=EXACT)


def full(model: Any, tokens: list[int], temperature: float = 1.0) -> Any:
    """Logprobs of the next tokens by the model itself."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float() / temperature, dim=-1)
    return logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:], dtype=torch.long)].numpy()


def test_full_logprobs_come_in_the_order_asked_for_and_leave_running_turns_where_they_are(make: Make) -> None:
    """A version is probed before it may sample: nothing else may go on meanwhile."""
    history, rng = History(make(end_id=6)), np.random.default_rng(5)
    for key in "abcd":
        history.ask(key, prompt(rng, 20, 30), 20)
    for _ in range(4):
        history.engine.step()
    lists = [list(prompt(rng, 1, 40)) for _ in range(20)] + [[8]]
    models = {V0: contract_model("qwen3"), V1: contract_model("qwen3", seed=1)}
    history.engine.load_weights(models[V1].state_dict(), V1)
    for tokens, values in zip(lists, history.engine.logprobs(lists), strict=True):
        assert values.dtype == np.float32 and np.allclose(values, full(models[V1], tokens), atol=EXACT, rtol=0)
    history.engine.load_weights(models[V0].state_dict(), V0)
    history.finish()
    assert {version for sampled in history.sampled.values() for _, _, version in sampled} == {V0}
    assert history.worst(models) < EXACT


def test_full_logprobs_do_not_wait_for_sessions_that_are_between_two_turns(make: Make) -> None:
    """Their tools may take longer than a version lives."""
    history, rng = History(make()), np.random.default_rng(7)
    model = contract_model("qwen3")
    for _ in range(2):
        for key in "abcd":
            history.ask(key, prompt(rng), 3)
        history.finish()
        tokens = [8, 9, 10, 11]
        assert np.allclose(history.engine.logprobs([tokens])[0], full(model, tokens), atol=EXACT, rtol=0)
    assert history.worst({V0: model}) < EXACT


def test_an_engine_recovers_from_weights_that_give_nothing_finite(make_one: Make) -> None:
    engine = make_one()
    good = {name: tensor.clone() for name, tensor in contract_model("qwen3").named_parameters()}
    engine.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}, V1)
    assert np.isnan(engine.logprobs([[8, 9, 10]])[0]).all(), "a probe must see it"
    engine.add(Request("a", (8, 9, 10, 11, 12), 4, 1.0, 0))
    with pytest.raises(MilesError, match=r"version .*step=1.* not finite, first in session a"):
        engine.step()
    engine.release("a")
    engine.load_weights(good, V2)
    history = History(engine)
    history.ask("b", (8, 9), 6)
    history.ask("c", (8,) * 12, 6)
    history.finish()
    assert history.worst({V2: contract_model("qwen3")}) < EXACT


def test_an_engine_in_bfloat16_casts_what_is_published_in_float32(make: Make) -> None:
    history, model = History(make("qwen3_moe", dtype="bfloat16")), contract_model("qwen3_moe", seed=1)
    history.engine.load_weights(model.state_dict(), V1)
    drain(history, list("abcdef"), np.random.default_rng(4), turns=2)
    gaps = []
    for key, tokens in history.tokens.items():
        values = full(model, tokens, history.temperature[key] or 1.0)
        gaps += [abs(float(values[at - 1]) - logprob) for at, logprob, _ in history.sampled[key]]
    assert 1e-4 < np.mean(gaps) < 0.1
    with pytest.raises(ValueError, match=r"torch\.bfloat16 .*, expected torch\.float32"):
        history.engine.load_weights(model.bfloat16().state_dict(), V2)
