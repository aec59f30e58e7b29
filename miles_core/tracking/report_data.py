"""The figures of a run's report: series over steps, series over time, and a lane for every role and replica.

All is read from the journals and metric shards; nothing is estimated but the ends of an attempt that wrote no metric point,
for which the times of its lease and heartbeat files are taken where they lie within the run.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.paths import RunPaths
from miles_core.records import Batch, Graded, Incident, StepDone, split_writer
from miles_core.run import all_writers, grader_writers
from miles_core.store.follow import Reading
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import Ledger, read_all
from miles_core.tracking.summary import Span, merge

Point = dict[str, Any]
Points = dict[tuple[str, int], list[Point]]
"""Metric points by (writer, attempt), in the order they were written."""

TIME_PARTS = (("wait_s", "waiting for a batch"), ("read_s", "reading"), ("train_s", "training"), ("publish_s", "publishing"))
_JOIN_S = 0.5
_BINS = 80


@dataclass(frozen=True)
class Attempt:
    """One attempt of a writer: its extent in seconds since the run was made."""

    number: int
    start_s: float
    end_s: float
    reason: str


@dataclass
class Lane:
    """What one role or replica did, in seconds since the run was made."""

    writer: str
    attempts: list[Attempt] = field(default_factory=list)
    busy: list[Span] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)

    @property
    def busy_s(self) -> float:
        """Seconds of work."""
        return sum(end - start for start, end in self.busy)


@dataclass(frozen=True)
class StepFigures:
    """All about one accepted step that a chart needs; lists over steps are made with `column`."""

    step: int
    record: StepDone
    ages: tuple[int, ...]
    """Staleness of every trained sample, in versions; empty if the batch is gone."""
    point: Point
    """The learner's metric point: seconds of each part."""
    lengths: dict[str, float]
    """Sampled tokens of its trajectories: mean, min, p50, max."""


@dataclass
class ReportData:
    """Everything the page shows, but for the sampled trajectories."""

    ledger: Ledger
    summary: dict[str, Any]
    steps: list[StepFigures]
    lanes: list[Lane]
    end_s: float
    """Last sign of life, in seconds since the run was made."""
    sampling: list[tuple[float, float]]
    """(seconds since the run was made, sampled tokens/s of all replicas), one a bin."""
    dropped_tokens: list[float]
    """Mean sampled tokens of each dropped group, as far as it had any."""

    def column(self, name: str) -> list[float | None]:
        """One of the learner's own metrics, by step."""
        return [figures.record.metrics.get(name) for figures in self.steps]

    def metric_names(self) -> set[str]:
        """Learner metrics that at least one step has."""
        return {name for figures in self.steps for name in figures.record.metrics}


def collect(ledger: Ledger, paths: RunPaths, summary: dict[str, Any]) -> ReportData:
    """Reads metric shards and grades, and folds them with the ledger."""
    points = read_points(paths.metrics("x-0", 0).parent.parent)
    made_s = ledger.run.created_s
    last = max([made_s, *(values[-1]["unix_s"] for values in points.values() if values)])
    end_s = (last if ledger.closed is None else max(last, ledger.closed.unix_s)) - made_s
    lanes = [_lane(ledger, paths, writer, points, end_s) for writer in all_writers(ledger.run.recipe)]
    for writer, busy in _grading(ledger, paths).items():
        lane = next(lane for lane in lanes if lane.writer == writer)
        lane.busy = merge([*lane.busy, *busy])
    dropped = [point["sampled_tokens"].get("mean") for point in _events(points, "orchestrator-0", "drop")]
    return ReportData(
        ledger=ledger, summary=summary, steps=_steps(ledger, points), lanes=lanes, end_s=end_s,
        sampling=_sampling(points, made_s, end_s), dropped_tokens=[mean for mean in dropped if mean is not None],
    )  # fmt: skip


def read_points(folder: Path) -> Points:
    """All metric points below metrics/; torn lines are left out."""
    points: Points = {}
    for path in sorted(folder.glob("*/a*.jsonl")):
        if not path.stem[1:].isdigit():
            continue
        key = path.parent.name, int(path.stem[1:])
        points[key] = [point for point in map(_parse, path.read_text(errors="replace").splitlines()) if point is not None]
    return points


def _parse(line: str) -> Point | None:
    try:
        point = json.loads(line)
    except ValueError:
        return None
    return point if isinstance(point, dict) and "event" in point and "unix_s" in point else None


def _events(points: Points, writer: str, event: str) -> list[Point]:
    """Points of one kind over all attempts of a writer."""
    return [point for key in sorted(points) if key[0] == writer for point in points[key] if point["event"] == event]


