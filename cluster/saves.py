"""Whether the learner can save within the warning that it gets ahead of a limit or a preemption.

At submit a save that cannot fit is refused: from the run's own measured saves, else from the bytes that one rank writes and the
filesystem's speed. What is not known refuses nobody. While the run lives, a save that was too slow is told once.
Failure: a metric that is lost costs a word; OSError of a look: look again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.profile import ClusterProfile
from miles_core.recipe import Recipe
from miles_core.tracking.tracker_feed import JsonTail

MASTER_BYTES = 12
"""Of each parameter in the optimizer's file: the float32 copy and two moments."""
_LEAD_PER_SAVE = 2
"""The lead that is advised: the step in hand ends first, and a filesystem is not always as quick."""


class SaveWatch:
    """The saves of one learner, all attempts; a look costs what is new."""

    def __init__(self, folder: Path, lead_s: float) -> None:
        """`folder`: the learner's metric shards; `lead_s`: how long ahead it is told to leave."""
        self._points, self._lead_s = JsonTail(folder), lead_s
        self._is_told = False

    def newly_slow(self) -> str:
        """How slow and what to do, once when a save took longer than the lead."""
        if self._is_told:
            return ""
        slowest_s = max(_saves(self._points), default=0.0)
        if slowest_s <= self._lead_s:
            return ""
        self._is_told = True
        return (
            f"a checkpoint took {slowest_s:.1f} s, but a job is told to leave only slurm.signal_lead_s={self._lead_s:g} s "
            f"ahead, so steps since the last whole checkpoint would be trained again: raise signal_lead_s, or save more often "
            f"(learner.checkpoint_every)"
        )


def measured_saves_s(folder: Path) -> list[float]:
    """Seconds of every save in a learner's metric shards; none where they cannot be read."""
    try:
        return _saves(JsonTail(folder))
    except OSError:
        return []


def _saves(points: JsonTail) -> list[float]:
    found = [point.get("checkpoint_s") for point in points.read()]
    return [float(seconds) for seconds in found if isinstance(seconds, int | float)]


def unfit_save(profile: ClusterProfile, recipe: Recipe, base_model: Path, measured_s: Sequence[float] = ()) -> str:
    """Why the learner cannot save within its warning, and what to change; empty where it can, or where nothing is known.

    `measured_s`: saves of this very run, which know better than any estimate. The median: one slow save says nothing.
    """
    lead_s = profile.slurm.signal_lead_s
    if profile.kind != "slurm":
        return ""
    if measured_s:
        needed_s = statistics.median(measured_s)
        takes = f"{needed_s:.1f} s (median of {len(measured_s)} measured in this run)"
    else:
        # Of an adapter only A and B are saved, which no filesystem is too slow for.
        parameters = None if recipe.model.lora is not None else num_parameters(base_model)
        if profile.write_mib_s is None or parameters is None:
            return ""
        mib = rank_bytes(recipe, profile.resources_for("learner").ranks, parameters) / 2**20
        needed_s = mib / profile.write_mib_s
        takes = f"at least {needed_s:.1f} s ({mib:.0f} MiB by one rank at write_mib_s={profile.write_mib_s:g})"
    if needed_s <= lead_s:
        return ""
    return (
        f"a checkpoint takes the learner {takes}, but a job is told to leave only "
        f"slurm.signal_lead_s={lead_s} s ahead of its limit or its preemption, so it could never save in time: set "
        f"signal_lead_s of the cluster profile to {math.ceil(_LEAD_PER_SAVE * needed_s)} (less than "
        f"resources.learner.time_min), or take a quicker filesystem as runs_root"
    )


def rank_bytes(recipe: Recipe, ranks: int, parameters: int) -> int:
    """What the rank with the most to write puts into a checkpoint: the optimizer's state is parted over the ranks; the weights
    are written by rank 0, or in ZeRO stage 3 not beside their master copy. A critic is a second model."""
    weight_bytes = 0 if recipe.learner.zero_stage == 3 else {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    models = 1 if recipe.learner.critic is None else 2
    return models * (weight_bytes * parameters + MASTER_BYTES * parameters // ranks)


def num_parameters(folder: Path) -> int | None:
    """Parameters of a model folder in Hugging Face layout, from the headers of its safetensors files; None: not known."""
    try:
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        return sum(_elements(folder / name) for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None


def _elements(path: Path) -> int:
    with safe_open(path, "numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - it is no mapping
