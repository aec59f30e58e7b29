"""What every role's main shares: arguments, lease, heartbeat, signals, journal, completion record, exit codes.

A role starts from `--run-dir D --replica I --attempt N` and nothing else; it reads the newest state at its start, never the
state it was submitted with. Exit codes: 0 done, or left as twin or superseded; 75 left on a signal or as an orphan with its
work saved (start it again); 1 an error of ours (traceback in the log); 2.. the exit code of a MilesError.

A holder that cannot renew its lease stops publishing, not living (I4): `before_write` re-reads the leases after every gap, and
no error of the filesystem ends the heartbeat.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from miles_core.errors import LeaseLost, MilesError
from miles_core.paths import RunPaths
from miles_core.records import Cuts, Done, Version, split_writer
from miles_core.rollbacks import Rollbacks, read_rollbacks
from miles_core.run import RunConfig, read_run
from miles_core.runtime.crash import crash_point
from miles_core.runtime.hardening import harden
from miles_core.runtime.machine import read_machine
from miles_core.store.follow import Follower, Reading, cut_predecessors
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import RENEWALS_PER_LEASE, Heartbeat, LeaseFolder, LivenessJudge, write_heartbeat
from miles_core.store.publish import publish_bytes
from miles_core.tracking.metrics import MetricShard

log = logging.getLogger("miles")

DRAINED_EXIT_CODE = 75
"""Exit code of a role that left before its end with its work saved (EX_TEMPFAIL): start it again, no retry is spent."""


class RoleContext:
    """One attempt of one role, from its lease to its completion record."""

    def __init__(
        self,
        run: RunConfig,
        paths: RunPaths,
        writer: str,
        attempt: int,
        *,
        token: str = "",
        job_id: str = "",
        fs: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run, self.paths, self.writer, self.attempt, self.token = run, paths, writer, attempt, token
        self.recipe, self.timing = run.recipe, run.timing
        self.fs = fs or FileSystem()
        self.clock, self.sleep, self.job_id = clock, sleep, job_id
        self.leases = LeaseFolder(self.fs, paths.leases, run.run_id, clock)
        self.reading = Reading(self.fs, self.leases, run.timing.visibility_s, clock, sleep)
        self.metrics = MetricShard(paths.metrics(writer, attempt))
        self.leave = threading.Event()
        """Set by TERM and USR2: seal, save, leave."""
        self.state, self.progress, self.load = "starting", 0, 0
        self.version: Version | None = None
        self.reads: Version | None = None
        """The version that is being read now, for the heartbeat."""
        self._counter = 0
        self._renewed_at = clock()
        self._gap_at = self._checked_at = self._renewed_at
        self._lost: LeaseLost | None = None
        self._stop_beating = threading.Event()
        self._beat_now = threading.Event()
        self._beater: threading.Thread | None = None
        self._is_done = False
        self.passed = Counter[str]()
        """How often each crash point was passed, by `role name`."""
        self._background = LeaseFolder(self.fs, paths.leases, run.run_id, clock)
        self._supervisor = LivenessJudge(self.fs, paths.heartbeats, run.timing.orphan_s, clock)

    def start(self) -> None:
        """Takes the lease and starts the heartbeat. Raises LeaseLost."""
        self.take_lease()
        self.fs.mkdir(self.paths.heartbeats)
        self._try_to_beat()
        self._beater = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)
        self._beater.start()

    def take_lease(self) -> None:
        """The first part of `start`. Raises LeaseLost."""
        self.crash_point("before_lease")
        self.leases.acquire(
            self.writer, self.attempt, self.token, host=socket.gethostname(), pid=os.getpid(), job_id=self.job_id,
            machine=read_machine(),
        )  # fmt: skip
        self.crash_point("after_lease")

    def crash_point(self, name: str, part: str = "") -> None:
        """A point whose number is how often this attempt passed it; `part`: of this role (collector, rollback)."""
        role = part or split_writer(self.writer)[0]
        self.passed[f"{role} {name}"] += 1
        crash_point(role, name, self.passed[f"{role} {name}"], self.attempt)

    def stop(self) -> None:
        """Stops the heartbeat."""
        self._stop_beating.set()
        self._beat_now.set()
        if self._beater is not None:
            self._beater.join(timeout=5)

    def say(self, state: str) -> None:
        """Sets `state`; that of one who begins to serve is renewed at once, since there is work that waits for it."""
        begins = state.startswith("serving") and not self.state.startswith("serving")
        self.state = state
        if begins:
            self._beat_now.set()

    def beat(self) -> None:
        """One renewal. OSError is not an end: it only stops publishing until a renewal succeeds."""
        self._counter += 1
        heartbeat = Heartbeat(
            writer=self.writer, attempt=self.attempt, counter=self._counter, state=self.state,
            progress=self.progress, load=self.load, version=self.version, reading=self.reads,
        )  # fmt: skip
        write_heartbeat(self.fs, self.paths.heartbeats, heartbeat)
        now = self.clock()
        # Measured behind the write, which may itself have hung. The gap is noted before the renewal that hides it: the other
        # thread reads them in the opposite order.
        if self._is_gap(now):
            self._gap_at = now
        self._renewed_at = now

    def before_write(self) -> None:
        """Called before every publish: after a gap in renewal it re-reads the leases. Raises LeaseLost; OSError: not now."""
        if self._lost is not None:
            raise self._lost
        begun = self.clock()
        if self._is_gap(begun) or self._gap_at > self._checked_at:
            self.leases.check(self.writer, self.attempt)
            self._checked_at = begun

    def _is_gap(self, now: float) -> bool:
        return now - self._renewed_at > self.timing.lease_s / 2

    @cached_property
    def rollbacks(self) -> Rollbacks:
        """All rollbacks of the run: first asked for behind the own lease, there are no others while this attempt lives."""
        return read_rollbacks(self.fs, self.paths)

    def journal(self) -> JournalWriter:
        """Opens this attempt's journal (its header is written at once, I2)."""
        return JournalWriter(
            self.fs, self.paths.journal(self.writer), run_id=self.run.run_id, writer=self.writer, attempt=self.attempt,
            token=self.token, sync_s=self.timing.sync_s, clock=self.clock, before_write=self.before_write,
            crash_point=self.crash_point,
        )  # fmt: skip

    def cut_predecessors(self) -> Cuts:
        """The first record of this attempt's journal, for self-cutting roles."""
        folder = self.paths.journal(self.writer)
        return cut_predecessors(self.reading, folder, self.writer, self.attempt, sleep=self.sleep)

    def follow(self, writer: str) -> Follower:
        """A follower of a self-cutting writer's journal."""
        return Follower(self.reading, self.paths.journal(writer), writer)

    def pause(self) -> None:
        """Sleeps one poll. Raises LeaseLost when the heartbeat found a higher attempt."""
        self.sleep(self.timing.poll_s)
        if self._lost is not None:
            raise self._lost

    def check_orphaned(self) -> bool:
        """True when no supervisor was seen alive for orphan_s; call it rarely, but at least three times in orphan_s."""
        try:
            self._background.refresh()
        except OSError as error:
            log.warning("leases not listed, so nothing is known of the supervisor: %s", error)
            return False
        attempt = self._background.newest("supervisor-0")
        return attempt > 0 and self._supervisor.observe("supervisor-0", attempt) == "dead"

    def finish(self, journal: JournalWriter, outcome: Literal["completed", "needs_rollback"], detail: str = "") -> None:
        """Flushes the journal and publishes the completion record, for the current attempt only. Raises LeaseLost, OSError."""
        journal.flush()
        self.leases.check(self.writer, self.attempt)
        done = Done(
            writer=self.writer, attempt=self.attempt, outcome=outcome, detail=detail,
            journal_bytes=journal.bytes, journal_hash=journal.hash,
        )  # fmt: skip
        self.crash_point("before_done")
        publish_bytes(self.fs, self.paths.done(self.writer), done.model_dump_json().encode())
        self.crash_point("after_done")
        self._is_done = True

    @property
    def exit_code(self) -> int:
        """Exit code of a main that returned."""
        return DRAINED_EXIT_CODE if self.leave.is_set() and not self._is_done else 0

    def _beat_forever(self) -> None:
        interval = self.timing.lease_s / RENEWALS_PER_LEASE
        # The judge starts its count again after a pause of a third of orphan_s, so it is asked more often.
        look_every_s = min(self.timing.lease_s, self.timing.orphan_s / 6)
        next_look = self.clock() + look_every_s
        try:
            while not self._stop_beating.is_set():
                self._beat_now.wait(interval)
                self._beat_now.clear()
                if self._stop_beating.is_set():
                    break
                self._try_to_beat()
                if self.clock() >= next_look:
                    next_look = self.clock() + look_every_s
                    self.leases_check_in_background()
                    self._leave_as_orphan()
        finally:
            # Whatever else ends this thread is a fault of ours: without a heartbeat the role is replaced, so it leaves.
            if not self._stop_beating.is_set():
                self.leave.set()

    def _try_to_beat(self) -> None:
        try:
            self.beat()
        except OSError as error:
            log.warning("heartbeat not renewed: %s", error)

    def leases_check_in_background(self) -> None:
        """Notices between writes that this attempt was superseded, so that an idle zombie leaves, too."""
        try:
            self._background.check(self.writer, self.attempt)
        except LeaseLost as lost:
            log.warning("%s", lost)
            self._lost = lost
            self.leave.set()
        except OSError as error:
            log.warning("leases not listed: %s", error)

    def _leave_as_orphan(self) -> None:
        is_supervisor = self.writer.startswith("supervisor-")
        if not is_supervisor and not self.leave.is_set() and self.check_orphaned():
            log.warning("no supervisor was seen for %g s: leaving", self.timing.orphan_s)
            self.leave.set()


