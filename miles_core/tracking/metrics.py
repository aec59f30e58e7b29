"""Metric shards: each attempt of each role appends JSON lines to its own file; reports and the tracker read them.

Not coordination: nothing decides by them, a lost line costs a point in a chart. Times are Unix seconds of the writing node.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("miles")


class MetricShard:
    """Appends one JSON object a line; buffered, written at most once a second."""

    def __init__(self, path: Path, flush_s: float = 1.0) -> None:
        self._path, self._flush_s = path, flush_s
        self._lines: list[str] = []
        self._flushed_at = 0.0

    def log(self, event: str, **values: Any) -> None:
        """One point: `event` names its kind (`step`, `busy`, `rollout` ...)."""
        self._lines.append(json.dumps({"event": event, "unix_s": round(time.time(), 4), **values}))
        if time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Writes what waits; a failure is logged and the lines are dropped."""
        if not self._lines:
            return
        self._flushed_at = time.monotonic()
        lines, self._lines = self._lines, []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            log.warning("metrics lost: %s", error)

    def close(self) -> None:
        """Writes the rest."""
        self.flush()


class BusyMeter:
    """Turns short busy spans into few `busy` points: spans closer than `join_s` count as one."""

    def __init__(self, shard: MetricShard, join_s: float = 0.05, at_most_s: float = 5.0) -> None:
        self._shard, self._join_s, self._at_most_s = shard, join_s, at_most_s
        self._start: float | None = None
        self._end = 0.0

    def add(self, start_s: float, end_s: float) -> None:
        """A busy span in Unix seconds, in order."""
        if self._start is not None and (start_s - self._end > self._join_s or end_s - self._start > self._at_most_s):
            self.close()
        if self._start is None:
            self._start = start_s
        self._end = end_s

    def close(self) -> None:
        """Writes the open span."""
        if self._start is not None:
            self._shard.log("busy", start_s=round(self._start, 4), end_s=round(self._end, 4))
            self._start = None


def read_metrics(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(writer, point) of all metric shards below metrics/, file by file; torn lines are skipped."""
    for path in sorted(folder.glob("*/a*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                point = json.loads(line)
            except json.JSONDecodeError:
                point = None
            if isinstance(point, dict) and {"event", "unix_s"} <= point.keys():
                yield path.parent.name, point
            else:
                log.warning("%s: skipped a torn line", path)
