"""A model out of an installed package says what its makers taught it, and a package without a model is refused by name."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from miles_core.environments.base import Message
from miles_core.errors import RecipeError
from miles_core.packaged import packaged_name
from miles_core.recipe import ModelSpec, load_recipe
from miles_core.records import Version
from miles_core.rollout.session import ChatRenderer
from miles_core.rollout.torch_engine import TorchEngine
from tasks.prepare import ensure_base_model

TEXT = "The capital of France is Paris. Water boils at 100 degrees Celsius."


@pytest.mark.timeout(900)  # reads 95 MB of 4-bit numbers, if no earlier test has
def test_smollm2_is_read_into_a_folder_that_needs_no_gguf() -> None:
    """Bytes and tokens are in the right places: a text is likely in its own order alone, and the template ends messages."""
    folder = ensure_base_model(load_recipe("smollm2"))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".jinja"}
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = ChatRenderer(tokenizer)
    opening = renderer.opening((Message("system", "Be brief."), Message("user", "12 + 7?")))
    assert tokenizer.decode(opening) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT
    engine = TorchEngine.from_folder(
        folder, dtype="float32", end_id=renderer.end_id, slots=1, max_tokens=64, version=Version(0, 0)
    )
    right, reverse = (float(values.mean()) for values in engine.logprobs([ids, ids[::-1]]))
    assert right > -2.5 and reverse < -5.0


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("no-such-model", "needs the Python package 'no-such-model', which is not installed here; `make models`"),
        ("numpy", "'numpy' holds 0 GGUF files, exactly one is needed; give a model's folder as model.path"),
        ("", "needs the Python package ''"),
    ],
)
def test_a_package_without_a_model_is_refused(package: str, says: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        packaged_name(package)
    assert says in str(refusal.value)


def test_exactly_one_source_is_given() -> None:
    for fields in ({}, {"path": "x", "package": "y"}, {"bootstrap": "x", "package": "y"}):
        with pytest.raises(ValueError, match="give exactly one of `path`"):
            ModelSpec.model_validate(fields)
