"""Whether something hides behind a bad frame of a journal: what is read for people stops there without a word.

A look, not a proof: bytes that another node wrote may come late and out of order for `visibility_s`. `miles verify` proves.
"""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.paths import RunPaths
from miles_core.store.fs import FileSystem
from miles_core.store.journal import decode_frame, frame_follows, list_segments, segment_name


def bad_frames(paths: RunPaths, writers: Iterable[str]) -> list[str]:
    """Where in the journals of these writers good frames lie behind a bad one. Raises OSError."""
    fs, found = FileSystem(), []
    for writer in writers:
        folder = paths.journal(writer)
        for attempt, segments in list_segments(fs, folder).items():
            for segment in segments:
                path = folder / segment_name(attempt, segment)
                position = _first_bad(fs.read(path))
                if position is not None:
                    found.append(f"{paths.relative(path)}: a bad frame at byte {position} hides what follows it")
    return found


def _first_bad(data: bytes) -> int | None:
    position = 0
    while (decoded := decode_frame(data, position)) is not None:
        position = decoded[1]
    return position if position < len(data) and frame_follows(data, position) else None
