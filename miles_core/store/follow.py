"""Act and cut (I5): reading another writer's journal over its attempts.

A record of an attempt is acted upon only if, after it was read, no higher lease of that writer is there; once there is one,
only the cut counts. Three kinds of reader follow from who takes the cut:

- `Follower`: the writer's successor cuts (orchestrator, learner, supervisor, evaluator); its first record, `Cuts`, says how.
- `DecidingFollower`: this reader decides (the orchestrator over replicas and graders); it takes the cut itself, from a read
  begun at least 2 x visibility_s after the newer lease was seen.
- `CopyReader`: orders, which a successor re-appends; an older attempt's copies are simply left.

Each reads with `pull`, then needs a listing of the leases, then delivers with `act`; `poll` does all three, and
`poll_together` does them for many readers with one listing. After an OSError nothing is lost: the next poll delivers it.

What may be acted upon and when a cut is due is decided by three pure functions, `may_act`, `cut_is_due` and `deliverable`, by
which a model of the protocol is explored exhaustively, too. They rest on one assumption: what one node wrote, all nodes see at
most visibility_s later. Then a record that anybody acted upon was written before its reader could see the newer lease, and
every cut holds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash
from pydantic import ValidationError

from miles_core.errors import DeadlineExceeded, JournalCorrupt
from miles_core.records import Cut, Cuts, parse_record
from miles_core.store.fs import FileSystem
from miles_core.store.journal import AttemptTail, Frame, encode_frame
from miles_core.store.lease import LeaseFolder

log = logging.getLogger("miles")

EMPTY_HASH = xxhash.xxh3_128().hexdigest()
_CUT_TRIES = 20


def may_act(attempt: int, newest: int) -> bool:
    """Whether records of `attempt` may be acted upon that were read before `newest` was listed as the highest lease."""
    return newest <= attempt


def cut_is_due(attempt: int, newest: int, seen_s: float, visibility_s: float) -> bool:
    """Whether `attempt` may be cut by a read begun now: a higher lease was seen `seen_s` ago, so all that counts is visible."""
    return newest > attempt and seen_s >= 2 * visibility_s


def deliverable(current: int, newest: int, cuts: Mapping[int, Cut] | None) -> list[tuple[int, Cut | None]]:
    """What a follower that stands at attempt `current` may deliver: (attempt, its cut, or None for all of it), in order.

    `cuts`: what the newest attempt says in its first record; None while that is not there. A lower attempt of which it names no
    cut is passed over.
    """
    if newest == 0 or (newest != current and cuts is None):
        return []
    lower = range(max(current, 1), newest)
    return [*((attempt, cuts[attempt]) for attempt in lower if cuts is not None and attempt in cuts), (newest, None)]


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
    sleep: Callable[[float], None] = time.sleep

    @property
    def patience_s(self) -> float:
        """What must be visible after visibility_s and still is not after this long is missing."""
        return 60 + 10 * self.visibility_s

    def tail(self, folder: Path, attempt: int) -> AttemptTail:
        """A tail at the beginning of one attempt's stream."""
        return AttemptTail(self.fs, folder, attempt, visibility_s=self.visibility_s, clock=self.clock)


