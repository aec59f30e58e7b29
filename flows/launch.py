"""One run from recipe to report, without Prefect: what `miles run` does and what flows/train hosts.

Tracking and the report are for people and best effort: neither ends a run nor hides how it ended.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.drain import drain_mark, lift_drain
from cluster.engines import check_engines
from cluster.epoch import read_closed, supervisor_context, take_epoch
from cluster.job_spec import live_jobs, make_job_spec
from cluster.own_code import unloadable
from cluster.profile import ClusterProfile, short_lead
from cluster.sandboxes import open_sandbox
from cluster.saves import measured_saves_s, unfit_save
from cluster.scheduler import Scheduler
from cluster.schedulers import make_scheduler
from cluster.supervise import Outcome, Progress, Supervisor
from miles_core.errors import HeldElsewhere, LeaseLost, MilesError, RecipeError, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import Incident
from miles_core.run import RunConfig, all_writers, read_run

log = logging.getLogger("miles")


@dataclass(frozen=True)
class Hooks:
    """Who wants to hear of it."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    on_incident: Callable[[Incident], None] = lambda incident: None


def request_cancel(paths: RunPaths) -> None:
    """Asks the run's supervisor, this or the next one, to end it."""
    paths.cancel_request.parent.mkdir(parents=True, exist_ok=True)
    paths.cancel_request.touch()


def supervise(
    paths: RunPaths,
    profile: ClusterProfile,
    hooks: Hooks,
    *,
    takeover: bool = False,
    unreachable_s: float = math.inf,
    around: Callable[[Scheduler], Scheduler] = lambda scheduler: scheduler,
    go_on: bool = False,
) -> Outcome | None:
    """Supervises a prepared run until it is over or drained; None when it was asked to leave. A closed run is only read.

    `around` puts something between the supervisor and the scheduler; `go_on` lifts a request to drain that is obeyed otherwise.
    Raises HeldElsewhere (also when another supervisor took the run over), NodesLost, NeedsRollback, SchedulerError,
    RecipeError, and DeadlineExceeded when the scheduler stays away for `unreachable_s`.
    """
    _let_nobody_write()
    run, paths = read_run(paths.root)
    if (closed := read_closed(run, paths)) is not None:
        return closed
    scheduler, known_drain = around(make_scheduler(profile, paths.root)), drain_mark(paths)
    if not paths.cancel_request.exists() and (go_on or known_drain is None):
        check_scripts(run, paths, profile, scheduler)
    context = take_epoch(lambda epoch: supervisor_context(run, paths, epoch), takeover=takeover)
    restore = _leave_on_signals(context.leave)
    try:
        # A request that came while the last holder's lease ran out is obeyed.
        lift_drain(paths, known_drain if go_on else None)
        with _tracked(run, paths, context.attempt, hooks) as (on_progress, on_poll):
            return Supervisor(
                context, profile, scheduler, on_progress=on_progress, on_incident=hooks.on_incident, on_poll=on_poll,
                unreachable_s=unreachable_s,
            ).run()  # fmt: skip
    except LeaseLost as lost:
        raise HeldElsewhere(f"run {run.run_id} was taken over by another supervisor: {lost}") from lost
    finally:
        # Also where `run` was not reached: a heartbeat left behind would hold the run against the next one.
        context.stop()
        _leave_report(paths)
        restore()


def _let_nobody_write() -> None:
    """Jobs inherit it, too: what they make in the run directory only its owner may change (I17)."""
    os.umask(os.umask(0o022) | 0o022)


def check_scripts(run: RunConfig, paths: RunPaths, profile: ClusterProfile, scheduler: Scheduler) -> None:
    """Makes every job's script once: what cannot be is refused before anything is submitted, what loses work is said.

    Raises RecipeError.
    """
    if warning := short_lead(profile, run.recipe):
        log.warning(warning)
    check_engines(run.recipe, profile)
    measured_s = measured_saves_s(paths.metrics("learner-0", 1).parent)
    faults = (
        unfit_save(profile, run.recipe, paths.base_model, measured_s),
        unloadable(run.recipe, profile, paths.code),
        open_sandbox(run.recipe, profile),
    )
    for fault in faults:
        if fault and not _may_live(run, scheduler):
            raise RecipeError(fault)
        if fault:
            log.warning(fault)
    for writer in all_writers(run.recipe):
        scheduler.script(make_job_spec(run, paths, profile, writer, 1))


def _may_live(run: RunConfig, scheduler: Scheduler) -> bool:
    """Whether jobs of the run may be there: those are better supervised than refused."""
    try:
        return bool(live_jobs(run, scheduler))
    except SchedulerError:
        return True


@contextmanager
def _tracked(
    run: RunConfig, paths: RunPaths, epoch: int, hooks: Hooks
) -> Iterator[tuple[Callable[[Progress], None], Callable[[], None]]]:
    """The supervisor's hooks (on_progress, on_poll), with the run's tracker behind them where the recipe asks for one."""
    if not run.recipe.tracking.wandb:
        yield hooks.on_progress, lambda: None
        return
    from miles_core.tracking.ledger import read_ledger
    from miles_core.tracking.summary import summarize
    from miles_core.tracking.wandb_tracker import open_tracker

    tracker = open_tracker(run, paths, epoch)

    def on_progress(progress: Progress) -> None:
        tracker.states = progress.roles
        hooks.on_progress(progress)

    try:
        yield on_progress, tracker.tick
    finally:
        tracker.close(lambda: summarize(read_ledger(run, paths), paths))


def _leave_report(paths: RunPaths) -> None:
    """The report of a run that ends here, or that its supervisor leaves."""
    from flows.report import build_report

    try:
        build_report(paths.root)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MilesError) as error:
        log.warning("no report was written (`miles report %s` tries again): %s", paths.root, error)


def _leave_on_signals(leave: threading.Event) -> Callable[[], None]:
    """TERM and INT make the supervisor leave, a second one at once; the jobs go on. Returns what restores the old handlers."""

    def handle(number: int, frame: Any) -> None:
        if leave.is_set():
            raise KeyboardInterrupt
        leave.set()

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever hosts it there handles signals
        old = {}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    return restore
