"""Makes a small base model from nothing: a tokenizer, a 3-layer Qwen3 (dense or with experts), a warm-up on demonstrations.

The warm-up has two phases of supervised training. Clean demonstrations teach the syntax and the copying of words and results;
a careless demonstrator then blurs the policy, so that reinforcement learning has something to gain: the skill is there, the
habit is not. Questions of the eval split never enter.

The same name, environment and source give the same bytes on one kind of machine: one thread, one seed. A cached model is
named by a digest of all three and appears whole or not at all; of two makers at once, one wins and both get its folder.

    folder = ensure_base_model("shell_puzzle", recipe.environment, cache)
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from miles_core import environments
from miles_core.bootstrap.chain_sum import ChainSumHabits
from miles_core.bootstrap.shell_puzzle import ShellHabits
from miles_core.bootstrap.terminal import TerminalHabits
from miles_core.bootstrap.training import Progress, WarmUp, warm_up
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec
from miles_core.store.fs import FileSystem
from miles_core.store.publish import temp_path

WARM_UPS: dict[str, WarmUp] = {
    "chain_sum": WarmUp(ChainSumHabits()),
    "chain_sum_moe": WarmUp(ChainSumHabits(), experts=16),
    "chain_sum_wide": WarmUp(ChainSumHabits(), head_dim=32),  # the narrowest heads that vLLM computes on a CPU
    "shell_puzzle": WarmUp(ShellHabits(), clean_steps=520, careless_steps=160),
    "terminal": WarmUp(TerminalHabits(), head_dim=32, clean_steps=240, careless_steps=80),
}


def ensure_base_model(name: str, environment: EnvironmentSpec, cache: Path, *, progress: Progress | None = None) -> Path:
    """The folder of base model `name` in the cache, made first if it is not there. Raises RecipeError."""
    target = cache / f"{name}-{bootstrap_digest(name, environment)}"
    return ensure_folder(target, lambda folder: make_base_model(name, environment, folder, progress=progress))


def bootstrap_digest(name: str, environment: EnvironmentSpec) -> str:
    """The cache key, 16 hex digits: settings, task family and options, and the source of the warm-up and of the tasks."""
    settings = find_warm_up(name, environment)
    key = json.dumps([name, asdict(settings), environment.family, environment.options], sort_keys=True)
    digest = hashlib.sha256(key.encode())
    tasks = Path(environments.__file__).parent
    for source in (*sorted(Path(__file__).parent.glob("*.py")), *(tasks / f"{name}.py" for name in settings.habits.tasks)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def make_base_model(name: str, environment: EnvironmentSpec, folder: Path, *, progress: Progress | None = None) -> None:
    """Makes base model `name` and saves it in Hugging Face layout (float32); `progress` gets a stage and its share in [0, 1].

    Raises RecipeError for a name or an environment this module has no demonstrations for.
    """
    build(find_warm_up(name, environment), environment, folder, progress or (lambda stage, share: None))


def build(settings: WarmUp, environment: EnvironmentSpec, folder: Path, progress: Progress) -> None:
    """Tokenizer, model and warm-up of these settings, saved into `folder`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    demonstrator = settings.habits.demonstrator(settings.seed, environment)
    tokenizer = demonstrator.tokenizer()
    model = warm_up(settings, demonstrator, tokenizer, progress)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def find_warm_up(name: str, environment: EnvironmentSpec) -> WarmUp:
    """The settings of a warm-up that fits the environment. Raises RecipeError."""
    if name not in WARM_UPS:
        raise RecipeError(f"model.bootstrap: no warm-up named {name!r}; there are: {', '.join(sorted(WARM_UPS))}")
    needs = WARM_UPS[name].habits.needs(environment)
    if needs:
        raise RecipeError(
            f"model.bootstrap={name!r} demonstrates another task than family={environment.family!r} with tool="
            f"{environment.tool!r}, max_turns={environment.max_turns} and options={environment.options}: set environment."
            f"{needs}, or give model.path"
        )
    return WARM_UPS[name]


def ensure_folder(target: Path, make: Callable[[Path], None]) -> Path:
    """Lets `make` fill a folder and publishes it as `target`, unless that exists; whoever renames first wins."""
    if target.exists():
        return target
    fs = FileSystem()
    temporary = temp_path(target)
    try:
        make(temporary)
        for path in (*temporary.iterdir(), temporary):
            fs.sync(path)
        fs.rename(temporary, target)
        fs.sync(target.parent)
    except OSError:
        # Another maker was first: a folder that holds something cannot be replaced.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
