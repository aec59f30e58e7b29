"""Journal: one writer appends framed records, anyone tails it (I2).

A frame is one line, readable with `cat`:  <length, 8 hex> <xxh3-64, 16 hex> <payload>\\n   with a JSON payload.

A writer attempt owns segments `a<attempt>-s<number>.journal`; each opens with a header frame. The attempt's *stream* is the
concatenation of all frames but the headers; positions are bytes of that stream. A new segment is opened only after a failed
write: its header says at which stream position it starts, and it repeats what was not yet synced, byte for byte. So a
torn tail never has good frames behind it in one file, and a reader that saw the unsynced frames loses nothing.

A reader opens, reads and closes at each poll. A short, zero-filled or unframed tail means "not yet"; a bad frame with good
frames behind it, still there after `visibility_s`, is JournalCorrupt.

Writer and reader are used by one thread; only `append` may come from another one.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

from miles_core.errors import JournalCorrupt
from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem

log = logging.getLogger("miles")

MAX_PAYLOAD_BYTES = 64 << 20
_PREFIX_BYTES = 8 + 1 + 16 + 1
_SEGMENT = re.compile(r"a(\d{4,})-s(\d{3,})\.journal")
_FRAME_START = re.compile(rb"(?<![0-9a-f])[0-9a-f]{8} [0-9a-f]{16} ")
_READ_BYTES = 8 << 20
_HEADER_READ_BYTES = 1 << 16
_LIST_AGAIN_S = 0.2
_RETRY_S, _RETRY_MAX_S = 0.1, 60.0


class Header(Closed):
    """First frame of a segment."""

    kind: Literal["header"] = "header"
    schema_version: int = 1
    run_id: str
    writer: str
    attempt: int
    token: str
    segment: int
    start_bytes: int
    """Stream position at which this segment starts."""


class Frame(NamedTuple):
    """One record's bytes and the stream position behind it."""

    end_bytes: int
    payload: bytes


def encode_frame(payload: bytes) -> bytes:
    """One framed line. ValueError for a payload that holds a newline or is over 64 MiB."""
    if b"\n" in payload or len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a journal payload is one line of at most {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}")
    return b"%08x %016x %s\n" % (len(payload), xxhash.xxh3_64_intdigest(payload), payload)


def decode_frame(data: bytes, position: int = 0) -> tuple[bytes, int] | None:
    """Payload and next position of the frame at `position`, or None if no whole, right frame is there."""
    body = position + _PREFIX_BYTES
    prefix = data[position:body]
    if len(prefix) < _PREFIX_BYTES or prefix[8:9] != b" " or prefix[25:26] != b" ":
        return None
    try:
        length, checksum = int(prefix[:8], 16), int(prefix[9:25], 16)
    except ValueError:
        return None
    payload = data[body : body + length]
    if len(payload) < length or data[body + length : body + length + 1] != b"\n":
        return None
    if xxhash.xxh3_64_intdigest(payload) != checksum:
        return None
    return payload, body + length + 1


def frame_follows(data: bytes, position: int) -> bool:
    """True if a good frame starts on any later line (or behind a hole of zeros) of `data`."""
    return any(decode_frame(data, match.start()) for match in _FRAME_START.finditer(data, position + 1))


def segment_name(attempt: int, segment: int) -> str:
    """File name of a segment."""
    return f"a{attempt:04d}-s{segment:03d}.journal"


def list_segments(fs: FileSystem, folder: Path) -> dict[int, list[int]]:
    """Segment numbers by attempt, both ascending; empty if the folder is not there yet."""
    try:
        names = fs.listdir(folder)
    except FileNotFoundError:
        return {}
    found: dict[int, list[int]] = {}
    for match in filter(None, map(_SEGMENT.fullmatch, names)):
        found.setdefault(int(match[1]), []).append(int(match[2]))
    return {attempt: sorted(found[attempt]) for attempt in sorted(found)}


