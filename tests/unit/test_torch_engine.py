"""What the torch engine does beyond the contract of all engines (test_engine_contract.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from miles_core.errors import DigestMismatch, RecipeError
from miles_core.policy.manifest import PROBE_TOLERANCE, PolicyManifest, Probe, probe_dtype, probe_prompts
from miles_core.policy.reader import check_probe
from miles_core.records import Version
from miles_core.rollout.torch_engine import PREFILL_TOKENS_PER_STEP, TorchEngine, sample, uniforms
from tests.unit.engine_history import History
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model, tiny_tokenizer

END = tiny_tokenizer().eos_token_id
V0, V1 = Version(0, 0), Version(1, 1)
EXACT = 1e-5


def engine_of(kind: Kind = "qwen3", slots: int = 3, max_tokens: int = 96, end_id: int = END) -> TorchEngine:
    return TorchEngine(tiny_model(kind), end_id=end_id, slots=slots, max_tokens=max_tokens, version=V0)


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