def _steps(ledger: Ledger, points: Points) -> list[StepFigures]:
    own = {(point["step"], point.get("attempt")): point for point in _events(points, "learner-0", "step")}
    lengths = {point["step"]: point.get("sampled_tokens", {}) for point in _events(points, "orchestrator-0", "batch")}
    figures = []
    for step in sorted(ledger.steps.steps):
        if step > 0:
            figures.append(StepFigures(
                step=step, record=ledger.steps.steps[step], ages=_ages(ledger.batches.get(step)),
                point=own.get((step, ledger.steps.attempts[step]), {}), lengths=lengths.get(step, {}),
            ))  # fmt: skip
    return figures


def _ages(batch: Batch | None) -> tuple[int, ...]:
    if batch is None:
        return ()
    return tuple(max(0, batch.step - 1 - member.oldest_step) for group in batch.groups for member in group.members)


def _lane(ledger: Ledger, paths: RunPaths, writer: str, points: Points, end_s: float) -> Lane:
    made_s = ledger.run.created_s
    lane = Lane(writer, incidents=[incident for incident in ledger.incidents if incident.writer == writer])
    spans: list[Span] = []
    for intent in ledger.intents[writer]:
        own = points.get((writer, intent.attempt), [])
        times = [point["unix_s"] - made_s for point in own] + _file_times(paths, writer, intent.attempt, made_s, end_s)
        busy = [_busy_span(point) for point in own if point["event"] in ("busy", "evaluation")]
        times += [start - made_s for start, _ in busy]
        spans += busy
        if times:
            lane.attempts.append(Attempt(intent.attempt, max(0.0, min(times)), max(times), intent.reason))
    lane.busy = merge((start - made_s, end - made_s) for start, end in spans)
    return lane


def _busy_span(point: Point) -> Span:
    if point["event"] == "evaluation":
        return point["unix_s"] - point["seconds"], point["unix_s"]
    return point["start_s"], point["end_s"]


def _file_times(paths: RunPaths, writer: str, attempt: int, made_s: float, end_s: float) -> list[float]:
    """When the lease was taken and the heartbeat last renewed; a copied run directory has lost these times."""
    times = []
    for folder in (paths.leases, paths.heartbeats):
        try:
            times.append((folder / f"{writer}.a{attempt}").stat().st_mtime - made_s)
        except OSError:
            continue
    return [time for time in times if 0 <= time <= end_s]


def _grading(ledger: Ledger, paths: RunPaths) -> dict[str, list[Span]]:
    """When graders gave grades: they write no busy spans, but each grade has its time."""
    fs = FileSystem()
    reading = Reading(fs, LeaseFolder(fs, paths.leases, ledger.run.run_id), ledger.run.timing.visibility_s)
    spans: dict[str, list[Span]] = {}
    for writer in grader_writers(ledger.run.recipe):
        records = [record for record in read_all(reading, paths.journal(writer)) if isinstance(record, Graded)]
        times = sorted(entry.grade.timestamp for record in records for entry in record.entries if entry.grade is not None)
        spans[writer] = _join([time - ledger.run.created_s for time in times])
    return spans


def _join(times: Sequence[float]) -> list[Span]:
    """Spans over times that are close to each other."""
    spans: list[Span] = []
    for time in times:
        if spans and time - spans[-1][1] <= _JOIN_S:
            spans[-1] = spans[-1][0], time
        else:
            spans.append((time, time))
    return spans


def _sampling(points: Points, made_s: float, end_s: float) -> list[tuple[float, float]]:
    """Sampled tokens/s over the run in equal bins: what each replica's counter rose by, spread over the time it rose in."""
    width = max(end_s, 1e-9) / _BINS
    totals = [0.0] * _BINS
    for (writer, _), values in points.items():
        if split_writer(writer)[0] == "rollout":
            rises = [(point["unix_s"] - made_s, point["tokens"]) for point in values if point["event"] == "rollout"]
            for (start, before), (end, after) in itertools.pairwise(rises):
                _spread(totals, width, (start, end), after - before)
    return [((index + 0.5) * width, total / width) for index, total in enumerate(totals)]


def _spread(totals: list[float], width: float, span: Span, amount: float) -> None:
    start, end = span
    if amount <= 0 or end <= start:
        return
    for index in range(max(0, int(start / width)), min(len(totals) - 1, int(end / width)) + 1):
        share = min(end, (index + 1) * width) - max(start, index * width)
        totals[index] += amount * max(0.0, share) / (end - start)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the window - 1 before it (fewer at the start)."""
    return [statistics.fmean(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]


def age_shares(figures: Iterable[StepFigures], bound: int) -> dict[int, list[float | None]]:
    """Share of trained samples by staleness, by step; None where the batch is gone."""
    shares: dict[int, list[float | None]] = defaultdict(list)
    for step in figures:
        for age in range(bound + 1):
            shares[age].append(step.ages.count(age) / len(step.ages) if step.ages else None)
    return shares
