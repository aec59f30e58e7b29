"""The supervisor's loop: gathers evidence, asks supervisor.decide, does what it says, journals everything (I13).

Hosted by `miles run` or by the train flow. Of two, the newer epoch wins: the lease is re-read before every intent,
submission, cancel and deletion. If this process dies, the jobs go on and the next supervisor adopts them.

Failure: an OSError costs what it hit in one tick. While the own journal cannot be written (disk full) nothing is started or
closed; jobs are still cancelled. A submission that may be taken later is tried again with back-off. One that is refused
for good ends a run that has not trained yet: its jobs are cancelled, since they would wait for that role for ever; once the
run has trained, the refusal counts against that role's retries and touches nobody else.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.collector import Collector
from cluster.directory import DirectoryWatch
from cluster.epoch import WRITER
from cluster.evidence import Evidence
from cluster.job_spec import log_tail, make_job_spec, token_of
from cluster.profile import ClusterProfile
from cluster.saves import SaveWatch
from cluster.scheduler import Cause, JobView, Phase, Scheduler
from cluster.supervisor import (
    Action,
    Adopt,
    AskToLeave,
    CancelJobs,
    Close,
    EndDrain,
    Exclusions,
    GiveUp,
    Lost,
    Overdue,
    Resubmit,
    Retire,
    Start,
    decide,
    is_suspended,
)
from miles_core.errors import DeadlineExceeded, LeaseLost, NeedsRollback, NodesLost, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import Deletion, Drained, Incident, Intent, JobEnded, Rollback, RunClosed, Submitted
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import read_cut

log = logging.getLogger("miles")

Outcome = RunClosed | Drained
"""How a supervisor's work ends, if it was not only asked to leave."""

_CANCEL_AGAIN_S = 10.0
_BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)
_SUBMIT_AGAIN_S = (15.0, 30.0, 60.0)
"""Long enough for a controller that took a submission without saying so to list the job."""
_NAP_S = 1.0
"""A request to leave or to cancel is noticed within this time."""


@dataclass(frozen=True)
class Progress:
    """What a person sees at each tick."""

    step: int
    steps: int
    mean_reward: float | None
    staleness: int | None
    roles: tuple[tuple[str, str], ...]
    """(writer, state in a few words)."""
    incidents: int
    seconds: float