class _Stream:
    """One attempt's stream with the frames that were read but not yet acted upon."""

    def __init__(self, reading: Reading, folder: Path, attempt: int) -> None:
        self.attempt = attempt
        self._reading, self._folder = reading, folder
        self._tail = reading.tail(folder, attempt)
        self._held: list[Frame] = []
        self._acted = xxhash.xxh3_128()
        self._acted_bytes = 0
        self._short_since: float | None = None

    def pull(self) -> None:
        """Reads what is new."""
        self._held.extend(self._tail.read())

    def first(self) -> Any:
        """The record that opens the stream; None while it is not there. Only before anything was taken."""
        return _parse(self._folder, self.attempt, self._held[0]) if self._held else None

    def take(self, until_bytes: int | None = None) -> list[Delivered]:
        """Held records (up to a cut); they count as acted upon."""
        frames = [frame for frame in self._held if until_bytes is None or frame.end_bytes <= until_bytes]
        taken = [Delivered(self.attempt, frame.end_bytes, _parse(self._folder, self.attempt, frame)) for frame in frames]
        self._held = self._held[len(frames) :]
        for frame in frames:
            self._acted.update(encode_frame(frame.payload))
            self._acted_bytes = frame.end_bytes
        return taken

    def cut_here(self, writer: str) -> Cut | None:
        """A cut behind everything that is visible now; None while a bad frame hides what follows it."""
        while frames := self._tail.read(list_now=True):
            self._held.extend(frames)
        if self._tail.is_suspect:
            return None
        return Cut(writer=writer, attempt=self.attempt, bytes=self._tail.bytes, hash=self._tail.hash)

    def finish(self, cut: Cut, ready: list[Delivered]) -> bool:
        """Adds to `ready` what lies before the cut and was not acted upon yet; True once the cut is reached.

        Raises JournalCorrupt if this reader acted beyond the cut, if the bytes are not those that were cut, or are missing.
        """
        self._check_not_beyond(cut)
        begun = self._reading.clock()
        new = self._tail.read(cut.bytes, list_now=True)
        self._held.extend(new)
        ready += self.take(cut.bytes)
        if self._acted_bytes < cut.bytes:
            self._check_patience(cut, begun, came=bool(new))
            return False
        if cut.bytes and self._acted.hexdigest() != cut.hash:
            raise JournalCorrupt(
                f"{self._folder}: attempt {cut.attempt} up to byte {cut.bytes} hashes to {self._acted.hexdigest()}, the cut "
                f"says {cut.hash}; the journal was changed after it was cut. `miles verify` shows what is affected"
            )
        return True

    def _check_not_beyond(self, cut: Cut) -> None:
        if self._acted_bytes > cut.bytes:
            raise JournalCorrupt(
                f"{self._folder}: acted upon {self._acted_bytes} bytes of attempt {cut.attempt}, but it was cut at "
                f"{cut.bytes}; the filesystem shows writes later than visibility_s. Raise timing.visibility_s"
            )

    def _check_patience(self, cut: Cut, begun: float, *, came: bool) -> None:
        if came or self._short_since is None:
            self._short_since = self._reading.clock()
        elif self._held or begun - self._short_since > self._reading.patience_s:
            raise JournalCorrupt(
                f"{self._folder}: attempt {cut.attempt} was cut at byte {cut.bytes}, but its records end at "
                f"{self._acted_bytes}, still after {begun - self._short_since:.0f} s; some are missing. `miles verify` shows "
                f"what is affected"
            )


class PolledReader(Protocol):
    """What `poll_together` needs."""

    def pull(self) -> None:
        """Reads what is new; the listing of the leases that `act` relies on comes after it."""

    def act(self) -> list[Delivered]:
        """New records that may be acted upon, by the last listing of the leases."""


def poll_together(reading: Reading, readers: Sequence[PolledReader]) -> list[list[Delivered]]:
    """Polls many readers with one listing of the leases (I16); one result for each, in their order.

    A reader whose files cannot be read now delivers at a later poll. OSError when the leases cannot be listed.
    """
    errors: list[OSError] = []
    for reader in readers:
        try:
            reader.pull()
        except OSError as error:
            errors.append(error)
    reading.leases.refresh()
    delivered: list[list[Delivered]] = []
    for reader in readers:
        try:
            delivered.append(reader.act())
        except OSError as error:
            errors.append(error)
            delivered.append([])
    if errors:
        log.warning("%d of %d journals not read, next poll tries again: %s", len(errors), len(readers), errors[0])
    return delivered


class Follower:
    """Follows a writer whose successor cuts it. A tombstone cuts nothing: what it retires waits for a later attempt."""

    def __init__(self, reading: Reading, folder: Path, writer: str) -> None:
        self._reading, self._folder, self._writer = reading, folder, writer
        self._streams: dict[int, _Stream] = {}
        self._current = 0
        self._ready: list[Delivered] = []
        self.cuts: dict[int, Cut] = {}
        """Cuts of lower attempts, as the newest attempt states them."""

    @property
    def attempt(self) -> int:
        """The attempt whose records are delivered now; 0 before the first."""
        return self._current

    def poll(self) -> list[Delivered]:
        """New records that may be acted upon, over all attempts, in order. OSError: nothing is lost, poll again."""
        self.pull()
        self._reading.leases.refresh()
        return self.act()

    def pull(self) -> None:
        """Reads what is new; the listing of the leases that `act` relies on comes after it."""
        if self._current:
            self._stream(self._current).pull()

    def act(self) -> list[Delivered]:
        """New records that may be acted upon, by the last listing of the leases."""
        newest = self._reading.leases.newest(self._writer)
        is_known = newest == self._current or self._learn_cuts(newest)
        for attempt, cut in deliverable(self._current, newest, self.cuts if is_known else None):
            self._enter(attempt)
            if cut is None:
                self._ready += self._stream(attempt).take()
            elif not self._stream(attempt).finish(cut, self._ready):
                break
        ready, self._ready = self._ready, []
        return ready

    def _enter(self, attempt: int) -> None:
        """Lower attempts are read to their cuts, or were passed over."""
        self._current = attempt
        for lower in [known for known in self._streams if known < attempt]:
            del self._streams[lower]

    def _stream(self, attempt: int) -> _Stream:
        if attempt not in self._streams:
            self._streams[attempt] = _Stream(self._reading, self._folder, attempt)
        return self._streams[attempt]

    def _learn_cuts(self, newest: int) -> bool:
        """Reads the first record of the newest attempt; False while it is not there, or a higher lease appeared."""
        stream = self._stream(newest)
        stream.pull()
        first = stream.first()
        if first is None:
            return False
        self._reading.leases.refresh()
        if not may_act(newest, self._reading.leases.newest(self._writer)):
            return False
        self.cuts = {cut.attempt: cut for cut in _opening_cuts(self._folder, newest, first).cuts}
        return True


