"""The nightly flow: trains a recipe once per slot of its schedule, and skips itself where that would do harm.

It skips (Completed, named Skipped) when a run of the recipe lives, or when its slot is long past: after a night without a
worker all missed slots would start at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import ValidationError

from cluster.epoch import WRITER, read_closed
from cluster.profile import load_cluster
from flows.pulse import Pulse, find_runs, watch
from flows.train import request_cancel_on_cancellation, train_run
from miles_core.errors import JournalCorrupt
from miles_core.paths import RunPaths
from miles_core.recipe import load_recipe
from miles_core.run import RunConfig, all_writers
from tasks.prepare import run_root

log = logging.getLogger("miles")


@flow(
    name="nightly", retries=3, retry_delay_seconds=30, flow_run_name="{recipe}-nightly-on-{cluster}",
    on_cancellation=[request_cancel_on_cancellation],
)  # fmt: skip
def nightly(
    recipe: str = "chain_sum", cluster: str = "local", settings: list[str] | None = None, max_slot_age_h: float = 6.0
) -> str | State[None]:
    """Trains `recipe` as run `<recipe>-<slot>` (UTC) and returns the run directory, or skips and says why."""
    resolved, profile = load_recipe(recipe, tuple(settings or ())), load_cluster(cluster)
    slot = flow_run.get_scheduled_start_time().astimezone(UTC)
    run_id = slot_run_id(resolved.name, slot)
    root = run_root(profile, run_id)
    is_retry = flow_run.get_run_count() > 1
    why = slot_is_old(slot, datetime.now(UTC), max_slot_age_h) if not is_retry else ""
    # A retry continues its own run, whose other roles go on.
    why = why or live_run(resolved.name, root.parent, but_not=[run_id] if is_retry else [])
    if why:
        get_run_logger().info("skipped: %s", why)
        return Completed(name="Skipped", message=why)
    return train_run(resolved, profile, run_id)


def slot_run_id(recipe_name: str, slot: datetime) -> str:
    """The same slot is the same run, over retries."""
    return f"{recipe_name}-{slot:%Y%m%d-%H%M}"


def slot_is_old(slot: datetime, now: datetime, max_slot_age_h: float) -> str:
    """Why this slot is not run any more; empty if it is."""
    age_h = (now - slot).total_seconds() / 3600
    if age_h <= max_slot_age_h:
        return ""
    return f"the slot {slot:%Y-%m-%d %H:%M} UTC is {age_h:.1f} h old, max_slot_age_h is {max_slot_age_h:g}"


def live_run(recipe_name: str, runs_root: Path, but_not: Sequence[str] = ()) -> str:
    """Which run of the recipe lives, and how that shows; empty if none. Takes lease_s where none lives.

    A run lives while it is not closed and its supervisor or any of its roles renews its heartbeat. One that cannot be judged
    counts as live: of two runs on one set of GPUs neither is of use.
    """
    pulses = []
    for run, paths in find_runs(runs_root):
        if run.recipe.name == recipe_name and run.run_id not in but_not and _is_open(run, paths):
            pulses.append(Pulse(run, paths, [WRITER, *all_writers(run.recipe)]))
    watch(pulses, until_first=True)
    for pulse in pulses:
        if pulse.verdict == "moving":
            return f"run {pulse.run.run_id} of this recipe lives: {pulse.moving} renews its lease"
    for pulse in pulses:
        if pulse.verdict == "unknown":
            return f"whether run {pulse.run.run_id} of this recipe lives could not be judged from {pulse.paths.heartbeats}"
    return ""


def _is_open(run: RunConfig, paths: RunPaths) -> bool:
    """Not closed, or not to be told from a damaged journal: then its heartbeats decide."""
    try:
        return read_closed(run, paths) is None
    except (JournalCorrupt, OSError, ValidationError) as error:
        log.warning("whether %s is closed cannot be read: %s", paths.root, error)
        return True
