"""The reconciler's decision: desired roles against observed evidence gives actions. Pure; the loop is cluster/supervise.py.

Rules (design section 6, I13, I14):
- A role is done when its completion record says so; that of a job that ended well is waited for 2 x visibility_s. Scheduler
  states are evidence; UNKNOWN is no information.
- Nothing is decided about a job from a failed query. A job that the scheduler no longer lists is lost only after several good
  queries without it, and only if its heartbeat is not alive.
- A refused submission costs a retry like a failure; one that may be taken later (transient) costs none.
- Node failure, preemption (also by suspension) and a drained slice cost no retry; other ends cost one; progress gives all
  retries back.
- A role that lives and says so, but has made no progress for a multiple of stall_s and does not say what it waits for, is
  replaced like one that failed (cluster/stalls.py).
- A lost rollout replica or grader is retired by a tombstone at once, so that its samples move before its successor starts.
- A drain starts nobody: running jobs are told to leave, queued ones are cancelled, late ones are named, then cancelled.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.scheduler import Cause, JobView, Phase
from miles_core.records import split_writer
from miles_core.runtime.context import DRAINED_EXIT_CODE

TOLD_TOO_EARLY_EXIT_CODE = 128 + signal.SIGUSR2
"""The warning ahead of a limit or a preemption ended a role that did not listen yet; it had nothing in hand."""
MISSING_QUERIES = 3
"""Good queries in a row without a job before it counts as vanished."""

Liveness = Literal["unknown", "alive", "dead"]


@dataclass(frozen=True)
class RoleView:
    """What is known of one writer."""

    writer: str
    attempt: int = 0
    """Newest intent; 0 before the first."""
    submitted: bool = False
    """A job id is recorded for that attempt."""
    jobs: tuple[JobView, ...] = ()
    """Jobs of that attempt in the newest good query."""
    ended_for_s: float = math.inf
    """Seconds since the newest of those jobs was first seen ended."""
    missing_queries: int = 0
    """Good queries in a row that did not list a submitted attempt."""
    done: bool = False
    liveness: Liveness = "unknown"
    newest_lease: int = 0
    failures: int = 0
    """Ends that cost a retry since the last progress."""
    last_end: str = ""
    """How the last one ended, for the message."""
    last_refusal: str = ""
    """Why the newest intent could not be submitted, for the message."""
    waits_until_s: float = 0.0
    """Back-off: no submission before this time of the supervisor's clock."""
    stalled_for_s: float = 0.0
    """Seconds that it has lived without any progress and without saying why it waits."""
    last_sign: str = ""
    """What it last said of itself, for the message."""
    drained: bool = False
    """It ended with a drain or before a rollback; the run goes on, and nobody has followed it yet."""


@dataclass(frozen=True)
class World:
    """One tick's evidence."""

    roles: Mapping[str, RoleView]
    """By writer, in submission order."""
    now_s: float
    query_ok: bool
    """The scheduler answered in this tick."""
    stale_jobs: tuple[str, ...] = ()
    """Ids of live jobs of other attempts than the newest: superseded ones, and those of an epoch that was cut."""
    cancel_requested: bool = False
    draining_for_s: float = -1.0
    """Seconds since this epoch saw the request to drain; -1 without one."""
    leave_s: float = 300.0
    """A drained job that is still there after this long is named; drain_s later it is cancelled."""
    needs_rollback: str = ""
    """The learner's word, if it gave up (I8)."""
    ended_for_s: float = -1.0
    """Seconds since orchestrator, learner and evaluator were all done; -1 before."""
    drain_s: float = 60.0
    max_failures: int = 3
    stall_limit_s: float = math.inf
    """A role that is stalled for this long is replaced."""
    visibility_s: float = 0.0
    """How late another node's completion record may appear here."""


@dataclass(frozen=True)
class Start:
    """New attempt: intent, then submission."""

    writer: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class Resubmit:
    """The intent stands but no job carries its token: submit it (again). Twins leave by themselves."""

    writer: str
    attempt: int


@dataclass(frozen=True)
class Adopt:
    """A job with the intent's token was found that no record names."""

    writer: str
    attempt: int
    job_id: str


@dataclass(frozen=True)
class Lost:
    """An attempt ended without a completion record."""

    writer: str
    attempt: int
    costs_retry: bool
    detail: str


@dataclass(frozen=True)
class Retire:
    """Tombstone above `attempt`, so that its work moves at once."""

    writer: str
    attempt: int


@dataclass(frozen=True)
class CancelJobs:
    """Cancel these jobs in one call."""

    job_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class AskToLeave:
    """USR2 to these jobs in one call: seal, save, leave."""

    job_ids: tuple[str, ...]


@dataclass(frozen=True)
class Overdue:
    """These writers were asked to leave and have not; `is_final`: their jobs are cancelled now."""

    writers: tuple[str, ...]
    is_final: bool


