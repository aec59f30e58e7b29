"""The supervisor's loop: gathers evidence, asks supervisor.decide, does what it says, journals everything (I13).

Hosted by `miles run` or by the train flow. Of two, the newer epoch wins: the lease is re-read before every intent,
submission, cancel and deletion. If this process dies, the jobs go on and the next supervisor adopts them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from cluster.profile import ClusterProfile, Role
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Scheduler, Snapshot, attempt_token
from cluster.supervisor import (
    Action,
    Adopt,
    CancelJobs,
    Close,
    Exclusions,
    GiveUp,
    Lost,
    Resubmit,
    Retire,
    RoleView,
    Start,
    World,
    decide,
    needed_for_the_end,
)
from miles_core.errors import HeldElsewhere, NeedsRollback, NodesLost, SchedulerError
from miles_core.paths import RunPaths
from miles_core.policy.lineage import StepLog
from miles_core.records import (
    Done,
    Incident,
    Intent,
    JobEnded,
    LivenessEntry,
    LivenessTable,
    RunClosed,
    Submitted,
    split_writer,
)
from miles_core.roles.runtime import RoleContext
from miles_core.run import RunConfig, all_writers, rollout_writers
from miles_core.store.follow import read_cut
from miles_core.store.lease import LivenessJudge
from miles_core.tracking.ledger import read_all

log = logging.getLogger("miles")

WRITER = "supervisor-0"
ROLE_ENV = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore::SyntaxWarning", "PYTHONDONTWRITEBYTECODE": ""}
"""Libraries' progress bars and warnings about their own source say nothing in a log; compiled modules are kept, else every role
compiles torch anew at its start."""
_CANCEL_AGAIN_S = 10.0
_BACKOFF_S = (0.0, 1.0, 5.0, 15.0, 60.0)


@dataclass
class RoleRecord:
    """What the supervisor's own journal says of one writer, plus this epoch's counts."""

    attempt: int = 0
    job_ids: list[str] = field(default_factory=list)
    all_job_ids: list[str] = field(default_factory=list)
    submitted: bool = False
    last_end: str = ""
    failures: int = 0
    progress: int = 0
    waits_until_s: float = 0.0
    missing_queries: int = 0

    def fold(self, record: object) -> None:
        """Takes one record of this or an earlier epoch."""
        if isinstance(record, Intent):
            self.attempt, self.submitted, self.job_ids = record.attempt, False, []
            self.last_end, self.missing_queries = "", 0
        elif isinstance(record, Submitted) and record.attempt == self.attempt:
            self.submitted = True
            self.job_ids.append(record.job_id)
            self.all_job_ids.append(record.job_id)


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


def take_epoch(context_of: Callable[[int], RoleContext], *, takeover: bool) -> RoleContext:
    """Takes the supervisor's lease. Raises HeldElsewhere while another supervisor renews its own.

    Without `takeover` a holder is watched for lease_s; one that does not move is dead and its run is adopted.
    """
    probe = context_of(0)
    probe.paths.leases.mkdir(parents=True, exist_ok=True)
    probe.leases.refresh()
    newest = probe.leases.newest(WRITER)
    if newest and not takeover and probe.leases.read(WRITER, newest).kind == "lease":
        _wait_until_dead(probe, newest)
    context = context_of(newest + 1)
    context.start()
    return context


def _wait_until_dead(probe: RoleContext, epoch: int) -> None:
    lease = probe.leases.read(WRITER, epoch)
    judge = LivenessJudge(probe.fs, probe.paths.heartbeats, probe.timing.lease_s, probe.clock)
    judge.observe(WRITER, epoch)
    first = judge.heartbeat(WRITER, epoch)
    deadline = probe.clock() + 3 * probe.timing.lease_s
    while judge.observe(WRITER, epoch) != "dead":
        current = judge.heartbeat(WRITER, epoch)
        if current is not None and first is not None and current.counter > first.counter:
            raise HeldElsewhere(
                f"run {probe.run.run_id} is supervised by process {lease.pid} on {lease.host} (epoch {epoch}). Watch it with "
                f"`miles status {probe.run.run_id}`, or take it over with --takeover"
            )
        if probe.clock() > deadline:
            raise HeldElsewhere(f"epoch {epoch} of {probe.run.run_id} could not be judged within {3 * probe.timing.lease_s} s")
        probe.sleep(probe.timing.lease_s / 10)


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
    ) -> None:
        self.context, self.profile, self.scheduler = context, profile, scheduler
        self.run_config: RunConfig = context.run
        self.paths: RunPaths = context.paths
        self._on_progress, self._on_incident, self._on_poll = on_progress, on_incident, on_poll
        self._pools = dict(rollout_writers(context.recipe))
        self.roles = {writer: RoleRecord() for writer in all_writers(context.recipe)}
        self._exclusions = Exclusions(profile.exclude_s, profile.exclude_max)
        self._judge = LivenessJudge(context.fs, self.paths.heartbeats, context.timing.lease_s, context.clock)
        self._steps = StepLog(context.follow("learner-0"))
        self._done: dict[str, Done] = {}
        self._ended_at: float | None = None
        self._cancelled_at: dict[str, float] = {}
        self._reported_ends: set[tuple[str, str]] = set()
        self._down_nodes: tuple[str, ...] = ()
        self._incidents = 0
        self._snapshot = Snapshot(ok=False)
        self._table: LivenessTable | None = None
        self._table_seen: tuple[int, int] = (0, 0)
        self._table_changed_at = context.clock()
        self._started_at = context.clock()

    def run(self) -> RunClosed | None:
        """Until the run is over, or (None) until context.leave is set. Raises NodesLost, NeedsRollback, LeaseLost.

        Only a RunClosed means that no job is left; in all other cases the jobs go on.
        """
        self._open_journal()
        try:
            while not self.context.leave.is_set():
                closed = self.tick()
                if closed is not None:
                    return closed
                self._sleep_one_tick()
            return None
        finally:
            self._release()

    def tick(self) -> RunClosed | None:
        """One round: evidence, decision, actions."""
        self._observe()
        world = self._world()
        for action in decide(world):
            closed = self._do(action)
            if closed is not None:
                return closed
        self.journal.flush_when_due()
        self._report_progress()
        self._on_poll()
        return None

    # --- journal -----------------------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        cuts = self.context.cut_predecessors()
        self.journal = self.context.journal()
        self.journal.write(cuts)
        for cut in cuts.cuts:
            for item in read_cut(self.context.reading, self.paths.journal(WRITER), cut):
                writer = getattr(item.record, "writer", "")
                if writer in self.roles:
                    self.roles[writer].fold(item.record)

    def _record(self, record: Intent | Submitted | JobEnded | Incident | RunClosed) -> None:
        self.context.leases.check(WRITER, self.context.attempt)
        self.journal.write(record)
        if not isinstance(record, (Incident, RunClosed)):
            self.roles[record.writer].fold(record)

    def incident(self, what: str, writer: str = "", detail: str = "") -> None:
        """Journals and logs something a person will ask about."""
        record = Incident(what=what, writer=writer, detail=detail, unix_s=time.time())
        self._incidents += 1
        log.warning("incident=%s writer=%s %s", what, writer or "-", detail)
        self._record(record)
        self._on_incident(record)

    def _release(self) -> None:
        """A clean end leaves a tombstone, so that the next supervisor need not wait for this one's lease to run out."""
        self.journal.flush()
        self.context.stop()
        self.context.leases.tombstone(WRITER, self.context.attempt + 1, attempt_token(self.run_config.run_id, WRITER, 0))

    # --- evidence ----------------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        self.context.leases.refresh()
        self._snapshot = self.scheduler.snapshot(self.run_config.run_id)
        if not self._snapshot.ok:
            log.warning("scheduler did not answer: %s", self._snapshot.error)
        self._read_done()
        self._read_liveness()
        self._steps.poll()
        self._note_down_nodes()
        for writer, record in self.roles.items():
            self._note_progress(writer, record)
            listed = any(job.writer == writer and job.attempt == record.attempt for job in self._snapshot.jobs)
            if self._snapshot.ok:
                record.missing_queries = 0 if listed or not record.submitted else record.missing_queries + 1

    def _sleep_one_tick(self) -> None:
        """Sleeps until the next query; heartbeats are observed in between, so that a long pause is no gap (I4)."""
        until = self.context.clock() + self.profile.scheduler_poll_s
        while (left := until - self.context.clock()) > 0:
            self.context.sleep(min(left, self.context.timing.lease_s / 8))
            self.context.leases.refresh()
            self._read_liveness()
            if self.context.leave.is_set() or self.paths.cancel_request.exists():
                return

    def _read_done(self) -> None:
        folder = self.paths.done("x").parent
        names = set(self.context.fs.listdir(folder)) if folder.is_dir() else set()
        for writer in self.roles:
            if writer not in self._done and f"{writer}.json" in names:
                self._done[writer] = Done.model_validate_json(self.paths.done(writer).read_bytes())
        if self._ended_at is None and all(writer in self._done for writer in self.roles if needed_for_the_end(writer)):
            self._ended_at = self.context.clock()

    def _read_liveness(self) -> None:
        orchestrator = self.context.leases.newest("orchestrator-0")
        if orchestrator:
            self._judge.observe("orchestrator-0", orchestrator)
        try:
            table = LivenessTable.model_validate_json(self.context.fs.read(self.paths.liveness_table))
        except (FileNotFoundError, ValidationError):
            return
        except OSError as error:
            log.warning("liveness table not readable: %s", error)
            return
        if (table.attempt, table.counter) != self._table_seen:
            self._table_seen = (table.attempt, table.counter)
            self._table, self._table_changed_at = table, self.context.clock()

    def _entry(self, writer: str, attempt: int) -> LivenessEntry | None:
        """The orchestrator's word on an attempt; None when its table is older than lease_s."""
        stale = self.context.clock() - self._table_changed_at > self.context.timing.lease_s
        if self._table is None or stale:
            return None
        found = [entry for entry in self._table.entries if entry.writer == writer and entry.attempt == attempt]
        return found[0] if found else None

    def _liveness(self, writer: str, attempt: int) -> str:
        if writer == "orchestrator-0":
            return self._judge.last_verdict((writer, attempt))
        entry = self._entry(writer, attempt)
        return "unknown" if entry is None else entry.verdict

    def _note_progress(self, writer: str, record: RoleRecord) -> None:
        entry = self._entry(writer, record.attempt)
        progress = 0 if entry is None else entry.progress
        if writer == "learner-0":
            progress = self._steps.newest_step
        heartbeat = self._judge.heartbeat(writer, record.attempt)
        if heartbeat is not None:
            progress = max(progress, heartbeat.progress)
        if progress > record.progress:
            record.failures = 0
        record.progress = max(record.progress, progress)

    def _note_down_nodes(self) -> None:
        new = set(self._snapshot.down_nodes) - set(self._down_nodes)
        if self._snapshot.ok:
            self._down_nodes = self._snapshot.down_nodes
        for node in sorted(new):
            self.incident("node_down", detail=f"node {node} is down or drained")

    def _jobs(self, writer: str, attempt: int) -> tuple[JobView, ...]:
        return tuple(job for job in self._snapshot.jobs if job.writer == writer and job.attempt == attempt)

    def _world(self) -> World:
        now = self.context.clock()
        learner = self._done.get("learner-0")
        views = {writer: self._view(writer, record) for writer, record in self.roles.items()}
        stale = tuple(
            job.job_id
            for job in self._snapshot.jobs
            if job.phase is not Phase.ENDED
            and job.writer in self.roles
            and job.attempt < self.roles[job.writer].attempt
            and now - self._cancelled_at.get(job.job_id, -_CANCEL_AGAIN_S) >= _CANCEL_AGAIN_S
        )
        return World(
            roles=views, now_s=now, query_ok=self._snapshot.ok, stale_jobs=stale,
            cancel_requested=self.paths.cancel_request.exists(),
            needs_rollback=learner.detail if learner is not None and learner.outcome == "needs_rollback" else "",
            ended_for_s=-1.0 if self._ended_at is None else now - self._ended_at,
            drain_s=self.profile.drain_s, max_failures=self.profile.role_failures,
        )  # fmt: skip

    def _view(self, writer: str, record: RoleRecord) -> RoleView:
        return RoleView(
            writer=writer, attempt=record.attempt, submitted=record.submitted, jobs=self._jobs(writer, record.attempt),
            missing_queries=record.missing_queries, done=writer in self._done,
            liveness=self._liveness(writer, record.attempt),  # type: ignore[arg-type]
            newest_lease=self.context.leases.newest(writer), failures=record.failures, last_end=record.last_end,
            waits_until_s=record.waits_until_s,
        )  # fmt: skip

    # --- actions -----------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> RunClosed | None:
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
            token = attempt_token(self.run_config.run_id, action.writer, action.attempt)
            self.context.leases.tombstone(action.writer, action.attempt, token)
        elif isinstance(action, CancelJobs):
            self._cancel(action)
        elif isinstance(action, GiveUp):
            self.incident("nodes_lost", action.writer, action.detail)
            tail = log_tail(self.paths, action.writer, self.roles[action.writer].attempt)
            raise NodesLost(f"{action.writer} cannot be replaced: {action.detail}\n{tail}")
        else:
            return self._close(action)
        return None

    def _start(self, action: Start) -> None:
        record = self.roles[action.writer]
        if record.attempt:
            self.incident("role_replaced", action.writer, f"attempt {action.attempt} replaces: {action.reason}")
        token = attempt_token(self.run_config.run_id, action.writer, action.attempt)
        usable = self._snapshot.usable_nodes
        exclude = self._exclusions.current(self.context.clock(), usable)
        self._record(Intent(writer=action.writer, attempt=action.attempt, token=token, reason=action.reason, exclude=exclude))
        self._submit(action.writer, action.attempt, exclude)

    def _submit(self, writer: str, attempt: int, exclude: tuple[str, ...] = ()) -> None:
        self.context.leases.check(WRITER, self.context.attempt)
        spec = make_job_spec(self.run_config, self.paths, self.profile, writer, attempt, exclude)
        try:
            job_id = self.scheduler.submit(spec)
        except SchedulerError as error:
            self.incident("submit_failed", writer, str(error))
            if not (error.ambiguous or error.transient):
                raise
            return
        self._record(Submitted(writer=writer, attempt=attempt, job_id=job_id))

    def _lost(self, action: Lost) -> None:
        record = self.roles[action.writer]
        jobs = self._jobs(action.writer, action.attempt)
        for job in jobs:
            if job.phase is Phase.ENDED and (action.writer, job.job_id) not in self._reported_ends:
                self._reported_ends.add((action.writer, job.job_id))
                self._record(JobEnded(
                    writer=action.writer, attempt=action.attempt, job_id=job.job_id, cause=job.cause.value, state=job.state,
                    exit_code=job.exit_code, nodes=job.nodes, reason=job.reason,
                ))  # fmt: skip
        self.incident("role_lost", action.writer, action.detail)
        record.last_end = action.detail
        if action.costs_retry:
            record.failures += 1
        record.waits_until_s = self.context.clock() + _BACKOFF_S[min(record.failures, len(_BACKOFF_S) - 1)]
        hung = not jobs or jobs[-1].phase is not Phase.ENDED
        if hung or jobs[-1].cause is Cause.INFRASTRUCTURE:
            self._exclusions.add(jobs[-1].nodes if jobs else (), self.context.clock())

    def _cancel(self, action: CancelJobs) -> None:
        now = self.context.clock()
        due = tuple(job for job in action.job_ids if now - self._cancelled_at.get(job, -_CANCEL_AGAIN_S) >= _CANCEL_AGAIN_S)
        if not due:
            return
        log.info("cancelling %d jobs: %s", len(due), action.reason)
        self._cancelled_at.update(dict.fromkeys(due, now))
        try:
            self.scheduler.cancel(due)
        except SchedulerError as error:
            self.incident("cancel_failed", detail=str(error))

    def _close(self, action: Close) -> RunClosed:
        closed = RunClosed(state=action.state, detail=action.detail, unix_s=time.time())
        self._record(closed)
        self._report_progress()
        if action.state == "NEEDS_ROLLBACK":
            raise NeedsRollback(f"run {self.run_config.run_id} needs a rollback: {action.detail}")
        return closed

    def _report_progress(self) -> None:
        newest = self._steps.steps.get(self._steps.newest_step)
        self._on_progress(Progress(
            step=max(self._steps.newest_step, 0), steps=self.context.recipe.steps,
            mean_reward=newest.mean_reward if newest is not None and newest.step > 0 else None,
            staleness=newest.staleness if newest is not None and newest.step > 0 else None,
            roles=tuple((writer, self._role_state(writer, record)) for writer, record in self.roles.items()),
            incidents=self._incidents, seconds=self.context.clock() - self._started_at,
        ))  # fmt: skip

    def _role_state(self, writer: str, record: RoleRecord) -> str:
        if writer in self._done:
            return "done"
        jobs = self._jobs(writer, record.attempt)
        if not jobs:
            return "submitting" if record.attempt else "not started"
        job = jobs[-1]
        if job.phase is Phase.PENDING:
            return f"queued ({job.reason})" if job.reason else "queued"
        heartbeat = self._judge.heartbeat(writer, record.attempt)
        entry = self._entry(writer, record.attempt)
        if heartbeat is not None:
            return heartbeat.state
        return entry.state if entry is not None and entry.state else job.phase.value


