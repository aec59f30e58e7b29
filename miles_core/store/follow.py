"""Act and cut (I5): reading another writer's journal over its attempts.

A record of an attempt is acted upon only if, after it was read, no higher lease of that writer is there; once there is one,
only the cut counts. Three kinds of reader follow from who takes the cut:

- `Follower`: the writer's successor cuts (orchestrator, learner, supervisor, evaluator); its first record, `Cuts`, says how.
- `DecidingFollower`: this reader decides (the orchestrator over replicas and graders); it takes the cut itself, from a read
  begun at least 2 x visibility_s after the newer lease was seen.
- `CopyReader`: orders, which a successor re-appends; an older attempt's copies are simply left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from miles_core.errors import DeadlineExceeded, JournalCorrupt
from miles_core.records import Cut, Cuts, parse_record
from miles_core.store.fs import FileSystem
from miles_core.store.journal import AttemptTail, Frame
from miles_core.store.lease import LeaseFolder

EMPTY_HASH = xxhash.xxh3_128().hexdigest()


class Delivered(NamedTuple):
    """One record that may be acted upon."""

    attempt: int
    end_bytes: int
    record: Any


@dataclass(frozen=True)
class Reading:
    """What every follower needs: filesystem, leases, times."""

    fs: FileSystem
    leases: LeaseFolder
    visibility_s: float
    clock: Callable[[], float] = time.monotonic

    def tail(self, folder: Path, attempt: int) -> AttemptTail:
        """A tail at the beginning of one attempt's stream."""
        return AttemptTail(self.fs, folder, attempt, visibility_s=self.visibility_s, clock=self.clock)


def _deliver(attempt: int, frames: list[Frame]) -> list[Delivered]:
    return [Delivered(attempt, frame.end_bytes, parse_record(frame.payload)) for frame in frames]


class _Stream:
    """One attempt's stream with the frames that were read but not yet acted upon."""

    def __init__(self, reading: Reading, folder: Path, attempt: int) -> None:
        self.attempt = attempt
        self.folder = folder
        self._tail = reading.tail(folder, attempt)
        self._held: list[Frame] = []
        self.acted_bytes = 0

    def pull(self, until_bytes: int | None = None) -> None:
        """Reads what is new."""
        self._held.extend(self._tail.read(until_bytes))

    def drain(self) -> Iterator[Frame]:
        """Reads to the end of what is visible now."""
        while frames := self._tail.read():
            self._held.extend(frames)
        return iter(self._held)

    @property
    def read_bytes(self) -> int:
        return self._tail.bytes

    @property
    def read_hash(self) -> str:
        return self._tail.hash

    def first(self) -> Frame | None:
        """First frame of the stream, if nothing was acted upon yet."""
        return self._held[0] if self._held and self.acted_bytes == 0 else None

    def take(self, until_bytes: int | None = None) -> list[Frame]:
        """Held frames (up to a cut); they count as acted upon."""
        taken = [frame for frame in self._held if until_bytes is None or frame.end_bytes <= until_bytes]
        self._held = self._held[len(taken) :]
        if taken:
            self.acted_bytes = taken[-1].end_bytes
        return taken

    def check_cut(self, cut: Cut) -> None:
        """Raises JournalCorrupt if this reader acted beyond the cut, or the bytes differ from what was cut."""
        if self.acted_bytes > cut.bytes:
            raise JournalCorrupt(
                f"{self.folder}: acted upon {self.acted_bytes} bytes of attempt {cut.attempt}, but it was cut at "
                f"{cut.bytes}; the filesystem shows writes later than visibility_s. Raise timing.visibility_s"
            )


