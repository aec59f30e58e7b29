"""`miles status`: what a run does now, from its files and, as far as it answers in seconds, its scheduler.

One object holds all of it; text and JSON are two views of that. Nothing here decides anything. Ages compare this machine's
clock with the nodes': between nodes whose clocks differ they are off by as much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cluster.epoch import read_cluster
from cluster.job_spec import token_of
from cluster.scheduler import JobView, Phase
from cluster.schedulers import make_scheduler
from flows.damage import bad_frames
from flows.figures import Pace, Point, newest_attempts, pace, read_tails, signs
from flows.symptoms import Symptom, diagnose
from miles_core.errors import MilesError
from miles_core.paths import RunPaths
from miles_core.records import Incident, LivenessEntry, split_writer
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import Lease, LeaseFolder
from miles_core.tracking.ledger import Ledger, read_ledger
from miles_core.tracking.summary import summarize

SUPERVISOR, LEARNER = "supervisor-0", "learner-0"
SELF_CUTTING = (SUPERVISOR, LEARNER, "orchestrator-0", "evaluator-0")


@dataclass(frozen=True)
class RoleStatus:
    """One role or replica. None: not known."""

    writer: str
    state: str
    attempt: int
    job_id: str | None
    node: str | None
    progress: int | None
    """Steps, trajectories or grades, by the role's own count."""
    seen_s: float | None
    """Seconds since its last metric point."""
    queue_reason: str | None = None
    """Why it waits in the queue, in the scheduler's words."""
    expected_start_unix_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        role, replica = split_writer(self.writer)
        return {"role": role, "replica": replica, **asdict(self)}


@dataclass(frozen=True)
class Queue:
    """The scheduler's answer. `why`: why there is none."""

    jobs: Mapping[str, JobView]
    """The newest job of each writer's newest attempt."""
    starts: Mapping[str, float]
    asked: bool
    why: str = ""


@dataclass(frozen=True)
class Status:
    """All of it."""

    run: RunConfig
    paths: RunPaths
    state: str
    ledger: Ledger
    summary: dict[str, Any]
    pace: Pace
    roles: tuple[RoleStatus, ...]
    queue: Queue
    symptoms: tuple[Symptom, ...]
    supervisor: str
    damage: tuple[str, ...]
    """Journals with a bad frame in the middle: what lies behind it is not in these figures."""
    table_age_s: float | None
    """How long ago the orchestrator told who lives."""
    now_s: float

    def as_json(self) -> dict[str, Any]:
        """Stable keys: those of the summary, and what only status knows."""
        first, *others = self.symptoms
        return {
            **self.summary,
            "state": self.state,
            "root": str(self.paths.root),
            "recipe": self.run.recipe.name,
            "cluster": self.run.cluster.get("name"),
            "progress": {"step": self.summary["steps"], "of": self.run.recipe.steps, **self.pace.as_json()},
            "roles": [role.as_json() for role in self.roles],
            "scheduler": {"asked": self.queue.asked, "why_unknown": self.queue.why},
            "supervisor": self.supervisor,
            "damage": list(self.damage),
            "requests": requests(self.paths),
            "symptom": first.as_json(),
            "also": [symptom.as_json() for symptom in others],
            "incidents": [_incident(incident, self.now_s) for incident in self.ledger.incidents],
        }


def look(run: RunConfig, paths: RunPaths, *, now_s: float | None = None) -> Status:
    """Reads the run and asks its scheduler. Raises MilesError for files that cannot be read."""
    now = time.time() if now_s is None else now_s
    ledger = read_ledger(run, paths)
    attempts = newest_attempts(ledger)
    tails = read_tails(paths, attempts)
    queue = ask_scheduler(ledger, paths, attempts)
    leases = _read_leases(run, paths, attempts)
    return Status(
        run=run, paths=paths, state=ledger.state, ledger=ledger, summary=summarize(ledger, paths),
        pace=pace(ledger, tails, now),
        roles=tuple(_role(ledger, writer, attempts[writer], queue, leases.get(writer), tails, now) for writer in attempts),
        queue=queue, symptoms=diagnose(signs(ledger, tails)), supervisor=_supervisor(run, paths),
        damage=tuple(bad_frames(paths, SELF_CUTTING)),
        table_age_s=_age(paths, now), now_s=now,
    )  # fmt: skip


def requests(paths: RunPaths) -> list[str]:
    """What a person asked of the supervisor, and nobody has taken back."""
    asked = {"cancel": paths.cancel_request, "drain": paths.drain_request}
    return [name for name, path in asked.items() if path.exists()]


