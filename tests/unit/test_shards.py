"""Shards: every trajectory comes back bit for bit, nothing invalid is written, nothing torn is believed."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import check_file
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import SCHEMA, ShardWriter, check_trajectory, encode_shard, read_rows, read_shard

ARRAYS = ("tokens", "loss_mask", "logprobs", "experts")


def make(index: int = 0, **changes: Any) -> Trajectory:
    """Prompt of 3 tokens, 4 sampled by two versions, a tool result of 2, 2 sampled."""
    sampled = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1], np.uint8)
    row = Trajectory(
        trajectory_id=f"g1.o1/{index}@rollout-0.a1", sample_id=f"g1.o1/{index}", group_id="g1.o1", order_id="w1.o1",
        producer="rollout-0", producer_attempt=1, task_seed=7, tokens=np.arange(11, dtype=np.int32), loss_mask=sampled,
        logprobs=(-0.5 * sampled).astype(np.float32), versions=(VersionRun(3, 4, 1), VersionRun(5, 5, 1)),
        turns=(Turn("user", 0, 3), Turn("assistant", 3, 7), Turn("tool", 7, 9), Turn("assistant", 9, 11)),
        temperature=0.7, status="complete", facts={"final_answer": "é\n12", "exit": None},
        created_s=1.25, started_s=2.5, finished_s=3.75,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def same(first: Trajectory, second: Trajectory) -> bool:
    """Equal in every field, arrays in dtype and every bit."""
    for field in dataclasses.fields(Trajectory):
        one, two = getattr(first, field.name), getattr(second, field.name)
        if field.name not in ARRAYS or one is None or two is None:
            if one is not two and one != two:
                return False
        elif one.dtype != two.dtype or one.shape != two.shape or one.tobytes() != two.tobytes():
            return False
    return True


def write(path: Path, rows: list[Trajectory]) -> Path:
    path.write_bytes(encode_shard(rows))
    return path


class FullDisk(FileSystem):
    """Appends fail while `full`."""

    full = False

    def append(self, path: Path, data: bytes) -> None:
        if self.full:
            super().append(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        super().append(path, data)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shard_writer(tmp_path: Path, fs: FileSystem | None = None, rows: int = 3, clock: Clock | None = None) -> ShardWriter:
    return ShardWriter(fs or FileSystem(), RunPaths(tmp_path), "rollout-0", 1, rows=rows, age_s=2.0, clock=clock or Clock())


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Valid rows of any shape: any turns, any version runs over what was sampled, with or without experts."""
    spans = draw(st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), st.integers(0, 6)), max_size=5))
    mask, turns = [], []
    for role, length in spans:
        turns.append(Turn(role, len(mask), len(mask) + length))
        mask += [int(role == "assistant" and draw(st.booleans())) for _ in range(length)]
    num_tokens, sampled = len(mask), [i for i, bit in enumerate(mask) if bit]
    starts = sorted({sampled[0], *draw(st.sets(st.sampled_from(sampled)))}) if sampled else []
    number = st.integers(0, 2**31 - 1)
    experts = None
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([np.uint8, np.uint16]))
        experts = np.arange(max(num_tokens - 1, 0) * 6, dtype=dtype).reshape(-1, 3, 2)
    failure = draw(st.sampled_from(["none", "infrastructure", "environment"]))
    logprob = st.floats(-(2.0**100), 0, width=32)
    return make(
        draw(st.integers(0, 99)),
        tokens=np.array(draw(st.lists(number, min_size=num_tokens, max_size=num_tokens)), np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.array([draw(logprob) if bit else 0.0 for bit in mask], np.float32),
        versions=tuple(VersionRun(start, draw(number), draw(st.integers(1, 9))) for start in starts),
        turns=tuple(turns), experts=experts, failure_kind=failure, task_seed=draw(st.integers(-(2**63), 2**63 - 1)),
        status="failed" if failure != "none" else draw(st.sampled_from(["complete", "truncated"])),
        facts=draw(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=3)),
        temperature=draw(st.floats(0, 10)), created_s=draw(st.floats(0, 2e9)), source=draw(st.sampled_from(["policy", "old"])),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(trajectories(), min_size=1, max_size=5))
