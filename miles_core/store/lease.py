"""Lease: which attempt of a role is current, and is it alive (I3, I4).

`leases/<writer>.a<attempt>` is created exclusively by the job of that attempt and never removed; the highest attempt is
current. One listing answers for all roles. A tombstone is a lease without a holder: it retires the attempts below it.

Liveness: a holder rewrites `heartbeats/<writer>.a<attempt>` with a rising counter. Observers judge by their own monotonic
clock over their own successful readings; nobody compares clocks or mtimes between nodes.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from miles_core.errors import LeaseLost, RunDirectoryError
from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem
from miles_core.store.journal import decode_frame, encode_frame
from miles_core.store.publish import publish_exclusive

_LEASE = re.compile(r"(?P<writer>[a-z_]+-\d+)\.a(?P<attempt>\d+)")
_HEARTBEAT_BYTES = 1024


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


class LeaseFolder:
    """Leases of one run."""

    def __init__(self, fs: FileSystem, folder: Path, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._fs, self._folder, self._run_id, self._clock = fs, folder, run_id, clock
        self._attempts: dict[str, list[int]] = {}
        self._first_seen: dict[tuple[str, int], float] = {}

    def refresh(self) -> None:
        """One listing of all leases. OSError when it fails: then the old view holds and says nothing new."""
        found: dict[str, list[int]] = {}
        for match in filter(None, map(_LEASE.fullmatch, self._fs.listdir(self._folder))):
            found.setdefault(match["writer"], []).append(int(match["attempt"]))
        now = self._clock()
        for writer, attempts in found.items():
            attempts.sort()
            for attempt in attempts:
                self._first_seen.setdefault((writer, attempt), now)
        self._attempts = found

    def newest(self, writer: str) -> int:
        """Highest attempt seen at the last refresh; 0 if none."""
        return self._attempts.get(writer, [0])[-1]

    def attempts(self, writer: str) -> list[int]:
        """All attempts seen at the last refresh, ascending."""
        return list(self._attempts.get(writer, []))

    def seen_for_s(self, writer: str, attempt: int) -> float:
        """Seconds since this observer first saw that lease, by its own clock."""
        first = self._first_seen.get((writer, attempt))
        return 0.0 if first is None else self._clock() - first

    def read(self, writer: str, attempt: int) -> Lease:
        """Content of a lease."""
        return Lease.model_validate_json(self._fs.read(self._path(writer, attempt)))

    def acquire(self, writer: str, attempt: int, token: str, *, host: str = "", pid: int = 0, job_id: str = "") -> Lease:
        """Takes the lease of one attempt. Raises LeaseLost: `twin` (another process holds it) or `superseded`."""
        lease = Lease(
            run_id=self._run_id, writer=writer, attempt=attempt, token=token, nonce=secrets.token_hex(8),
            host=host, pid=pid, job_id=job_id,
        )  # fmt: skip
        path = self._path(writer, attempt)
        if not publish_exclusive(self._fs, path, lease.model_dump_json().encode()):
            other = self.read(writer, attempt)
            if other.run_id != self._run_id:
                raise RunDirectoryError(f"{path} belongs to run {other.run_id}, this is run {self._run_id}")
            if other.nonce != lease.nonce:
                raise LeaseLost(
                    f"{writer} attempt {attempt} is already held by job {other.job_id or '?'} (pid {other.pid} on "
                    f"{other.host or '?'}): this one is its twin and leaves",
                    why="twin",
                )
        self.check(writer, attempt)
        return lease

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
    """Rewrites a heartbeat in place: one framed line of fixed length, so a torn one is seen as such."""
    payload = heartbeat.model_dump_json().encode()
    padding = _HEARTBEAT_BYTES - len(encode_frame(payload))
    fs.overwrite(heartbeat_path(folder, heartbeat.writer, heartbeat.attempt), encode_frame(payload + b" " * padding))


def read_heartbeat(fs: FileSystem, folder: Path, writer: str, attempt: int) -> Heartbeat | None:
    """The newest heartbeat, or None when there is none yet or it is torn (no successful reading)."""
    try:
        decoded = decode_frame(fs.read(heartbeat_path(folder, writer, attempt)))
    except FileNotFoundError:
        return None
    return None if decoded is None else Heartbeat.model_validate_json(decoded[0])


Liveness = Literal["unknown", "alive", "dead"]


class LivenessJudge:
    """Judges holders by changes of their counters, over this observer's own successful readings (I4).

    `observe` is called at every poll. A pause between two of the observer's polls that is long against lease_s (it was
    stopped, or its filesystem hung) starts the count again, so a stall of everything kills nobody.
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
        counter = -1 if heartbeat is None else heartbeat.counter
        known = self._changed.get(key)
        if known is None or counter != known[0] or gap > self._lease_s / 3:
            self._changed[key] = (counter, now)
        if heartbeat is not None:
            self._last[key] = heartbeat
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
        for table in (self._changed, self._last_success, self._last):
            table.pop((writer, attempt), None)  # type: ignore[attr-defined]