def ask_scheduler(ledger: Ledger, paths: RunPaths, attempts: Mapping[str, int]) -> Queue:
    """The jobs of the newest attempts and their expected starts; within seconds, or why not."""
    if ledger.closed is not None or ledger.drained is not None:
        return Queue({}, {}, asked=False, why="no job of the run is left")
    try:
        scheduler = make_scheduler(read_cluster(ledger.run), paths.root, patient=False)
    except MilesError as error:
        return Queue({}, {}, asked=False, why=str(error).partition("\n")[0])
    snapshot = scheduler.snapshot(ledger.run.run_id)
    if not snapshot.ok:
        return Queue({}, {}, asked=True, why=snapshot.error)
    jobs = {
        job.writer: job for job in snapshot.jobs
        if job.attempt == attempts.get(job.writer) and job.token == token_of(ledger.run, job.writer, job.attempt)
    }  # fmt: skip
    waiting = tuple(job.job_id for job in jobs.values() if job.phase is Phase.PENDING)
    return Queue(jobs, scheduler.expected_starts(waiting), asked=True)


# --- roles -----------------------------------------------------------------------------------------------------------


def _role(
    ledger: Ledger, writer: str, attempt: int, queue: Queue, lease: Lease | None, tails: Mapping[str, list[Point]], now: float
) -> RoleStatus:
    job, entry = queue.jobs.get(writer), _entry(ledger, writer, attempt)
    submitted = [record.job_id for record in ledger.submitted[writer] if record.attempt == attempt]
    is_queued = job is not None and job.phase is Phase.PENDING
    points = tails.get(writer) or []
    return RoleStatus(
        writer=writer, state=role_state(ledger, writer, attempt, job, entry, queue), attempt=attempt,
        job_id=submitted[-1] if submitted else (job.job_id if job is not None else None),
        node=lease.host or None if lease is not None else None,
        progress=max(ledger.steps.newest_step, 0) if writer == LEARNER else entry.progress if entry is not None else None,
        seen_s=max(0.0, now - points[-1]["unix_s"]) if points else None,
        queue_reason=job.reason or "no reason given" if job is not None and is_queued else None,
        expected_start_unix_s=queue.starts.get(job.job_id) if job is not None and is_queued else None,
    )  # fmt: skip


def role_state(
    ledger: Ledger, writer: str, attempt: int, job: JobView | None, entry: LivenessEntry | None, queue: Queue
) -> str:
    """In a few words: what the role, the orchestrator and the scheduler say; UNKNOWN if nobody does."""
    if writer in ledger.done:
        return "done"
    if ledger.closed is not None or ledger.drained is not None:
        return "ended" if attempt else "not started"
    if attempt == 0:
        return "not started"
    if job is not None and job.phase is Phase.PENDING:
        return "queued"
    if job is not None and job.phase is Phase.ENDED:
        return f"ended: {job.state}"
    if entry is not None and entry.verdict == "dead":
        return f"silent for {entry.silent_s:.0f} s"
    if entry is not None:
        return entry.state or entry.verdict
    if job is not None:
        return "starting"
    return "UNKNOWN" if not queue.asked or queue.why else "not listed by the scheduler"


def _entry(ledger: Ledger, writer: str, attempt: int) -> LivenessEntry | None:
    entries = () if ledger.liveness is None else ledger.liveness.entries
    return next((entry for entry in entries if (entry.writer, entry.attempt) == (writer, attempt)), None)


def _read_leases(run: RunConfig, paths: RunPaths, attempts: Mapping[str, int]) -> dict[str, Lease]:
    """Of attempts that have begun; says on which node."""
    folder = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    found = {}
    for writer, attempt in attempts.items():
        try:
            found[writer] = folder.read(writer, attempt)
        except OSError:
            continue
    return found


def _supervisor(run: RunConfig, paths: RunPaths) -> str:
    """Who took the run last; whether it lives would take lease_s of watching."""
    folder = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    try:
        folder.refresh()
        epoch = folder.newest(SUPERVISOR)
        lease = folder.read(SUPERVISOR, epoch) if epoch else None
    except OSError as error:
        return f"UNKNOWN ({error.strerror or error})"
    if lease is None:
        return "none yet"
    if lease.kind == "tombstone":
        return "none: the last one left"
    return f"process {lease.pid} on {lease.host or 'an unknown host'} (epoch {epoch})"


def _age(paths: RunPaths, now_s: float) -> float | None:
    try:
        return max(0.0, now_s - os.stat(paths.liveness_table).st_mtime)
    except OSError:
        return None


def _incident(incident: Incident, now_s: float) -> dict[str, Any]:
    return {**incident.model_dump(exclude={"kind"}), "age_s": max(0.0, now_s - incident.unix_s)}