def make_job_spec(
    run: RunConfig, paths: RunPaths, profile: ClusterProfile, writer: str, attempt: int, exclude: tuple[str, ...] = ()
) -> JobSpec:
    """The job of one attempt: a role's main from the code snapshot with plain arguments, nothing pickled (I17)."""
    role, replica = split_writer(writer)
    pool = dict(rollout_writers(run.recipe)).get(writer)
    token = attempt_token(run.run_id, writer, attempt)
    role_name: Role = role  # type: ignore[assignment]
    root = paths.root.resolve()
    return JobSpec(
        run_id=run.run_id, run_dir=root, writer=writer, attempt=attempt, token=token,
        command=(
            sys.executable, "-u", "-m", f"miles_core.roles.{role}",
            "--run-dir", str(root), "--replica", str(replica), "--attempt", str(attempt),
        ),
        resources=profile.resources_for(role_name, pool),
        log_dir=RunPaths(root).logs(writer, attempt),
        env={"PYTHONPATH": str(RunPaths(root).code), "MILES_TOKEN": token, **ROLE_ENV, **_inherited()},
        exclude=exclude,
    )  # fmt: skip


def _inherited() -> dict[str, str]:
    """Test hooks that roles read from their environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("MILES_CRASH_")}


def log_tail(paths: RunPaths, writer: str, attempt: int, lines: int = 20) -> str:
    """The end of an attempt's newest log, for an error message."""
    folder = paths.logs(writer, attempt)
    files = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if not files:
        return f"(no log in {folder})"
    text = files[-1].read_text(errors="replace").splitlines()[-lines:]
    return f"last lines of {files[-1]}:\n" + "\n".join(f"  {line}" for line in text)


def supervisor_context(run: RunConfig, paths: RunPaths, epoch: int) -> RoleContext:
    """The context of one epoch."""
    return RoleContext(run, paths, WRITER, epoch, token=attempt_token(run.run_id, WRITER, epoch))


def read_closed(run: RunConfig, paths: RunPaths) -> RunClosed | None:
    """The last word on a run, if a supervisor closed it."""
    records = read_all(supervisor_context(run, paths, 0).reading, paths.journal(WRITER))
    return next((record for record in reversed(records) if isinstance(record, RunClosed)), None)


def read_cluster(run: RunConfig) -> ClusterProfile:
    """The cluster profile that a run was made with."""
    return ClusterProfile.model_validate(json.loads(json.dumps(run.cluster)))