class JournalWriter:
    """Appends records of one attempt. Records are grouped: `append` buffers, `flush` writes and syncs.

    `before_write` is asked before every write and raises LeaseLost when this attempt must not publish any more. A failed
    flush (disk full, filesystem error, `before_write`) keeps the records: the next flush writes them to a new segment. So
    does the header that the constructor could not write; the constructor itself raises no OSError.
    """

    def __init__(
        self,
        fs: FileSystem,
        folder: Path,
        *,
        run_id: str,
        writer: str,
        attempt: int,
        token: str,
        sync_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        before_write: Callable[[], None] = lambda: None,
        crash_point: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`crash_point` is passed around each write of bytes (crash tests)."""
        self._fs, self._folder, self._clock, self._sync_s = fs, folder, clock, sync_s
        self._header = Header(run_id=run_id, writer=writer, attempt=attempt, token=token, segment=0, start_bytes=0)
        self._attempt = attempt
        self._before_write, self._crash_point = before_write, crash_point
        self._pending: list[bytes] = []
        self._state = xxhash.xxh3_128()
        self._segment = -1
        self._segment_is_open = False
        self._failed: OSError | None = None
        self._failures = 0
        self.bytes = 0
        """Stream position behind the last appended record."""
        self.synced_bytes = 0
        """Stream position behind the last synced record."""
        self._last_try = clock()
        try:
            self.flush()
        except OSError as error:
            log.warning("%s: attempt %d not opened yet, the next flush tries again: %s", folder, attempt, error)

    @property
    def hash(self) -> str:
        """xxh3-128 of the stream up to `bytes`."""
        return self._state.hexdigest()

    def append(self, record: Closed) -> int:
        """Adds a record to the group; returns the stream position behind it. Nothing is written before flush."""
        frame = encode_frame(record.model_dump_json(exclude_defaults=False).encode())
        self._pending.append(frame)
        self._state.update(frame)
        self.bytes += len(frame)
        return self.bytes

    def write(self, record: Closed) -> int:
        """append and flush."""
        position = self.append(record)
        self.flush()
        return position

    def flush_when_due(self) -> None:
        """Flushes if something waits and the last flush is at least sync_s ago.

        Raises OSError as `flush` does. After a failure it tries less and less often and in between raises what failed last:
        every try opens a segment, and a full disk must not fill the folder with empty ones.
        """
        waited_s = self._clock() - self._last_try
        if self._failed is not None and waited_s < min(_RETRY_MAX_S, _RETRY_S * 2.0**self._failures):
            raise OSError(self._failed.errno, self._failed.strerror, self._failed.filename)
        if (self._pending or not self._segment_is_open) and waited_s >= self._sync_s:
            self.flush()

    def flush(self) -> None:
        """Writes and syncs all pending records. Raises OSError; then nothing is lost and it may be called again."""
        self._last_try = self._clock()
        self._before_write()
        try:
            self._flush()
        except OSError as error:
            self._failed, self._failures = error, self._failures + 1
            raise
        self._failed, self._failures = None, 0

    def _flush(self) -> None:
        count = len(self._pending)
        body = b"".join(self._pending[:count])
        if not body and self._segment_is_open:
            return
        if self._segment_is_open:
            self._append_to_segment(body)
        else:
            self._append_to_new_segment(body)
        del self._pending[:count]
        self.synced_bytes += len(body)

    def _append_to_segment(self, body: bytes) -> None:
        path = self._folder / segment_name(self._attempt, self._segment)
        self._segment_is_open = False
        self._crash_point("before_flush")
        self._fs.append(path, body)
        self._fs.sync(path)
        self._crash_point("after_flush")
        self._segment_is_open = True

    def _append_to_new_segment(self, body: bytes) -> None:
        self._fs.mkdir(self._folder)
        self._segment += 1
        header = self._header.model_copy(update={"segment": self._segment, "start_bytes": self.synced_bytes})
        self._append_to_segment(encode_frame(header.model_dump_json().encode()) + body)
        self._segment_is_open = False
        self._fs.sync(self._folder)
        self._segment_is_open = True


@dataclass
class _Position:
    segment: int
    start_bytes: int
    """Stream position of the segment's first frame."""
    header_bytes: int


class AttemptTail:
    """Reads the stream of one attempt from its beginning on, over all its segments."""

    def __init__(
        self,
        fs: FileSystem,
        folder: Path,
        attempt: int,
        *,
        visibility_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fs, self._folder, self._clock, self._visibility_s = fs, folder, clock, visibility_s
        self.attempt = attempt
        self.header: Header | None = None
        """Header of the first segment once read."""
        self.bytes = 0
        """Stream position behind the last frame returned."""
        self._state = xxhash.xxh3_128()
        self._at: _Position | None = None
        self._listed_at: float | None = None
        self._suspects: dict[int, tuple[int, float]] = {}

    @property
    def hash(self) -> str:
        """xxh3-128 of the stream up to `bytes`."""
        return self._state.hexdigest()

    @property
    def is_suspect(self) -> bool:
        """The last read found a bad frame with good frames behind it: bytes that come late, or damage."""
        return bool(self._suspects)

    def read(self, until_bytes: int | None = None, *, list_now: bool = False) -> list[Frame]:
        """New whole frames, none beyond `until_bytes`, some MiB at a time; [] at the end of what is visible.

        A later segment is looked for at times only, or with `list_now` at each call: then [] means the end of all segments.
        Raises JournalCorrupt; OSError (ESTALE: try again), and then nothing was read.
        """
        if until_bytes is not None and self.bytes >= until_bytes:
            return []
        frames = self._read_segment(until_bytes)
        if not frames and (self._listing_is_due() or list_now):
            while not frames and self._enter_next_segment():
                frames = self._read_segment(until_bytes)
        return frames

    def _listing_is_due(self) -> bool:
        now = self._clock()
        again_s = max(self._visibility_s, _LIST_AGAIN_S)
        if self._at is not None and self._listed_at is not None and now - self._listed_at < again_s:
            return False
        self._listed_at = now
        return True

    def _enter_next_segment(self) -> bool:
        """Moves to the next segment whose header is whole and that does not start beyond what was read."""
        current = -1 if self._at is None else self._at.segment
        segments = list_segments(self._fs, self._folder).get(self.attempt, [])
        return any(self._enter(segment) for segment in segments if segment > current)

    def _enter(self, segment: int) -> bool:
        begun = self._clock()
        try:
            data = self._fs.read(self._folder / segment_name(self.attempt, segment), 0, _HEADER_READ_BYTES)
        except FileNotFoundError:  # listed, but a cached "no such file" still hides it
            return False
        self._watch_bad_frame(segment, data, 0, begun)
        decoded = decode_frame(data)
        if decoded is None:
            return False
        header = Header.model_validate_json(decoded[0])
        self._check_header(segment, header)
        if header.start_bytes > self.bytes:  # what lies before it is not all visible yet
            return False
        self._at = _Position(segment, header.start_bytes, decoded[1])
        self._suspects.clear()
        return True

    def _check_header(self, segment: int, header: Header) -> None:
        if self.header is None:
            self.header = header
        expected = self.header.model_copy(
            update={"attempt": self.attempt, "segment": segment, "start_bytes": header.start_bytes}
        )
        if header != expected:
            raise JournalCorrupt(
                f"{self._folder / segment_name(self.attempt, segment)} opens with {header!r}, expected {expected!r}: a second "
                f"process wrote as this attempt, or the file was moved here"
            )

    def _read_segment(self, until_bytes: int | None) -> list[Frame]:
        if self._at is None:
            return []
        path = self._folder / segment_name(self.attempt, self._at.segment)
        offset = self._at.header_bytes + self.bytes - self._at.start_bytes
        begun = self._clock()
        data = self._fs.read(path, offset, _READ_BYTES)
        if len(data) == _READ_BYTES and decode_frame(data) is None:  # one frame longer than a normal read
            data = self._fs.read(path, offset, MAX_PAYLOAD_BYTES + _READ_BYTES)
        frames: list[Frame] = []
        position = 0
        while self.bytes != until_bytes and (decoded := decode_frame(data, position)) is not None:
            payload, following = decoded
            end = self.bytes + following - position
            if until_bytes is not None and end > until_bytes:
                raise JournalCorrupt(
                    f"{path}: the stream is cut at byte {until_bytes}, but a frame goes from {self.bytes} to {end}: these are "
                    f"not the bytes that were cut. `miles verify` shows what is affected"
                )
            self._state.update(data[position:following])
            self.bytes = end
            frames.append(Frame(end, payload))
            position = following
        self._watch_bad_frame(self._at.segment, data, position, begun)
        return frames

    def _watch_bad_frame(self, segment: int, data: bytes, position: int, begun: float) -> None:
        """Bytes come late by visibility_s at most: a bad frame that a read begun later than that still finds is damage."""
        if position == len(data) or decode_frame(data, position) is not None or not frame_follows(data, position):
            self._suspects.pop(segment, None)
            return
        found = self._suspects.get(segment)
        if found is None or found[0] != self.bytes:
            self._suspects[segment] = (self.bytes, self._clock())
        elif begun - found[1] > self._visibility_s:
            raise JournalCorrupt(
                f"{self._folder / segment_name(self.attempt, segment)}: a bad frame at byte {self.bytes} of the stream with "
                f"good frames behind it; the file was changed or the disk is faulty. `miles verify` shows what is affected"
            )
