"""How fast a run is and what the symptom table looks at, from the ledger and the ends of the metric shards.

Only the last bytes of each shard are read: a status must not cost more on the tenth day than on the first. Times are those of
the nodes that wrote them; None is "cannot be said", and `why` says why not.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.symptoms import Signs
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe
from miles_core.run import all_writers, rollout_writers
from miles_core.tracking.ledger import Ledger

Point = dict[str, Any]

_TAIL_BYTES = 64 << 10
_RECENT_STEPS = 20
_MIN_INTERVALS = 3
_WINDOW_S = 120.0
_LOOKS_S = 300.0


@dataclass(frozen=True)
class Pace:
    """Speed of the recent steps, and what follows from it."""

    median_step_s: float | None = None
    """Median over the recent intervals between steps."""
    steps_per_h: float | None = None
    samples_per_h: float | None = None
    """Trained samples."""
    tokens_per_s: float | None = None
    """Sampled by all replicas, over the last two minutes."""
    last_step_age_s: float | None = None
    end_unix_s: float | None = None
    """When the last step is to be expected."""
    why: str = ""
    """Why the end is not known."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_tails(paths: RunPaths, attempts: Mapping[str, int]) -> dict[str, list[Point]]:
    """The last metric points of the newest attempt of each writer, oldest first."""
    return {writer: _tail(paths.metrics(writer, attempt)) for writer, attempt in attempts.items() if attempt}


def newest_attempts(ledger: Ledger) -> dict[str, int]:
    """Newest intent of every writer; 0 before the first."""
    return {
        writer: ledger.intents[writer][-1].attempt if ledger.intents[writer] else 0 for writer in all_writers(ledger.run.recipe)
    }


def _tail(path: Path) -> list[Point]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    # The first line may be the end of a longer one.
    found = [_parse(line) for line in (lines if size <= _TAIL_BYTES else lines[1:])]
    return [point for point in found if point is not None]


def _parse(line: bytes) -> Point | None:
    try:
        point = json.loads(line)
    except ValueError:
        return None
    return point if isinstance(point, dict) and "event" in point and isinstance(point.get("unix_s"), int | float) else None


def pace(ledger: Ledger, tails: Mapping[str, Sequence[Point]], now_s: float) -> Pace:
    """The run's speed, as far as its points say it."""
    recipe, newest = ledger.run.recipe, max(ledger.steps.newest_step, 0)
    ends = sorted({point["step"]: point["unix_s"] for point in _events(tails, "learner-0", "step")}.items())
    times = [when for _, when in ends]
    intervals = [second - first for first, second in itertools.pairwise(times)][-_RECENT_STEPS:]
    tokens_per_s = _tokens_per_s(tails, [writer for writer, _ in rollout_writers(recipe)], now_s)
    known = Pace(tokens_per_s=tokens_per_s, last_step_age_s=max(0.0, now_s - times[-1]) if times else None)
    if newest >= recipe.steps or ledger.closed is not None:
        return Pace(**{**asdict(known), **_speed(intervals, recipe), "why": "the run is over"})
    if len(intervals) < _MIN_INTERVALS:
        return Pace(**{**asdict(known), "why": f"{len(intervals)} intervals between steps, {_MIN_INTERVALS} are needed"})
    speed = _speed(intervals, recipe)
    why = "the run is drained" if ledger.drained is not None else _standstill(now_s - times[-1], speed["median_step_s"])
    end = None if why else times[-1] + (recipe.steps - newest) * speed["median_step_s"]
    return Pace(**{**asdict(known), **speed, "end_unix_s": end if end is None else max(end, now_s), "why": why})


def _speed(intervals: Sequence[float], recipe: Recipe) -> dict[str, float]:
    if not intervals:
        return {}
    median = statistics.median(intervals)
    steps_per_h = 3600 / median if median > 0 else 0.0
    samples = recipe.orchestrator.prompts * recipe.orchestrator.samples
    return {"median_step_s": median, "steps_per_h": steps_per_h, "samples_per_h": steps_per_h * samples}


