"""Whether this machine holds what a recipe asks of its sandbox, told before anything is submitted to it.

Only where jobs run on this machine; of the nodes of a cluster `miles doctor --nodes` and the roles themselves say it.
"""

from __future__ import annotations

from cluster.profile import ClusterProfile
from miles_core.environments.terminal import check_sandbox
from miles_core.environments.terminal_task import FAMILY as TERMINAL
from miles_core.errors import RecipeError
from miles_core.recipe import Recipe


def open_sandbox(recipe: Recipe, profile: ClusterProfile) -> str | None:
    """Why the roles would refuse to start here, in words; None if they would not, or nobody can tell."""
    if recipe.environment.family != TERMINAL or (profile.kind == "slurm" and profile.slurm.devslurm is None):
        return None
    try:
        check_sandbox()
    except (RecipeError, OSError) as error:
        return str(error)
    return None
