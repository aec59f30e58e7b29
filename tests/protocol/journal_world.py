"""One journal, its writer and its readers on a filesystem that fails, for tests of store/journal.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem
from miles_core.store.journal import (
    AttemptTail,
    Frame,
    JournalWriter,
    segment_name,
)
from tests.protocol.faulty_fs import FakeClock, FaultyFS, Server

FOLDER = Path("/run/journal")
VISIBILITY_S = 10.0


class Note(Closed):
    """Any record."""

    number: int
    text: str = ""


def payload(number: int, text: str = "") -> bytes:
    """A Note as it stands in the journal."""
    return Note(number=number, text=text).model_dump_json().encode()


def writer(fs: FileSystem, folder: Path = FOLDER, **options: Any) -> JournalWriter:
    """Attempt 1 of one writer."""
    return JournalWriter(fs, folder, run_id="r", writer="learner-0", attempt=1, token="t", **options)


def tail(fs: FaultyFS) -> AttemptTail:
    """A new reader of that attempt."""
    return AttemptTail(fs, FOLDER, 1, visibility_s=VISIBILITY_S, clock=fs.clock)


def read_all(reader: AttemptTail) -> list[bytes]:
    """Payloads up to the end of what is visible."""
    found: list[Frame] = []
    while frames := reader.read(list_now=True):
        found += frames
    return [frame.payload for frame in found]


def numbers(fs: FaultyFS) -> list[int]:
    """Numbers of all notes that a new reader on that node finds."""
    return [Note.model_validate_json(found).number for found in read_all(tail(fs))]


def nodes(**options: Any) -> tuple[Server, FaultyFS, FaultyFS]:
    """A server, the writer's node and another node."""
    server = Server(FakeClock(), VISIBILITY_S, **options)
    return server, server.node("writer"), server.node("reader")


def replace_bytes(server: Server, segment: int, content: bytes) -> None:
    """Somebody changes a segment, visible at once."""
    server.clock.advance(VISIBILITY_S)
    file = server.current(FOLDER / segment_name(1, segment))
    assert file is not None
    server.content(file, "")
    file.settled[:] = content
    file.size = len(content)


def bytes_of(server: Server, segment: int) -> bytes:
    """A segment's bytes on the server."""
    file = server.current(FOLDER / segment_name(1, segment))
    assert file is not None
    return server.content(file, "writer")