class DecidingFollower:
    """Follows a writer and takes the cuts itself. `on_cut` must make the cut durable before records behind it are used.

    When `on_cut` raises it is asked again at a later poll, with the same cut: two cuts of one attempt never differ.
    """

    def __init__(
        self, reading: Reading, folder: Path, writer: str, *, cuts: dict[int, Cut], on_cut: Callable[[Cut], None]
    ) -> None:
        self._reading, self._folder, self._writer, self._on_cut = reading, folder, writer, on_cut
        self._cuts = dict(cuts)
        self._proposed: Cut | None = None
        self._stream = _Stream(reading, folder, 1)
        self._has_pulled = False
        self._ready: list[Delivered] = []

    @property
    def attempt(self) -> int:
        """The attempt being read; 0 before the first poll."""
        return self._stream.attempt if self._has_pulled else 0

    def is_cut(self, attempt: int) -> bool:
        """True once nothing more can come of that attempt."""
        return attempt in self._cuts

    def poll(self) -> list[Delivered]:
        """New records that may be acted upon, in order. OSError: nothing is lost, poll again."""
        self.pull()
        self._reading.leases.refresh()
        return self.act()

    def pull(self) -> None:
        """Reads what is new; the listing of the leases that `act` relies on comes after it."""
        self._has_pulled = True
        if self._proposed is None and not self.is_cut(self._stream.attempt):
            self._stream.pull()

    def act(self) -> list[Delivered]:
        """New records that may be acted upon, by the last listing of the leases."""
        while (cut := self._cut(self._stream)) is not None:
            if not self._stream.finish(cut, self._ready):
                break
            self._stream = _Stream(self._reading, self._folder, cut.attempt + 1)
            self._stream.pull()
            self._reading.leases.refresh()
        else:
            if may_act(self._stream.attempt, self._reading.leases.newest(self._writer)):
                self._ready += self._stream.take()
        ready, self._ready = self._ready, []
        return ready

    def _cut(self, stream: _Stream) -> Cut | None:
        """The cut of this attempt: known, or taken now because a higher lease was seen for long enough."""
        if stream.attempt in self._cuts:
            return self._cuts[stream.attempt]
        if self._proposed is None:
            leases = self._reading.leases
            seen_s = leases.superseded_for_s(self._writer, stream.attempt)
            if not cut_is_due(stream.attempt, leases.newest(self._writer), seen_s, self._reading.visibility_s):
                return None
            self._proposed = stream.cut_here(self._writer)
        if self._proposed is not None:
            self._on_cut(self._proposed)
            self._cuts[stream.attempt], self._proposed = self._proposed, None
        return self._cuts.get(stream.attempt)


class CopyReader:
    """Reads the newest orchestrator attempt's copies in one folder; those of older attempts it leaves."""

    def __init__(self, reading: Reading, folder: Path, writer: str) -> None:
        self._reading, self._folder, self._writer = reading, folder, writer
        self._stream: _Stream | None = None

    def poll(self) -> list[Delivered]:
        """New copies that may be acted upon. OSError: nothing is lost, poll again."""
        self.pull()
        self._reading.leases.refresh()
        return self.act()

    def pull(self) -> None:
        """Reads what is new; the listing of the leases that `act` relies on comes after it."""
        if self._stream is not None:
            self._stream.pull()

    def act(self) -> list[Delivered]:
        """New copies that may be acted upon, by the last listing of the leases."""
        newest = self._reading.leases.newest(self._writer)
        if newest == 0:
            return []
        if self._stream is None or self._stream.attempt != newest:
            self._stream = _Stream(self._reading, self._folder, newest)
            self._stream.pull()
            self._reading.leases.refresh()
            if not may_act(newest, self._reading.leases.newest(self._writer)):
                return []
        return self._stream.take()


