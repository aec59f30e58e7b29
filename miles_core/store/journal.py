"""Journal: one writer appends framed records, anyone tails it (I2).

A frame is one line, readable with `cat`:  <length, 8 hex> <xxh3-64, 16 hex> <payload>\\n   with a JSON payload.

A writer attempt owns segments `a<attempt>-s<number>.journal`; each opens with a header frame. The attempt's *stream* is the
concatenation of all frames but the headers; positions are bytes of that stream. A new segment is opened only after a failed
write: its header says at which stream position it starts, and it repeats what was not yet synced, byte for byte. So a
torn tail never has good frames behind it in one file, and a reader that saw the unsynced frames loses nothing.

A reader opens, reads and closes at each poll. A short, zero-filled or unframed tail means "not yet"; a bad frame with good
frames behind it, still there after `visibility_s`, is JournalCorrupt.
"""

from __future__ import annotations

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

MAX_PAYLOAD_BYTES = 64 << 20
_PREFIX_BYTES = 8 + 1 + 16 + 1
_SEGMENT = re.compile(r"a(\d{4,})-s(\d{3,})\.journal")
_READ_BYTES = 8 << 20


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
    starts = re.compile(rb"(?<![0-9a-f])[0-9a-f]{8} [0-9a-f]{16} ")
    return any(decode_frame(data, match.start()) for match in starts.finditer(data, position + 1))


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
    flush (disk full, filesystem error) raises OSError and keeps the records: the next flush writes them to a new segment.
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
    ) -> None:
        self._fs, self._folder, self._clock, self._sync_s = fs, folder, clock, sync_s
        self._identity = {"run_id": run_id, "writer": writer, "attempt": attempt, "token": token}
        self._attempt = attempt
        self._before_write = before_write
        self._pending: list[bytes] = []
        self._state = xxhash.xxh3_128()
        self._segment = -1
        self._segment_is_open = False
        self.bytes = 0
        """Stream position behind the last appended record."""
        self.synced_bytes = 0
        """Stream position behind the last synced record."""
        self._last_sync = clock()
        folder.mkdir(parents=True, exist_ok=True)
        self.flush()

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
        """Flushes if something waits and the last sync is at least sync_s ago."""
        if self._pending and self._clock() - self._last_sync >= self._sync_s:
            self.flush()

    def flush(self) -> None:
        """Writes and syncs all pending records. Raises OSError; then nothing is lost and it may be called again."""
        self._before_write()
        if not self._segment_is_open:
            self._segment += 1
        path = self._folder / segment_name(self._attempt, self._segment)
        data = b"".join(self._pending)
        if not self._segment_is_open:
            header = Header(**self._identity, segment=self._segment, start_bytes=self.synced_bytes)
            data = encode_frame(header.model_dump_json().encode()) + data
        if not data:
            return
        was_open, self._segment_is_open = self._segment_is_open, False
        self._fs.append(path, data)
        self._fs.sync(path)
        if not was_open:
            self._fs.sync(self._folder)
        self._segment_is_open = True
        self._pending.clear()
        self.synced_bytes = self.bytes
        self._last_sync = self._clock()


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
        self._bad_since: float | None = None

    @property
    def hash(self) -> str:
        """xxh3-128 of the stream up to `bytes`."""
        return self._state.hexdigest()

    def read(self, until_bytes: int | None = None) -> list[Frame]:
        """New whole frames, none that ends beyond `until_bytes`. Raises JournalCorrupt, OSError (ESTALE: try again)."""
        frames = self._read_segment(until_bytes)
        if not frames and self._listing_is_due():
            while self._enter_next_segment():
                frames = self._read_segment(until_bytes)
                if frames:
                    break
        return frames

    def _listing_is_due(self) -> bool:
        now = self._clock()
        if self._at is None or self._listed_at is None or now - self._listed_at >= max(self._visibility_s, 0.2):
            self._listed_at = now
            return True
        return self._bad_since is not None

    def _enter_next_segment(self) -> bool:
        """Moves to the next segment whose header is whole and that does not start beyond what was read."""
        current = -1 if self._at is None else self._at.segment
        for segment in list_segments(self._fs, self._folder).get(self.attempt, []):
            if segment > current and self._enter(segment):
                return True
        return False

    def _enter(self, segment: int) -> bool:
        decoded = decode_frame(self._fs.read(self._folder / segment_name(self.attempt, segment), 0, 1 << 16))
        if decoded is None:
            return False
        header = Header.model_validate_json(decoded[0])
        if header.attempt != self.attempt or header.segment != segment or header.start_bytes > self.bytes:
            return False
        if self.header is None:
            self.header = header
        self._at = _Position(segment, header.start_bytes, decoded[1])
        self._bad_since = None
        return True

    def _read_segment(self, until_bytes: int | None) -> list[Frame]:
        if self._at is None:
            return []
        path = self._folder / segment_name(self.attempt, self._at.segment)
        offset = self._at.header_bytes + self.bytes - self._at.start_bytes
        data = self._fs.read(path, offset, _READ_BYTES)
        frames: list[Frame] = []
        position = 0
        while (decoded := decode_frame(data, position)) is not None:
            payload, following = decoded
            end = self.bytes + following - position
            if until_bytes is not None and end > until_bytes:
                return frames
            self._state.update(data[position:following])
            self.bytes = end
            frames.append(Frame(end, payload))
            position = following
        self._watch_bad_tail(path, data, position, offset + position)
        if not frames and len(data) == _READ_BYTES:
            return self._read_large(path, offset, until_bytes)
        return frames

    def _read_large(self, path: Path, offset: int, until_bytes: int | None) -> list[Frame]:
        """One frame that is longer than a normal read."""
        decoded = decode_frame(self._fs.read(path, offset, MAX_PAYLOAD_BYTES + 64))
        if decoded is None or (until_bytes is not None and self.bytes + decoded[1] > until_bytes):
            return []
        self._state.update(encode_frame(decoded[0]))
        self.bytes += decoded[1]
        return [Frame(self.bytes, decoded[0])]

    def _watch_bad_tail(self, path: Path, data: bytes, position: int, offset: int) -> None:
        if position == len(data) or not frame_follows(data, position):
            self._bad_since = None
            return
        now = self._clock()
        if self._bad_since is None:
            self._bad_since = now
        elif now - self._bad_since > self._visibility_s:
            raise JournalCorrupt(
                f"{path}: a bad frame at byte {offset} with good frames behind it; the file was changed or the disk is "
                f"faulty. `miles verify` shows what is affected"
            )
