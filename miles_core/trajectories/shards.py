"""Trajectory shards: Arrow IPC files, one row a trajectory, immutable once their journal record announces them.

Invariants: every row that is written or read passes `check_trajectory`; a shard is named by (producer, attempt, number) and
no two share a name; what was added stays in the writer until a shard that holds it is on disk, so a failed seal (disk full)
loses nothing and may be called again. Failure: a torn or changed file is a DigestMismatch naming the path, a file of another
schema version a RunDirectoryError naming both versions. Files are read whole: no mmap, no descriptor held.
"""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import ShardEntry, ShardSealed, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import Durability, digest_bytes, publish_bytes
from miles_core.trajectories.schema import FailureKind, Segment, Status, Trajectory, Turn, VersionRun

SCHEMA_VERSION = 2
_VERSION_KEY = b"miles_trajectory_schema"
_VERSION_RUN = pa.struct([("start", pa.int32()), ("step", pa.int32()), ("attempt", pa.int32())])
_TURN = pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())])
_SEGMENT = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("parent", pa.int32())])
_TEXTS = ("trajectory_id", "sample_id", "group_id", "order_id", "producer", "status", "failure_kind", "source")
_NUMBERS = {
    "producer_attempt": pa.int32(),
    "task_seed": pa.int64(),
    "temperature": pa.float64(),
    "created_s": pa.float64(),
    "started_s": pa.float64(),
    "finished_s": pa.float64(),
}
_PER_TOKEN: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
}
_EXPERT_DTYPES = ("uint8", "uint16")

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _TEXTS),
        *_NUMBERS.items(),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in _PER_TOKEN.items()),
        ("versions", pa.list_(_VERSION_RUN)),
        ("turns", pa.list_(_TURN)),
        ("segments", pa.list_(_SEGMENT)),
        ("facts", pa.string()),
        ("experts", pa.binary()),
        ("experts_shape", pa.list_(pa.int32())),
        ("experts_dtype", pa.string()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""The one schema. `facts` is JSON text; `experts` holds the raw bytes of an array of that shape and dtype, or null."""


def check_trajectory(row: Trajectory) -> None:
    """Raises ValueError, naming the trajectory and the field, unless the row is what schema.py says."""
    for problem in _problems(row):
        raise ValueError(f"trajectory {row.trajectory_id}: {problem}")


def _problems(row: Trajectory) -> Iterable[str]:
    """What is wrong with a row; later checks may rely on the earlier ones, so only the first counts."""
    num_tokens = len(row.tokens)
    for name, dtype in _PER_TOKEN.items():
        values = getattr(row, name)
        if values.shape != (num_tokens,) or values.dtype != dtype:
            yield f"{name} is {values.dtype}{list(values.shape)}, expected {dtype}[{num_tokens}]"
    if row.status not in get_args(Status) or row.failure_kind not in get_args(FailureKind):
        yield f"status {row.status!r} with failure_kind {row.failure_kind!r} is not in the closed lists"
    if (row.status == "failed") != (row.failure_kind in ("infrastructure", "environment")) and row.failure_kind != "model":
        yield f"status {row.status!r} does not go with failure_kind {row.failure_kind!r}"
    if not -(2**63) <= row.task_seed < 2**63:
        yield f"task_seed {row.task_seed} does not fit into 64 bits"
    if row.loss_mask.max(initial=0) > 1:
        yield f"loss_mask holds {row.loss_mask.max()}, only 0 and 1 are allowed"
    sampled = np.flatnonzero(row.loss_mask)
    yield from _logprob_problems(row)
    yield from _span_problems(row, sampled)
    yield from _version_problems(row, sampled)
    yield from _segment_problems(row)
    if row.experts is not None and (row.experts.dtype.name not in _EXPERT_DTYPES or row.experts.ndim != 3):
        yield f"experts is {row.experts.dtype}{list(row.experts.shape)}, expected uint8 or uint16 [T-1, layers, k]"
    if row.experts is not None and row.experts.shape[0] != max(num_tokens - 1, 0):
        yield f"experts has {row.experts.shape[0]} positions for {num_tokens} tokens, expected one less than tokens"


def _logprob_problems(row: Trajectory) -> Iterable[str]:
    finite = np.isfinite(row.logprobs)
    if not finite.all():
        at = int(np.flatnonzero(~finite)[0])
        yield f"logprob {row.logprobs[at]} at token {at} is not finite"
    if np.any(row.logprobs[row.loss_mask == 0] != 0):
        yield "logprobs differ from 0 where nothing was sampled"


def _span_problems(row: Trajectory, sampled: Any) -> Iterable[str]:
    """Turns ascend without overlap, and only assistant turns hold sampled tokens."""
    allowed = np.zeros(len(row.tokens), dtype=bool)
    previous = 0
    for turn in row.turns:
        if not previous <= turn.start <= turn.end <= len(row.tokens):
            yield f"turn {tuple(turn)} overlaps its predecessor or leaves the {len(row.tokens)} tokens"
        previous = turn.end
        allowed[turn.start : turn.end] = turn.role == "assistant"
    if not allowed[sampled].all():
        yield f"token {int(sampled[~allowed[sampled]][0])} is in the loss mask but in no assistant turn"


def _version_problems(row: Trajectory, sampled: Any) -> Iterable[str]:
    """Runs ascend and cover every sampled token; nothing sampled, no runs."""
    starts = [run.start for run in row.versions]
    if any(second <= first for first, second in itertools.pairwise(starts)):
        yield f"version runs start at {starts}, which does not ascend"
    if starts and (min(starts) < 0 or max(starts) >= len(row.tokens)):
        yield f"version runs start at {starts}, outside the {len(row.tokens)} tokens"
    if len(sampled) and (not starts or sampled[0] < starts[0]):
        yield f"token {int(sampled[0])} was sampled but no version run covers it (runs start at {starts})"
    if starts and not len(sampled):
        yield f"version runs start at {starts} although no token was sampled"


def _segment_problems(row: Trajectory) -> Iterable[str]:
    """Segments lie one behind another, cover all tokens, follow what they go on from, and cut no turn and no record."""
    end = 0
    for index, segment in enumerate(row.segments):
        if segment.start != end or segment.end <= end or not -1 <= segment.parent < index:
            yield f"segment {index} is {tuple(segment)}, expected one that starts at {end} and goes on from an earlier one"
        end = segment.end
    if row.segments and end != len(row.tokens):
        yield f"its segments end at {end}, its {len(row.tokens)} tokens do not"
    inner = {segment.start for segment in row.segments} - {turn.start for turn in row.turns}
    if inner:
        yield f"a segment starts at {min(inner)}, within a turn"
    if row.segments and row.experts is not None:
        yield "a branching episode has no record of experts"


def encode_shard(rows: Sequence[Trajectory]) -> bytes:
    """The bytes of a shard file, compressed with zstd where pyarrow has it, else lz4."""
    codec = "zstd" if pa.Codec.is_available("zstd") else "lz4"
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec)) as file:
        file.write_batch(pa.record_batch([_column(field, rows) for field in SCHEMA], schema=SCHEMA))
    return sink.getvalue()


def _column(field: pa.Field, rows: Sequence[Trajectory]) -> pa.Array:
    name = field.name
    if name in _PER_TOKEN:
        return _token_column([getattr(row, name) for row in rows], _PER_TOKEN[name])
    cells: list[Any]
    if name in ("versions", "turns", "segments"):
        cells = [[item._asdict() for item in getattr(row, name)] for row in rows]
    elif name == "facts":
        cells = [json.dumps(row.facts, allow_nan=False) for row in rows]
    elif name.startswith("experts"):
        cells = [None if row.experts is None else _expert_cell(row.experts, name) for row in rows]
    else:
        cells = [getattr(row, name) for row in rows]
    return pa.array(cells, field.type)


def _token_column(arrays: list[Any], dtype: np.dtype[Any]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate([np.empty(0, dtype), *arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _expert_cell(experts: Any, column: str) -> Any:
    if column == "experts_shape":
        return list(experts.shape)
    return experts.dtype.name if column == "experts_dtype" else experts.astype(experts.dtype.newbyteorder("<")).tobytes()


def read_shard(path: Path, *, digest: str | None = None) -> list[Trajectory]:
    """All rows of a shard, in order. With `digest`, the bytes read are checked against it.

    Raises OSError (FileNotFoundError: not visible yet), DigestMismatch, RunDirectoryError.
    """
    batch = _read_batch(path, digest)
    return _rows(path, batch, range(batch.num_rows))


def read_rows(path: Path, rows: Sequence[int], *, digest: str | None = None) -> list[Trajectory]:
    """Some rows of a shard, in the order asked for. Raises as read_shard, and DigestMismatch for a row that is not there."""
    return _rows(path, _read_batch(path, digest), rows)


def decode_shard(data: bytes, path: Path) -> list[Trajectory]:
    """All rows of encode_shard's bytes; `path` names them in errors. Raises DigestMismatch, RunDirectoryError."""
    batch = _decode(path, data, None)
    return _rows(path, batch, range(batch.num_rows))


def _read_batch(path: Path, digest: str | None) -> pa.RecordBatch:
    return _decode(path, path.read_bytes(), digest)


def _decode(path: Path, data: bytes, digest: str | None) -> pa.RecordBatch:
    if digest is not None and digest_bytes(data) != digest:
        raise DigestMismatch(
            f"{path}: digest {digest_bytes(data)} of its {len(data)} bytes, announced {digest}; the file is torn, not yet "
            f"wholly visible, or was changed"
        )
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as file:
            _check_version(path, file.schema)
            batch = file.get_batch(0)
            batch.validate(full=True)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DigestMismatch(f"{path}: {len(data)} bytes that are no whole trajectory shard: {error}") from error
    return batch


def _check_version(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode(errors="replace")
    if found == str(SCHEMA_VERSION) and not schema.equals(SCHEMA):
        raise DigestMismatch(f"{path}: its columns are not those of trajectory schema {found}; the file was changed")
    if found != str(SCHEMA_VERSION):
        raise RunDirectoryError(
            f"{path} was written with trajectory schema {found}, this code reads schema {SCHEMA_VERSION}; "
            f"read it with the code snapshot of its own run"
        )


def _rows(path: Path, batch: pa.RecordBatch, indices: Sequence[int]) -> list[Trajectory]:
    found = []
    for index in indices:
        if not 0 <= index < batch.num_rows:
            raise DigestMismatch(f"{path}: row {index} was announced, but the shard has {batch.num_rows} rows")
        try:
            row = _row(batch, index)
            check_trajectory(row)
        except (ValueError, TypeError) as error:
            raise DigestMismatch(f"{path}: row {index} is not a valid trajectory: {error}") from error
        found.append(row)
    return found


def _row(batch: pa.RecordBatch, index: int) -> Trajectory:
    def cell(name: str) -> Any:
        return batch.column(name)[index]

    return Trajectory(
        **{name: cell(name).as_py() for name in (*_TEXTS, *_NUMBERS)},
        **{name: cell(name).values.to_numpy(zero_copy_only=False).copy() for name in _PER_TOKEN},
        versions=tuple(VersionRun(**run) for run in cell("versions").as_py()),
        turns=tuple(Turn(**turn) for turn in cell("turns").as_py()),
        segments=tuple(Segment(**segment) for segment in cell("segments").as_py()),
        facts=json.loads(cell("facts").as_py()),
        experts=_experts(cell),
    )


def _experts(cell: Callable[[str], Any]) -> Any:
    """The chosen experts, or None. ValueError for a dtype or shape that is not theirs."""
    data, shape, dtype = (cell(name).as_py() for name in ("experts", "experts_shape", "experts_dtype"))
    if data is None:
        return None
    if dtype not in _EXPERT_DTYPES:
        raise ValueError(f"experts of dtype {dtype!r}")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(shape)


class ShardWriter:
    """Collects finished trajectories of one attempt and seals them into shards, by rows or by age."""

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        writer: str,
        attempt: int,
        *,
        rows: int,
        age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fs, self._paths, self._writer, self._attempt = fs, paths, writer, attempt
        self._max_rows, self._age_s, self._clock = rows, age_s, clock
        self._waiting: list[tuple[float, Trajectory]] = []
        self.sealed = 0
        """Shards on disk so far; the number of the next one."""

    @property
    def num_waiting(self) -> int:
        """Rows that are in no shard yet."""
        return len(self._waiting)

    def add(self, row: Trajectory) -> None:
        """Takes a row; ValueError if it is not valid, so that a later seal can only fail in the filesystem."""
        check_trajectory(row)
        try:
            json.dumps(row.facts, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"trajectory {row.trajectory_id}: facts are not JSON: {error}") from error
        self._waiting.append((self._clock(), row))

    def due(self) -> bool:
        """True when enough rows wait, or the oldest has waited long enough."""
        if not self._waiting:
            return False
        return len(self._waiting) >= self._max_rows or self._clock() - self._waiting[0][0] >= self._age_s

    def seal(self) -> ShardSealed | None:
        """Writes the oldest waiting rows (at most `rows`) as one shard; None if none waits. OSError: they go on waiting."""
        rows = [row for _, row in self._waiting[: self._max_rows]]
        if not rows:
            return None
        path = self._paths.shard(self._writer, self._attempt, self.sealed)
        data = encode_shard(rows)
        publish_bytes(self._fs, path, data, Durability.RENAMED)
        del self._waiting[: len(rows)]
        self.sealed += 1
        return ShardSealed(
            path=self._paths.relative(path),
            size_bytes=len(data),
            digest=digest_bytes(data),
            rows=tuple(_entry(index, row) for index, row in enumerate(rows)),
        )


def _entry(index: int, row: Trajectory) -> ShardEntry:
    return ShardEntry(
        trajectory_id=row.trajectory_id,
        sample_id=row.sample_id,
        group_id=row.group_id,
        order_id=row.order_id,
        row=index,
        status=row.status,
        failure_kind=row.failure_kind,
        versions=tuple(dict.fromkeys(Version(run.step, run.attempt) for run in row.versions)),
        num_tokens=len(row.tokens),
        num_sampled_tokens=row.num_sampled,
    )