@dataclass(frozen=True)
class GiveUp:
    """A role cannot be replaced: NodesLost."""

    writer: str
    detail: str


@dataclass(frozen=True)
class Close:
    """The run is over."""

    state: Literal["COMPLETED", "CANCELLED", "NEEDS_ROLLBACK"]
    detail: str = ""


@dataclass(frozen=True)
class EndDrain:
    """No job is left; the run stays open."""


Action = Start | Resubmit | Adopt | Lost | Retire | CancelJobs | AskToLeave | Overdue | GiveUp | Close | EndDrain


def decide(world: World) -> list[Action]:
    """All actions of one tick, in the order in which they are to be done."""
    if world.cancel_requested:
        return _wind_down(world, Close("CANCELLED", "cancelled on request"), "the run was cancelled")
    if world.needs_rollback:
        return _wind_down(world, Close("NEEDS_ROLLBACK", world.needs_rollback), "the run needs a rollback")
    if world.ended_for_s >= 0:
        return _end(world)
    if world.draining_for_s >= 0:
        return _drain(world)
    actions: list[Action] = []
    if world.stale_jobs and world.query_ok:
        actions.append(CancelJobs(world.stale_jobs, "superseded by a newer attempt"))
    for view in world.roles.values():
        if not view.done and not (is_worker(view.writer) and _is_done(world, "orchestrator-0")):
            actions += _reconcile(world, view)
    return actions


def needed_for_the_end(writer: str) -> bool:
    """True for the roles whose completion ends a run."""
    return not is_worker(writer)


def costs_retry(job: JobView) -> bool:
    """True if this end is the role's own fault (I14)."""
    if job.cause in (Cause.INFRASTRUCTURE, Cause.CANCELLED):
        return False
    return job.exit_code not in (DRAINED_EXIT_CODE, TOLD_TOO_EARLY_EXIT_CODE)


def is_suspended(job: JobView) -> bool:
    """A better job has its cores: it stands still, which is nobody's fault."""
    return job.state.startswith("SUSPENDED")


def next_attempt(view: RoleView) -> int:
    """Attempt numbers only rise, above every intent and every lease."""
    return max(view.attempt, view.newest_lease) + 1


def is_worker(writer: str) -> bool:
    """True for the roles that end with the run; the others end it."""
    return split_writer(writer)[0] in ("rollout", "grader")


def _is_done(world: World, writer: str) -> bool:
    return writer in world.roles and world.roles[writer].done


def _live(view: RoleView) -> list[JobView]:
    return [job for job in view.jobs if job.phase is not Phase.ENDED]


def _reconcile(world: World, view: RoleView) -> list[Action]:
    if view.attempt == 0:
        return [Start(view.writer, next_attempt(view), "first start")]
    if not world.query_ok:
        return []
    live = _live(view)
    if live and not view.submitted:
        return [Adopt(view.writer, view.attempt, live[0].job_id)]
    if live:
        if _is_hung(view, live):
            return _replace(world, view, _hung(view, live), not any(is_suspended(job) for job in live))
        if _runs(view, live) and view.stalled_for_s >= world.stall_limit_s:
            return _replace(world, view, _stalled(world, view), True)
        return _replace_retired(world, view)
    if view.drained:
        return _succeed(view, "the run goes on after a drain or a rollback")
    if view.jobs:
        if view.jobs[-1].cause is Cause.COMPLETED and view.ended_for_s < 2 * world.visibility_s:
            return []
        return _replace(world, view, _ended(view, view.jobs[-1]), costs_retry(view.jobs[-1]))
    if not view.submitted:
        return _resubmit(world, view)
    if view.missing_queries >= MISSING_QUERIES and view.liveness != "alive":
        return _replace(world, view, f"attempt {view.attempt} vanished from the scheduler", False)
    return []


def _replace_retired(world: World, view: RoleView) -> list[Action]:
    """A higher lease over a live job: a supervisor died between the tombstone and its successor's intent."""
    if view.newest_lease <= view.attempt:
        return []
    return _replace(world, view, f"attempt {view.attempt} was retired and its successor never submitted", False)


def _resubmit(world: World, view: RoleView) -> list[Action]:
    if view.failures > world.max_failures:
        return [
            GiveUp(view.writer, f"{view.failures} failures without progress; the last: {view.last_refusal or view.last_end}")
        ]
    return [] if world.now_s < view.waits_until_s else [Resubmit(view.writer, view.attempt)]


def _is_hung(view: RoleView, live: list[JobView]) -> bool:
    return _runs(view, live) and view.liveness == "dead"


def _runs(view: RoleView, live: list[JobView]) -> bool:
    """Its job runs, and the newest attempt holds the lease: what is heard, or not heard, is of that job."""
    return any(job.phase is Phase.RUNNING for job in live) and view.newest_lease == view.attempt


