"""verify's own reading of journals: segments to streams, streams to records, cuts and completion records against both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from miles_core.paths import RunPaths
from miles_core.records import Cut, Cuts, Done, parse_record

_SEGMENT = re.compile(r"a(\d{4,})-s(\d{3,})\.journal")
_LEASE = re.compile(r"([a-z_]+-\d+)\.a(\d+)")
_PREFIX = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{16}) ")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    kind: str
    """A word to search for, for example `shard_digest`."""
    where: str
    """Path below the run directory, or the id of what is concerned."""
    detail: str


@dataclass
class Stream:
    """One attempt's stream, read whole."""

    writer: str
    attempt: int
    where: str
    data: bytes = b""
    records: list[tuple[int, Any]] = field(default_factory=list)
    """(stream position behind it, record)."""
    torn: bool = False
    """Bytes behind the last whole frame."""
    accepted_bytes: int = -1
    """Set by the cut; -1 = all of it."""

    @property
    def accepted(self) -> Iterator[Any]:
        """Records that count."""
        return (record for end, record in self.records if self.accepted_bytes < 0 or end <= self.accepted_bytes)


class Files:
    """A run directory's journals, leases and completion records, with every fault found on the way."""

    def __init__(self, paths: RunPaths, run_id: str) -> None:
        self.paths, self.run_id = paths, run_id
        self.faults: list[Fault] = []
        self.leases = self._read_leases()
        self.done: dict[str, Done] = {}
        self.streams: dict[str, dict[int, Stream]] = {}

    def fault(self, kind: str, where: str | Path, detail: str) -> None:
        """Notes a fault."""
        name = self.paths.relative(where) if isinstance(where, Path) else where
        self.faults.append(Fault(kind, name, detail))

    def read_writer(self, writer: str) -> dict[int, Stream]:
        """All attempts of one writer's journal, with the checks that need no other file."""
        folder = self.paths.journal(writer)
        streams = {attempt: self._stream(folder, writer, attempt, names) for attempt, names in _segments(folder).items()}
        self.streams[writer] = streams
        self._read_done(writer, streams)
        for attempt in streams:
            if attempt not in self.leases.get(writer, {}):
                self.fault("lease", folder, f"{writer} attempt {attempt} wrote a journal but has no lease")
        return streams

    def apply_own_cuts(self, writer: str) -> None:
        """Cuts of a self-cutting writer: those that its newest attempt's first record states."""
        streams = self.streams[writer]
        newest = next((streams[a] for a in sorted(streams, reverse=True) if streams[a].records), None)
        if newest is None:
            return
        first = newest.records[0][1]
        if not isinstance(first, Cuts):
            self.fault("cuts", newest.where, f"attempt {newest.attempt} opens with {first.kind!r} instead of its cuts")
            return
        for cut in first.cuts:
            self.apply_cut(writer, cut)
        for attempt, stream in streams.items():
            if attempt < newest.attempt and attempt not in {cut.attempt for cut in first.cuts}:
                self.fault("cuts", newest.where, f"attempt {newest.attempt} does not cut attempt {attempt}")
                stream.accepted_bytes = 0

    def apply_cut(self, writer: str, cut: Cut) -> None:
        """Checks one cut against the bytes and applies it."""
        stream = self.streams.get(writer, {}).get(cut.attempt)
        data = b"" if stream is None else stream.data
        where = str(self.paths.relative(self.paths.journal(writer)))
        if len(data) < cut.bytes:
            self.fault(
                "journal_short",
                where,
                f"{writer} attempt {cut.attempt} has {len(data)} bytes, cut at {cut.bytes}: records are gone",
            )
        elif xxhash.xxh3_128_hexdigest(data[: cut.bytes]) != cut.hash:
            self.fault(
                "journal_changed", where, f"{writer} attempt {cut.attempt}: bytes up to {cut.bytes} differ from the cut's hash"
            )
        if stream is not None:
            stream.accepted_bytes = cut.bytes

    def _read_leases(self) -> dict[str, dict[int, dict[str, Any]]]:
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for path in sorted(self.paths.leases.iterdir()) if self.paths.leases.is_dir() else []:
            match = _LEASE.fullmatch(path.name)
            if match is None:
                continue
            try:
                lease = json.loads(path.read_bytes())
            except json.JSONDecodeError as error:
                self.fault("lease", path, f"not readable: {error}")
                continue
            if not isinstance(lease, dict):
                self.fault("lease", path, f"not readable: {lease!r}")
                continue
            if lease.get("run_id") != self.run_id:
                self.fault("lease", path, f"belongs to run {lease.get('run_id')}")
            found.setdefault(match[1], {})[int(match[2])] = lease
        return found

    def _read_done(self, writer: str, streams: dict[int, Stream]) -> None:
        path = self.paths.done(writer)
        if not path.exists():
            return
        try:
            done = Done.model_validate_json(path.read_bytes())
        except ValidationError as error:
            self.fault("completion_record", path, f"not readable: {error}")
            return
        self.done[writer] = done
        stream = streams.get(done.attempt)
        data = b"" if stream is None else stream.data
        if len(data) != done.journal_bytes:
            self.fault(
                "journal_short" if len(data) < done.journal_bytes else "journal_long", self.paths.journal(writer),
                f"{writer} attempt {done.attempt} has {len(data)} whole bytes, its completion record says {done.journal_bytes}",
            )  # fmt: skip
        elif xxhash.xxh3_128_hexdigest(data) != done.journal_hash:
            self.fault(
                "journal_changed", self.paths.journal(writer), f"{writer} attempt {done.attempt} differs from its final hash"
            )

    def _stream(self, folder: Path, writer: str, attempt: int, names: list[str]) -> Stream:
        stream = Stream(writer, attempt, self.paths.relative(folder))
        for name in names:
            self._add_segment(stream, folder / name)
        end = 0
        for payload, end in _frames(stream.data):
            self._add_record(stream, payload, end)
        return stream

    def _add_segment(self, stream: Stream, path: Path) -> None:
        raw = path.read_bytes()
        whole = _whole_bytes(raw)
        if any(True for _ in _frames(raw, _next_frame(raw, whole))):
            self.fault("journal_frame", path, f"a bad frame at byte {whole} with good frames behind it")
        stream.torn = whole < len(raw)
        first = next(_frames(raw), None)
        if first is None:
            return
        header = json.loads(first[0])
        lease = self.leases.get(stream.writer, {}).get(stream.attempt, {})
        if header.get("kind") != "header" or header.get("run_id") != self.run_id or header.get("attempt") != stream.attempt:
            self.fault("journal_header", path, f"not a segment of run {self.run_id}, attempt {stream.attempt}: {header}")
            return
        if header.get("writer") != stream.writer or (lease and header.get("token") != lease.get("token")):
            self.fault("journal_header", path, f"written by {header.get('writer')}, not by the holder of the lease")
        start, body = header["start_bytes"], raw[first[1] : whole]
        overlap = stream.data[start : start + len(body)]
        if start > len(stream.data) or body[: len(overlap)] != overlap:
            self.fault("journal_segment", path, f"starts at stream byte {start} but does not continue what was written before")
            return
        stream.data = stream.data[: start + len(body)] if len(overlap) == len(body) else stream.data[:start] + body

    def _add_record(self, stream: Stream, payload: bytes, end: int) -> None:
        try:
            stream.records.append((end, parse_record(payload)))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            self.fault("record", stream.where, f"attempt {stream.attempt}, record ending at byte {end}: {key}: {first['msg']}")