class Follower:
    """Follows a writer whose successor cuts it."""

    def __init__(self, reading: Reading, folder: Path, writer: str) -> None:
        self._reading, self._folder, self._writer = reading, folder, writer
        self._streams: dict[int, _Stream] = {}
        self._current = 0
        self.cuts: dict[int, Cut] = {}
        """Cuts of lower attempts, as the newest attempt states them."""

    @property
    def attempt(self) -> int:
        """The attempt whose records are delivered now; 0 before the first."""
        return self._current

    def poll(self) -> list[Delivered]:
        """New records that may be acted upon, over all attempts, in order. OSError: nothing is lost, poll again."""
        if self._current:
            self._stream(self._current).pull()
        self._reading.leases.refresh()
        newest = self._reading.leases.newest(self._writer)
        if newest == 0:
            return []
        if newest != self._current and not self._learn_cuts(newest):
            return []
        delivered = self._finish_cut_attempts(newest)
        if self._current == newest:
            delivered += _deliver(newest, self._stream(newest).take())
        return delivered

    def _stream(self, attempt: int) -> _Stream:
        return self._streams.setdefault(attempt, _Stream(self._reading, self._folder, attempt))

    def _learn_cuts(self, newest: int) -> bool:
        """Reads the first record of the newest attempt; False while it is not there, or a higher lease appeared."""
        stream = self._stream(newest)
        stream.pull()
        self._reading.leases.refresh()
        first = stream.first()
        if first is None or self._reading.leases.newest(self._writer) != newest:
            return False
        record = parse_record(first.payload)
        if not isinstance(record, Cuts):
            raise JournalCorrupt(f"{self._folder}: attempt {newest} opens with {record.kind!r} instead of its cuts")
        self.cuts = {cut.attempt: cut for cut in record.cuts}
        return True

    def _finish_cut_attempts(self, newest: int) -> list[Delivered]:
        delivered: list[Delivered] = []
        for attempt in range(max(self._current, 1), newest):
            cut = self.cuts.get(attempt)
            if cut is not None and cut.bytes > 0:
                stream = self._stream(attempt)
                stream.check_cut(cut)
                stream.pull(cut.bytes)
                delivered += _deliver(attempt, stream.take(cut.bytes))
                if stream.acted_bytes < cut.bytes:
                    self._current = attempt
                    return delivered
                self._check_hash(stream, cut)
            self._streams.pop(attempt, None)
        self._current = newest
        return delivered

    def _check_hash(self, stream: _Stream, cut: Cut) -> None:
        if stream.read_bytes == cut.bytes and stream.read_hash != cut.hash:
            raise JournalCorrupt(
                f"{self._folder}: attempt {cut.attempt} up to byte {cut.bytes} hashes to {stream.read_hash}, the cut says "
                f"{cut.hash}; the journal was changed after it was cut"
            )


class DecidingFollower:
    """Follows a writer and takes the cuts itself. `on_cut` must make the cut durable before records behind it are used."""

    def __init__(
        self, reading: Reading, folder: Path, writer: str, *, cuts: dict[int, Cut], on_cut: Callable[[Cut], None]
    ) -> None:
        self._reading, self._folder, self._writer, self._on_cut = reading, folder, writer, on_cut
        self._cuts = dict(cuts)
        self._stream: _Stream | None = None

    @property
    def attempt(self) -> int:
        """The attempt being read; 0 before the first."""
        return 0 if self._stream is None else self._stream.attempt

    def is_cut(self, attempt: int) -> bool:
        """True once nothing more can come of that attempt."""
        return attempt in self._cuts

    def poll(self) -> list[Delivered]:
        """New records that may be acted upon, in order. OSError: nothing is lost, poll again."""
        delivered: list[Delivered] = []
        while True:
            if self._stream is None:
                self._stream = _Stream(self._reading, self._folder, 1)
            stream = self._stream
            cut = self._cuts.get(stream.attempt)
            if cut is None:
                stream.pull()
                self._reading.leases.refresh()
                newest = self._reading.leases.newest(self._writer)
                if newest <= stream.attempt:
                    return delivered + _deliver(stream.attempt, stream.take())
                cut = self._take_cut(stream, newest)
                if cut is None:
                    return delivered
            stream.check_cut(cut)
            stream.pull(cut.bytes)
            delivered += _deliver(stream.attempt, stream.take(cut.bytes))
            if stream.acted_bytes < cut.bytes:
                return delivered
            self._stream = _Stream(self._reading, self._folder, stream.attempt + 1)

    def _take_cut(self, stream: _Stream, newest: int) -> Cut | None:
        next_attempt = min(a for a in self._reading.leases.attempts(self._writer) if a > stream.attempt)
        if self._reading.leases.seen_for_s(self._writer, next_attempt) < 2 * self._reading.visibility_s:
            return None
        stream.drain()
        cut = Cut(writer=self._writer, attempt=stream.attempt, bytes=stream.read_bytes, hash=stream.read_hash)
        self._on_cut(cut)
        self._cuts[cut.attempt] = cut
        return cut


