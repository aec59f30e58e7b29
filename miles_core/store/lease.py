"""Lease: which attempt of a role is current, and is it alive (I3, I4).

`leases/<writer>.a<attempt>` is created exclusively by the job of that attempt and never removed; the highest attempt is
current. One listing answers for all roles. A tombstone is a lease without a holder: it retires the attempts below it.

Liveness: a holder rewrites `heartbeats/<writer>.a<attempt>` with a rising counter. Observers judge by their own monotonic
clock over their own successful readings; nobody compares clocks or mtimes between nodes.
"""

from __future__ import annotations

import errno
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from miles_core.errors import LeaseLost, RunDirectoryError
from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem
from miles_core.store.journal import decode_frame, encode_frame
from miles_core.store.publish import publish_exclusive

_LEASE = re.compile(r"(?P<writer>[a-z_]+-\d+)\.a(?P<attempt>\d+)")
_HEARTBEAT_BYTES = 1024
_PAYLOAD_BYTES = _HEARTBEAT_BYTES - len(encode_frame(b""))
_STATE_CHARACTERS = 160

RENEWALS_PER_LEASE = 8
"""A holder rewrites its heartbeat this often in lease_s."""
_LONG_GAP = 1 / 3
"""A pause of the observer longer than this part of lease_s starts its count again. A living holder is then never silent for
lease_s: its bytes come at most 1/3 late (lease_s >= 3 x visibility_s), a shorter pause hides 1/3, and one renewal each before
and behind that pause are 2/8: together 11/12."""


UNKNOWN: Final = "UNKNOWN"
"""A fact that could not be had, as records say it."""


class Machine(Closed):
    """Where an attempt runs, for people."""

    kernel: str = UNKNOWN
    libc: str = UNKNOWN
    cpu: str = UNKNOWN
    """Model name."""
    cpus: float = 0
    """CPUs that affinity and cgroup leave; 0 = unknown."""
    gpus: tuple[str, ...] = ()
    """Model of every GPU of this host, as the NVIDIA driver lists them."""
    gpus_visible: str = ""
    """CUDA_VISIBLE_DEVICES."""
    nodes: str = ""
    """SLURM_JOB_NODELIST, as Slurm gives it: where the ranks of a job of several nodes are."""


class Lease(Closed):
    """Content of a lease file."""

    kind: Literal["lease", "tombstone"] = "lease"
    run_id: str
    writer: str
    attempt: int
    token: str
    nonce: str
    """Tells two processes of one attempt apart (twins)."""
    host: str = ""
    pid: int = 0
    job_id: str = ""
    machine: Machine | None = None


class Heartbeat(Closed):
    """What a holder says of itself, a few times per lease_s."""

    writer: str
    attempt: int
    counter: int
    state: str = ""
    """`starting`, `serving`, `waiting: <what>`, `training`, `leaving` ..."""
    progress: int = 0
    """Anything that only rises while the role works: steps, trajectories, grades."""
    load: int = 0
    """Work in progress, in the role's own unit (rollout: unfinished samples)."""
    version: tuple[int, int] | None = None
    """(step, attempt) of the weights in use."""
    reading: tuple[int, int] | None = None
    """(step, attempt) of the version it is on its way to; the collector waits for it, up to a cap (I12)."""


