"""The files of a base model, and whether they still are what a run was made from.

A base model that was given stays where it is (the run directory holds a link), so somebody may change it under a run. Whoever
adds an adapter to it checks it first: an adapter means nothing on other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

from miles_core.errors import DigestMismatch, RecipeError
from miles_core.paths import RunPaths
from miles_core.records import FileDigest
from miles_core.run import RunConfig
from miles_core.store.publish import digest_file

MODEL_SUFFIXES = frozenset({".safetensors", ".gguf", ".json", ".model", ".txt", ".jinja", ".tiktoken", ".py"})
"""Weights, tokenizer, configuration, chat template and model code of a folder in Hugging Face layout."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def model_files(folder: Path, suffixes: Iterable[str] = MODEL_SUFFIXES) -> tuple[FileDigest, ...]:
    """Size and xxh3-128 of every file of a model folder that decides what the model says, by name. RecipeError, OSError."""
    wanted = frozenset(suffixes)
    files = sorted(path for path in folder.iterdir() if path.suffix in wanted and path.is_file())
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise RecipeError(f"{folder} has no *.safetensors (or *.gguf) file: it is not a model folder")
    return tuple(map(describe_file, files))


def describe_file(path: Path) -> FileDigest:
    """A file's name, size and digest. Raises OSError."""
    return FileDigest(name=path.name, size_bytes=path.stat().st_size, digest=digest_file(path))


def weights_digest(files: Iterable[FileDigest]) -> str:
    """xxh3-128 over names and digests of the weight files among `files`, which are ordered by name."""
    state, known = xxhash.xxh3_128(), tuple(files)
    for suffix in WEIGHT_SUFFIXES:
        for file in known:
            if file.name.endswith(suffix):
                state.update(f"{file.name} {file.digest}\n".encode())
    return state.hexdigest()


def check_base_model(run: RunConfig, paths: RunPaths) -> None:
    """Raises DigestMismatch unless the weights in the run's `base_model` are those it was made from; RecipeError, OSError."""
    found = weights_digest(model_files(paths.base_model, WEIGHT_SUFFIXES))
    if found != run.base_model_digest:
        raise DigestMismatch(
            f"the base model {paths.base_model.resolve()} has weights {found}, run {run.run_id} was made from "
            f"{run.base_model_digest}: an adapter fits the weights it was trained on and no others; put them back"
        )
