"""What the tracker logs, read from a run directory as it grows: each poll costs what is new.

Not coordination: nothing acts by it. A step's row needs its record, its batch and the points of learner and orchestrator;
points are buffered by their writers, so a row waits for them a while and then goes without.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.records import (
    DROP_REASONS,
    Batch,
    Drop,
    EvaluationPoint,
    GradesChosen,
    Incident,
    Intent,
    JobEnded,
    LivenessTable,
    parse_record,
    split_writer,
)
from miles_core.rollbacks import read_rollbacks
from miles_core.run import RunConfig, all_writers
from miles_core.store.follow import Follower, Reading, poll_together
from miles_core.store.fs import FileSystem
from miles_core.store.journal import AttemptTail, list_segments
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import mean_sampled

Row = dict[str, Any]

LEARNER_NAMES = {
    "k3": "kl/mismatch_mean",
    "logprob_gap_mean": "kl/logprob_gap_mean",
    "logprob_gap_max": "kl/logprob_gap_max",
    "k3_no_replay": "kl/mismatch_mean_no_replay",
    "logprob_gap_max_no_replay": "kl/logprob_gap_max_no_replay",
    "routing_changed_frac": "routing/changed_frac",
    "routing_load_cv": "routing/load_cv",
    "routing_load_peak": "routing/load_peak",
    "routing_cold_frac": "routing/cold_frac",
    "routing_missing_tokens": "routing/missing_tokens",
    "clip_frac": "clip/frac",
    "tis_clip_frac": "clip/tis_frac",
    "ratio_deviation_max": "clip/ratio_deviation_max",
    "entropy": "entropy/mean",
}
"""W&B names of the learner's metrics; any other one is `train/<its name>`."""
TIMES = {"wait_s": "time/wait_for_batch", "read_s": "time/read", "train_s": "time/train", "publish_s": "time/publish"}
GAUGES = {
    "open": "queue/open_groups",
    "ready": "queue/ready_groups",
    "in_flight": "queue/in_flight",
    "waiting_for_versions": "queue/waiting_for_versions",
    "untrained_batches": "queue/untrained_batches",
    "in_grading": "grader/backlog",
    "ungraded": "grader/ungraded",
}
"""Names of the orchestrator's gauges."""
POINT_WAIT_S = 60.0


