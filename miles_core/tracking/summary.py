"""reports/summary.json: the figures of one run, live or finished."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from miles_core.paths import RunPaths
from miles_core.records import CheckpointSaved, Published, split_writer
from miles_core.run import RunConfig, all_writers
from miles_core.store.fs import FileSystem
from miles_core.store.publish import Durability, publish_bytes
from miles_core.tracking.ledger import Ledger, read_ledger
from miles_core.tracking.metrics import read_metrics

Span = tuple[float, float]


def write_summary(run: RunConfig, paths: RunPaths) -> dict[str, Any]:
    """Builds the summary, publishes it and returns it."""
    summary = summarize(read_ledger(run, paths), paths)
    data = json.dumps(summary, indent=2).encode() + b"\n"
    publish_bytes(FileSystem(), paths.summary, data, Durability.RENAMED)
    return summary


def summarize(ledger: Ledger, paths: RunPaths) -> dict[str, Any]:
    """The summary of a ledger. Rewards are means over all samples of a step's groups at the recipe's temperature, also of those
    that were replaced for having no spread; `trained`: without these."""
    steps = [ledger.steps.steps[step] for step in sorted(ledger.steps.steps) if step > 0]
    rewards, trained = [ledger.sampled_reward(step.step) for step in steps], [step.mean_reward for step in steps]
    staleness = [step.staleness for step in steps]
    seconds, newest = _seconds(ledger, paths), ledger.steps.newest_published
    lora = ledger.run.recipe.model.lora
    return {
        "run_id": ledger.run.run_id,
        "state": ledger.state,
        "steps": len(steps),
        "reward": {**_ends(rewards), "trained": _ends(trained)},
        "eval": _evaluation(ledger),
        "staleness": {
            "mean": _mean(staleness),
            "max": max(staleness, default=None),
            "bound": ledger.run.recipe.orchestrator.max_staleness,
        },
        "groups": {
            "issued": ledger.issued,
            "trained": ledger.trained_groups,
            "dropped": dict(sorted(ledger.drops.items())),
            "open": len(ledger.open_groups),
        },
        "seconds": seconds,
        "tokens_per_s": _ratio(ledger.sampled_tokens, seconds["rollout_busy"]),
        "policy": {
            "versions": len(ledger.steps.published),
            "bytes_published": sum(published.size_bytes for published in ledger.steps.published.values()),
            "bytes_newest": None if newest is None else newest.size_bytes,
            "adapter": None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
            "bytes_full": sum(published.full_bytes or published.size_bytes for published in ledger.steps.published.values()),
        },
        "disk": _disk(ledger),
        "rollbacks": [rollback.model_dump(exclude={"kind", "attempts"}) for rollback in ledger.steps.rollbacks.records],
        "jobs": [_job(ledger, writer) for writer in all_writers(ledger.run.recipe)],
        "incidents": [incident.model_dump(exclude={"kind"}) for incident in ledger.incidents],
    }


def _evaluation(ledger: Ledger) -> dict[str, Any]:
    before = ledger.evaluations.get(0)
    after = ledger.evaluations.get(ledger.run.recipe.steps)
    return {
        "greedy_before": None if before is None else before.greedy_score,
        "greedy_after": None if after is None else after.greedy_score,
        "n": ledger.run.recipe.evaluation.problems,
        "points": [{"step": step, "greedy": point.greedy_score} for step, point in sorted(ledger.evaluations.items())],
        "abandoned": [
            {"step": point.version.step, "attempt": point.version.attempt, "greedy": point.greedy_score}
            for point in ledger.abandoned_evaluations
        ],
    }


def _disk(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Bytes that are left of what was announced, and bytes that the collector deleted; journals and logs are not in it."""
    made = [*ledger.steps.published.values(), *ledger.steps.checkpoints.values(), *ledger.steps.abandoned]
    checkpoints = [record for record in made if isinstance(record, CheckpointSaved)]
    written = {
        "version": sum(record.size_bytes for record in made if isinstance(record, Published)),
        "checkpoint": sum(file.size_bytes for record in checkpoints for file in record.files),
        "shard": ledger.shard_bytes,
    }
    deleted = Counter[str]()
    for item in ledger.deleted.values():
        deleted[item.what] += item.size_bytes
    return {
        f"{what}s": {"bytes": size_bytes - deleted[what], "deleted_bytes": deleted[what]}
        for what, size_bytes in written.items()
    }


def _job(ledger: Ledger, writer: str) -> dict[str, Any]:
    role, replica = split_writer(writer)
    return {
        "role": role,
        "replica": replica,
        "attempts": len(ledger.intents[writer]),
        "job_ids": list(dict.fromkeys(record.job_id for record in ledger.submitted[writer])),
    }


def _seconds(ledger: Ledger, paths: RunPaths) -> dict[str, float | None]:
    spans: dict[str, list[Span]] = {"learner": [], "rollout": []}
    last = ledger.run.created_s
    for writer, point in read_metrics(paths.metrics("x-0", 0).parent.parent):
        last = max(last, point["unix_s"])
        role = split_writer(writer)[0]
        if point["event"] == "busy" and role in spans:
            spans[role].append((point["start_s"], point["end_s"]))
    learner, rollout = merge(spans["learner"]), merge(spans["rollout"])
    end = last if ledger.closed is None else ledger.closed.unix_s
    first = min((span[0] for span in learner + rollout), default=None)
    return {
        "total": round(end - ledger.run.created_s, 2),
        "setup": None if first is None else round(first - ledger.run.created_s, 2),
        "learner_busy": round(length(learner), 2),
        "rollout_busy": round(length(rollout), 2),
        "both_busy": round(length(intersect(learner, rollout)), 2),
    }


def merge(spans: Iterable[Span]) -> list[Span]:
    """Union of spans as disjoint ones, ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(first: list[Span], second: list[Span]) -> list[Span]:
    """Common parts of two lists of disjoint, ascending spans."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Seconds covered by disjoint spans."""
    return sum(end - start for start, end in spans)


def _mean(values: list[float] | list[int]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _ends(values: list[float]) -> dict[str, Any]:
    return {"first5": _mean(values[:5]), "last5": _mean(values[-5:])}


def _ratio(count: float, seconds: float | None) -> float | None:
    return round(count / seconds, 1) if seconds else None
