"""Whether jobs could load what a recipe names of one's own, asked of their interpreters before anything is submitted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from cluster.engines import python_of
from cluster.profile import ClusterProfile
from cluster.role_env import without_slurm
from miles_core.environments.verifiers_env import FAMILY as VERIFIERS
from miles_core.environments.verifiers_env import TRIED, check_options, module_of
from miles_core.recipe import Recipe

ASK_S = 120.0
"""An import may take this long."""

END = "-- asked"
"""A line that is printed behind all answers: a module may end the process, with 0, while it is imported."""
ASK = f"import sys; from miles_core.named import main; code = main(sys.argv[1:]); print('\\n{END}'); sys.exit(code)"
ROLLOUTS = "environment."
"""What rollout replicas load is under this key. They alone may have another interpreter than this process."""

log = logging.getLogger("miles")


def names_of(recipe: Recipe) -> dict[str, str]:
    """Keys of the recipe and what they name as `package.module:name`."""
    environment, ranking = recipe.environment, recipe.grader.ranking
    found = {"environment.family": environment.family} if environment.is_own else {}
    if environment.family == VERIFIERS:
        name, _ = check_options(environment.options)
        found |= {
            "environment.family": "verifiers:load_environment",
            "environment.options.environment": f"{module_of(name)}:load_environment",
        }
    if environment.agent is not None:
        found["environment.agent.run"] = environment.agent.run
    if ranking is not None and ":" in ranking:
        found["grader.ranking"] = ranking
    return found


def unloadable(recipe: Recipe, profile: ClusterProfile, code: Path) -> str | None:
    """What jobs that run `code` could not load, in words; None if there is nothing.

    Where `slurm.setup` prepares the jobs' shells they may find more than is found here: then it is a warning, and None.
    """
    names = names_of(recipe)
    if not names or not (code / "miles_core" / "named.py").exists():  # a run of a version that could not be asked
        return None
    played = {key: name for key, name in names.items() if key.startswith(ROLLOUTS)}
    asked = {python_of(recipe, profile, pool.name): played for pool in recipe.rollout.pools} | {sys.executable: names}
    faults = [fault for python in sorted(asked) if asked[python] and (fault := _ask(python, code, asked[python]))]
    if not faults:
        return None
    if recipe.environment.family == VERIFIERS:
        faults[0] += f". docs/agents.md has the commands that install verifiers=={TRIED}, the environment's own goes beside it"
    if profile.kind == "slurm" and profile.slurm.setup:
        log.warning("%s. If slurm.setup of the jobs brings it, all is well", faults[0])
        return None
    return faults[0]


def _ask(python: str, code: Path, names: dict[str, str]) -> str:
    """Faults of an interpreter, empty if there are none."""
    told = ", ".join(f"{key}: {name!r}" for key, name in names.items())
    path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [python, "-c", ASK, *(f"{key}={name}" for key, name in names.items())],
            cwd=code, env={**without_slurm(os.environ), "PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{told}: not imported by {python} within {ASK_S:g} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and END in lines:
        return ""
    said = "; ".join(filter(None, lines[: lines.index(END)])) if END in lines else ""
    if not said:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        said = f"{told}: a process that imported it ended with code {done.returncode} and said {last}"
    return said if python == sys.executable else f"{said} (asked of {python})"