class JsonTail:
    """New whole lines of all metric shards of one writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def read(self) -> list[Row]:
        """New points, attempt by attempt; a torn line is left out. OSError: read again."""
        points: list[Row] = []
        names = [name for name in sorted(_names(self._folder)) if name.endswith(".jsonl")]
        for name in names:
            with open(self._folder / name, "rb") as file:
                file.seek(self._offsets.get(name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[name] = self._offsets.get(name, 0) + len(whole)
            points += filter(None, map(_parse_point, whole.splitlines()))
        return points


def _names(folder: Path) -> list[str]:
    try:
        return FileSystem().listdir(folder)
    except FileNotFoundError:
        return []


def _parse_point(line: bytes) -> Row | None:
    try:
        point = json.loads(line)
    except ValueError:
        return None
    return point if isinstance(point, dict) else None


class RecordTail:
    """New records of one journal over all its attempts, without judging cuts: for people."""

    def __init__(self, reading: Reading, folder: Path) -> None:
        self._reading, self._folder = reading, folder
        self._tails: dict[int, AttemptTail] = {}

    def read(self) -> list[Any]:
        """New records, attempt by attempt. OSError: read again."""
        records: list[Any] = []
        for attempt in list_segments(self._reading.fs, self._folder):
            if attempt not in self._tails:
                self._tails[attempt] = self._reading.tail(self._folder, attempt)
            if attempt >= max(self._tails) - 1:
                while frames := self._tails[attempt].read():
                    records += [parse_record(frame.payload) for frame in frames]
        return records


class TrackerFeed:
    """Folds journals and metric shards; `take_steps` gives each step's row once, in order."""

    def __init__(
        self, run: RunConfig, paths: RunPaths, *, clock: Callable[[], float] = time.monotonic, fs: FileSystem | None = None
    ) -> None:
        self.run, self.paths, self._clock = run, paths, clock
        self._fs = fs or FileSystem()
        self._reading = Reading(self._fs, LeaseFolder(self._fs, paths.leases, run.run_id), run.timing.visibility_s)
        writers = ("learner-0", "orchestrator-0", "evaluator-0")
        self._followers = [Follower(self._reading, paths.journal(writer), writer) for writer in writers]
        self._supervisor = RecordTail(self._reading, paths.journal("supervisor-0"))
        self._points = [JsonTail(paths.metrics(writer, 1).parent) for writer in writers[:2]]
        self._rollbacks = read_rollbacks(self._fs, paths)
        self.lineage = Lineage(self._rollbacks)
        self._batches: dict[int, tuple[Batch, Counter[str]]] = {}
        self._drops: Counter[str] = Counter()
        self._replaced: list[float] = []
        """Rewards of groups without spread that were replaced since the newest batch."""
        self._sampled: dict[int, float] = {}
        """Mean reward of all groups sampled for a batch, replaced ones included."""
        self._learner_points: dict[int, Row] = {}
        self._batch_points: dict[int, Row] = {}
        self._seen_at: dict[int, float] = {}
        self._evaluations: dict[int, EvaluationPoint] = {}
        self._gauges: Row = {}
        self._counts: Counter[str] = Counter()
        self.job_ids: dict[str, list[str]] = {}
        """Jobs of each writer, as submitted."""

    def is_superseded(self, epoch: int) -> bool:
        """True if a newer supervisor was there at the last poll; a tombstone is none. OSError: unknown."""
        leases = self._reading.leases
        newest = leases.newest("supervisor-0")
        return newest > epoch and leases.read("supervisor-0", newest).kind == "lease"

    def poll(self) -> int:
        """Reads what is new; returns how many records and points that was. OSError: poll again."""
        learner, orchestrator, evaluator = poll_together(self._reading, self._followers)
        for item in learner:
            self.lineage.fold(item)
        for item in orchestrator:
            if not self._rollbacks.voids(item.attempt, item.record):
                self._fold_orchestrator(item.record)
        for item in evaluator:
            if isinstance(item.record, EvaluationPoint) and not self._rollbacks.abandons(item.record.version):
                self._evaluations.setdefault(item.record.version.step, item.record)
        supervisor = self._supervisor.read()
        for record in supervisor:
            self._fold_supervisor(record)
        points = [point for tail in self._points for point in tail.read()]
        for point in points:
            self._fold_point(point)
        return sum(map(len, (learner, orchestrator, evaluator, supervisor, points)))

    def take_steps(self, after: int, *, finishing: bool = False) -> list[tuple[int, Row, Batch | None]]:
        """(step, row, batch) of accepted steps behind `after`, ascending; up to the first that still waits for its points."""
        taken = []
        for step in range(after + 1, self.lineage.newest_step + 1):
            if step not in self.lineage.steps or not (finishing or self._is_complete(step)):
                break
            batch, drops = self._batches.pop(step, (None, Counter()))
            points = {**self._batch_points.pop(step, {}), **self._learner_points.pop(step, {})}
            taken.append((step, self._step_row(step, batch, drops, points), batch))
            self._seen_at.pop(step, None)
        return taken

    def forget(self, until: int) -> None:
        """Drops what is held of steps that were logged before."""
        for held in (self._batches, self._sampled, self._batch_points, self._learner_points):
            for step in [step for step in held if step <= until]:
                del held[step]

    def take_evaluations(self, after: int) -> list[tuple[int, Row]]:
        """(step, row) of evaluations behind step `after`, ascending: a late point of an earlier version is left out."""
        steps = sorted(step for step in self._evaluations if step > after)
        rows = []
        for step in steps:
            point = self._evaluations[step]
            rows.append((step, {"eval/step": step, "eval/greedy": point.greedy_score, "eval/seconds": point.seconds}))
        return rows

    def gauges(self, states: Iterable[tuple[str, str]]) -> Row:
        """Every gauge there is, zero where nothing was heard: what the queues, graders and jobs do now."""
        row: Row = {name: self._gauges.get(key, 0) for key, name in GAUGES.items()}
        row |= {"grader/graded": self._counts["graded"]}
        row |= {f"slurm/{name}": self._counts[name] for name in ("replacements", "incidents", "jobs_lost", "node_failures")}
        row["slurm/queued"] = sum(state.startswith("queued") for _, state in states)
        alive = self._alive()
        row |= {f"slurm/alive_{role}": alive[role] for role in dict.fromkeys(map(_role, all_writers(self.run.recipe)))}
        return row

    def _is_complete(self, step: int) -> bool:
        if step == 0 or (step in self._learner_points and step in self._batch_points and step in self._batches):
            return True
        return self._clock() - self._seen_at.setdefault(step, self._clock()) >= POINT_WAIT_S

    def _step_row(self, step: int, batch: Batch | None, drops: Counter[str], points: Row) -> Row:
        record = self.lineage.steps[step]
        row: Row = {"policy_version": step, "train/step": step}
        published = self.lineage.published_at(step)
        if published is not None:
            row["perf/bytes_published"] = published.size_bytes
        if step == 0:
            return row
        row |= {"reward/mean": record.mean_reward, "off_policy/max": record.staleness}
        row |= {LEARNER_NAMES.get(name, f"train/{name}"): value for name, value in record.metrics.items()}
        row |= {name: points[key] for key, name in TIMES.items() if key in points}
        row |= {f"len/response_{key}": points["sampled_tokens"][key] for key in points.get("sampled_tokens", {}) if key != "n"}
        row |= _speeds(row, record.metrics.get("tokens"))
        if batch is not None:
            row |= {"reward/sampled_mean": self._sampled.pop(step), **_batch_figures(batch, drops)}
        return row

    def _fold_orchestrator(self, record: Any) -> None:
        if isinstance(record, Batch):
            self._batches[record.step] = record, self._drops.copy()
            trained = statistics.fmean(reward for group in record.groups for reward in group.rewards)
            self._sampled[record.step] = mean_sampled(trained, len(record.groups), self._replaced)
            self._replaced = []
        elif isinstance(record, Drop):
            self._drops[record.reason] += 1
            self._replaced += [record.reward] if record.reason == "no_spread" and record.reward is not None else []
        elif isinstance(record, GradesChosen):
            self._counts["graded"] += len(record.grades)

    def _fold_supervisor(self, record: Any) -> None:
        if isinstance(record, Intent):
            self._counts["replacements"] += record.attempt > 1
        elif isinstance(record, JobEnded):
            self._counts["jobs_lost"] += 1
        elif isinstance(record, Incident):
            self._counts["incidents"] += 1
            self._counts["node_failures"] += record.what == "node_down"
        elif record.kind == "submitted":
            self.job_ids.setdefault(record.writer, []).append(record.job_id)

    def _fold_point(self, point: Row) -> None:
        event, step = point.get("event"), point.get("step")
        if event == "step" and isinstance(step, int):
            self._learner_points[step] = point
        elif event == "batch" and isinstance(step, int):
            self._batch_points[step] = point
        elif event == "orchestrator":
            self._gauges = point

    def _alive(self) -> Counter[str]:
        try:
            table = LivenessTable.model_validate_json(self._fs.read(self.paths.liveness_table))
        except (OSError, ValidationError):
            return Counter()
        return Counter(_role(entry.writer) for entry in table.entries if entry.verdict == "alive")


def _role(writer: str) -> str:
    return split_writer(writer)[0]


def _speeds(row: Row, tokens: float | None) -> Row:
    if "time/train" not in row:
        return {}
    step_s = sum(row[name] for name in TIMES.values() if name in row)
    speeds: Row = {"time/step": step_s}
    if tokens and step_s > 0 and row["time/train"] > 0:
        speeds |= {"perf/throughput": tokens / step_s, "perf/train_throughput": tokens / row["time/train"]}
    return speeds


def _batch_figures(batch: Batch, drops: Counter[str]) -> Row:
    members = [member for group in batch.groups for member in group.members]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    flat = sum(len(set(group.rewards)) == 1 for group in batch.groups)
    return {
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/zero_spread_frac": flat / len(batch.groups),
        "off_policy/mean": statistics.fmean(batch.step - 1 - member.oldest_step for member in members),
        "off_policy/dropped": drops["stale"],
        **{f"drops/{reason}": drops[reason] for reason in DROP_REASONS},
    }
