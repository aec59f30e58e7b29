"""What the supervisor knows at each tick: the scheduler's snapshot, completion records, heartbeats, steps, its own records.

Failure: an OSError (ESTALE, a hanging mount) or a damaged file of somebody else costs what would have been learnt from it in
this tick and nothing else; what is known stays known. It is logged when it begins and when it is over.
"""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from cluster.drain import LEAVE_S, DrainRequest, read_drain_request
from cluster.job_spec import token_of
from cluster.scheduler import JobView, Phase, Scheduler, Snapshot
from cluster.stalls import STALL_LIMIT, Sign, StallWatch
from cluster.supervisor import Liveness, RoleView, World, is_worker, needed_for_the_end
from miles_core.errors import JournalCorrupt
from miles_core.policy.lineage import StepLog
from miles_core.records import Done, Drained, Intent, LivenessEntry, LivenessTable, Rollback, StepDone, Submitted, Version
from miles_core.run import all_writers
from miles_core.runtime.context import RoleContext
from miles_core.store.lease import LivenessJudge
from miles_core.tracking.ledger import read_all

log = logging.getLogger("miles")
Result = TypeVar("Result")

LOW_DISK_BYTES = 256 << 20
"""Less than this is told to a person."""


class Troubles:
    """The border to files and commands that may fail for a while."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def attempt(self, what: str, call: Callable[[], Result]) -> Result | None:
        """The result of `call`; None after an OSError or damage in a file that is not the supervisor's own."""
        try:
            result = call()
        except (OSError, ValidationError, JournalCorrupt) as error:
            self.note(what, str(error))
            return None
        self.note(what, "")
        return result

    def note(self, what: str, error: str) -> bool:
        """Logs the beginning and the end of a trouble; True if this is its beginning."""
        if error and what not in self._failing:
            log.warning("%s: %s; tried again at each tick", what, error)
            self._failing.add(what)
            return True
        if not error and what in self._failing:
            log.warning("%s: goes on", what)
            self._failing.discard(what)
        return False


@dataclass
class RoleRecord:
    """What the supervisor's own journal says of one writer, plus this epoch's counts."""

    writer: str
    attempt: int = 0
    exclude: tuple[str, ...] = ()
    submitted: bool = False
    last_end: str = ""
    failures: int = 0
    losses: int = 0
    """Ends of any cause since the last progress."""
    refusals: int = 0
    """Submissions in a row that were not taken."""
    last_refusal: str = ""
    progress: int = 0
    waits_until_s: float = 0.0
    missing_queries: int = 0
    drained: bool = False

    def fold(self, record: object) -> None:
        """Takes one record of this or an earlier epoch."""
        if isinstance(record, Intent):
            self.attempt, self.exclude, self.submitted = record.attempt, record.exclude, False
            self.last_end, self.missing_queries, self.drained = "", 0, False
            if is_worker(self.writer):
                # Counted anew by each attempt; the other roles go on with their predecessor's count.
                self.progress = 0
        elif isinstance(record, Submitted) and record.attempt == self.attempt:
            self.submitted, self.refusals, self.last_refusal, self.drained = True, 0, "", False
        elif isinstance(record, Drained | Rollback) and self.attempt:
            self.submitted, self.drained = False, True

    def note_progress(self, progress: int) -> None:
        """Progress gives all retries back (I14)."""
        if progress > self.progress:
            self.progress = progress
            self.give_back()

    def give_back(self) -> None:
        """All retries."""
        self.failures = self.losses = 0


@dataclass(frozen=True)
class Seen:
    """The liveness table, and when it last changed by the supervisor's clock."""

    key: tuple[int, int]
    entries: Mapping[tuple[str, int], LivenessEntry]
    """By writer and attempt."""
    changed_at_s: float
    is_fresh: bool
    """It changed since this epoch began: whoever writes it lives."""


def _free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free