def _segments(folder: Path) -> dict[int, list[str]]:
    found: dict[int, list[tuple[int, str]]] = {}
    for path in folder.iterdir() if folder.is_dir() else []:
        match = _SEGMENT.fullmatch(path.name)
        if match is not None:
            found.setdefault(int(match[1]), []).append((int(match[2]), path.name))
    return {attempt: [name for _, name in sorted(found[attempt])] for attempt in sorted(found)}


def _frames(data: bytes, position: int = 0) -> Iterator[tuple[bytes, int]]:
    """(payload, position behind it) of the unbroken run of good frames from `position` on."""
    while (match := _PREFIX.match(data, position)) is not None:
        start, size = match.end(), int(match[1], 16)
        payload, end = data[start : start + size], start + size + 1
        if data[end - 1 : end] != b"\n" or xxhash.xxh3_64_intdigest(payload) != int(match[2], 16):
            return
        yield payload, end
        position = end


def _whole_bytes(data: bytes) -> int:
    """Length of the unbroken run of good frames at the beginning."""
    return max((end for _, end in _frames(data)), default=0)


def _next_frame(data: bytes, position: int) -> int:
    """Where a good frame begins behind a bad place; the end of `data` if there is none."""
    for match in _PREFIX.finditer(data, position + 1):
        if next(_frames(data, match.start()), None) is not None:
            return match.start()
    return len(data)
