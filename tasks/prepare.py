"""Ensure steps before a run: the base model, the code snapshot, run.json. Each is cheap when already done."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from pathlib import Path

import xxhash

from cluster.profile import ClusterProfile
from miles_core.errors import RecipeError, RunDirectoryError
from miles_core.paths import RunPaths, check_trusted
from miles_core.recipe import Recipe
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_file, publish_exclusive, temp_path

log = logging.getLogger("miles")

SOURCE = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "cluster", "miles_core", "configs")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def cache_folder() -> Path:
    """Where base models are kept between runs: MILES_CACHE, else ~/.cache/miles."""
    return Path(os.environ.get("MILES_CACHE", "~/.cache/miles")).expanduser()


def new_run_id(recipe: Recipe) -> str:
    """`<recipe>-<UTC time>`."""
    return f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def run_root(profile: ClusterProfile, run_id: str) -> Path:
    """The run directory of a run id. Raises RunDirectoryError for an id that cannot be a folder and a job name."""
    if not RUN_ID.fullmatch(run_id):
        raise RunDirectoryError(f"run id {run_id!r}: use at most 64 letters, digits and . _ - and begin with a letter or digit")
    return Path(profile.runs_root).expanduser().resolve() / run_id


def ensure_base_model(recipe: Recipe) -> Path:
    """The base model's folder: made by its warm-up (cached by content), or given. Raises RecipeError."""
    if recipe.model.bootstrap is not None:
        from miles_core.bootstrap import ensure_base_model as make

        return make(recipe.model.bootstrap, recipe.environment, cache_folder() / "models")
    folder = Path(str(recipe.model.path)).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise RecipeError(f"model.path: {folder} has no config.json; give a folder in Hugging Face layout")
        return folder.resolve()
    if str(recipe.model.path).startswith(("/", ".", "~")):
        raise RecipeError(f"model.path: {folder} is not there; give a folder in Hugging Face layout, or a hub id")
    return _from_hub(str(recipe.model.path))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise RecipeError(
            f"model.path: {name!r} is neither a folder here nor to be had from the model hub ({type(error).__name__}). "
            f"Download it where there is a network and give the folder"
        ) from error


def ensure_run(recipe: Recipe, profile: ClusterProfile, run_id: str, base_model: Path) -> RunPaths:
    """The run directory with code snapshot, base model and run.json; a run id in use must have the same recipe.

    Raises RunDirectoryError.
    """
    paths = RunPaths(run_root(profile, run_id))
    if paths.run_file.exists():
        _same_recipe(paths, recipe)
        return paths
    paths.root.mkdir(parents=True, exist_ok=True)
    os.chmod(paths.root, 0o755)
    check_trusted(paths.root)
    code_digest = snapshot_code(paths)
    _ensure_base_copy(paths, base_model)
    for folder in (paths.leases, paths.heartbeats, paths.done("x").parent, paths.cancel_request.parent, paths.reports):
        folder.mkdir(parents=True, exist_ok=True)
    run = RunConfig(
        run_id=run_id, recipe=recipe, timing=profile.timing, cluster=json.loads(profile.model_dump_json()),
        code_digest=code_digest, base_model_digest=weights_file_digest(paths.base_model), created_s=time.time(),
    )  # fmt: skip
    publish_exclusive(FileSystem(), paths.run_file, run.model_dump_json(indent=2).encode())
    return paths


def _same_recipe(paths: RunPaths, recipe: Recipe) -> None:
    check_trusted(paths.root)
    there = RunConfig.model_validate_json(paths.run_file.read_bytes()).recipe
    if there != recipe:
        changed = [name for name in type(recipe).model_fields if getattr(there, name) != getattr(recipe, name)]
        raise RunDirectoryError(
            f"{paths.root} was started with another recipe (different: {', '.join(changed)}). Take another --run-id, or the "
            f"recipe in {paths.run_file}"
        )


def source_files() -> list[Path]:
    """Files of the code snapshot, relative to the source folder, sorted."""
    return sorted(
        path.relative_to(SOURCE)
        for package in PACKAGES
        for path in (SOURCE / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".json") and "__pycache__" not in path.parts
    )


def snapshot_code(paths: RunPaths) -> str:
    """Copies the code that the jobs will run, whole or not at all; returns its digest."""
    state = xxhash.xxh3_128()
    files = source_files()
    for name in files:
        state.update(str(name).encode() + b"\0" + (SOURCE / name).read_bytes())
    if not paths.code.exists():
        temp = temp_path(paths.code)
        for name in files:
            (temp / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SOURCE / name, temp / name)
        os.rename(temp, paths.code)
    return state.hexdigest()


def _ensure_base_copy(paths: RunPaths, base_model: Path) -> None:
    """A made model is copied (the cache may be cleaned); a given one is linked."""
    if paths.base_model.exists():
        return
    if base_model.is_relative_to(cache_folder()):
        temp = temp_path(paths.base_model)
        shutil.copytree(base_model, temp)
        os.rename(temp, paths.base_model)
    else:
        os.symlink(base_model.resolve(), paths.base_model)


def weights_file_digest(folder: Path) -> str:
    """xxh3-128 over names and digests of a model folder's weight files. Raises RecipeError when there are none."""
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.gguf"))
    if not files:
        raise RecipeError(f"{folder} has no *.safetensors (or *.gguf) file: it is not a model folder")
    state = xxhash.xxh3_128()
    for path in files:
        state.update(f"{path.name} {digest_file(path)}\n".encode())
    return state.hexdigest()