def _replace(world: World, view: RoleView, detail: str, costs: bool) -> list[Action]:
    if view.last_end != detail:
        return [Lost(view.writer, view.attempt, costs, detail)]
    if view.failures > world.max_failures:
        return [GiveUp(view.writer, f"{view.failures} failures without progress; the last: {detail}")]
    if world.now_s < view.waits_until_s:
        return []
    return _succeed(view, detail)


def _succeed(view: RoleView, reason: str) -> list[Action]:
    attempt = next_attempt(view)
    if is_worker(view.writer) and 0 < view.newest_lease == view.attempt:
        return [Retire(view.writer, attempt), Start(view.writer, attempt + 1, reason)]
    return [Start(view.writer, attempt, reason)]


def _hung(view: RoleView, live: list[JobView]) -> str:
    says = "has suspended its job" if any(is_suspended(job) for job in live) else "says it runs"
    return f"attempt {view.attempt}: its heartbeat stopped while the scheduler {says}"


def _stalled(world: World, view: RoleView) -> str:
    return f"attempt {view.attempt} lives but made no progress for {world.stall_limit_s:g} s: {view.last_sign}"


def _ended(view: RoleView, job: JobView) -> str:
    code = "" if job.exit_code is None else f" exit code {job.exit_code}"
    nodes = f" on {','.join(job.nodes)}" if job.nodes else ""
    reason = f" ({job.reason})" if job.reason and job.reason != "None" else ""
    return f"attempt {view.attempt}, job {job.job_id}: {job.state}{code}{nodes}{reason} without a completion record"


def _all_live(world: World) -> tuple[str, ...]:
    return tuple(job.job_id for view in world.roles.values() for job in _live(view)) + world.stale_jobs


def _wind_down(world: World, close: Close, reason: str) -> list[Action]:
    """Cancels what is listed; then retires every role, so that one the scheduler forgot, or has not listed yet, leaves, too."""
    if not world.query_ok:
        return []
    live = _all_live(world)
    if live:
        return [CancelJobs(live, reason)]
    unfinished = [view for view in world.roles.values() if not view.done and 0 < view.attempt >= view.newest_lease]
    return [*(Retire(view.writer, next_attempt(view)) for view in unfinished), close]


def _end(world: World) -> list[Action]:
    if not world.query_ok:
        return []
    live = _all_live(world)
    if not live:
        return [Close("COMPLETED")]
    if world.ended_for_s >= world.drain_s:
        return [CancelJobs(live, f"still there {world.drain_s:.0f} s after the end of the run")]
    return []


def _drain(world: World) -> list[Action]:
    """Signals are repeated: one that came before its role could hear it is lost."""
    if not world.query_ok:
        return []
    live = {view.writer: _live(view) for view in world.roles.values() if _live(view)}
    idle = (*_ids(job for jobs in live.values() for job in jobs if job.phase is Phase.PENDING), *world.stale_jobs)
    working = {writer: _ids(job for job in jobs if job.phase is not Phase.PENDING) for writer, jobs in live.items()}
    late = tuple(writer for writer, job_ids in working.items() if job_ids)
    actions: list[Action] = [CancelJobs(idle, "the run is drained, and they do nothing for it")] if idle else []
    if not late:
        return actions or _end_drain(world)
    job_ids = tuple(job_id for ids in working.values() for job_id in ids)
    is_final = world.draining_for_s >= world.leave_s + world.drain_s
    if world.draining_for_s >= world.leave_s:
        actions.append(Overdue(late, is_final))
    return [*actions, CancelJobs(job_ids, "asked to leave, but did not") if is_final else AskToLeave(job_ids)]


def _ids(jobs: Iterable[JobView]) -> tuple[str, ...]:
    return tuple(job.job_id for job in jobs)


def _end_drain(world: World) -> list[Action]:
    """What the scheduler may list later, or forgot, is retired: it leaves as soon as it looks at its lease."""
    started = [view for view in world.roles.values() if view.attempt and not view.done and not view.jobs and not view.drained]
    if any(view.missing_queries < MISSING_QUERIES if view.submitted else world.now_s < view.waits_until_s for view in started):
        return []
    return [*(Retire(view.writer, next_attempt(view)) for view in started), EndDrain()]


@dataclass
class Exclusions:
    """Suspect nodes, each for a while, never so many that the partition empties."""

    exclude_s: float
    most: int
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, nodes: tuple[str, ...], now_s: float) -> None:
        """A role was lost on these nodes."""
        for node in nodes:
            self._until[node] = now_s + self.exclude_s

    def current(self, now_s: float, usable_nodes: int | None) -> tuple[str, ...]:
        """Nodes to avoid now; the most recent first, at least one usable node is left."""
        self._until = {node: until for node, until in self._until.items() if until > now_s}
        most = self.most if usable_nodes is None else min(self.most, max(usable_nodes - 1, 0))
        return tuple(sorted(self._until, key=lambda node: -self._until[node])[:most])