def test_every_row_comes_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, rows: list[Trajectory]) -> None:
    path = write(tmp_path_factory.mktemp("shards") / "s.arrow", rows)
    read = read_shard(path)
    assert len(read) == len(rows) and all(map(same, rows, read))


def test_rows_come_in_the_order_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "s.arrow", [make(i) for i in range(4)])
    assert [row.sample_id for row in read_rows(path, [3, 0])] == ["g1.o1/3", "g1.o1/0"]
    with pytest.raises(DigestMismatch, match="row 4 was announced, but the shard has 4"):
        read_rows(path, [4])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_come_back_through_a_sealed_shard_beside_rows_without(tmp_path: Path, dtype: Any) -> None:
    largest = np.iinfo(dtype).max
    experts = (largest - np.arange(10 * 3 * 4)).astype(dtype).reshape(10, 3, 4)
    writer = shard_writer(tmp_path, rows=2)
    writer.add(make(0, experts=experts))
    writer.add(make(1))
    sealed = writer.seal()
    assert sealed is not None
    recorded, plain = read_shard(tmp_path / sealed.path, digest=sealed.digest)
    assert plain.experts is None and same(recorded, make(0, experts=experts)) and recorded.experts is not None
    assert recorded.experts[0, 0, 0] == largest and recorded.experts.flags.writeable


@pytest.mark.parametrize("cut", [0, 5, 100, -200, -1])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "torn.arrow", [make(i) for i in range(4)])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DigestMismatch, match=r"torn\.arrow"):
        read_shard(path)


def test_no_flipped_byte_passes_the_announced_digest(tmp_path: Path) -> None:
    writer = shard_writer(tmp_path, rows=1)
    writer.add(make())
    sealed = writer.seal()
    assert sealed is not None
    path = tmp_path / sealed.path
    data = path.read_bytes()
    assert same(read_rows(path, [0], digest=sealed.digest)[0], make())
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(DigestMismatch, match="announced"):
            read_rows(path, [0], digest=sealed.digest)


def test_without_a_digest_a_flipped_byte_raises_or_reads_but_never_crashes(tmp_path: Path) -> None:
    data = encode_shard([make(i) for i in range(2)])
    path = tmp_path / "s.arrow"
    refused = 0
    for position in range(0, len(data), 41):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        try:
            read_shard(path)
        except (DigestMismatch, RunDirectoryError):
            refused += 1
    assert refused > 0


def test_a_missing_shard_is_not_yet_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_shard(tmp_path / "none.arrow")