def _standstill(age_s: float, median_s: float) -> str:
    return f"no step for {age_s:.0f} s" if age_s > max(60.0, 10 * median_s) else ""


def _tokens_per_s(tails: Mapping[str, Sequence[Point]], writers: Sequence[str], now_s: float) -> float | None:
    """Sum over the replicas that said something lately; None where none did."""
    rates = []
    for writer in writers:
        points = [point for point in _events(tails, writer, "rollout") if point["unix_s"] >= now_s - _WINDOW_S]
        seconds = points[-1]["unix_s"] - points[0]["unix_s"] if points else 0.0
        if seconds > 0:
            rates.append((points[-1]["tokens"] - points[0]["tokens"]) / seconds)
    return sum(rates) if rates else None


def signs(ledger: Ledger, tails: Mapping[str, Sequence[Point]]) -> Signs:
    """What the symptom table looks at."""
    steps = [ledger.steps.steps[step] for step in sorted(ledger.steps.steps) if step > 0]
    spec = ledger.run.recipe.orchestrator
    looks = _events(tails, "orchestrator-0", "orchestrator")
    looks = [look for look in looks if look["unix_s"] >= looks[-1]["unix_s"] - _LOOKS_S]
    # Before the first policy version nothing is given out: that the backlog fills then is no growth.
    looks = list(itertools.dropwhile(lambda look: _backlog(look) == 0, looks))
    lost = ledger.drops["incomplete"] + ledger.drops["ungraded"]
    return Signs(
        rewards=[step.mean_reward for step in steps],
        losses=[step.metrics["loss"] for step in steps if "loss" in step.metrics],
        entropies=[step.metrics["entropy"] for step in steps if "entropy" in step.metrics],
        max_staleness=max((step.staleness for step in steps[-_RECENT_STEPS:]), default=0),
        spread_share=_spread_share(ledger),
        lost_share=lost / ledger.issued if ledger.issued else None,
        backlog=[_backlog(look) for look in looks],
        batch_samples=spec.prompts * spec.samples,
        empty_share=_share([look.get("untrained_batches", 0) == 0 and look.get("ready", 0) < spec.prompts for look in looks]),
        learner_wait_share=_wait_share(_events(tails, "learner-0", "step")[-_RECENT_STEPS:]),
        slots_busy=_slots_busy(ledger.run.recipe, tails),
    )  # fmt: skip


def _backlog(look: Point) -> float:
    return float(sum(look.get(name, 0) for name in ("in_flight", "in_grading", "ungraded")))


def _spread_share(ledger: Ledger) -> float | None:
    recent = sorted(ledger.batches)[-_RECENT_STEPS:]
    groups = [group for step in recent for group in ledger.batches[step].groups]
    return _share([len(set(group.rewards)) > 1 for group in groups])


def _wait_share(points: Sequence[Point]) -> float | None:
    total: dict[str, float] = defaultdict(float)
    for point in points:
        for part in ("wait_s", "read_s", "train_s", "publish_s"):
            total[part] += float(point.get(part, 0.0))
    everything = sum(total.values())
    return total["wait_s"] / everything if everything > 0 else None


def _slots_busy(recipe: Recipe, tails: Mapping[str, Sequence[Point]]) -> float | None:
    slots = {pool.name: pool.slots for pool in recipe.rollout.pools}
    busy = [
        point["active"] / slots[pool]
        for writer, pool in rollout_writers(recipe)
        for point in _events(tails, writer, "rollout")[-int(_LOOKS_S) :]
    ]
    return statistics.fmean(busy) if busy else None


def _share(facts: Sequence[bool]) -> float | None:
    return sum(facts) / len(facts) if facts else None


def _events(tails: Mapping[str, Sequence[Point]], writer: str, event: str) -> list[Point]:
    return [point for point in tails.get(writer, ()) if point["event"] == event]
