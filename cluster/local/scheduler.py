"""The embedded default: each job is a process of this machine, in a session of its own. Linux only (/proc).

Jobs live and die apart from whoever started them. Everything known of job 7 is in `<run_dir>/local_jobs/`: `7.json` (who it
is, on which boot of which host), `7.pid` and `7.exit` (written by shim.py) and `7.cancel`; so a new supervisor, or a status
command, sees the same jobs. Ids are claimed by exclusive creation and are never used twice in a run directory.

Ends: an exit file tells the exit code; without one, a job whose process is gone, or that belongs to another boot of this host,
was lost to the infrastructure. A job of another host (a run directory that two login nodes share, a container that came back
under another name) cannot be looked at from here, so it is not listed: its heartbeat decides. cancel is TERM to the whole
process group; a further call, 5 s and more after the first, is KILL. Of the resources only `cpus` (threads) and `tasks`
(processes with Slurm's variables) have a meaning here; excluded nodes have none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal as signals
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.local import shim
from cluster.role_env import quoted, role_env, without_slurm
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Snapshot
from miles_core.errors import SchedulerError

FOLDER = "local_jobs"
START_DEADLINE_S = 30.0
"""A job without a pid file after this long was never started: its supervisor died in between."""
KILL_AFTER_S = 5.0


@dataclass(frozen=True)
class JobRecord:
    """Content of `<id>.json`."""

    job_id: str
    run_id: str
    writer: str
    attempt: int
    token: str
    host: str
    boot_id: str
    submitted_s: float
    """Monotonic clock of that boot."""


class LocalScheduler:
    """The jobs of one run directory, as processes of this machine."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is CLOCK_MONOTONIC, which all processes of one boot share."""
        self._folder = run_dir / FOLDER
        self._clock = clock
        self._host, self._boot_id = socket.gethostname(), _boot_id()
        self._records: dict[str, JobRecord] = {}
        self._ended: dict[str, JobView] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """Shims started by this object, to reap them."""

    # ---- Scheduler

    def script(self, spec: JobSpec) -> str:
        """What is run, as shell text."""
        exports = [f"export {name}={quoted(name, value)}" for name, value in sorted(role_env(spec).items())]
        return "\n".join((*exports, f"cd {shlex.quote(str(_code(spec)))}", _start_line(spec), ""))

    def submit(self, spec: JobSpec) -> str:
        """Starts the process. Raises SchedulerError."""
        try:
            record = self._claim(spec)
        except OSError as error:
            raise SchedulerError(f"{self._folder} does not take the job of {spec.writer}: {error}", transient=True) from error
        try:
            self._started[record.job_id] = self._start(spec, record.job_id)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path(record.job_id, "json").unlink()
            raise SchedulerError(
                f"{spec.writer} attempt {spec.attempt} cannot be started: {error}; is the code snapshot {_code(spec)} there?",
                transient=not isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError)),
            ) from error
        return record.job_id

    def snapshot(self, run_id: str) -> Snapshot:
        """All jobs ever started in this run directory, oldest first."""
        try:
            jobs = [self._view(job_id) for job_id in self._ids()]
        except OSError as error:
            return Snapshot(ok=False, error=f"{self._folder} is not readable: {error}")
        return Snapshot(ok=True, jobs=tuple(job for job in jobs if job and job.run_id == run_id), usable_nodes=1)

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        """TERM to the process group, KILL 5 s later; a named signal goes to the role's own process only."""
        try:
            number = signals.Signals[f"SIG{signal}"] if signal else None
        except KeyError as error:
            raise SchedulerError(f"there is no signal {signal!r}; give a name like USR2") from error
        for job_id in job_ids:
            try:
                self._cancel(job_id, number)
            except OSError as error:
                raise SchedulerError(f"job {job_id} in {self._folder} cannot be cancelled: {error}", transient=True) from error

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        """Nothing waits here."""
        return {}

    # ---- submission

    def _claim(self, spec: JobSpec) -> JobRecord:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max((int(job_id) for job_id in self._ids()), default=0)
        while True:
            number += 1
            record = JobRecord(
                job_id=str(number), run_id=spec.run_id, writer=spec.writer, attempt=spec.attempt, token=spec.token,
                host=self._host, boot_id=self._boot_id, submitted_s=self._clock(),
            )  # fmt: skip
            try:
                with self._path(record.job_id, "json").open("x") as file:
                    json.dump(asdict(record), file)
            except FileExistsError:
                continue
            return record

    def _start(self, spec: JobSpec, job_id: str) -> subprocess.Popen[bytes]:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        prefix = str((self._folder / job_id).resolve())
        env = {**without_slurm(os.environ), **role_env(spec), "MILES_JOB_ID": job_id}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (spec.env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))))
        with (spec.log_dir / f"{job_id}_0.out").open("ab") as output:
            return subprocess.Popen(
                [
                    sys.executable, "-I", "-S", shim.__file__,
                    prefix, str(spec.resources.ranks), str(spec.log_dir / job_id), *spec.command,
                ],
                cwd=_code(spec), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    # ---- observation

    def _ids(self) -> list[str]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return sorted((job_id for job_id in ids if job_id.isdigit()), key=int)

    def _view(self, job_id: str) -> JobView | None:
        """None: nothing is known of it from here. Its record is not complete, or it was started on another host."""
        if job_id in self._ended:
            return self._ended[job_id]
        record = self._record(job_id)
        if record is None or (record.host != self._host and _read(self._path(job_id, "exit")) is None):
            return None
        view = self._observe(record)
        if view.phase is Phase.ENDED:
            self._ended[job_id] = view
        return view

    def _record(self, job_id: str) -> JobRecord | None:
        if job_id not in self._records:
            text = _read(self._path(job_id, "json"))
            try:
                self._records[job_id] = JobRecord(**json.loads(text or ""))
            except ValueError:
                return None
        return self._records[job_id]

    def _observe(self, record: JobRecord) -> JobView:
        gone = self._gone(record)
        # Read after the process was looked for: a job that ended in between has its exit file by now.
        code = _read(self._path(record.job_id, "exit"))
        cancelled = self._path(record.job_id, "cancel").exists()
        if code is not None:
            cause = Cause.CANCELLED if cancelled else Cause.COMPLETED if code == "0" else Cause.FAILED
            return self._job_view(record, Phase.ENDED, cause, cause.name, exit_code=int(code))
        if gone is None:
            phase = Phase.RUNNING if self._path(record.job_id, "pid").exists() else Phase.PENDING
            return self._job_view(record, phase, Cause.NONE, phase.name)
        if cancelled:
            return self._job_view(record, Phase.ENDED, Cause.CANCELLED, "CANCELLED", reason=gone)
        return self._job_view(record, Phase.ENDED, Cause.INFRASTRUCTURE, "NODE_FAIL", reason=gone)

    def _gone(self, record: JobRecord) -> str | None:
        """Why there can be no process of this job any more; None if there may be one."""
        if record.boot_id != self._boot_id:
            return f"{self._host} was started again"
        child = self._started.get(record.job_id)
        ended = child is not None and child.poll() is not None
        shim_id = self._shim_id(record.job_id)
        if shim_id is not None:
            return None if _is_alive(*shim_id) else "its process is gone without an exit code"
        if ended or self._clock() - record.submitted_s > START_DEADLINE_S:
            return "its process was never started"
        return None

    def _shim_id(self, job_id: str) -> tuple[int, int] | None:
        """Pid of the job's shim, which is also its process group, and its start time; None before it has started."""
        text = _read(self._path(job_id, "pid"))
        if text is None:
            return None
        pid, ticks = (int(word) for word in text.split())
        return pid, ticks

    def _job_view(
        self, record: JobRecord, phase: Phase, cause: Cause, state: str, *, reason: str = "", exit_code: int | None = None
    ) -> JobView:
        return JobView(
            job_id=record.job_id, run_id=record.run_id, writer=record.writer, attempt=record.attempt, token=record.token,
            phase=phase, cause=cause, state=state, reason=reason, exit_code=exit_code, nodes=(record.host,),
        )  # fmt: skip

    # ---- cancelling

    def _cancel(self, job_id: str, number: signals.Signals | None) -> None:
        record = self._record(job_id)
        if record is None or record.host != self._host or self._observe(record).phase is Phase.ENDED:
            return
        if number is not None:
            self._send(job_id, os.kill, number)
            return
        first_s = self._mark_cancelled(job_id)
        if first_s is None:
            self._send(job_id, os.killpg, signals.SIGTERM)
        elif self._clock() - first_s >= KILL_AFTER_S:
            self._send(job_id, os.killpg, signals.SIGKILL)

    def _mark_cancelled(self, job_id: str) -> float | None:
        """Time of the first cancel, or None if this is it."""
        path = self._path(job_id, "cancel")
        text = _read(path)
        if text is not None:
            return float(text)
        temporary = path.with_suffix(f".cancel.{os.getpid()}")
        temporary.write_text(repr(self._clock()))
        temporary.replace(path)
        return None

    def _send(self, job_id: str, kill: Callable[[int, int], None], number: int) -> None:
        shim_id = self._shim_id(job_id)
        if shim_id is None or not _is_alive(*shim_id):
            return
        try:
            kill(shim_id[0], number)
        except ProcessLookupError:
            return

    def _path(self, job_id: str, suffix: str) -> Path:
        return self._folder / f"{job_id}.{suffix}"


def _start_line(spec: JobSpec) -> str:
    ranks, command = spec.resources.ranks, shlex.join(spec.command)
    if ranks == 1:
        return f"exec {command}"
    place = f"SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS={ranks}"
    return f"for rank in $(seq 0 {ranks - 1}); do {place} {command} & done; wait"


def _code(spec: JobSpec) -> Path:
    return spec.run_dir / "code"


def _is_alive(pid: int, ticks: int) -> bool:
    """Not a stranger with the same number: the start time agrees."""
    return shim.start_ticks(pid) == ticks


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
