"""One run from recipe to summary, without Prefect: what `miles run` does and what flows/train hosts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.profile import ClusterProfile
from cluster.schedulers import make_scheduler
from cluster.supervise import Progress, Supervisor, read_closed, supervisor_context, take_epoch
from miles_core.paths import RunPaths
from miles_core.records import Incident, RunClosed
from miles_core.run import read_run


@dataclass(frozen=True)
class Hooks:
    """Who wants to hear of it."""

    on_progress: Callable[[Progress], None] = lambda progress: None
    on_incident: Callable[[Incident], None] = lambda incident: None


def supervise(paths: RunPaths, profile: ClusterProfile, hooks: Hooks, *, takeover: bool = False) -> RunClosed | None:
    """Supervises a prepared run until it is over; None when it was asked to leave. A closed run is only read.

    Raises HeldElsewhere, NodesLost, NeedsRollback, SchedulerError.
    """
    run, paths = read_run(paths.root)
    closed = read_closed(run, paths)
    if closed is not None:
        return closed
    scheduler = make_scheduler(profile, paths.root)
    context = take_epoch(lambda epoch: supervisor_context(run, paths, epoch), takeover=takeover)
    restore = _leave_on_signals(context.leave.set)
    try:
        supervisor = Supervisor(context, profile, scheduler, on_progress=hooks.on_progress, on_incident=hooks.on_incident)
        return supervisor.run()
    finally:
        restore()


def _leave_on_signals(leave: Callable[[], None]) -> Callable[[], None]:
    """TERM and INT make the supervisor leave; the jobs go on. Returns a function that restores the old handlers."""

    def handle(number: int, frame: Any) -> None:
        leave()

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever hosts it there handles signals
        old = {}

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    return restore
