"""The one W&B client of a run, beside its supervisor.

Roles append metric shards; this reads them and the journals, and logs each step once, over its own axes. It is best effort:
whatever W&B, its process or the disk does, the run goes on after one warning, and journals and metric shards are whole.

Exactly one supervisor epoch tracks. A cursor file says what was logged; it is published before a row is sent, so after a
kill -9 a row may be missing in W&B but none is there twice. Each epoch is a W&B run of the same id (offline: a folder of
its own); axes go on where the last one stopped.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlparse

from pydantic import ValidationError

from miles_core.errors import MilesError
from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.records import Batch
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.publish import Durability, publish_bytes
from miles_core.tracking.samples import Sample, Tokens, choose, load_tokens, read_samples
from miles_core.tracking.tracker_feed import Row, TrackerFeed

log = logging.getLogger("miles")

TABLE_ROWS = 8
TABLES = 4
TABLE_COLUMNS = ["step", "trajectory", "versions", "reward", "status", "sampled_tokens", "prompt", "response"]
_TICK_S = 2.0
_GAUGE_S = 10.0
_CLOSE_S = 60.0
_PENDING_BYTES = 64 << 20


class Sink(Protocol):
    """Where messages go (see wandb_sink)."""

    def send(self, message: Row) -> None:
        """Takes one message; never waits. OSError when nobody takes messages any more."""
        ...

    def close(self) -> None:
        """Ends it; waits for what was sent at most a minute."""
        ...


class ProcessSink:
    """A wandb_sink process in a session of its own, so that Ctrl-C at the supervisor's terminal does not reach it."""

    def __init__(self, log_file: Path, environment: Mapping[str, str]) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (source, environment.get("PYTHONPATH", ""))))
        with open(log_file, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "miles_core.tracking.wandb_sink"],
                stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
                env={**environment, "PYTHONPATH": path},
            )  # fmt: skip
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._pending: deque[bytes] = deque()
        self.pending_bytes = 0
        """What the process did not take yet."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Row) -> None:
        """Writes what the pipe takes now; the rest waits here, up to a bound."""
        line = json.dumps(message).encode() + b"\n"
        self._pending.append(line)
        self.pending_bytes += len(line)
        if self.pending_bytes > _PENDING_BYTES:
            raise OSError(f"the W&B process takes no messages; see {self.log_file}")
        self._flush()

    def _flush(self) -> bool:
        """True when nothing waits."""
        while self._pending:
            try:
                written = os.write(self._pipe.fileno(), self._pending[0])
            except BlockingIOError:
                return False
            self.pending_bytes -= written
            rest = self._pending.popleft()[written:]
            if rest:
                self._pending.appendleft(rest)
        return True

    def close(self) -> None:
        """Lets the process write what it has; one that takes longer than a minute is ended. Raises OSError."""
        deadline = time.monotonic() + _CLOSE_S
        try:
            while not self._flush() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            self._pipe.close()
            code = self._wait(deadline)
        if code:
            raise OSError(f"the W&B process ended with exit code {code}; see {self.log_file}")

    def _wait(self, deadline: float) -> int:
        try:
            return self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class Cursor(Closed):
    """What was logged, over all supervisor epochs."""

    step: int = -1
    eval_step: int = -1
    wall_s: float = -1.0
    tables: int = 0


class WandbTracker:
    """Feeds a sink from a run directory; `tick` is called by the supervisor's loop and never raises."""

    def __init__(
        self,
        feed: TrackerFeed,
        epoch: int,
        make_sink: Callable[[], Sink],
        *,
        mode: str,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._feed, self._epoch, self._make_sink, self._mode = feed, epoch, make_sink, mode
        self._clock, self._unix_clock = clock, unix_clock
        self._cursor_file = cursor_file(feed.paths)
        self._cursor = Cursor()
        self._sink: Sink | None = None
        self._tokens: Tokens | None = None
        self._is_over = mode == "disabled"
        self._next_tick = self._next_gauges = clock()
        self.states: tuple[tuple[str, str], ...] = ()
        """(writer, state in a few words) of every role, as the supervisor sees it."""

    def tick(self) -> None:
        """Logs what is new, at most every 2 s."""
        if not self._is_over and self._clock() >= self._next_tick:
            self._next_tick = self._clock() + _TICK_S
            self._best_effort(self._log_new)

    def close(self, summary: Callable[[], Row]) -> None:
        """Logs the rest, then the summary, and ends the W&B run."""
        if not self._is_over:
            self._best_effort(lambda: self._finish(summary))
        self._is_over = True
        if self._sink is not None:
            self._best_effort(self._sink.close)

    def _best_effort(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, ValueError, LookupError, TypeError, MilesError) as error:
            self._is_over = True
            log.warning("W&B tracking of this run has stopped (the run goes on; its metric shards are whole): %s", error)

    def _log_new(self, *, finishing: bool = False) -> None:
        try:
            while self._feed.poll() and finishing:
                pass
        except OSError as error:
            log.info("tracker: not readable now, next tick tries again: %s", error)
            return
        if self._feed.is_superseded(self._epoch):
            raise MilesError(f"a newer supervisor than epoch {self._epoch} tracks the run now")
        sink = self._sink or self._start()
        for step, row, batch in self._feed.take_steps(self._cursor.step, finishing=finishing):
            message = {"row": row, **self._table(step, batch)}
            self._move(step=step, tables=self._cursor.tables + ("rollouts" in message))
            sink.send(message)
        for step, row in self._feed.take_evaluations(self._cursor.eval_step):
            self._move(eval_step=step)
            sink.send({"row": row})
        if finishing or self._clock() >= self._next_gauges:
            self._next_gauges = self._clock() + _GAUGE_S
            self._send_gauges(sink)

    def _send_gauges(self, sink: Sink) -> None:
        wall_s = self._wall_s()
        if wall_s > self._cursor.wall_s:
            self._move(wall_s=wall_s)
            sink.send({"row": {"wall_s": wall_s, **self._feed.gauges(self.states)}})

    def _wall_s(self) -> float:
        """Seconds since the run was made; never behind what was logged."""
        return max(round(self._unix_clock() - self._feed.run.created_s, 1), self._cursor.wall_s)

    def _finish(self, summary: Callable[[], Row]) -> None:
        self._log_new(finishing=True)
        if self._sink is not None:
            self._sink.send({"config": {"job_ids": self._feed.job_ids}, "summary": flatten(summary())})

    def _start(self) -> Sink:
        self._cursor = _read_cursor(self._cursor_file)
        self._feed.forget(self._cursor.step)
        self._sink = self._make_sink()
        self._sink.send({"start": start_arguments(self._feed.run, self._feed.paths, self._mode)})
        return self._sink

    def _move(self, **changes: Any) -> None:
        """Publishes the cursor before the row is sent: a row may be lost with this process, none is logged twice."""
        self._cursor = self._cursor.model_copy(update=changes)
        data = self._cursor.model_dump_json().encode()
        publish_bytes(FileSystem(), self._cursor_file, data, Durability.RENAMED)

    def _table(self, step: int, batch: Batch | None) -> Row:
        """A few rollouts at each quarter of the run: at most 32 over all tables."""
        due = self._cursor.tables + 1
        if batch is None or due > TABLES or step < self._feed.run.recipe.steps * due // TABLES:
            return {}
        if self._tokens is None:
            self._tokens = load_tokens(self._feed.paths.base_model)
        samples = read_samples(self._feed.paths, choose(batch, TABLE_ROWS))
        rows = [_table_row(sample, self._tokens) for sample in samples]
        return {"rollouts": {"columns": TABLE_COLUMNS, "rows": rows}}


def _table_row(sample: Sample, tokens: Tokens) -> list[Any]:
    row = sample.row
    first = int(row.loss_mask.argmax()) if row.num_sampled else len(row.tokens)
    versions = ", ".join(f"v{run.step}" for run in row.versions)
    head = [sample.step, row.trajectory_id, versions, sample.reward, row.status, row.num_sampled]
    return [*head, tokens.text(row.tokens[:first].tolist()), tokens.text(row.tokens[first:].tolist())]


def open_tracker(run: RunConfig, paths: RunPaths, epoch: int) -> WandbTracker:
    """The tracker of a supervisor epoch; where WANDB_MODE turns it off, one that does nothing."""
    mode = choose_mode(os.environ)
    log_file = paths.logs("supervisor-0", epoch) / "wandb.out"
    environment = {**os.environ, "WANDB_MODE": mode}
    if mode == "offline":
        environment.pop("WANDB_API_KEY", None)
    return WandbTracker(TrackerFeed(run, paths), epoch, lambda: ProcessSink(log_file, environment), mode=mode)


def choose_mode(environment: Mapping[str, str]) -> str:
    """`online` only where WANDB_MODE asks for it and there is a key; `disabled` where it says so; else `offline`."""
    asked = environment.get("WANDB_MODE", "offline")
    if asked in ("disabled", "dryrun"):
        return "disabled" if asked == "disabled" else "offline"
    if asked == "online" and _has_key(environment):
        return "online"
    if asked == "online":
        log.warning("W&B: WANDB_MODE=online, but there is no WANDB_API_KEY and no login; tracking offline")
    return "offline"


def _has_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environment.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def start_arguments(run: RunConfig, paths: RunPaths, mode: str) -> Row:
    """Keyword arguments of wandb.init. Of the cluster profile only its name: its setup lines may hold a site's secrets."""
    cluster = str(run.cluster.get("name", "unknown"))
    return {
        "project": run.recipe.tracking.project,
        "id": run.run_id,
        "name": run.run_id,
        "group": run.recipe.name,
        "job_type": "rl",
        "tags": [run.recipe.name, cluster],
        "mode": mode,
        "dir": str(paths.root),
        "config": {
            "recipe": run.recipe.model_dump(mode="json"),
            "cluster": cluster,
            "code_digest": run.code_digest,
            "base_model_digest": run.base_model_digest,
        },
    }


def cursor_file(paths: RunPaths) -> Path:
    """Where the tracker says what it logged."""
    return paths.cancel_request.with_name("wandb_cursor.json")


def _read_cursor(path: Path) -> Cursor:
    try:
        return Cursor.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Cursor()
    except ValidationError as error:
        raise MilesError(
            f"{path} is no cursor of the tracker ({error}); nothing is logged, so that nothing is twice"
        ) from error


def flatten(values: Mapping[str, Any], prefix: str = "summary") -> Row:
    """Nested figures under one name each; lists are left to reports/summary.json."""
    flat: Row = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}/{key}")
        elif not isinstance(value, list):
            flat[f"{prefix}/{key}"] = value
    return flat


def sync_line(paths: RunPaths, run_id: str) -> str | None:
    """The command that uploads what was tracked offline; None if nothing was."""
    folders = sorted((paths.root / "wandb").glob("offline-run-*"))
    if not folders:
        return None
    return f"wandb sync --id {shlex.quote(run_id)} " + " ".join(shlex.quote(str(folder)) for folder in folders)