def test_another_schema_version_is_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    for metadata, found in (({b"miles_trajectory_schema": b"9"}, "schema 9"), (None, "schema none")):
        schema = SCHEMA.with_metadata(metadata)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
            file.write_batch(pa.record_batch([pa.array([], field.type) for field in schema], schema=schema))
        with pytest.raises(RunDirectoryError, match=f"{found}, this code reads schema 2"):
            read_shard(path)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "one length": ({"loss_mask": np.zeros(10, np.uint8)}, "loss_mask is uint8\\[10\\]"),
    "dtype": ({"logprobs": np.zeros(11)}, "logprobs is float64"),
    "nan": ({"logprobs": np.array([0, 0, 0, np.nan] + 7 * [0], np.float32)}, "token 3 is not finite"),
    "infinite": ({"logprobs": np.array([0, 0, 0, -np.inf] + 7 * [0], np.float32)}, "token 3 is not finite"),
    "logprob of a prompt token": ({"logprobs": np.full(11, -1, np.float32)}, "where nothing was sampled"),
    "mask value": ({"loss_mask": np.array([0, 0, 0, 2] + 7 * [0], np.uint8)}, "loss_mask holds 2"),
    "mask on a tool's tokens": ({"loss_mask": np.array(9 * [0] + [1, 1], np.uint8), "logprobs": np.zeros(11, np.float32),
                                 "turns": (Turn("user", 0, 9), Turn("tool", 9, 11))}, "token 9 is in the loss mask"),
    "turns overlap": ({"turns": (Turn("user", 0, 4), Turn("assistant", 3, 11))}, "overlaps"),
    "turn leaves": ({"turns": (Turn("assistant", 0, 12),)}, "leaves the 11 tokens"),
    "version missing": ({"versions": ()}, "token 3 was sampled but no version run"),
    "version late": ({"versions": (VersionRun(4, 1, 1),)}, "token 3 was sampled but no version run"),
    "versions descend": ({"versions": (VersionRun(3, 1, 1), VersionRun(3, 2, 1))}, "does not ascend"),
    "version outside": ({"versions": (VersionRun(3, 1, 1), VersionRun(11, 2, 1))}, "outside"),
    "version of nothing": ({"loss_mask": np.zeros(11, np.uint8), "logprobs": np.zeros(11, np.float32)}, "no token was sampled"),
    "failed without a kind": ({"status": "failed"}, "does not go with"),
    "complete with a kind": ({"failure_kind": "environment"}, "does not go with"),
    "status": ({"status": "fine"}, "closed lists"),
    "experts": ({"experts": np.zeros((11, 2, 2), np.uint8)}, "11 positions for 11 tokens"),
    "expert dtype": ({"experts": np.zeros((10, 2, 2), np.int64)}, "experts is int64"),
    "seed": ({"task_seed": 2**63}, "64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_id_and_field(tmp_path: Path, name: str) -> None:
    changes, message = BAD_ROWS[name]
    check_trajectory(make())
    writer = shard_writer(tmp_path)
    with pytest.raises(ValueError, match=f"g1.o1/0@rollout-0.a1: .*{message}"):
        writer.add(make(**changes))
    assert writer.num_waiting == 0


@pytest.mark.parametrize("value", [float("nan"), b"bytes", {1, 2}])
def test_facts_that_are_not_json_are_refused_at_once(tmp_path: Path, value: Any) -> None:
    writer = shard_writer(tmp_path)
    with pytest.raises(ValueError, match=r"g1\.o1/0@rollout-0\.a1: facts are not JSON"):
        writer.add(make(facts={"score": value}))
    assert writer.num_waiting == 0


def test_a_shard_is_sealed_by_rows_or_by_age(tmp_path: Path) -> None:
    clock = Clock()
    writer = shard_writer(tmp_path, clock=clock)
    assert not writer.due() and writer.seal() is None
    writer.add(make(0))
    clock.now = 1.9
    assert not writer.due()
    clock.now = 2.0
    assert writer.due()
    clock.now = 0.0
    for index in range(1, 5):
        writer.add(make(index))
    assert writer.due()
    first, second = writer.seal(), writer.seal()
    assert first is not None and second is not None and writer.seal() is None
    assert [len(first.rows), len(second.rows), writer.sealed] == [3, 2, 2] and first.path != second.path


def test_the_announcement_describes_the_file(tmp_path: Path) -> None:
    writer = shard_writer(tmp_path)
    writer.add(make(0))
    writer.add(make(1, status="failed", failure_kind="environment"))
    sealed = writer.seal()
    assert sealed is not None
    path = tmp_path / sealed.path
    check_file(path, sealed.size_bytes, sealed.digest)
    entry, failed = sealed.rows
    assert (entry.row, entry.sample_id, entry.order_id, entry.status) == (0, "g1.o1/0", "w1.o1", "complete")
    assert entry.versions == (Version(4, 1), Version(5, 1)) and (entry.num_tokens, entry.num_sampled_tokens) == (11, 6)
    assert (failed.row, failed.status, failed.failure_kind) == (1, "failed", "environment")
    assert path.parent.joinpath(path.name) in list(path.parent.iterdir()) and len(list(path.parent.iterdir())) == 1


def test_a_full_disk_loses_no_row_and_leaves_no_torn_file(tmp_path: Path) -> None:
    fs = FullDisk()
    writer = shard_writer(tmp_path, fs)
    writer.add(make(0))
    fs.full = True
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            writer.seal()
    assert writer.num_waiting == 1 and not [path for path in tmp_path.rglob("*") if path.is_file()]
    writer.add(make(1))
    fs.full = False
    sealed = writer.seal()
    assert sealed is not None and [row.sample_id for row in read_shard(tmp_path / sealed.path)] == ["g1.o1/0", "g1.o1/1"]
