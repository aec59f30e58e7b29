"""The engine's cached, packed, continuously batched logprobs are those of Hugging Face's own forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from miles_core.errors import DigestMismatch, MilesError, RecipeError
from miles_core.policy.manifest import PROBE_TOLERANCE, PolicyManifest, Probe, probe_dtype, probe_prompts
from miles_core.policy.reader import check_probe
from miles_core.records import Version
from miles_core.rollout.engine import Finished, Request
from miles_core.rollout.torch_engine import PREFILL_TOKENS_PER_STEP, TorchEngine, sample, uniforms
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model, tiny_tokenizer

KINDS = get_args(Kind)
END = tiny_tokenizer().eos_token_id
V0, V1, V2 = Version(0, 0), Version(1, 1), Version(2, 1)
EXACT = 1e-5


def engine_of(kind: Kind = "qwen3", slots: int = 3, max_tokens: int = 96, end_id: int = END) -> TorchEngine:
    return TorchEngine(tiny_model(kind), end_id=end_id, slots=slots, max_tokens=max_tokens, version=V0)


def prompt(rng: np.random.Generator, low: int = 1, high: int = 20) -> tuple[int, ...]:
    return tuple(rng.integers(7, 300, rng.integers(low, high)).tolist())


class History:
    """What a test asked for and got, per session."""

    def __init__(self, engine: TorchEngine) -> None:
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


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_a_full_forward_pass_over_turns_lengths_and_refills(kind: Kind) -> None:
    history = History(engine_of(kind))
    drain(history, [f"s{i}" for i in range(9)], np.random.default_rng(0), turns=3)
    assert len(history.sampled) == 9 and all(count == 3 for count in history.turns.values())
    reference = tiny_model(kind)
    assert history.worst({V0: reference}) < EXACT
    for key, tokens in history.tokens.items():
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0].float() / (history.temperature[key] or 1.0)
        full = torch.log_softmax(logits, dim=-1)
        assert max(abs(float(full[at - 1, tokens[at]]) - logprob) for at, logprob, _ in history.sampled[key]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_weights_change_between_steps_and_every_token_names_its_version(kind: Kind) -> None:
    history = History(engine_of(kind))
    models = {V0: tiny_model(kind), V1: tiny_model(kind, seed=1), V2: tiny_model(kind, seed=2)}

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


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_hugging_face_generate(kind: Kind) -> None:
    history, reference, rng = History(engine_of(kind)), tiny_model(kind), np.random.default_rng(1)
    for key in "abc":
        history.ask(key, prompt(rng, 2), 16, temperature=0.0)
    prompts = {key: torch.tensor([tokens]) for key, tokens in history.tokens.items()}
    while history.engine.running:
        for turn in history.engine.step():
            history.take(turn)
    for key, ids in prompts.items():
        mask = torch.ones_like(ids)
        expected = reference.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=END, pad_token_id=0
        )
        assert history.tokens[key] == expected[0].tolist()


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    def run(crowd: int, slots: int) -> list[int]:
        history, rng = History(engine_of(slots=slots)), np.random.default_rng(2)
        own = prompt(rng, 5)
        for number in range(crowd):
            history.ask(f"n{number}", prompt(rng), 30)
            history.engine.step()
        history.ask("own", own, 30)
        while "own" not in history.turns:
            for turn in history.engine.step():
                history.take(turn)
        return history.tokens["own"]

    assert run(0, 1) == run(3, 4) == run(6, 8)


def test_samples_of_one_prompt_differ_by_seed_alone() -> None:
    engine = engine_of(slots=5)
    for number, seed in enumerate([1, 1, 2, 3, -1]):
        engine.add(Request(f"s{number}", (8, 9, 10), 12, 1.0, seed))
    turns: dict[str, tuple[int, ...]] = {}
    while engine.running:
        turns |= {turn.session_key: tuple(turn.tokens.tolist()) for turn in engine.step()}
    assert turns["s0"] == turns["s1"] and len(set(turns.values())) == 4


def test_the_draw_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0]])
    count = 20_000
    uniform = (np.arange(count) + 0.5) / count
    for temperature in (1.0, 0.5):
        tokens, logprobs = sample(logits.expand(count, -1), np.full(count, temperature, dtype=np.float32), uniform)
        expected = torch.softmax(logits[0] / temperature, dim=-1)
        assert np.allclose(np.bincount(tokens, minlength=4) / count, expected, atol=1e-4)
        assert np.allclose(logprobs, expected.log()[tokens], atol=1e-6) and logprobs.dtype == np.float32
    edges = np.array([0.0, 1 - 2.0**-48])
    tokens, _ = sample(torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1), np.ones(2, dtype=np.float32), edges)
    assert tokens.tolist() == [1, 1]


def test_the_hash_is_even_and_differs_by_seed_and_position() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == len(values) and values.min() >= 0 and values.max() < 1
    assert np.abs(np.histogram(values, bins=20, range=(0, 1))[0] / len(values) - 0.05).max() < 0.005


def test_reading_long_prompts_never_stalls_a_decoding_row() -> None:
    history = History(engine_of(slots=8, max_tokens=200, end_id=-1))
    history.ask("decodes", (8, 9), 6)
    history.engine.step()
    for number in range(7):
        history.ask(f"reads{number}", tuple(range(10 + number, 170 + number)), 4)
    assert 2 * PREFILL_TOKENS_PER_STEP < 7 * 160
    finished: list[set[str]] = []
    for _ in range(6):
        turns = history.engine.step()
        finished.append({turn.session_key for turn in turns})
        for turn in turns:
            history.take(turn)
    # Three prompts are read per step, in the order of arrival, and four tokens follow.
    assert finished == [set()] * 3 + [{"reads0", "reads1", "reads2"}, {"decodes", "reads3", "reads4", "reads5"}, {"reads6"}]
    assert history.worst({V0: tiny_model()}) < EXACT


def test_a_prompt_longer_than_the_budget_of_a_step_is_read_whole() -> None:
    model = tiny_model(max_position_embeddings=1024)
    engine = TorchEngine(model, end_id=-1, slots=2, max_tokens=700, version=V0)
    history = History(engine)
    history.ask("long", tuple(range(10, 300)) * 2, 1)
    assert len(history.tokens["long"]) > PREFILL_TOKENS_PER_STEP
    (turn,) = engine.step()
    history.take(turn)
    assert history.worst({V0: tiny_model(max_position_embeddings=1024)}) < EXACT


def test_a_turn_ends_at_its_limit_at_the_end_of_the_context_and_at_the_end_token() -> None:
    engine = engine_of(max_tokens=16, end_id=-1)
    engine.add(Request("limit", (8, 9), 3, 1.0, 0))
    engine.add(Request("context", (8,) * 12, 100, 1.0, 0))
    turns = {turn.session_key: turn for _ in range(4) for turn in engine.step()}
    assert {key: (len(turn.tokens), turn.reason) for key, turn in turns.items()} == {
        "limit": (3, "length"),
        "context": (4, "length"),
    }
    ending = engine_of(end_id=int(turns["limit"].tokens[1]))
    ending.add(Request("end", (8, 9), 3, 1.0, 0))
    (turn,) = [turn for _ in range(2) for turn in ending.step()]
    assert (len(turn.tokens), turn.reason) == (2, "end")


def test_slots_are_counted_and_misuse_is_named() -> None:
    engine = engine_of(slots=2, max_tokens=16)
    engine.add(Request("a", (8,), 8, 1.0, 0))
    assert (engine.free_slots, engine.running) == (1, 1)
    with pytest.raises(ValueError, match="session a: its turn is still being sampled"):
        engine.add(Request("a", (8,), 8, 1.0, 0))
    for tokens, limit in (((), 4), ((8,) * 16, 4), ((8,), 0)):
        with pytest.raises(ValueError, match="session b: cannot append"):
            engine.add(Request("b", tokens, limit, 1.0, 0))
    assert engine.free_slots == 1
    engine.add(Request("b", (8,), 8, 1.0, 0))
    with pytest.raises(ValueError, match="session c: all 2 slots are taken"):
        engine.add(Request("c", (8,), 8, 1.0, 0))
    engine.step()
    engine.release("a")
    assert (engine.free_slots, engine.running) == (1, 1)
    with pytest.raises(KeyError):
        engine.release("a")


def test_an_idle_engine_steps_to_nothing() -> None:
    assert engine_of().step() == []


def test_weights_that_do_not_fit_are_named_and_change_nothing() -> None:
    engine, weights = engine_of(), tiny_model(seed=1).state_dict()
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


def test_published_weights_are_cast_to_the_dtype_the_engine_computes_in() -> None:
    model = tiny_model("qwen3_moe").bfloat16()
    engine = TorchEngine(model, end_id=END, slots=1, max_tokens=16, version=V0, weights_dtype="float32")
    published = tiny_model("qwen3_moe", seed=1)
    engine.load_weights(published.state_dict(), V1)
    expected = TorchEngine(published.bfloat16(), end_id=END, slots=1, max_tokens=16, version=V1).logprobs([[8, 9, 10]])[0]
    assert model.dtype == torch.bfloat16 and np.array_equal(engine.logprobs([[8, 9, 10]])[0], expected)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 .*, expected torch\.float32"):
        engine.load_weights(published.state_dict(), V2)


def test_a_coarser_engine_passes_the_probe_of_its_own_weights_alone() -> None:
    vocabulary = tiny_model().config.vocab_size
    prompts = probe_prompts(vocabulary)

    def answers(seed: int, dtype: torch.dtype) -> list[Any]:
        model = tiny_model("qwen3_moe", seed).to(dtype)
        engine = TorchEngine(model, end_id=END, slots=1, max_tokens=16, version=V0)
        return engine.logprobs([list(tokens) for tokens in prompts])

    dtype = probe_dtype("float32", "bfloat16")
    assert dtype == probe_dtype("bfloat16", "float32") == "bfloat16" and probe_dtype("float32", "float32") == "float32"
    learner = tuple(tuple(values.tolist()) for values in answers(0, torch.float32))
    probe = Probe(prompts=prompts, logprobs=learner, dtype=dtype, tolerance=PROBE_TOLERANCE[dtype])
    manifest = PolicyManifest(
        run_id="r", version=V1, weights_digest="", files=(), tensors=(), probe=probe, learner_token=""
    )  # fmt: skip
    assert 0 < check_probe(manifest, answers(0, torch.bfloat16)) < PROBE_TOLERANCE[dtype] / 2
    with pytest.raises(DigestMismatch, match=r"by a mean .* nats, tolerance 0\.4"):
        check_probe(manifest, answers(1, torch.bfloat16))


@pytest.mark.parametrize("dropped", [(), ("lm_head.weight",), ("model.embed_tokens.weight",)])
def test_one_name_of_tied_weights_is_enough(dropped: tuple[str, ...]) -> None:
    engine, model = engine_of(), tiny_model(seed=1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
    engine.load_weights(weights, V1)
    expected = TorchEngine(model, end_id=END, slots=1, max_tokens=16, version=V1).logprobs([[8, 9, 10]])[0]
    assert engine.version == V1 and np.array_equal(engine.logprobs([[8, 9, 10]])[0], expected)


def test_an_engine_recovers_from_weights_that_give_nothing_finite() -> None:
    engine = engine_of(slots=2)
    good = {name: tensor.clone() for name, tensor in tiny_model().named_parameters()}
    engine.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}, V1)
    engine.add(Request("a", (8, 9, 10, 11, 12), 4, 1.0, 0))
    with pytest.raises(MilesError, match=r"version .*step=1.* not finite, first in session a"):
        engine.step()
    engine.release("a")
    engine.load_weights(good, V2)
    history = History(engine)
    # "b" takes the slot "a" left; beside a longer row, the keys "a" left behind are in its sight, if masked.
    history.ask("b", (8, 9), 6)
    history.ask("c", (8,) * 12, 6)
    while engine.running:
        for turn in engine.step():
            history.take(turn)
    assert history.worst({V2: tiny_model()}) < EXACT


def test_full_logprobs_come_in_the_order_asked_for() -> None:
    engine, reference, rng = engine_of(), tiny_model(), np.random.default_rng(5)
    lists = [list(prompt(rng, 1, 40)) for _ in range(40)] + [[8]]
    for temperature in (1.0, 0.5):
        for tokens, values in zip(lists, engine.logprobs(lists, temperature), strict=True):
            with torch.no_grad():
                full = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float() / temperature, dim=-1)
            expected = full[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:], dtype=torch.long)]
            assert values.dtype == np.float32 and np.allclose(values, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_folder_is_loaded_in_the_recipes_dtype(tmp_path: Path, dtype: str) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    history = History(TorchEngine.from_folder(folder, dtype=dtype, end_id=END, slots=2, max_tokens=64, version=V0))
    history.ask("a", (8, 9, 10), 12)
    while history.engine.running:
        for turn in history.engine.step():
            history.take(turn)
    full = history.engine.logprobs([history.tokens["a"]])[0]
    bound = EXACT if dtype == "float32" else 0.2
    assert max(abs(float(full[at - 1]) - logprob) for at, logprob, _ in history.sampled["a"]) < bound


@pytest.mark.parametrize(
    ("model", "max_tokens", "says"),
    [
        (lambda: tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=1), 64, "full attention only"),
        (tiny_model, 257, "max_position_embeddings=256; lower it"),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)), 64, "not 'gpt2'"),
    ],
)
def test_a_model_the_engine_would_compute_wrongly_is_refused(model: Any, max_tokens: int, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        TorchEngine(model(), end_id=END, slots=1, max_tokens=max_tokens, version=V0)