class Supervisor:
    """One epoch over one run."""

    def __init__(
        self,
        context: RoleContext,
        profile: ClusterProfile,
        scheduler: Scheduler,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_incident: Callable[[Incident], None] = lambda incident: None,
        on_poll: Callable[[], None] = lambda: None,
        unreachable_s: float = math.inf,
    ) -> None:
        """`unreachable_s`: how long the scheduler may stay away; a run outlives it, a person who cancels does not wait."""
        self.context, self.profile, self.scheduler = context, profile, scheduler
        self.run_config: RunConfig = context.run
        self.paths: RunPaths = context.paths
        self.evidence = Evidence(context, scheduler)
        self.roles = self.evidence.roles
        self.collector = Collector(context, self._record)
        self._saves = SaveWatch(self.paths.metrics("learner-0", 1).parent, profile.slurm.signal_lead_s)
        self._directory = DirectoryWatch(self.paths, profile, context.timing.lease_s, context.clock)
        self._on_progress, self._on_incident, self._on_poll = on_progress, on_incident, on_poll
        self._unreachable_s = unreachable_s
        self._exclusions = Exclusions(profile.exclude_s, profile.exclude_max)
        self._cancelled_at: dict[str, float] = {}
        self._asked_at: dict[str, float] = {}
        self._overdue: dict[bool, tuple[str, ...]] = {}
        """Who was late in a drain: named, and (True) cancelled."""
        self._reported_ends: set[tuple[str, str]] = set()
        self._untold: list[Incident] = []
        self._incidents = 0
        self._is_busy = False
        """The scheduler did not take a submission in this tick; the next ones wait."""
        self._has_lost = False
        """The last decision found a role lost."""
        self._started_at = context.clock()

    def run(self) -> Outcome | None:
        """Until the run is over or drained, or (None) until context.leave is set.

        Raises NodesLost, NeedsRollback, LeaseLost, SchedulerError, DeadlineExceeded, RunDirectoryError. Only an outcome, or the
        SchedulerError of a run that has not trained, means that no job is left; in all other cases the jobs go on.
        """
        try:
            self._open_journal()
            while not self.context.leave.is_set():
                closed = self.tick()
                if closed is not None:
                    return closed
                self._sleep_one_tick()
            # A lost lease sets `leave`, too.
            self.evidence.troubles.attempt("leases", self.context.before_write)
            return None
        finally:
            self._release()

    def tick(self) -> Outcome | None:
        """One round: evidence, decision, actions."""
        self.evidence.observe()
        self._check_reachable()
        self._directory.check(self.evidence.troubles.attempt("run.json", self._directory.is_there), self.evidence.snapshot)
        try:
            closed = self.evidence.troubles.attempt("run directory", self._act)
        finally:
            self._tell()
        self._report_progress()
        self._on_poll()
        if isinstance(closed, RunClosed) and closed.state == "NEEDS_ROLLBACK":
            raise NeedsRollback(f"run {self.run_config.run_id} needs a rollback: {closed.detail}")
        return closed

    # --- journal -----------------------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        cuts = self.context.cut_predecessors()
        self.journal = self.context.journal()
        self.journal.write(cuts)
        for cut in cuts.cuts:
            for item in read_cut(self.context.reading, self.paths.journal(WRITER), cut):
                self._remember(item.record)
                if isinstance(item.record, Deletion):
                    self.collector.fold(item.record)

    def _remember(self, record: object) -> None:
        writer = getattr(record, "writer", "")
        if isinstance(record, Drained | Rollback):
            for role in self.roles.values():
                role.fold(record)
        elif writer in self.roles:
            self.roles[writer].fold(record)
        if isinstance(record, JobEnded):
            self._reported_ends.add((record.writer, record.job_id))

    def _record(self, record: Intent | Submitted | Deletion | Outcome) -> None:
        """On disk, or OSError: then it is on disk before anything else is done."""
        self.context.leases.check(WRITER, self.context.attempt)
        self.journal.append(record)
        self._remember(record)
        self.journal.flush()

    def incident(self, what: str, writer: str = "", detail: str = "") -> None:
        """Journals (with the next records) and logs something a person will ask about."""
        record = Incident(what=what, writer=writer, detail=detail, unix_s=time.time())
        self._incidents += 1
        log.warning("incident=%s writer=%s %s", what, writer or "-", detail)
        self.journal.append(record)
        self._untold.append(record)

    def _tell(self) -> None:
        """Outside the border of `_act`: an error of whoever wants to hear is no trouble of the run directory."""
        untold, self._untold = self._untold, []
        for record in untold:
            self._on_incident(record)

    def _journal_is_whole(self) -> bool:
        """Everything decided so far is on disk."""
        self.evidence.troubles.attempt("the supervisor's journal", self.journal.flush_when_due)
        return self.journal.synced_bytes == self.journal.bytes

    def _release(self) -> None:
        """A clean end leaves a tombstone, so that the next supervisor need not wait for this one's lease to run out.

        Whatever ends this epoch, its heartbeat ends with it: a flow may enter again in the same process.
        """
        self.context.stop()
        try:
            if hasattr(self, "journal"):
                self.journal.flush()
            self.context.leases.check(WRITER, self.context.attempt)
            self._tombstone(WRITER, self.context.attempt + 1)
        except (OSError, LeaseLost) as error:
            log.warning("left without a tombstone: %s", error)

    def _tombstone(self, writer: str, attempt: int) -> None:
        self.context.crash_point("before_tombstone")
        self.context.leases.tombstone(writer, attempt, token_of(self.run_config, writer, attempt))
        self.context.crash_point("after_tombstone")

    # --- time --------------------------------------------------------------------------------------------------------

    def _check_reachable(self) -> None:
        since = self.evidence.unreachable_since_s
        if since is None or self.context.clock() - since < self._unreachable_s:
            return
        raise DeadlineExceeded(
            f"the scheduler of run {self.run_config.run_id} has not answered for {self._unreachable_s:g} s: "
            f"{self.evidence.snapshot.error}"
        )

    def _sleep_one_tick(self) -> None:
        """Sleeps until the next query; heartbeats are observed in between, so that a long pause is no gap (I4)."""
        clock, look_every_s = self.context.clock, self.context.timing.lease_s / 8
        until, look_at = clock() + self.profile.scheduler_poll_s, clock() + look_every_s
        known = self.evidence.requests
        while (left := until - clock()) > 0:
            self.context.sleep(min(left, look_every_s, _NAP_S))
            if clock() >= look_at:
                look_at = clock() + look_every_s
                self.evidence.look()
            self.evidence.look_for_requests()
            if self.context.leave.is_set() or self.evidence.requests != known:
                return

    # --- actions -----------------------------------------------------------------------------------------------------

    def _act(self) -> Outcome | None:
        self._is_busy = False
        down = self.evidence.newly_down()
        if down:
            self.incident("node_down", detail=f"down or drained: {', '.join(down)}")
        if low := self.evidence.newly_low_on_disk():
            self.incident("disk_low", detail=low)
        for writer, detail in self.evidence.newly_stalled():
            self.incident("role_stalled", writer, detail)
        if self.profile.kind == "slurm" and (slow := self.evidence.troubles.attempt("metrics", self._saves.newly_slow)):
            self.incident("save_slower_than_grace", "learner-0", slow)
        may_write = self._journal_is_whole()
        closed = self._decide(may_write)
        if closed is None and self._has_lost:
            # Their successors, by the same evidence: on a real cluster the next query is half a minute away.
            closed = self._decide(self._journal_is_whole())
        if closed is not None:
            return closed
        if may_write:
            self.evidence.troubles.attempt("deleting what retired", self._collect)
        self.journal.flush_when_due()
        return None

    def _decide(self, may_write: bool) -> Outcome | None:
        self._has_lost = False
        world = self.evidence.world(drain_s=self.profile.drain_s, max_failures=self.profile.role_failures)
        for action in decide(world):
            if self.context.leave.is_set():
                break
            if may_write or isinstance(action, CancelJobs | AskToLeave):
                closed = self._do(action)
                if closed is not None:
                    return closed
        return None

    def _collect(self) -> None:
        self.collector.tick(self.evidence.reading())

    def _do(self, action: Action) -> Outcome | None:
        self.context.leases.check(WRITER, self.context.attempt)
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Resubmit):
            self._submit(action.writer, action.attempt)
        elif isinstance(action, Adopt):
            self._record(Submitted(writer=action.writer, attempt=action.attempt, job_id=action.job_id, adopted=True))
        elif isinstance(action, Lost):
            self._lost(action)
        elif isinstance(action, Retire):
            self._tombstone(action.writer, action.attempt)
        elif isinstance(action, CancelJobs):
            self._cancel(action)
        elif isinstance(action, AskToLeave):
            self._ask_to_leave(action)
        elif isinstance(action, Overdue):
            self._name_overdue(action)
        elif isinstance(action, GiveUp):
            self._give_up(action)
        elif isinstance(action, EndDrain):
            return self._end_drain()
        else:
            return self._close(action)
        return None

    def _start(self, action: Start) -> None:
        record = self.roles[action.writer]
        if self._is_busy:
            return
        if record.attempt and not record.drained:
            self.incident("role_replaced", action.writer, f"attempt {action.attempt} replaces: {action.reason}")
        token = token_of(self.run_config, action.writer, action.attempt)
        exclude = self._exclusions.current(self.context.clock(), self.evidence.snapshot.usable_nodes)
        self._record(Intent(writer=action.writer, attempt=action.attempt, token=token, reason=action.reason, exclude=exclude))
        self._submit(action.writer, action.attempt)

    def _submit(self, writer: str, attempt: int) -> None:
        if self._is_busy:
            return
        self.context.leases.check(WRITER, self.context.attempt)
        spec = make_job_spec(self.run_config, self.paths, self.profile, writer, attempt, self.roles[writer].exclude)
        self.context.crash_point("before_submit")
        try:
            job_id = self.scheduler.submit(spec)
            self.context.crash_point("after_submit")
        except SchedulerError as error:
            self._not_taken(writer, error)
            return
        self._record(Submitted(writer=writer, attempt=attempt, job_id=job_id))

    def _not_taken(self, writer: str, error: SchedulerError) -> None:
        """Tried again later; raises `error` if that is hopeless and the run has not trained yet."""
        record = self.roles[writer]
        is_permanent = not (error.ambiguous or error.transient)
        if str(error) != record.last_refusal:
            self.incident("submit_failed", writer, str(error))
        record.last_refusal, record.refusals = str(error), record.refusals + 1
        pause_s = _SUBMIT_AGAIN_S[min(record.refusals, len(_SUBMIT_AGAIN_S)) - 1]
        record.waits_until_s = self.context.clock() + pause_s
        self._is_busy = not is_permanent
        if is_permanent:
            record.failures += 1
            if not self.evidence.has_trained():
                raise self._end_before_training(error)

    def _end_before_training(self, error: SchedulerError) -> SchedulerError:
        """Cancels what was submitted, and says so."""
        live = self._live_now()
        note = "no job of this run is left"
        if live:
            try:
                self.scheduler.cancel(live)
                note = f"the {len(live)} jobs of this run that were already submitted are cancelled ({', '.join(live)})"
            except SchedulerError as failure:
                note = f"jobs {', '.join(live)} of this run could not be cancelled ({failure}): cancel them by hand"
        self.incident("refused", detail=note)
        root = self.paths.root
        return SchedulerError(
            f"{error}\n{note}; correct the cluster profile and continue with --run-id {self.run_config.run_id}, or end the run "
            f"with `miles cancel {root}`"
        )

    def _live_now(self) -> tuple[str, ...]:
        """Live jobs, from a query that also sees what this tick submitted."""
        self.evidence.observe()
        return self.evidence.live_jobs()

    def _lost(self, action: Lost) -> None:
        record, now = self.roles[action.writer], self.context.clock()
        jobs = self.evidence.jobs_of(action.writer)
        self._has_lost = True
        record.last_end = action.detail
        record.losses += 1
        record.failures += action.costs_retry
        # The first loss is replaced at once. What costs no retry is not always nobody's fault: a node that kills everything at
        # once must not be fed at each tick.
        times = max(record.failures if record.failures > 1 else 0, record.losses - 1)
        record.waits_until_s = now + _BACKOFF_S[min(times, len(_BACKOFF_S) - 1)]
        if jobs and _is_suspect(jobs[-1]):
            down = tuple(node for node in jobs[-1].nodes if node in self.evidence.snapshot.down_nodes)
            # Of a job of several nodes the one that died, not its healthy neighbours.
            self._exclusions.add(down or jobs[-1].nodes, now)
        if jobs and jobs[-1].cause is Cause.INFRASTRUCTURE:
            # Slurm may hold a job whose launch failed for an administrator: it shall not start behind its successor.
            self._cancel(CancelJobs((jobs[-1].job_id,), "lost"))
        self.incident("role_lost", action.writer, action.detail)
        for job in jobs:
            if job.phase is Phase.ENDED and (action.writer, job.job_id) not in self._reported_ends:
                ended = JobEnded(
                    writer=action.writer, attempt=action.attempt, job_id=job.job_id, cause=job.cause.value, state=job.state,
                    exit_code=job.exit_code, nodes=job.nodes, reason=job.reason,
                )  # fmt: skip
                self.journal.append(ended)
                self._remember(ended)

    def _cancel(self, action: CancelJobs) -> None:
        if due := self._due(action.job_ids, self._cancelled_at):
            log.info("cancelling %d jobs: %s", len(due), action.reason)
            self._tell_scheduler("cancelling", due)

    def _ask_to_leave(self, action: AskToLeave) -> None:
        if due := self._due(action.job_ids, self._asked_at):
            log.info("asking %d jobs to leave", len(due))
            self._tell_scheduler("asking jobs to leave", due, signal="USR2")

    def _due(self, job_ids: tuple[str, ...], told_at: dict[str, float]) -> tuple[str, ...]:
        """Those that were not told for a while; they are from now on."""
        now = self.context.clock()
        due = tuple(job for job in job_ids if now - told_at.get(job, -math.inf) >= _CANCEL_AGAIN_S)
        told_at.update(dict.fromkeys(due, now))
        return due

    def _tell_scheduler(self, what: str, job_ids: tuple[str, ...], signal: str = "") -> None:
        self.context.crash_point("before_cancel")
        try:
            self.scheduler.cancel(job_ids, signal=signal)
            self.context.crash_point("after_cancel")
        except SchedulerError as error:
            if self.evidence.troubles.note(what, str(error)):
                self.incident("cancel_failed", detail=f"{what}: {error}")
        else:
            self.evidence.troubles.note(what, "")

    def _name_overdue(self, action: Overdue) -> None:
        if action.is_final in self._overdue:
            return
        self._overdue[action.is_final] = action.writers
        within_s = self.evidence.leave_s + (self.profile.drain_s if action.is_final else 0.0)
        what = "drain_cancelled" if action.is_final else "drain_late"
        self.incident(what, detail=f"still there {within_s:g} s after they were asked to leave: {', '.join(action.writers)}")

    def _give_up(self, action: GiveUp) -> None:
        self.incident("nodes_lost", action.writer, action.detail)
        tail = log_tail(self.paths, action.writer, self.roles[action.writer].attempt)
        raise NodesLost(
            f"{action.writer} cannot be replaced: {action.detail}\n{tail}\nThe other jobs go on: mend the cause and run again "
            f"with --run-id {self.run_config.run_id}, or end them with `miles cancel {self.paths.root}`"
        )

    def _end_drain(self) -> Drained:
        drained = Drained(cancelled=self._overdue.get(True, ()), unix_s=time.time())
        self._record(drained)
        return drained

    def _close(self, action: Close) -> RunClosed:
        closed = RunClosed(state=action.state, detail=action.detail, unix_s=time.time())
        self._record(closed)
        return closed

    # --- for people --------------------------------------------------------------------------------------------------

    def _report_progress(self) -> None:
        steps = self.evidence.steps
        newest = steps.steps.get(steps.newest_step)
        self._on_progress(Progress(
            step=max(steps.newest_step, 0), steps=self.context.recipe.steps,
            mean_reward=newest.mean_reward if newest is not None and newest.step > 0 else None,
            staleness=newest.staleness if newest is not None and newest.step > 0 else None,
            roles=tuple((writer, self._role_state(writer)) for writer in self.roles),
            incidents=self._incidents, seconds=self.context.clock() - self._started_at,
        ))  # fmt: skip

    def _role_state(self, writer: str) -> str:
        if writer in self.evidence.done:
            return "done"
        jobs = self.evidence.jobs_of(writer)
        if not jobs:
            return "submitting" if self.roles[writer].attempt else "not started"
        job = jobs[-1]
        if job.phase is Phase.PENDING:
            return f"queued ({job.reason})" if job.reason else "queued"
        return self.evidence.state_of(writer) or job.phase.value


def _is_suspect(job: JobView) -> bool:
    """The node may be at fault: it was lost, or a role hung on it. Preemption says nothing about a node."""
    if job.phase is not Phase.ENDED:
        return not is_suspended(job)
    return job.cause is Cause.INFRASTRUCTURE and not job.state.startswith("PREEMPTED")
