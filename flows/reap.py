"""The reap flow: the last of three layers that end jobs nobody wants any more (after the supervisor and the jobs themselves).

It ends the jobs of a run
- that is closed, but some of its jobs live on;
- whose cancel was requested while no supervisor was there to obey (that run is closed as CANCELLED);
- whose drain was requested while no supervisor was there to obey (that run stays open: `resume` continues it);
- whose supervisor has been silent for orphan_s (that run stays open: `resume` continues it).

A run whose supervisor renews its lease is never touched: silence is watched for lease_s in each call, counted over calls by
the monotonic clock of this boot, and before anything is cancelled the run's supervisor lease is taken, as a supervisor would
(I3). Of a run on a scheduler that does not answer it says so, and fails at its end; the next call tries again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from pydantic import Field, ValidationError

from cluster.epoch import WRITER, read_closed, read_cluster, supervisor_context, take_epoch
from cluster.job_spec import live_jobs, token_of
from cluster.profile import load_cluster
from cluster.scheduler import Scheduler
from cluster.schedulers import make_scheduler
from flows.launch import Hooks, supervise
from flows.prefect_report import API_ERRORS, artifact_key
from flows.pulse import Pulse, find_runs, watch
from miles_core.errors import DeadlineExceeded, HeldElsewhere, LeaseLost, MilesError
from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.records import Drained
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.store.publish import Durability, publish_bytes
from tasks.prepare import run_root

log = logging.getLogger("miles")

MEMORY_FILE = ".reap.json"
_CANCEL_AGAIN_S = 10.0
_CANCEL_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Finding:
    """A run with jobs that nobody wants any more."""

    run_id: str
    why: str
    jobs: tuple[str, ...]
    done: str
    """What was done about it."""
    is_failure: bool = False


class Silence(Closed):
    """A supervisor's heartbeat that did not move since `since_s`."""

    epoch: int
    counter: int
    since_s: float


class Memory(Closed):
    """What one call leaves for the next, in <runs_root>/.reap.json. Times are of the monotonic clock of boot `boot_id`."""

    boot_id: str
    silent: dict[str, Silence] = Field(default_factory=dict)
    """By run."""
    clean: tuple[str, ...] = ()
    """Closed runs that have no job left: not asked for again."""


@flow(name="reap", flow_run_name="reap-on-{cluster}")
def reap(cluster: str = "local", orphan_s: float | None = None, dry_run: bool = False) -> list[dict[str, object]]:
    """Ends what is left below the runs_root of `cluster`; `dry_run` only reports.

    `orphan_s`: silence of a supervisor after which its jobs are orphans, None = that of each run. Raises MilesError if
    something is left that could not be ended.
    """
    runs_root = run_root(load_cluster(cluster), "x").parent
    findings = Reaper(runs_root, orphan_s=orphan_s, dry_run=dry_run).run()
    rows: list[dict[str, object]] = [asdict(finding) for finding in findings]
    for finding in findings:
        get_run_logger().warning("%s: %s; jobs %s: %s", finding.run_id, finding.why, finding.jobs, finding.done)
    if rows:
        try:
            create_table_artifact(rows, key=artifact_key("reap", cluster), description=f"Leftovers below {runs_root}")
        except API_ERRORS as error:
            log.warning("Prefect was not told: %s", error)
    failed = [f"{finding.run_id}: {finding.done}" for finding in findings if finding.is_failure]
    if failed:
        raise MilesError("\n".join(failed))
    return rows


