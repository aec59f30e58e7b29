"""Journals on a filesystem that fails, tears and shows things late (I2)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from miles_core.errors import JournalCorrupt, LeaseLost
from miles_core.store.fs import FileSystem
from miles_core.store.journal import (
    JournalWriter,
    decode_frame,
    encode_frame,
    frame_follows,
    list_segments,
    segment_name,
)
from tests.protocol.faulty_fs import FakeClock, Fault, Server
from tests.protocol.journal_world import (
    FOLDER,
    VISIBILITY_S,
    Note,
    bytes_of,
    nodes,
    numbers,
    payload,
    read_all,
    replace_bytes,
    tail,
    writer,
)

# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b"a\nb", b"x" * ((64 << 20) + 1)], ids=["newline", "too long"])
def test_a_payload_is_one_line_of_bounded_length(bad: bytes) -> None:
    with pytest.raises(ValueError, match="one line"):
        encode_frame(bad)


def test_any_changed_byte_and_any_prefix_of_a_frame_is_no_frame() -> None:
    frame = encode_frame(payload(1, "text"))
    assert decode_frame(frame) == (payload(1, "text"), len(frame))
    for position in range(len(frame)):
        assert decode_frame(frame[:position]) is None
        changed = bytearray(frame)
        changed[position] ^= 0x04
        assert decode_frame(bytes(changed)) is None, position


def test_frames_behind_bad_bytes_are_found_also_behind_zeros() -> None:
    good = encode_frame(payload(1))
    assert frame_follows(bytes(40) + good, 0) and frame_follows(b"torn line\n" + good, 0)
    assert not frame_follows(good[:-1], 0) and not frame_follows(bytes(4000), 0)


# --- writer ----------------------------------------------------------------------------------------------------------


def test_a_segment_opens_with_a_header_before_any_record() -> None:
    _, fs, _ = nodes()
    writer(fs)
    reader = tail(fs)
    assert reader.read() == [] and reader.header is not None
    assert (reader.header.writer, reader.header.attempt, reader.header.token) == ("learner-0", 1, "t")


def test_records_are_grouped_and_flushed_when_due() -> None:
    clock = FakeClock()
    fs = Server(clock, VISIBILITY_S).node("writer")
    journal = writer(fs, sync_s=1.0, clock=clock)
    appends = fs.calls["append"]
    for number in range(5):
        journal.append(Note(number=number))
        journal.flush_when_due()
    assert fs.calls["append"] == appends and journal.synced_bytes == 0
    clock.advance(1.0)
    journal.flush_when_due()
    assert fs.calls["append"] == appends + 1 and numbers(fs) == list(range(5))
    assert journal.synced_bytes == journal.bytes


WRITE_FAULTS = [
    *(("append", fault) for fault in (Fault.ERROR, Fault.FULL, Fault.SHORT, Fault.ZEROS, Fault.UNREPORTED)),
    *(("sync", fault) for fault in (Fault.ERROR, Fault.UNREPORTED)),
]


@pytest.mark.parametrize(("operation", "fault"), WRITE_FAULTS)
def test_after_a_failed_flush_a_new_segment_repeats_what_was_not_synced(operation: str, fault: Fault) -> None:
    server, fs, _ = nodes(seed=3)
    journal = writer(fs)
    journal.write(Note(number=1))
    synced = journal.bytes
    for number in (2, 3):
        journal.append(Note(number=number))
    fs.fail(operation, fault)
    with pytest.raises(OSError):
        journal.flush()
    assert journal.synced_bytes == synced
    journal.write(Note(number=4))
    header, *frames = bytes_of(server, 1).splitlines(keepends=True)
    assert f'"segment":1,"start_bytes":{synced}'.encode() in header
    assert frames == [encode_frame(payload(number)) for number in (2, 3, 4)]
    assert numbers(fs) == [1, 2, 3, 4] and journal.synced_bytes == journal.bytes


def test_a_segment_whose_folder_could_not_be_synced_is_left_too() -> None:
    server, fs, _ = nodes()
    fs.fail("sync", None, Fault.ERROR)
    journal = writer(fs)
    journal.append(Note(number=1))
    fs.fail("sync", None, Fault.ERROR)
    with pytest.raises(OSError):
        journal.flush()
    journal.write(Note(number=2))
    assert list_segments(fs, FOLDER) == {1: [0, 1, 2]} and numbers(fs) == [1, 2]
    assert bytes_of(server, 1).count(b"\n") == 2 and bytes_of(server, 2).count(b"\n") == 3


def test_a_full_disk_at_the_start_is_no_end() -> None:
    clock = FakeClock()
    server = Server(clock, VISIBILITY_S)
    fs = server.node("writer")
    fs.fail("append", Fault.SHORT)
    journal = writer(fs, sync_s=1.0, clock=clock)
    clock.advance(1.0)
    journal.flush_when_due()
    reader = tail(fs)
    assert reader.read() == [] and reader.header is not None and reader.header.segment == 1
    journal.write(Note(number=1))
    assert numbers(fs) == [1] and list_segments(fs, FOLDER) == {1: [0, 1]}


def test_a_disk_that_stays_full_does_not_fill_the_folder() -> None:
    clock = FakeClock()
    fs = Server(clock, VISIBILITY_S).node("writer")
    journal = writer(fs, sync_s=0.05, clock=clock)
    journal.append(Note(number=1))
    errors = 0
    while clock() < 3600:
        clock.advance(0.05)
        fs.fail("append", Fault.SHORT)
        try:
            journal.flush_when_due()
        except OSError as error:
            errors += error.errno == errno.ENOSPC
    assert errors == 3600 / 0.05, "between two tries the caller is told that it still fails"
    assert len(list_segments(fs, FOLDER)[1]) < 100
    fs.heal()
    clock.advance(60.0)
    journal.flush_when_due()
    assert numbers(fs) == [1]


@pytest.mark.parametrize("error", [LeaseLost("superseded", why="superseded"), OSError(errno.ESTALE, "stale")])
def test_a_writer_that_may_not_write_keeps_its_records(error: Exception) -> None:
    _, fs, _ = nodes()
    refusals: list[Exception] = []

    def before_write() -> None:
        if refusals:
            raise refusals.pop()

    journal = writer(fs, before_write=before_write)
    refusals.append(error)
    with pytest.raises(type(error)):
        journal.write(Note(number=1))
    assert numbers(fs) == []
    journal.write(Note(number=2))
    assert numbers(fs) == [1, 2] and list_segments(fs, FOLDER) == {1: [0]}


def test_a_superseded_attempt_opens_nothing() -> None:
    _, fs, _ = nodes()

    def before_write() -> None:
        raise LeaseLost("superseded", why="superseded")

    with pytest.raises(LeaseLost):
        writer(fs, before_write=before_write)
    assert list_segments(fs, FOLDER) == {}


def test_a_record_appended_while_a_flush_runs_goes_with_the_next() -> None:
    class Slow(FileSystem):
        def sync(self, path: Path) -> None:
            if late:
                journal.append(late.pop())

    _, node, _ = nodes()
    late: list[Note] = []
    slow = Slow()
    slow.append, slow.mkdir = node.append, node.mkdir  # type: ignore[method-assign]
    journal = writer(slow)
    journal.append(Note(number=1))
    late.append(Note(number=2))
    journal.flush()
    assert numbers(node) == [1] and journal.synced_bytes < journal.bytes
    journal.flush()
    assert numbers(node) == [1, 2] and journal.synced_bytes == journal.bytes


# --- reader ----------------------------------------------------------------------------------------------------------


def test_a_reader_of_many_segments_reaches_the_end_within_one_moment() -> None:
    _, fs, _ = nodes()
    journal = writer(fs)
    for number in range(6):
        fs.fail("append", Fault.SHORT)
        journal.append(Note(number=number))
        with pytest.raises(OSError):
            journal.flush()
        journal.flush()
    assert numbers(fs) == list(range(6))


def test_a_listed_segment_that_cannot_be_opened_yet_is_waited_for() -> None:
    server, fs, other = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    server.clock.advance(VISIBILITY_S)
    reader = tail(other)
    assert read_all(reader) == [payload(1)]
    fs.fail("append", Fault.FULL)
    with pytest.raises(OSError):
        journal.write(Note(number=2))
    journal.flush()
    name = server.names[FOLDER / segment_name(1, 1)][-1]
    name.seen_s |= {"readerlist": 0.0, "readeropen": server.clock() + 5.0}
    assert segment_name(1, 1) in other.listdir(FOLDER)
    assert read_all(reader) == []
    server.clock.advance(VISIBILITY_S)
    assert read_all(reader) == [payload(2)]


def test_a_segment_is_not_entered_before_all_in_front_of_it_is_read() -> None:
    server, fs, other = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    fs.fail("append", Fault.FULL)
    with pytest.raises(OSError):
        journal.write(Note(number=2))
    journal.flush()
    old, new = (server.current(FOLDER / segment_name(1, segment)) for segment in (0, 1))
    assert old is not None and new is not None
    for entries in server.names.values():
        for entry in entries:
            entry.seen_s |= {"readerlist": 0.0, "readeropen": 0.0}
    for write in new.writes:
        write.seen_s["reader"] = 0.0
    for index, write in enumerate(old.writes):
        write.seen_s["reader"] = 0.0 if index < 2 else 5.0
    reader = tail(other)
    assert read_all(reader) == []
    server.clock.advance(5.0)
    assert read_all(reader) == [payload(1), payload(2)]


def test_a_torn_or_zero_filled_tail_means_not_yet() -> None:
    server, fs, _ = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    whole = bytes_of(server, 0) + encode_frame(payload(2))
    for end in (len(whole) - 1, len(whole) - 20, len(whole) - len(encode_frame(payload(2))) + 3):
        for filling in (b"", bytes(len(whole) - end), bytes(5000)):
            replace_bytes(server, 0, whole[:end] + filling)
            reader = tail(fs)
            assert read_all(reader) == [payload(1)]
            server.clock.advance(10 * VISIBILITY_S)
            assert read_all(reader) == []
            replace_bytes(server, 0, whole)
            assert read_all(reader) == [payload(2)]


@pytest.mark.parametrize("length", [5, 9 << 20], ids=["short", "longer than a normal read"])
def test_a_bad_frame_before_good_ones_is_corrupt_but_not_before_visibility_s(length: int) -> None:
    server, fs, _ = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    good = bytes_of(server, 0)
    bad = bytearray(encode_frame(payload(2, "x" * length)))
    bad[40] ^= 1
    replace_bytes(server, 0, good + bytes(bad) + encode_frame(payload(3)))
    reader = tail(fs)
    assert read_all(reader) == [payload(1)] and reader.is_suspect
    server.clock.advance(VISIBILITY_S)
    assert read_all(reader) == []
    server.clock.advance(0.1)
    with pytest.raises(JournalCorrupt, match=f"bad frame at byte {journal.bytes}"):
        reader.read()


def test_a_damaged_header_before_good_frames_is_corrupt_too() -> None:
    server, fs, _ = nodes()
    writer(fs).write(Note(number=1))
    damaged = bytearray(bytes_of(server, 0))
    damaged[30] ^= 1
    replace_bytes(server, 0, bytes(damaged))
    reader = tail(fs)
    assert read_all(reader) == []
    server.clock.advance(VISIBILITY_S + 0.1)
    with pytest.raises(JournalCorrupt, match="bad frame"):
        reader.read()


def test_holes_that_heal_one_after_the_other_are_not_corrupt() -> None:
    server, fs, _ = nodes()
    journal = writer(fs)
    frames = [encode_frame(payload(number)) for number in range(8)]
    header = bytes_of(server, 0)
    reader = tail(fs)
    for hole in range(6):
        shown = [*frames[:hole], bytes(len(frames[hole])), *frames[hole + 1 :]]
        replace_bytes(server, 0, header + b"".join(shown))
        read_all(reader)
        assert reader.bytes == sum(map(len, frames[:hole])) and reader.is_suspect
    replace_bytes(server, 0, header + b"".join(frames))
    assert read_all(reader) == [payload(number) for number in range(5, 8)]
    assert journal.bytes == 0


def test_a_reader_that_was_stopped_within_a_read_calls_nothing_corrupt() -> None:
    """The bytes of a read that was begun in time say nothing about what is visible when the process goes on."""
    server, fs, other = nodes()
    writer(fs).write(Note(number=1))
    good = bytes_of(server, 0)
    replace_bytes(server, 0, good + bytes(30) + encode_frame(payload(3)))
    server.hang_s = 5 * VISIBILITY_S
    reader = tail(other)
    read_all(reader)
    other.fail("read", Fault.STOP)
    assert reader.read() == []


def test_a_segment_of_another_run_or_process_is_refused() -> None:
    server, fs, _ = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    twin = JournalWriter(fs, Path("/twin"), run_id="r", writer="learner-0", attempt=1, token="other")
    fs.fail("append", Fault.FULL)
    with pytest.raises(OSError):
        twin.write(Note(number=2))
    twin.flush()
    server.set_name(FOLDER / segment_name(1, 1), "writer", server.current(Path("/twin") / segment_name(1, 1)))
    with pytest.raises(JournalCorrupt, match=r"second\s+process"):
        numbers(fs)


def test_a_cut_inside_a_frame_is_refused_and_one_between_frames_holds() -> None:
    _, fs, _ = nodes()
    journal = writer(fs)
    first = journal.write(Note(number=1))
    journal.write(Note(number=2))
    assert [frame.payload for frame in tail(fs).read(first)] == [payload(1)]
    assert tail(fs).read(0) == []
    with pytest.raises(JournalCorrupt, match=f"cut at byte {first + 1}"):
        tail(fs).read(first + 1)


def test_one_frame_longer_than_a_normal_read_is_read() -> None:
    _, fs, _ = nodes()
    journal = writer(fs)
    journal.write(Note(number=1))
    journal.write(Note(number=2, text="y" * (9 << 20)))
    journal.write(Note(number=3))
    reader = tail(fs)
    assert read_all(reader) == [payload(1), payload(2, "y" * (9 << 20)), payload(3)]
    assert reader.hash == journal.hash and reader.bytes == journal.bytes


def test_an_idle_reader_lists_its_folder_once_in_visibility_s() -> None:
    server, fs, other = nodes()
    writer(fs).write(Note(number=1))
    server.clock.advance(VISIBILITY_S)
    reader = tail(other)
    read_all(reader)
    before = other.calls.copy()
    for _ in range(100):
        server.clock.advance(VISIBILITY_S / 50)
        reader.read()
    assert other.calls["read"] - before["read"] == 100
    assert other.calls["listdir"] - before["listdir"] <= 2
