"""The W&B tracker: what it logs, once, over which axes; and a real offline W&B run with a supervisor killed in the middle."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_core.store.fs import FileSystem
from miles_core.tracking.tracker_feed import POINT_WAIT_S, TrackerFeed
from miles_core.tracking.wandb_tracker import ProcessSink, WandbTracker, choose_mode, cursor_file, open_tracker, sync_line
from tests.unit.synthetic_run import HOSTILE, MADE_S, SyntheticRun

KEY = "0123456789abcdef0123456789abcdef01234567"


class Listener:
    """A sink that keeps what it is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_closed = False

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(json.loads(json.dumps(message)))

    def close(self) -> None:
        self.is_closed = True

    def rows(self, axis: str) -> list[dict[str, Any]]:
        return [message["row"] for message in self.messages if axis in message.get("row", {})]

    def steps(self) -> list[int]:
        return [row["train/step"] for row in self.rows("train/step")]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 5.0
        return self.now_s


class CountingFileSystem(FileSystem):
    """Counts what is read."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        data = super().read(path, offset, limit)
        self.read_bytes += len(data)
        return data


class Refusing(Listener):
    """A sink whose process is gone."""

    def send(self, message: dict[str, Any]) -> None:
        raise BrokenPipeError("gone")


def tracker_of(made: SyntheticRun, sink: Listener, epoch: int = 1, clock: Callable[[], float] | None = None) -> WandbTracker:
    clock = clock or Clock()
    feed = TrackerFeed(made.run, made.paths, clock=clock)
    return WandbTracker(feed, epoch, lambda: sink, mode="offline", clock=clock, unix_clock=lambda: MADE_S + clock())


@pytest.fixture
def made(tmp_path: Path) -> SyntheticRun:
    return SyntheticRun(tmp_path / "synthetic-1")


def test_a_step_has_the_promised_names_and_values(made: SyntheticRun) -> None:
    made.drop("g99.o1")
    made.train(1)
    made.train(2)
    made.train(3)
    made.evaluate(0, 0.25)
    sink = Listener()
    tracker_of(made, sink).tick()
    assert sink.steps() == [0, 1, 2, 3]
    row = sink.rows("train/step")[-1]
    expected = {
        "policy_version": 3, "reward/mean": 0.5, "reward/std": 0.5, "reward/max": 1.0, "reward/zero_spread_frac": 0.0,
        "off_policy/mean": 1.0, "off_policy/max": 1, "off_policy/dropped": 1, "drops/stale": 1, "drops/ungraded": 0,
        "len/response_mean": 3, "len/response_max": 4, "time/wait_for_batch": 1.0, "time/train": 2.0, "time/step": 3.2,
        "perf/throughput": 12.5, "perf/train_throughput": 20.0, "perf/bytes_published": 1000, "kl/mismatch_mean": 0.01,
        "entropy/mean": 0.5, "train/grad_norm": 1.0,
    }  # fmt: skip
    assert {name: row.get(name) for name in expected} == pytest.approx(expected)
    assert sink.rows("eval/step") == [{"eval/step": 0, "eval/greedy": 0.25, "eval/seconds": 1.0}]


def test_gauges_have_every_key_and_their_own_axis(made: SyntheticRun) -> None:
    made.train(1)
    made.lose("rollout-0", "node n1 failed")
    sink = Listener()
    tracker = tracker_of(made, sink)
    tracker.states = (("learner-0", "queued (Resources)"), ("rollout-0", "serving"))
    tracker.tick()
    (row,) = sink.rows("wall_s")
    assert row["slurm/queued"] == 1 and row["slurm/replacements"] == 1 and row["slurm/jobs_lost"] == 1
    assert row["grader/backlog"] == 1 and row["grader/graded"] == 2 and row["queue/open_groups"] == 3
    assert row["slurm/alive_learner"] == 0 and "policy_version" not in row


def test_a_tick_costs_what_is_new_however_old_the_run_is(tmp_path: Path) -> None:
    made, counted = SyntheticRun(tmp_path / "long", steps=40), CountingFileSystem()
    sink = Listener()
    feed = TrackerFeed(made.run, made.paths, fs=counted)
    tracker = WandbTracker(feed, 1, lambda: sink, mode="offline", clock=Clock())
    read = []
    for step in range(1, 31):
        made.train(step)
        before = counted.read_bytes
        tracker.tick()
        read.append(counted.read_bytes - before)
    assert sink.steps() == list(range(31))
    assert read[-1] < 1.2 * read[4], f"bytes read at each tick: {read}"


def test_a_damaged_metric_line_costs_only_itself(made: SyntheticRun) -> None:
    made.point("learner-0", "step", step="x")
    made.point("orchestrator-0", "batch")
    with open(made.paths.metrics("learner-0", 1), "a") as file:
        file.write('{"event": "st\n[1]\n')
    made.train(1)
    sink = Listener()
    tracker_of(made, sink).tick()
    assert sink.steps() == [0, 1]


def test_a_step_waits_for_its_points_then_goes_without(made: SyntheticRun) -> None:
    now = [0.0]
    sink = Listener()
    tracker = tracker_of(made, sink, clock=lambda: now[0])
    made.train(1, points=False)
    tracker.tick()
    assert sink.steps() == [0]
    now[0] += 5
    made.add_points(1)
    tracker.tick()
    assert sink.steps() == [0, 1] and sink.rows("train/step")[1]["time/train"] == 2.0
    made.train(2, points=False)
    now[0] += 5
    tracker.tick()
    now[0] += POINT_WAIT_S
    tracker.tick()
    assert sink.steps() == [0, 1, 2] and "time/train" not in sink.rows("train/step")[2]


def test_a_successor_goes_on_where_the_cursor_stands(made: SyntheticRun) -> None:
    made.train(1)
    made.evaluate(0, 0.1)
    first, second = Listener(), Listener()
    tracker_of(made, first).tick()
    made.open("supervisor-0", 2)
    made.train(2)
    made.train(3)
    made.evaluate(3, 0.9)
    successor = tracker_of(made, second, epoch=2)
    successor.tick()
    successor.close(dict)
    assert first.steps() + second.steps() == [0, 1, 2, 3]
    assert [row["eval/step"] for row in first.rows("eval/step") + second.rows("eval/step")] == [0, 3]
    assert second.is_closed


def test_a_supervisor_that_was_superseded_logs_nothing_more(made: SyntheticRun, caplog: pytest.LogCaptureFixture) -> None:
    made.train(1)
    sink = Listener()
    tracker = tracker_of(made, sink)
    tracker.tick()
    made.open("supervisor-0", 2)
    made.train(2)
    for _ in range(3):
        tracker.tick()
    assert sink.steps() == [0, 1]
    assert caplog.text.count("tracking of this run has stopped") == 1


def test_a_tombstone_of_its_own_end_does_not_stop_the_last_rows(made: SyntheticRun) -> None:
    sink = Listener()
    tracker = tracker_of(made, sink)
    tracker.tick()
    made.train(1)
    made.leases.tombstone("supervisor-0", 2, "t")
    tracker.close(lambda: {"reward": {"last5": 0.5}, "jobs": [1]})
    assert sink.steps() == [0, 1]
    assert sink.messages[-1]["summary"] == {"summary/reward/last5": 0.5}
    assert sink.messages[-1]["config"]["job_ids"]["learner-0"] == ["100"]


@pytest.mark.parametrize("what", ["sink", "cursor"])
def test_trouble_is_one_warning_and_never_an_error(made: SyntheticRun, what: str, caplog: pytest.LogCaptureFixture) -> None:
    made.train(1)
    sink = Refusing() if what == "sink" else Listener()
    if what == "cursor":
        made.paths.cancel_request.parent.mkdir(exist_ok=True)
        cursor_file(made.paths).write_text("{")
    tracker = tracker_of(made, sink)
    for _ in range(3):
        tracker.tick()
    tracker.close(dict)
    assert len(caplog.records) == 1 and sink.steps() == []


def test_at_most_32_rollouts_over_all_tables(made: SyntheticRun) -> None:
    made.add_tokenizer()
    for step in range(1, 9):
        made.train(step)
    sink = Listener()
    tracker_of(made, sink).tick()
    tables = {message["row"]["train/step"]: message["rollouts"] for message in sink.messages if "rollouts" in message}
    assert list(tables) == [2, 4, 6, 8]
    assert sum(len(table["rows"]) for table in tables.values()) <= 32
    row = dict(zip(tables[8]["columns"], tables[8]["rows"][0], strict=True))
    assert row["prompt"] == "What is 1 + 1 ? \n" and row["response"] == f"{HOSTILE}two & 2" and row["versions"] == "v6, v7"


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": KEY}, "offline"),
        ({"WANDB_MODE": "online", "NETRC": "/nowhere"}, "offline"),
        ({"WANDB_MODE": "online", "WANDB_API_KEY": KEY}, "online"),
        ({"WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_online_needs_to_be_asked_for_and_a_key(environment: dict[str, str], mode: str) -> None:
    assert choose_mode(environment) == mode


def test_a_sink_that_takes_nothing_blocks_nobody(tmp_path: Path) -> None:
    sink = ProcessSink(tmp_path / "log", {"PATH": "/bin", "PYTHONPATH": "", "WANDB_MODE": "offline"})
    os.kill(sink.pid, signal.SIGSTOP)
    try:
        for _ in range(40):
            sink.send({"row": {"x": "y" * 10_000}})
        assert sink.pending_bytes > 300_000
    finally:
        os.kill(sink.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"exit code|Broken pipe"):
        sink.close()


# --- real W&B, offline -------------------------------------------------------------------------------------------------

TRACK = """
import sys, time
from pathlib import Path
from miles_core.run import read_run
from miles_core.tracking.wandb_tracker import open_tracker
run, paths = read_run(Path(sys.argv[1]))
tracker = open_tracker(run, paths, 1)
tracker.tick()
print("ticked", flush=True)
time.sleep(600)
"""


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a LevelDB log of 32 KiB blocks behind a header of 7 bytes; a torn end is no record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    rows = [record.history for file in files for record in wandb_records(file) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"waited 60 s for {what}"
        time.sleep(0.1)


def test_one_run_with_monotonic_axes_over_a_killed_supervisor(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    made.add_tokenizer()
    for step in range(1, 4):
        made.train(step)
    made.evaluate(0, 0.25)
    root = made.paths.root
    first = subprocess.Popen([sys.executable, "-c", TRACK, str(root)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "ticked\n"
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    wait_for(lambda: any(row.get("eval/step") == 0 for row in history(root)), "the first epoch's rows")

    made.open("supervisor-0", 2)
    for step in range(4, 9):
        made.train(step)
    made.evaluate(8, 0.75)
    made.close()
    second = open_tracker(made.run, made.paths, 2)
    second.tick()
    second.close(lambda: {"reward": {"last5": 0.5}})

    rows = history(root)
    for axis, expected in (("policy_version", list(range(9))), ("train/step", list(range(9))), ("eval/step", [0, 8])):
        assert [row[axis] for row in rows if axis in row] == expected
    wall = [row["wall_s"] for row in rows if "wall_s" in row]
    assert len(wall) >= 2 and all(before < after for before, after in itertools.pairwise(wall))
    files = sorted((root / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    assert len(files) == 2 and {record.run.run_id for record in records if record.HasField("run")} == {"synthetic-1"}
    patterns = {(m.metric.glob_name, m.metric.step_metric) for m in records if m.HasField("metric")}
    assert {("reward/*", "policy_version"), ("train/*", "train/step"), ("slurm/*", "wall_s")} <= patterns
    summary = {item.key: item.value_json for record in records if record.HasField("summary") for item in record.summary.update}
    assert json.loads(summary["summary/reward/last5"]) == 0.5
    line = sync_line(made.paths, made.run.run_id)
    assert line is not None and line.startswith("wandb sync --id synthetic-1 ") and line.count("offline-run-") == 2
    leaks = [path for path in root.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert leaks == []
    tracked = b"".join(path.read_bytes() for path in (root / "wandb").rglob("*") if path.is_file())
    assert b"hush" not in tracked, "the cluster profile may hold secrets"