class Reaper:
    """One call over one folder of runs."""

    def __init__(
        self,
        runs_root: Path,
        *,
        orphan_s: float | None = None,
        dry_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root, self._orphan_s, self._dry_run = runs_root, orphan_s, dry_run
        self._clock, self._sleep = clock, sleep
        self._clean: set[str] = set()

    def run(self) -> list[Finding]:
        """Looks at all runs and ends what nobody wants. Raises OSError if the folder cannot be written."""
        memory = self._read_memory()
        self._clean = set(memory.clean)
        runs = [(run, paths) for run, paths in find_runs(self._root) if _key(run) not in self._clean]
        began_s = self._clock()
        pulses = [Pulse(run, paths, [WRITER], clock=self._clock) for run, paths in runs]
        watch(pulses, clock=self._clock, sleep=self._sleep)
        silent = {_key(pulse.run): _silence(pulse, memory, began_s) for pulse in pulses if pulse.verdict == "silent"}
        found = [
            self._examine(pulse.run, pulse.paths, silent[_key(pulse.run)]) for pulse in pulses if _key(pulse.run) in silent
        ]
        self._write_memory(Memory(boot_id=memory.boot_id, silent=silent, clean=tuple(sorted(self._clean))))
        return [finding for finding in found if finding is not None]

    def _examine(self, run: RunConfig, paths: RunPaths, silence: Silence) -> Finding | None:
        try:
            why = self._why(run, paths, silence)
            scheduler = make_scheduler(read_cluster(run), paths.root) if why else None
            jobs = _live_ids(run, scheduler) if scheduler is not None else ()
        except (MilesError, OSError, ValidationError) as error:
            return Finding(run.run_id, "could not be examined", (), str(error), is_failure=True)
        is_closed = why.startswith("closed")
        if not jobs and is_closed:
            self._clean.add(_key(run))
        if scheduler is None or not (jobs or (paths.cancel_request.exists() and not is_closed)):
            return None
        if self._dry_run:
            return Finding(run.run_id, why, jobs, "nothing: this is a dry run")
        try:
            done = self._end(run, paths, scheduler, is_closed)
        except (MilesError, OSError) as error:
            return Finding(run.run_id, why, jobs, str(error), is_failure=not isinstance(error, HeldElsewhere))
        return Finding(run.run_id, why, jobs, done)

    def _why(self, run: RunConfig, paths: RunPaths, silence: Silence) -> str:
        """Why nobody wants its jobs; empty while somebody may."""
        closed = read_closed(run, paths)
        if closed is not None:
            return f"closed as {closed.state}"
        if paths.cancel_request.exists():
            return "its cancel was requested, and no supervisor is there"
        if paths.drain_request.exists():
            return "its drain was requested, and no supervisor is there"
        silent_s = self._clock() - silence.since_s
        orphan_s = run.timing.orphan_s if self._orphan_s is None else self._orphan_s
        return f"no supervisor for at least {silent_s:.0f} s" if silent_s >= orphan_s else ""

    def _end(self, run: RunConfig, paths: RunPaths, scheduler: Scheduler, is_closed: bool) -> str:
        if (paths.cancel_request.exists() or paths.drain_request.exists()) and not is_closed:
            closed = supervise(paths, read_cluster(run), Hooks(), unreachable_s=_CANCEL_DEADLINE_S)
            if isinstance(closed, Drained):
                return "drained; `resume` continues the run"
            return "left before the request was obeyed" if closed is None else f"ended and closed as {closed.state}"
        context = take_epoch(lambda epoch: supervisor_context(run, paths, epoch), takeover=False)
        try:
            self._cancel(context, scheduler)
        except LeaseLost as lost:
            raise HeldElsewhere(f"run {run.run_id} was taken over meanwhile: {lost}") from lost
        finally:
            _release(context)
        return "cancelled" if is_closed else "cancelled; `resume` continues the run"

    def _cancel(self, context: RoleContext, scheduler: Scheduler) -> None:
        until = self._clock() + _CANCEL_DEADLINE_S
        while jobs := _live_ids(context.run, scheduler):
            if self._clock() > until:
                raise DeadlineExceeded(f"jobs {', '.join(jobs)} live on {_CANCEL_DEADLINE_S:g} s after their cancel")
            context.leases.check(WRITER, context.attempt)
            scheduler.cancel(jobs)
            again_at = self._clock() + _CANCEL_AGAIN_S
            while self._clock() < again_at and live_jobs(context.run, scheduler):
                self._sleep(read_cluster(context.run).scheduler_poll_s)

    def _read_memory(self) -> Memory:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        try:
            memory = Memory.model_validate_json((self._root / MEMORY_FILE).read_bytes())
        except FileNotFoundError:
            return Memory(boot_id=boot_id)
        except ValidationError as error:
            log.warning("%s is not readable, so all silence counts from now: %s", self._root / MEMORY_FILE, error)
            return Memory(boot_id=boot_id)
        # Another boot's clock, or another host's: what is clean stays clean.
        return memory if memory.boot_id == boot_id else Memory(boot_id=boot_id, clean=memory.clean)

    def _write_memory(self, memory: Memory) -> None:
        if self._root.is_dir():
            data = json.dumps(memory.model_dump(), indent=1).encode()
            publish_bytes(FileSystem(), self._root / MEMORY_FILE, data, Durability.RENAMED)


def _live_ids(run: RunConfig, scheduler: Scheduler) -> tuple[str, ...]:
    return tuple(job.job_id for job in live_jobs(run, scheduler))


def _key(run: RunConfig) -> str:
    """A run that has the id of one that was removed is another run."""
    return f"{run.run_id}@{run.created_s!r}"


def _silence(pulse: Pulse, memory: Memory, began_s: float) -> Silence:
    epoch, counter = pulse.at(WRITER)
    known = memory.silent.get(_key(pulse.run))
    if known is not None and (known.epoch, known.counter) == (epoch, counter):
        return known
    return Silence(epoch=epoch, counter=counter, since_s=began_s)


def _release(context: RoleContext) -> None:
    """A tombstone, so that the next supervisor need not wait."""
    context.stop()
    epoch = context.attempt + 1
    try:
        context.leases.tombstone(WRITER, epoch, token_of(context.run, WRITER, epoch))
    except OSError as error:
        log.warning("left without a tombstone: %s", error)
