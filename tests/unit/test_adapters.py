"""LoRA: what the learner trains is what an engine, an export and PEFT's formula compute; the base model stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core.adapters import LoraLinear, adapter_tensors, add_adapter, base_only, check_lora, merged_model
from miles_core.base_model import check_base_model, model_files, weights_digest
from miles_core.errors import DigestMismatch, RecipeError, RunDirectoryError
from miles_core.export import export_version
from miles_core.learner.trainer import Dtype, Trainer
from miles_core.paths import RunPaths
from miles_core.policy.manifest import adapter_of, tensor_entries
from miles_core.policy.manifest import weights_digest as digest_of
from miles_core.policy.publisher import Publisher
from miles_core.policy.reader import read_manifest
from miles_core.recipe import LoraSpec, ModelSpec
from miles_core.records import Cuts, StepDone, Version
from miles_core.rollout.torch_engine import TorchEngine
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder
from tasks.prepare import ensure_base_model
from tests.protocol.learner_run import make_run
from tests.unit.test_export import PROBE
from tests.unit.test_trainer import LORA, SPEC, assert_same_bytes, make_batch, norm, reference_gradient, sealed, train
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model

ATTENTION = LoraSpec(rank=4, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
TOKENS = [[5, 9, 200, 31, 7, 7, 80, 12], [3, 1, 4]]
V0 = Version(0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base")


def engine_of(folder: Path, lora: LoraSpec, dtype: str = "float32", weights_dtype: str = "float32") -> TorchEngine:
    return TorchEngine.from_folder(
        folder, dtype=dtype, weights_dtype=weights_dtype, lora=lora, end_id=0, slots=1, max_tokens=32, version=V0
    )


def largest_gap(first: list[Any], second: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def test_a_layer_and_its_gradient_are_those_of_the_plain_formula() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 5, dtype=torch.float64)
    layer = LoraLinear(plain, "a.q_proj", LoraSpec(rank=2, alpha=3), seed=1)
    layer.lora_B.data.normal_()
    x, target = (torch.randn(2, 3, size, dtype=torch.float64) for size in (6, 5))
    own, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = (tensor.detach().clone().requires_grad_() for tensor in (layer.lora_A, layer.lora_B))
    (layer(own) * target).sum().backward()
    expected = reference @ plain.weight.T + plain.bias + 1.5 * (reference @ a.T) @ b.T
    (expected * target).sum().backward()
    torch.testing.assert_close(layer(x), expected.detach(), rtol=0, atol=1e-12)
    for found, wanted in ((own.grad, reference.grad), (layer.lora_A.grad, a.grad), (layer.lora_B.grad, b.grad)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert plain.weight.grad is None and plain.bias.grad is None


@pytest.mark.parametrize(("kind", "lora"), [("llama", LORA), ("qwen3", LORA), ("qwen3_moe", ATTENTION)])
def test_learner_and_engine_agree_from_the_base_model_on(tmp_path: Path, kind: Kind, lora: LoraSpec) -> None:
    base = save_tiny_model(tmp_path / "base", kind)
    trainer, engine = Trainer(base, SPEC, "float32", lora=lora), engine_of(base, lora)
    plain = engine.logprobs(TOKENS)
    engine.load_weights(trainer.state_tensors(), Version(0, 1))
    assert largest_gap(engine.logprobs(TOKENS), plain) == 0, "version 0 is the base model"
    metrics = train(trainer, range(1, 4))
    tensors = trainer.state_tensors()
    engine.load_weights(tensors, Version(3, 1))
    assert largest_gap(engine.logprobs(TOKENS), plain) > 1e-2
    assert largest_gap(trainer.logprobs(TOKENS), engine.logprobs(TOKENS)) < 1e-4
    assert metrics["ratio_deviation_start"] < 1e-6
    assert {name.rpartition(".lora_")[2] for name in tensors} == {"A.weight", "B.weight"}
    whole = merged_model(base, lora, "float32", tensors)
    export = AutoModelForCausalLM.from_pretrained(base)
    export.load_state_dict(whole, strict=kind == "llama")
    with torch.no_grad():
        scores = torch.log_softmax(export(torch.tensor(TOKENS[:1])).logits[0, :-1].float(), dim=-1)
    expected = scores.gather(-1, torch.tensor(TOKENS[0][1:])[:, None])[:, 0].numpy()
    assert largest_gap([engine.logprobs(TOKENS)[0]], [expected]) < 1e-5


def test_in_bfloat16_an_adapter_adds_nothing_to_the_gap(folder: Path) -> None:
    """Learner and engine compute with the same rounded weights; the two would differ by the rounding of W x + B A x."""
    trainer = Trainer(folder, SPEC, "bfloat16", lora=LORA)
    train(trainer, range(1, 4))
    engine = engine_of(folder, LORA, "bfloat16", "bfloat16")
    engine.load_weights(trainer.state_tensors(), V0)
    merged = TorchEngine.from_folder(folder, dtype="bfloat16", end_id=0, slots=1, max_tokens=32, version=V0)
    merged.load_weights(merged_model(folder, LORA, "bfloat16", trainer.state_tensors()), V0)
    assert largest_gap(engine.logprobs(TOKENS), merged.logprobs(TOKENS)) == 0
    gap = np.concatenate([np.abs(a - b) for a, b in zip(trainer.logprobs(TOKENS), engine.logprobs(TOKENS), strict=True)])
    assert gap.mean() < 0.03
    coarse = engine_of(folder, LORA, "bfloat16", "float32")
    fine = Trainer(folder, SPEC, "float32", lora=LORA)
    coarse.load_weights(fine.state_tensors(), V0)
    assert largest_gap(coarse.logprobs(TOKENS), fine.logprobs(TOKENS)) < 0.4


def test_the_gradient_is_that_of_the_merged_weights_projected(folder: Path, tmp_path: Path) -> None:
    """The norm of what DeepSpeed was given, against the dense gradient of the merged model without DeepSpeed."""
    spec = SPEC.model_copy(update={"minibatches": 1, "grad_clip": 1e9, "correction": "tis"})
    trainer = Trainer(folder, spec, "float32", lora=LORA)
    train(trainer, range(2, 3))
    tensors = trainer.state_tensors()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(merged_model(folder, LORA, "float32", tensors), strict=False)
    model.save_pretrained(tmp_path / "merged")
    dense = reference_gradient(tmp_path / "merged", 64, drop=True)
    expected: dict[str, torch.Tensor] = {}
    for name in (name.removesuffix(".lora_A.weight") for name in tensors if name.endswith("A.weight")):
        gradient, a, b = dense[f"model.{name}.weight"], tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        expected |= {f"{name}.A": LORA.scale * b.T @ gradient, f"{name}.B": LORA.scale * gradient @ a.T}
    assert trainer.train(*make_batch(1), 1)["grad_norm"] == pytest.approx(norm(expected), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_trainer_goes_on_bit_exactly_from_a_checkpoint_without_the_base(
    folder: Path, tmp_path: Path, dtype: Dtype
) -> None:
    straight = Trainer(folder, SPEC, dtype, lora=LORA)
    before = {name: tensor.detach().clone() for name, tensor in straight._module.named_parameters() if not tensor.requires_grad}
    train(straight, range(1, 3))
    straight.save(tmp_path)
    train(straight, range(3, 5))
    resumed = Trainer(folder, SPEC, dtype, lora=LORA, seed=5)
    resumed.load(tmp_path, sealed(tmp_path))
    train(resumed, range(3, 5))
    first, second = straight.state_tensors(), resumed.state_tensors()
    assert {tensor.dtype for tensor in first.values()} == {getattr(torch, dtype)}
    assert_same_bytes({k: v.float() for k, v in first.items()}, {k: v.float() for k, v in second.items()})
    adapter_bytes = sum(tensor.numel() * 4 for tensor in first.values())
    assert sum(file.size_bytes for file in sealed(tmp_path)) < 5 * adapter_bytes + 40_000
    for name, tensor in straight._module.named_parameters():
        if name in before:
            assert torch.equal(tensor, before[name]), f"{name} is of the base model"


def test_the_seed_decides_how_an_adapter_begins(folder: Path) -> None:
    one, same, other = (Trainer(folder, SPEC, "float32", lora=LORA, seed=seed).state_tensors() for seed in (1, 1, 2))
    assert_same_bytes(one, same)
    assert not torch.equal(one["model.layers.0.mlp.up_proj.lora_A.weight"], other["model.layers.0.mlp.up_proj.lora_A.weight"])
    drawn = torch.cat([tensor.flatten() for name, tensor in one.items() if name.endswith("lora_A.weight") and "mlp.up" in name])
    assert float(drawn.abs().max()) <= 32**-0.5 and float(drawn.std()) == pytest.approx((3 * 32) ** -0.5, rel=0.1)


def test_the_pull_to_the_base_model_needs_no_second_copy(folder: Path) -> None:
    spec = SPEC.model_copy(update={"kl_coef": 0.3})
    trainer = Trainer(folder, spec, "float32", lora=LORA)
    start = train(trainer, range(1, 2))
    assert start["kl_base"] == pytest.approx(0, abs=1e-3), "its first minibatch is the base model itself"
    found = train(trainer, range(2, 3))
    merged = Trainer(folder, spec, "float32", lora=LORA)
    train(merged, range(1, 2))
    base = Trainer(folder, spec, "float32")._base
    merged._base = base  # A whole model of its own, as without an adapter.
    assert found["kl_base"] == pytest.approx(train(merged, range(2, 3))["kl_base"], rel=1e-4) and found["kl_base"] > 0
    model = trainer._module.model
    assert all(layer.is_on for layer in model.modules() if isinstance(layer, LoraLinear))


@pytest.mark.parametrize(
    ("lora", "kind", "message"),
    [
        ({"targets": ["qproj"]}, "qwen3", r"qproj names no .* qwen3 model; there are q_proj, k_proj, .*, down_proj"),
        ({"targets": ["lm_head"]}, "llama", "lm_head names no linear layer"),
        ({"targets": ["experts"]}, "qwen3_moe", r"experts names no .* there are q_proj, k_proj, v_proj, o_proj \("),
        ({"rank": 25}, "qwen3", r"rank=25 is more than model.layers.0.self_attn.k_proj can have, which is 24 x 32; at most 24"),
    ],
)
def test_an_adapter_that_the_model_cannot_have_is_refused_at_submit(
    tmp_path: Path, lora: dict[str, Any], kind: Kind, message: str
) -> None:
    save_tiny_model(tmp_path / "base", kind)
    model = ModelSpec.model_validate({"path": str(tmp_path / "base"), "lora": lora})
    run, _ = make_run(tmp_path / "run", model=model)
    with pytest.raises(RecipeError, match=message):
        ensure_base_model(run.recipe)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="no config of a causal language model"):
        check_lora(tmp_path, LORA)


def test_an_adapter_that_does_not_fit_is_named_and_changes_nothing(folder: Path) -> None:
    engine, model = engine_of(folder, ATTENTION), tiny_model()
    add_adapter(model, LORA, 0)
    before = engine.logprobs(TOKENS)
    tensors = {name: tensor for name, tensor in _adapter(model).items() if "mlp" not in name and "q_proj" not in name}
    tensors |= {"model.layers.0.self_attn.k_proj.lora_A.weight": torch.zeros(3, 32), "model.extra": torch.zeros(1)}
    with pytest.raises(ValueError, match="nothing was changed") as refused:
        engine.load_weights(tensors, V0)
    for part in (
        "unknown: model.extra",
        "missing: model.layers.1.self_attn.q_proj.lora_B.weight",
        "k_proj.lora_A.weight: torch.float32 (3, 32), expected torch.float32 (4, 32)",
    ):
        assert part in str(refused.value)
    assert largest_gap(engine.logprobs(TOKENS), before) == 0


def _adapter(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in adapter_tensors(model).items()}


# --- versions and exports


def published_adapter(root: Path) -> tuple[RunConfig, RunPaths, dict[str, torch.Tensor]]:
    """A run whose learner published one adapter, not all zeros."""
    base = save_tiny_model(root.parent / "base")
    run, paths = make_run(root, model=ModelSpec(path=str(base), lora=LORA))
    paths.base_model.symlink_to(base)
    run = run.model_copy(update={"base_model_digest": weights_digest(model_files(base))})
    model = tiny_model()
    add_adapter(model, LORA, 3)
    torch.manual_seed(1)
    tensors = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in _adapter(model).items()}
    fs = FileSystem()
    LeaseFolder(fs, paths.leases, run.run_id).acquire("learner-0", 1, "token")
    journal = JournalWriter(fs, paths.journal("learner-0"), run_id=run.run_id, writer="learner-0", attempt=1, token="token")
    publisher = Publisher(fs, paths, run.recipe.policy, run_id=run.run_id, learner_token="token", adapter=adapter_of(run))
    digest = digest_of(tensors)
    journal.write(Cuts())
    journal.write(StepDone(step=0, batch_id="", manifest_digest="", weights_digest=digest, staleness=0, mean_reward=0.0))
    published = publisher.write(publisher.prepare(Version(0, 1), tensors, tensor_entries(tensors), PROBE))
    journal.write(published)
    journal.flush()
    manifest = read_manifest(fs, paths, run.run_id, published)
    assert manifest.adapter is not None and manifest.adapter.base_digest == run.base_model_digest
    assert published.size_bytes < 60_000
    return run, paths, tensors


def test_an_export_is_merged_or_the_adapter_alone(tmp_path: Path) -> None:
    run, paths, tensors = published_adapter(tmp_path / "run")
    engine = engine_of(paths.base_model, LORA)
    engine.load_weights(tensors, V0)
    record = export_version(run, paths, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor(TOKENS[:1])).logits[0, :-1], dim=-1)
    found = scores.gather(-1, torch.tensor(TOKENS[0][1:])[:, None])[:, 0].numpy()
    assert largest_gap([found], [engine.logprobs(TOKENS)[0]]) < 1e-5
    assert record["adapter"] == {"rank": 4, "alpha": 8.0, "base_digest": run.base_model_digest}
    assert export_version(run, paths, tmp_path / "adapter", adapter=True) == record
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    given = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]).eval()
    for name, parameter in base.named_parameters():
        prefix = "base_model.model." + name.removesuffix(".weight")
        if f"{prefix}.lora_A.weight" in given:
            assert name.split(".")[-2] in config["target_modules"]
            update = given.pop(f"{prefix}.lora_B.weight") @ given.pop(f"{prefix}.lora_A.weight")
            parameter.data += config["lora_alpha"] / config["r"] * update
    assert not given, "all of it belongs to a layer"
    with torch.no_grad():
        torch.testing.assert_close(base(torch.tensor(TOKENS[:1])).logits, model(torch.tensor(TOKENS[:1])).logits)


def test_another_base_model_under_an_adapter_is_refused(tmp_path: Path) -> None:
    run, paths, _ = published_adapter(tmp_path / "run")
    check_base_model(run, paths)
    tiny_model(seed=9).save_pretrained(tmp_path / "base")
    with pytest.raises(DigestMismatch, match=r"run tiny-1 was made from .* put them back"):
        export_version(run, paths, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_run_that_trains_all_weights_has_no_adapter_to_export(tmp_path: Path) -> None:
    run, paths = make_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"trains all weights \(model.lora is null\)"):
        export_version(run, paths, tmp_path / "adapter", adapter=True)


def test_the_base_model_alone_while_an_adapter_is_off() -> None:
    model, plain = tiny_model(), tiny_model()
    add_adapter(model, LORA, 0)
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            layer.lora_B.data.normal_()
    ids = torch.tensor(TOKENS[:1])
    with torch.no_grad(), base_only(model):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert not torch.allclose(model(ids).logits, plain(ids).logits)