def cut_predecessors(reading: Reading, folder: Path, writer: str, attempt: int, *, sleep: Callable[[float], None]) -> Cuts:
    """Cuts every lower attempt of `writer`, for the first record of attempt `attempt`, which must hold its lease.

    The newest lower attempt that wrote its first record has already cut those below itself; its own stream is read to the
    end, not before 2 x visibility_s after the lease of `attempt` was seen. Raises DeadlineExceeded, JournalCorrupt.
    """
    if attempt == 1:
        return Cuts()
    pause = _patient_sleep(reading, sleep, f"{writer} attempt {attempt}: waited for what its predecessors wrote in {folder}")
    while not cut_is_due(attempt - 1, attempt, seen_s := reading.leases.seen_for_s(writer, attempt), reading.visibility_s):
        pause(2 * reading.visibility_s - seen_s)
        try:
            reading.leases.refresh()
        except OSError as error:
            log.warning("leases not listed, trying again: %s", error)
    found: dict[int, Cut] = {}
    for lower in range(attempt - 1, 0, -1):
        if lower not in found:
            cut, first = _cut_one(_Stream(reading, folder, lower), writer, lambda: pause(reading.visibility_s / 4))
            found[lower] = cut
            if first is not None:
                found.update({cut.attempt: cut for cut in _opening_cuts(folder, lower, first).cuts})
    return Cuts(cuts=tuple(found[lower] for lower in sorted(found)))


def _patient_sleep(reading: Reading, sleep: Callable[[float], None], what: str) -> Callable[[float], None]:
    """Sleeps until patience_s was slept in all; a process that was stopped or a filesystem that hung has not slept."""
    slept_s = 0.0

    def pause(seconds: float) -> None:
        nonlocal slept_s
        if slept_s > reading.patience_s:
            raise DeadlineExceeded(f"{what} for {slept_s:.0f} s; is the run directory mounted and readable?")
        slept_s += max(0.01, seconds)
        sleep(max(0.01, seconds))

    return pause


def _cut_one(stream: _Stream, writer: str, pause: Callable[[], None]) -> tuple[Cut, Any]:
    """A cut behind all that is visible of one attempt, and the record that opens it (None: it wrote nothing)."""
    while True:
        try:
            cut = stream.cut_here(writer)
        except OSError as error:
            log.warning("journal not read, trying again: %s", error)
        else:
            if cut is not None:
                return cut, stream.first()
        pause()


def read_cut(reading: Reading, folder: Path, cut: Cut) -> list[Delivered]:
    """All records of one attempt up to its cut. Raises JournalCorrupt if the bytes differ or stay away for 2 x visibility_s."""
    stream = _Stream(reading, folder, cut.attempt)
    delivered: list[Delivered] = []
    tries = 0
    while tries <= _CUT_TRIES:
        known = len(delivered)
        try:
            if stream.finish(cut, delivered):
                return delivered
        except OSError as error:
            if tries == _CUT_TRIES:
                raise
            log.warning("journal not read, trying again: %s", error)
        if len(delivered) == known:
            tries += 1
            reading.sleep(2 * reading.visibility_s / _CUT_TRIES)
    raise JournalCorrupt(
        f"{folder}: attempt {cut.attempt} was cut at byte {cut.bytes}, but its records end at "
        f"{delivered[-1].end_bytes if delivered else 0}; records are missing. `miles verify` shows what is affected"
    )


def _opening_cuts(folder: Path, attempt: int, first: Any) -> Cuts:
    if not isinstance(first, Cuts):
        raise JournalCorrupt(f"{folder}: attempt {attempt} opens with {first.kind!r} instead of its cuts")
    return first


def _parse(folder: Path, attempt: int, frame: Frame) -> Any:
    try:
        return parse_record(frame.payload)
    except ValidationError as error:
        raise JournalCorrupt(
            f"{folder}: attempt {attempt}, the record before byte {frame.end_bytes} is none of this version's: {error}"
        ) from error
