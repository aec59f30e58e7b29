"""Ways to falsify a run directory, each as somebody who also repairs the checksums he knows of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.store.journal import decode_frame, encode_frame

Record = dict[str, Any]


def journal_file(root: Path, name: str) -> Path:
    """First segment of attempt 1 in a journal folder."""
    return root / name / "a0001-s000.journal"


def read_records(path: Path) -> list[Record]:
    """All records of a segment, header included."""
    data, position, records = path.read_bytes(), 0, []
    while (decoded := decode_frame(data, position)) is not None:
        payload, position = decoded
        records.append(json.loads(payload))
    return records


def write_records(path: Path, records: list[Record]) -> None:
    """Writes them back with right checksums."""
    path.write_bytes(b"".join(encode_frame(json.dumps(record, separators=(",", ":")).encode()) for record in records))


def edit_records(path: Path, edit: Callable[[list[Record]], None]) -> None:
    """Changes a segment's records in place."""
    records = read_records(path)
    edit(records)
    write_records(path, records)


def of_kind(records: list[Record], kind: str) -> list[Record]:
    """Records of one kind."""
    return [record for record in records if record["kind"] == kind]


def flip_byte(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
