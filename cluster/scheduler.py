"""The one protocol every scheduler keeps: local processes, Slurm, and the fake that tests use.

A scheduler reports evidence, never verdicts: whether a role is done is its completion record's word (I14). UNKNOWN is a
value: no information, neither success nor failure. Job ids are hints; the token in the comment identifies a job (I13).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from cluster.profile import Resources


class Phase(Enum):
    """Where a job is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


class Cause(Enum):
    """Why an ended job ended, as far as the scheduler says."""

    NONE = "none"
    COMPLETED = "completed"
    FAILED = "failed"
    """The program ended with an error: costs a retry."""
    LIMIT = "limit"
    """Walltime, deadline or memory limit: costs a retry."""
    INFRASTRUCTURE = "infrastructure"
    """Node failure, preemption, failed launch: nobody's fault, costs no retry."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class JobSpec:
    """What to start: one attempt of one role. `writer` is `<role>-<replica>`, for example `rollout-1`."""

    run_id: str
    run_dir: Path
    writer: str
    attempt: int
    token: str
    command: tuple[str, ...]
    """argv of the role, run from the code snapshot; the first item is the interpreter."""
    resources: Resources
    log_dir: Path
    """Folder of this attempt's logs; the file is `<job id>_<task>.out`."""
    env: dict[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    """Nodes not to use."""

    @property
    def name(self) -> str:
        """Job name for people: `miles-<run>-<role>-<replica>`."""
        return f"miles-{self.run_id}-{self.writer}"

    @property
    def comment(self) -> str:
        """The job's comment: run, writer, attempt and token, in one word without quotes or spaces."""
        return f"miles:{self.run_id}:{self.writer}:a{self.attempt}:{self.token}"


def attempt_token(run_id: str, writer: str, attempt: int) -> str:
    """token = H(run, role, replica, attempt) (I3): the same for every submission of one attempt."""
    return hashlib.sha256(f"{run_id}/{writer}/{attempt}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class JobView:
    """What the scheduler knows of one job."""

    job_id: str
    run_id: str
    writer: str
    attempt: int
    token: str
    phase: Phase
    cause: Cause = Cause.NONE
    state: str = ""
    """The scheduler's own word, for people."""
    reason: str = ""
    """Why it waits or ended, in the scheduler's words."""
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All jobs of a run that the scheduler still knows, from one query. `ok` False: the query failed, `jobs` says nothing."""

    ok: bool
    jobs: tuple[JobView, ...] = ()
    error: str = ""
    down_nodes: tuple[str, ...] = ()
    """Nodes that are down or drained, for the incident list."""
    usable_nodes: int | None = None
    """Nodes that could run something; None = not known."""


class Scheduler(Protocol):
    """Starts, lists and cancels jobs. Every call has a deadline inside and raises SchedulerError."""

    def submit(self, spec: JobSpec) -> str:
        """Starts a job and returns its id. SchedulerError.ambiguous: it may have been accepted; search by token first."""
        ...

    def snapshot(self, run_id: str) -> Snapshot:
        """All jobs of the run, in one query. Never raises for an unreachable scheduler: returns ok=False."""
        ...

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        """Cancels all given jobs in one call (or sends them a signal by name). Unknown and ended ids are no error."""
        ...

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        """When pending jobs are expected to start, in Unix seconds, as far as the scheduler says; raises nothing."""
        ...

    def script(self, spec: JobSpec) -> str:
        """The exact text that submit would hand over, for `miles jobs`."""
        ...