@dataclass
class Evidence:
    """Gathered by `observe`, once a tick, and `look`, several times in lease_s."""

    context: RoleContext
    scheduler: Scheduler
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(ok=False))
    """Jobs of this very run: those whose token is one of its attempts'."""
    done: dict[str, Done] = field(default_factory=dict)
    ended_at_s: float | None = None
    cancel_requested: bool = False
    drain: DrainRequest | None = None
    draining_since_s: float | None = None
    unreachable_since_s: float | None = None
    """Since when the scheduler has not answered."""
    free_bytes: Callable[[Path], int] = _free_bytes

    def __post_init__(self) -> None:
        context = self.context
        self.roles = {writer: RoleRecord(writer) for writer in all_writers(context.recipe)}
        self.steps = StepLog(context.follow("learner-0"), context.rollbacks)
        self.troubles = Troubles()
        self._judge = LivenessJudge(context.fs, context.paths.heartbeats, context.timing.lease_s, context.clock)
        self._seen: Seen | None = None
        recipe = context.recipe
        episode_s, grade_s = recipe.environment.episode_deadline_s, recipe.grader.deadline_s
        # The orchestrator itself says after stall_s what it waits for; that takes a moment to be heard.
        lag_s = context.timing.lease_s
        allowances_s = {"orchestrator": lag_s, "rollout": episode_s, "evaluator": episode_s, "grader": grade_s}
        self._stalls = StallWatch(context.timing.stall_s, allowances_s)
        self._named: set[str] = set()
        """Whose stall was told."""
        self._down: set[str] = set()
        self._is_low = False
        self._jobs: dict[str, list[JobView]] = {}
        self._ended_at: dict[str, float] = {}

    # --- gathering ---------------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Everything, once."""
        self._ask_scheduler()
        self.look()
        self.troubles.attempt("completion records", self._read_done)
        self.troubles.attempt("the learner's journal", self.steps.poll)
        for record in self.roles.values():
            record.note_progress(self._progress_of(record))
            if self._waits_for_the_end(record):
                record.give_back()
            listed = bool(self.jobs_of(record.writer))
            if self.snapshot.ok:
                record.missing_queries = 0 if listed or not record.submitted else record.missing_queries + 1

    def look(self) -> None:
        """Leases, heartbeats and requests; often enough that a long pause is no gap (I4)."""
        self.troubles.attempt("leases", self.context.leases.refresh)
        self.troubles.attempt("liveness table", self._read_table)
        self.look_for_requests()
        for writer in filter(needed_for_the_end, self.roles):
            if (newest := self.context.leases.newest(writer)) > 0:
                self._judge.observe(writer, newest)
        now = self.context.clock()
        for writer in self.roles:
            self._stalls.observe(writer, self._sign_of(writer), now)

    def look_for_requests(self) -> None:
        """Reads the requests to cancel and to drain. A request once seen stays seen."""
        context = self.context
        exists = self.troubles.attempt("request to cancel", context.paths.cancel_request.exists)
        self.cancel_requested = self.cancel_requested or bool(exists)
        drain = self.troubles.attempt("request to drain", lambda: read_drain_request(context.fs, context.paths))
        if drain is not None and self.drain is None:
            self.draining_since_s = context.clock()
        self.drain = drain or self.drain

    @property
    def requests(self) -> tuple[bool, bool]:
        """(cancel, drain): what a person asked for so far."""
        return self.cancel_requested, self.drain is not None

    def _ask_scheduler(self) -> None:
        run = self.context.run
        snapshot = self.scheduler.snapshot(run.run_id)
        self.troubles.note("the scheduler", snapshot.error if not snapshot.ok else "")
        ours = tuple(
            job for job in snapshot.jobs if job.writer in self.roles and job.token == token_of(run, job.writer, job.attempt)
        )
        self.snapshot = Snapshot(snapshot.ok, ours, snapshot.error, snapshot.down_nodes, snapshot.usable_nodes)
        self._jobs = defaultdict(list)
        for job in ours:
            self._jobs[job.writer].append(job)
            if job.phase is Phase.ENDED:
                self._ended_at.setdefault(job.job_id, self.context.clock())
        if snapshot.ok:
            self.unreachable_since_s = None
        elif self.unreachable_since_s is None:
            self.unreachable_since_s = self.context.clock()

    @property
    def leave_s(self) -> float:
        """How long jobs may take to leave a run that is drained."""
        return LEAVE_S if self.drain is None else self.drain.leave_s

    def newly_down(self) -> list[str]:
        """Nodes that went down since the last call. Where the scheduler did not say, nothing changed."""
        if not self.snapshot.ok or self.snapshot.usable_nodes is None:
            return []
        new = set(self.snapshot.down_nodes) - self._down
        self._down = set(self.snapshot.down_nodes)
        return sorted(new)

    def newly_low_on_disk(self) -> str:
        """Where and how little, once when the run directory's filesystem runs full; roles then wait and say nothing else."""
        free_bytes = self.troubles.attempt("free space", lambda: self.free_bytes(self.context.paths.root))
        if free_bytes is None:
            return ""
        was_low, self._is_low = self._is_low, free_bytes < LOW_DISK_BYTES
        if was_low or not self._is_low:
            return ""
        return (
            f"{free_bytes / 2**20:.0f} MiB are left for {self.context.paths.root}: make room, the roles wait for it and go on"
        )

    def newly_stalled(self) -> list[tuple[str, str]]:
        """(writer, its last progress) of roles that live but have not got on for stall_s, each once per stall."""
        stall_s = self.context.timing.stall_s
        stalled = [writer for writer in self.roles if self._stalls.seconds(writer) >= stall_s]
        new = [writer for writer in stalled if writer not in self._named]
        self._named = set(stalled)
        limit = f"replaced after {STALL_LIMIT * stall_s:g} s of that"
        return [
            (
                writer,
                f"attempt {self.roles[writer].attempt} lives but made no progress for {stall_s:g} s, {limit}: "
                f"{self._stalls.describe(writer)}",
            )
            for writer in new
        ]

    def _read_done(self) -> None:
        folder = self.context.paths.done("x").parent
        try:
            names = set(self.context.fs.listdir(folder))
        except FileNotFoundError:
            return
        for writer in self.roles:
            if writer not in self.done and f"{writer}.json" in names:
                done = Done.model_validate_json(self.context.fs.read(self.context.paths.done(writer)))
                if self.context.rollbacks.precede(writer, done.attempt):
                    self.done[writer] = done
        if self.ended_at_s is None and all(writer in self.done for writer in self.roles if needed_for_the_end(writer)):
            self.ended_at_s = self.context.clock()

    def _read_table(self) -> None:
        try:
            table = LivenessTable.model_validate_json(self.context.fs.read(self.context.paths.liveness_table))
        except FileNotFoundError:
            return
        key = (table.attempt, table.counter)
        if self._seen is None or key != self._seen.key:
            entries = {(entry.writer, entry.attempt): entry for entry in table.entries}
            # The first one may be as old as the last supervisor: nothing is believed of it before it changes.
            self._seen = Seen(key, entries, self.context.clock(), is_fresh=self._seen is not None)

    # --- conclusions -------------------------------------------------------------------------------------------------

    def jobs_of(self, writer: str) -> tuple[JobView, ...]:
        """Jobs of the newest attempt."""
        attempt = self.roles[writer].attempt
        return tuple(job for job in self._jobs.get(writer, ()) if job.attempt == attempt)

    def live_jobs(self) -> tuple[str, ...]:
        """Ids of all jobs that have not ended, of whatever attempt."""
        return tuple(job.job_id for job in self.snapshot.jobs if job.phase is not Phase.ENDED)

    def has_trained(self) -> bool:
        """Whether any attempt of the learner ever recorded a step; True also where that cannot be read."""
        try:
            records: Iterable[object] = read_all(self.context.reading, self.context.paths.journal("learner-0"))
        except (OSError, JournalCorrupt):
            return True
        return any(isinstance(record, StepDone) and record.step > 0 for record in records)

    def entry_of(self, writer: str) -> LivenessEntry | None:
        """The orchestrator's word on the newest attempt; None when its table is older than lease_s."""
        seen, attempt = self._seen, self.roles[writer].attempt
        if seen is None or not seen.is_fresh or self.context.clock() - seen.changed_at_s > self.context.timing.lease_s:
            return None
        return seen.entries.get((writer, attempt))

    def state_of(self, writer: str) -> str:
        """What the newest attempt says of itself; empty if nothing is known."""
        heartbeat = self._judge.heartbeat(writer, self.roles[writer].attempt)
        if heartbeat is not None:
            return heartbeat.state
        entry = self.entry_of(writer)
        return "" if entry is None else entry.state

    def reading(self) -> list[Version]:
        """Versions that roles said they read when they were last heard of; an old table only delays the collector."""
        entries = () if self._seen is None else self._seen.entries.values()
        found = [entry.reading for entry in entries if entry.reading is not None and entry.verdict != "dead"]
        evaluator = self._judge.heartbeat("evaluator-0", self.context.leases.newest("evaluator-0"))
        if evaluator is not None and evaluator.reading is not None:
            found.append(Version(*evaluator.reading))
        return found

    def _liveness_of(self, writer: str) -> Liveness:
        """The few roles that a run cannot end without are judged here, also when the orchestrator is gone; the many by the
        orchestrator's table (I4)."""
        if needed_for_the_end(writer):
            return self._judge.last_verdict((writer, self.roles[writer].attempt))
        entry = self.entry_of(writer)
        return "unknown" if entry is None else entry.verdict

    def _sign_of(self, writer: str) -> Sign | None:
        """What a living attempt says of itself; None if nothing is known of it now, or it is done."""
        attempt = self.roles[writer].attempt
        if writer in self.done or self._liveness_of(writer) != "alive":
            return None
        said = self._judge.heartbeat(writer, attempt) if needed_for_the_end(writer) else self.entry_of(writer)
        return None if said is None or not said.state else Sign(attempt, said.state, said.progress, said.load, said.version)

    def _progress_of(self, record: RoleRecord) -> int:
        if record.writer == "learner-0":
            return self.steps.newest_step
        heartbeat = self._judge.heartbeat(record.writer, record.attempt)
        entry = self.entry_of(record.writer)
        return max(0 if entry is None else entry.progress, 0 if heartbeat is None else heartbeat.progress)

    def _waits_for_the_end(self, record: RoleRecord) -> bool:
        """An evaluator that waits for a version that is not trained yet does all that it can: for days it has no progress."""
        steps = self.context.recipe.steps
        is_early = record.writer == "evaluator-0" and self.steps.newest_step < steps
        return is_early and self.state_of(record.writer) == f"waiting: version {steps}"

    def world(self, *, drain_s: float, max_failures: int) -> World:
        """All of it, as the decision takes it."""
        now, learner = self.context.clock(), self.done.get("learner-0")
        return World(
            roles={writer: self._view(record) for writer, record in self.roles.items()},
            now_s=now, query_ok=self.snapshot.ok, cancel_requested=self.cancel_requested,
            stale_jobs=tuple(
                job.job_id for job in self.snapshot.jobs
                if job.phase is not Phase.ENDED and job.attempt != self.roles[job.writer].attempt
            ),
            needs_rollback=learner.detail if learner is not None and learner.outcome == "needs_rollback" else "",
            ended_for_s=-1.0 if self.ended_at_s is None else now - self.ended_at_s,
            draining_for_s=-1.0 if self.draining_since_s is None else now - self.draining_since_s,
            leave_s=self.leave_s,
            drain_s=drain_s, max_failures=max_failures, visibility_s=self.context.timing.visibility_s,
            stall_limit_s=STALL_LIMIT * self.context.timing.stall_s,
        )  # fmt: skip

    def _view(self, record: RoleRecord) -> RoleView:
        jobs = self.jobs_of(record.writer)
        ended_at = self._ended_at.get(jobs[-1].job_id) if jobs else None
        return RoleView(
            writer=record.writer, attempt=record.attempt, submitted=record.submitted, jobs=jobs,
            ended_for_s=0.0 if ended_at is None else self.context.clock() - ended_at,
            missing_queries=record.missing_queries, done=record.writer in self.done,
            liveness=self._liveness_of(record.writer), newest_lease=self.context.leases.newest(record.writer),
            failures=record.failures, last_end=record.last_end, last_refusal=record.last_refusal,
            waits_until_s=record.waits_until_s, drained=record.drained,
            stalled_for_s=self._stalls.seconds(record.writer), last_sign=self._stalls.describe(record.writer),
        )  # fmt: skip