class CopyReader:
    """Reads the newest orchestrator attempt's copies in one folder; those of older attempts it leaves."""

    def __init__(self, reading: Reading, folder: Path, writer: str) -> None:
        self._reading, self._folder, self._writer = reading, folder, writer
        self._stream: _Stream | None = None

    def poll(self) -> list[Delivered]:
        """New copies that may be acted upon. OSError: nothing is lost, poll again."""
        if self._stream is not None:
            self._stream.pull()
        self._reading.leases.refresh()
        newest = self._reading.leases.newest(self._writer)
        if newest == 0:
            return []
        if self._stream is None or self._stream.attempt != newest:
            self._stream = _Stream(self._reading, self._folder, newest)
            self._stream.pull()
            self._reading.leases.refresh()
            if self._reading.leases.newest(self._writer) != newest:
                return []
        return _deliver(newest, self._stream.take())


def cut_predecessors(
    reading: Reading, folder: Path, writer: str, attempt: int, *, sleep: Callable[[float], None]
) -> Cuts:
    """Cuts every lower attempt of `writer`, for the first record of attempt `attempt`, which must hold its lease.

    The newest lower attempt that wrote its first record has already cut those below itself; its own stream is read to the
    end, not before 2 x visibility_s after the lease of `attempt` was seen.
    """
    if attempt == 1:
        return Cuts()
    deadline = reading.clock() + 60 + 10 * reading.visibility_s
    while (seen := reading.leases.seen_for_s(writer, attempt)) < 2 * reading.visibility_s:
        if reading.clock() > deadline:
            raise DeadlineExceeded(f"{writer} attempt {attempt}: its own lease did not become visible; is the run directory mounted?")
        sleep(max(0.01, 2 * reading.visibility_s - seen))
        reading.leases.refresh()
    found: dict[int, Cut] = {}
    for lower in range(attempt - 1, 0, -1):
        if lower in found:
            continue
        stream = _Stream(reading, folder, lower)
        frames = list(stream.drain())
        found[lower] = Cut(writer=writer, attempt=lower, bytes=stream.read_bytes, hash=stream.read_hash)
        if frames:
            first = parse_record(frames[0].payload)
            if not isinstance(first, Cuts):
                raise JournalCorrupt(f"{folder}: attempt {lower} opens with {first.kind!r} instead of its cuts")
            found.update({cut.attempt: cut for cut in first.cuts})
    return Cuts(cuts=tuple(found[lower] for lower in sorted(found)))


def read_cut(reading: Reading, folder: Path, cut: Cut) -> list[Delivered]:
    """All records of one attempt up to its cut. Raises JournalCorrupt if the bytes are gone or differ."""
    tail = reading.tail(folder, cut.attempt)
    frames: list[Frame] = []
    while tail.bytes < cut.bytes:
        new = tail.read(cut.bytes)
        if not new:
            raise JournalCorrupt(
                f"{folder}: attempt {cut.attempt} ends at byte {tail.bytes}, but it was cut at {cut.bytes}; records are missing"
            )
        frames += new
    if tail.hash != cut.hash:
        raise JournalCorrupt(f"{folder}: attempt {cut.attempt} up to byte {cut.bytes} does not hash to {cut.hash}")
    return _deliver(cut.attempt, frames)