class LeaseFolder:
    """Leases of one run, as one observer saw them. A lease once seen stays seen, whatever a later listing shows."""

    def __init__(self, fs: FileSystem, folder: Path, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._fs, self._folder, self._run_id, self._clock = fs, folder, run_id, clock
        self._names: set[str] = set()
        self._attempts: dict[str, list[int]] = {}
        self._first_seen: dict[tuple[str, int], float] = {}

    def refresh(self) -> None:
        """One listing of all leases. OSError when it fails: then the old view holds and says nothing new."""
        new = set(self._fs.listdir(self._folder)) - self._names
        now = self._clock()
        for match in filter(None, map(_LEASE.fullmatch, new)):
            writer, attempt = match["writer"], int(match["attempt"])
            self._names.add(match.string)
            self._first_seen[writer, attempt] = now
            self._attempts[writer] = sorted([*self._attempts.get(writer, []), attempt])

    def newest(self, writer: str) -> int:
        """Highest attempt seen so far; 0 if none."""
        return self._attempts.get(writer, [0])[-1]

    def writers(self) -> list[str]:
        """Every writer with a lease seen so far, sorted."""
        return sorted(self._attempts)

    def attempts(self, writer: str) -> list[int]:
        """All attempts seen so far, ascending."""
        return list(self._attempts.get(writer, []))

    def seen_for_s(self, writer: str, attempt: int) -> float:
        """Seconds since this observer first saw that lease, by its own clock."""
        first = self._first_seen.get((writer, attempt))
        return 0.0 if first is None else self._clock() - first

    def superseded_for_s(self, writer: str, attempt: int) -> float:
        """Seconds since this observer first saw any higher lease, by its own clock."""
        return max((self.seen_for_s(writer, other) for other in self.attempts(writer) if other > attempt), default=0.0)

    def read(self, writer: str, attempt: int) -> Lease:
        """Content of a lease. OSError also while it is not whole (its name came before its bytes, or never any bytes)."""
        path = self._path(writer, attempt)
        try:
            return Lease.model_validate_json(self._fs.read(path))
        except ValidationError as error:
            raise OSError(errno.EAGAIN, "the lease is not whole (yet)", str(path)) from error

    def acquire(
        self, writer: str, attempt: int, token: str, *, host: str = "", pid: int = 0, job_id: str = "",
        machine: Machine | None = None,
    ) -> Lease:  # fmt: skip
        """Takes the lease of one attempt. Raises LeaseLost: `twin` (another process holds it) or `superseded`."""
        lease = Lease(
            run_id=self._run_id, writer=writer, attempt=attempt, token=token, nonce=secrets.token_hex(8),
            host=host, pid=pid, job_id=job_id, machine=machine,
        )  # fmt: skip
        if not publish_exclusive(self._fs, self._path(writer, attempt), lease.model_dump_json().encode()):
            self._check_mine(lease)
        self.check(writer, attempt)
        return lease

    def _check_mine(self, mine: Lease) -> None:
        """Raises unless the lease that exists was made by this very process."""
        path = self._path(mine.writer, mine.attempt)
        try:
            other = self.read(mine.writer, mine.attempt)
        except OSError as error:
            raise LeaseLost(f"{path} is another process's and cannot be read ({error}): leaving", why="twin") from error
        if other.run_id != self._run_id:
            raise RunDirectoryError(f"{path} belongs to run {other.run_id}, this is run {self._run_id}")
        if other.kind == "tombstone":
            raise LeaseLost(f"{mine.writer} was retired up to attempt {mine.attempt}: leaving", why="superseded")
        if other.nonce != mine.nonce:
            raise LeaseLost(
                f"{mine.writer} attempt {mine.attempt} is already held by job {other.job_id or '?'} (pid {other.pid} on "
                f"{other.host or '?'}): this one is its twin and leaves",
                why="twin",
            )

    def check(self, writer: str, attempt: int) -> None:
        """Re-reads the leases; raises LeaseLost when a higher attempt exists."""
        self.refresh()
        newest = self.newest(writer)
        if newest > attempt:
            raise LeaseLost(f"{writer} attempt {attempt} was superseded by attempt {newest}: leaving", why="superseded")

    def tombstone(self, writer: str, attempt: int, token: str) -> bool:
        """Retires all attempts of `writer` below `attempt`. False if that lease exists."""
        grave = Lease(
            kind="tombstone", run_id=self._run_id, writer=writer, attempt=attempt, token=token, nonce=secrets.token_hex(8)
        )
        return publish_exclusive(self._fs, self._path(writer, attempt), grave.model_dump_json().encode())

    def _path(self, writer: str, attempt: int) -> Path:
        return self._folder / f"{writer}.a{attempt}"


def heartbeat_path(folder: Path, writer: str, attempt: int) -> Path:
    """Where an attempt's heartbeat is. One file an attempt: a zombie cannot overwrite its successor's."""
    return folder / f"{writer}.a{attempt}"


def write_heartbeat(fs: FileSystem, folder: Path, heartbeat: Heartbeat) -> None:
    """Rewrites a heartbeat in place: one framed line of fixed length, so a torn one is seen as such; clips a long state."""
    # Unprintable: what JSON writes as six bytes (control characters) or refuses (undecodable bytes of a file name).
    state = "".join(character if character.isprintable() else "?" for character in heartbeat.state[:_STATE_CHARACTERS])
    payload = heartbeat.model_copy(update={"state": state}).model_dump_json().encode()
    fs.overwrite(heartbeat_path(folder, heartbeat.writer, heartbeat.attempt), encode_frame(payload.ljust(_PAYLOAD_BYTES)))


def read_heartbeat(fs: FileSystem, folder: Path, writer: str, attempt: int) -> Heartbeat | None:
    """The newest heartbeat, or None when there is none yet or it is torn. OSError: no reading."""
    try:
        decoded = decode_frame(fs.read(heartbeat_path(folder, writer, attempt), 0, _HEARTBEAT_BYTES))
    except FileNotFoundError:
        return None
    return None if decoded is None else Heartbeat.model_validate_json(decoded[0])


Liveness = Literal["unknown", "alive", "dead"]


class LivenessJudge:
    """Judges holders by changes of their counters, over this observer's own successful readings (I4).

    `observe` is called at every poll, several times in lease_s / 3. A longer pause between two successful readings (the
    observer was stopped, its filesystem hung) starts the count again, so a stall of everything kills nobody; an observer that
    looks more rarely than that never judges anybody dead.
    """

    def __init__(self, fs: FileSystem, folder: Path, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fs, self._folder, self._lease_s, self._clock = fs, folder, lease_s, clock
        self._changed: dict[tuple[str, int], tuple[int, float]] = {}
        self._last_success: dict[tuple[str, int], float] = {}
        self._last: dict[tuple[str, int], Heartbeat] = {}

    def observe(self, writer: str, attempt: int) -> Liveness:
        """Reads the heartbeat once and judges: dead = no change for lease_s of uninterrupted successful readings."""
        key = (writer, attempt)
        try:
            heartbeat = read_heartbeat(self._fs, self._folder, writer, attempt)
        except OSError:
            return self.last_verdict(key)
        now = self._clock()
        gap = now - self._last_success.get(key, now)
        self._last_success[key] = now
        if heartbeat is not None:
            self._last[key] = heartbeat
        # A torn or missing one after a whole one is no change: a holder that died while it wrote must count as silent.
        counter = self._last[key].counter if key in self._last else -1
        known = self._changed.get(key)
        if known is None or counter != known[0] or gap > self._lease_s * _LONG_GAP:
            self._changed[key] = (counter, now)
        return self.last_verdict(key)

    def last_verdict(self, key: tuple[str, int]) -> Liveness:
        """The verdict of the last successful readings."""
        if key not in self._changed or key not in self._last_success:
            return "unknown"
        counter, since = self._changed[key]
        if self._last_success[key] - since >= self._lease_s:
            return "dead"
        return "unknown" if counter < 0 else "alive"

    def heartbeat(self, writer: str, attempt: int) -> Heartbeat | None:
        """The last heartbeat read."""
        return self._last.get((writer, attempt))

    def silent_s(self, writer: str, attempt: int) -> float:
        """Seconds without a change, by successful readings."""
        known = self._changed.get((writer, attempt))
        return 0.0 if known is None else self._last_success[(writer, attempt)] - known[1]

    def forget(self, writer: str, attempt: int) -> None:
        """Drops what is known of an attempt that no longer matters."""
        key = (writer, attempt)
        self._changed.pop(key, None)
        self._last_success.pop(key, None)
        self._last.pop(key, None)