RoleMain = Callable[[RoleContext], None]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The arguments of every role."""
    parser = argparse.ArgumentParser(description="One attempt of one role; started by the supervisor.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--attempt", type=int, required=True)
    return parser.parse_args(argv)


def start_logging(who: str) -> None:
    """To stderr, which the scheduler keeps as the attempt's log."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s {who} %(message)s", stream=sys.stderr)
    logging.Formatter.default_msec_format = "%s.%03d"


def own_job_id() -> str:
    """The scheduler's id of this process's job; empty without a scheduler."""
    return os.environ.get("SLURM_JOB_ID", os.environ.get("MILES_JOB_ID", ""))


def exit_code_of(work: Callable[[], int]) -> int:
    """What `work` returns, or the exit code of what it raised, which is logged: the last border of a role's process."""
    try:
        return work()
    except LeaseLost as lost:
        log.warning("%s", lost)
        return lost.exit_code
    except MilesError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("unexpected error")
        return 1


def run_role(role: str, main: RoleMain, argv: list[str] | None = None) -> int:
    """Runs a role's main with everything around it and returns the exit code."""
    arguments = parse_arguments(argv)
    writer = f"{role}-{arguments.replica}"
    start_logging(f"role={writer} attempt={arguments.attempt}")
    harden()
    return exit_code_of(lambda: _play(writer, arguments, main))


def _play(writer: str, arguments: argparse.Namespace, main: RoleMain) -> int:
    run, paths = read_run(arguments.run_dir)
    context = RoleContext(
        run, paths, writer, arguments.attempt,
        token=os.environ.get("MILES_TOKEN", ""), job_id=own_job_id(),
    )  # fmt: skip
    try:
        _install_signals(context)
        context.start()
        main(context)
        return context.exit_code
    finally:
        context.stop()
        context.metrics.close()


def _install_signals(context: RoleContext) -> None:
    def leave(number: int, frame: Any) -> None:
        log.info("signal=%s: leaving after what is in hand", signal.Signals(number).name)
        context.leave.set()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR2, leave)
