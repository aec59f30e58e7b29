"""A beginning that sessions share is computed once, and no logprob tells; nothing is lent across an exchange of weights."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from miles_core.records import Version
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.torch_engine import PREFILL_TOKENS_PER_STEP, TorchEngine
from tests.unit.contract_engines import V2
from tests.unit.engine_history import History
from tests.unit.test_torch_engine import END, EXACT, V0, V1, engine_of
from tests.unit.tiny_models import Kind, tiny_model

KINDS = get_args(Kind)
LEAD = tuple(range(40, 70))
QUESTIONS = [tuple(range(100 + 10 * number, 106 + 10 * number)) for number in range(5)]


class Counted:
    """How many tokens an engine's model was fed."""

    def __init__(self, engine: TorchEngine) -> None:
        self.tokens = 0
        engine._model.base_model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.tokens += named["input_ids"].numel()


def play(history: History, groups: int, samples: int, swap: Any = None, turns: int = 1) -> None:
    """Groups of samples with one prompt each, all with the same lead; a new session into every freed slot."""
    engine, steps = history.engine, 0
    waiting = [(f"g{group}s{sample}", LEAD + QUESTIONS[group % 5]) for group in range(groups) for sample in range(samples)]
    while waiting or engine.running:
        while waiting and engine.free_slots:
            key, tokens = waiting.pop(0)
            history.ask(key, tokens, 1 + len(waiting) % 7, float(len(waiting) % 3 > 0))
        for turn in engine.step():
            history.take(turn)
            if history.turns[turn.session_key] < turns:
                history.ask(turn.session_key, (8, 9, 10), 3, history.temperature[turn.session_key])
            else:
                engine.release(turn.session_key)
        steps += 1
        if swap:
            swap(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prompt_is_read_once_and_equals_a_forward_pass_of_each(kind: Kind) -> None:
    history = History(engine_of(kind, slots=6))
    fed = Counted(history.engine)
    play(history, groups=5, samples=4, turns=2)
    assert len(history.sampled) == 20 and history.worst({V0: tiny_model(kind)}) < EXACT
    sampled = sum(len(tokens) for tokens in history.sampled.values())
    # The lead once, each question but its newest token once; what each session reads itself: that token, turns and samples.
    shared, own = len(LEAD) + 5 * (len(QUESTIONS[0]) - 1), 20 * (1 + 3) + sampled - 20
    assert fed.tokens == shared + own


def test_greedy_tokens_are_those_of_sessions_that_run_alone() -> None:
    together = History(engine_of(slots=6))
    for number, question in enumerate([*QUESTIONS, QUESTIONS[0]]):
        together.ask(f"s{number}", LEAD + question, 12, 0.0)
    while together.engine.running:
        for turn in together.engine.step():
            together.take(turn)
    for number, question in enumerate(QUESTIONS):
        alone = History(engine_of(slots=1))
        alone.ask("s", LEAD + question, 12, 0.0)
        while alone.engine.running:
            for turn in alone.engine.step():
                alone.take(turn)
        assert together.tokens[f"s{number}"] == alone.tokens["s"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_other_weights_computed_is_lent(kind: Kind) -> None:
    history = History(engine_of(kind, slots=4))
    models = {V0: tiny_model(kind), V1: tiny_model(kind, seed=1), V2: tiny_model(kind, seed=2)}

    def swap(steps: int) -> None:
        if steps in (2, 7):
            version = V1 if steps == 2 else V2
            history.engine.load_weights(models[version].state_dict(), version)
            assert history.engine.running

    play(history, groups=5, samples=5, swap=swap)
    assert history.worst(models) < EXACT
    assert {version for sampled in history.sampled.values() for _, _, version in sampled} == models.keys()


def test_sessions_that_waited_for_another_one_read_for_themselves_when_the_weights_change_in_between() -> None:
    history = History(engine_of(slots=4))
    fed = Counted(history.engine)
    for key in "abcd":
        history.ask(key, LEAD + QUESTIONS[0], 3)
    for turn in history.engine.step():
        history.take(turn)
    assert fed.tokens == 36, "one reads for all four"
    models = {V0: tiny_model(), V1: tiny_model(seed=1)}
    history.engine.load_weights(models[V1].state_dict(), V1)
    while history.engine.running:
        for turn in history.engine.step():
            history.take(turn)
    assert history.worst(models) < EXACT
    # b reads again for b, c and d; a only decodes.
    assert fed.tokens == 36 + 36 + 2 + 3 * 2 + 2


def test_a_lender_may_leave_and_its_slot_lends_until_it_is_taken() -> None:
    engine = engine_of(slots=2)
    fed = Counted(engine)
    engine.add(Request("a", LEAD, 4, 1.0, 0))
    engine.step()
    engine.release("a")
    history = History(engine)
    history.ask("own", (*LEAD, 7), 1)  # the slot that held it
    history.ask("other", (*LEAD, 8), 1)
    fed.tokens = 0
    for turn in engine.step():
        history.take(turn)
    assert fed.tokens == 2 and len(history.sampled) == 2
    assert history.worst({V0: tiny_model()}) < EXACT


def test_short_beginnings_in_common_keep_nobody_waiting() -> None:
    engine = engine_of(slots=4)
    for number in range(4):
        engine.add(Request(f"s{number}", (8, 9, *range(20 + 10 * number, 30 + 10 * number)), 1, 1.0, 0))
    assert len(engine.step()) == 4


def test_the_budget_of_a_step_is_of_tokens_that_are_computed() -> None:
    engine = engine_of(slots=20, max_tokens=200)
    for number in range(20):
        engine.add(Request(f"s{number}", (*range(10, 160), 200 + number), 2, 1.0, 0))
    assert 5 * PREFILL_TOKENS_PER_STEP < 20 * 151
    assert (len(engine.step()), len(engine.step())) == (0, 1)
    assert engine.running == 19


def test_a_session_that_left_unread_lends_nothing() -> None:
    """A session that was released before it read anything, and the next one in its slot with another prompt."""
    history = History(engine_of(slots=2))
    history.engine.add(Request("gone", LEAD + QUESTIONS[0], 3, 1.0, 0))
    history.engine.release("gone")
    history.ask("a", LEAD[:20] + QUESTIONS[1], 3)
    history.ask("b", LEAD + QUESTIONS[0], 3)
    while history.engine.running:
        for turn in history.engine.step():
            history.take(turn)
    assert history.worst({V0: tiny_model()}) < EXACT


def test_copied_positions_name_the_experts_of_the_pass_that_computed_them() -> None:
    model = tiny_model("qwen3_moe")
    engine = TorchEngine(model, end_id=END, slots=4, max_tokens=96, version=Version(0, 0), record_experts=True)
    prompts = [LEAD + QUESTIONS[0], LEAD + QUESTIONS[0], LEAD + QUESTIONS[1], LEAD[:25] + QUESTIONS[2]]
    for number, tokens in enumerate(prompts):
        engine.add(Request(f"s{number}", tokens, 4, 1.0, number))
    turns: dict[str, Finished] = {}
    while engine.running:
        turns |= {turn.session_key: turn for turn in engine.step()}
    reference = tiny_model("qwen3_moe")
    for number, tokens in enumerate(prompts):
        turn = turns[f"s{number}"]
        whole = torch.tensor([[*tokens, *turn.tokens.tolist()[:-1]]])
        with torch.no_grad():
            layers = reference(whole, output_router_logits=True, past_key_values=DynamicCache()).router_logits
        chosen = torch.stack([torch.topk(layer, 2).indices for layer in layers], dim=1).numpy()
        assert turn.experts is not None
        assert np.array_equal(np.sort(turn.experts, axis=-1), np.sort(chosen, axis=-1))
