"""Act and cut (I5), case by case: whatever is late, torn or written by zombies, all readers accept the same sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest

from miles_core.errors import DeadlineExceeded, JournalCorrupt
from miles_core.recipe import Closed
from miles_core.records import Cut, Cuts
from miles_core.store.follow import (
    EMPTY_HASH,
    CopyReader,
    DecidingFollower,
    Delivered,
    Follower,
    poll_together,
    read_cut,
)
from miles_core.store.journal import segment_name
from tests.protocol.faulty_fs import Fault, FaultyFS, Server
from tests.protocol.follow_world import (
    VISIBILITY_S,
    Writer,
    make_server,
    poll_until_quiet,
    reading_of,
    texts,
)

# --- Follower: explicit ----------------------------------------------------------------------------------------------


def test_a_follower_delivers_the_first_attempt_as_it_is_written() -> None:
    server = make_server(lag=0.0)
    learner = Writer(server, "learner-0", 1).open().write("s1")
    follower = Follower(reading_of(server.node("a")), learner.folder, "learner-0")
    assert texts(follower.poll()) == ["s1"] and follower.poll() == []
    learner.write("s2", "s3")
    found = follower.poll()
    assert texts(found) == ["s2", "s3"] and {item.attempt for item in found} == {1} and follower.attempt == 1
    assert found[-1].end_bytes == learner.journal.bytes


def test_nothing_is_delivered_without_a_lease_nor_between_a_newer_lease_and_its_first_record() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("s1")
    reading = reading_of(server.node("a"))
    follower = Follower(reading, first.folder, "learner-0")
    assert Follower(reading, first.folder, "orchestrator-0").poll() == []
    assert texts(follower.poll()) == ["s1"]
    second = Writer(server, "learner-0", 2)
    first.write("late")
    assert follower.poll() == []
    _ = second.journal
    assert follower.poll() == []
    second.open()
    assert texts(follower.poll()) == ["late"], "written before the successor's read began: the cut holds it"
    first.write("zombie")
    second.write("s2")
    assert texts(follower.poll()) == ["s2"] and follower.attempt == 2
    assert [cut.attempt for cut in second.cuts.cuts] == [1] == list(follower.cuts)


def test_a_reader_that_starts_late_delivers_the_same_sequence() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    early = Follower(reading_of(server.node("a")), first.folder, "learner-0")
    seen = early.poll()
    second = Writer(server, "learner-0", 2).open().write("b1")
    first.write("zombie")
    seen += early.poll()
    third = Writer(server, "learner-0", 3).open().write("c1")
    second.write("zombie")
    seen += early.poll()
    late = Follower(reading_of(server.node("b")), third.folder, "learner-0")
    assert late.poll() == seen and texts(seen) == ["a1", "b1", "c1"]


def test_an_attempt_that_died_before_its_first_record_and_a_tombstone_are_cut_at_nothing() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    _ = Writer(server, "learner-0", 2).journal
    server.clock.advance(1.0)
    first.reading.leases.tombstone("learner-0", 3, "t")
    fourth = Writer(server, "learner-0", 4).open().write("d1")
    assert [(cut.attempt, cut.bytes > 0) for cut in fourth.cuts.cuts] == [(1, True), (2, False), (3, False)]
    assert fourth.cuts.cuts[1].hash == EMPTY_HASH
    assert texts(Follower(reading_of(server.node("a")), first.folder, "learner-0").poll()) == ["a1", "d1"]


@pytest.mark.parametrize("reads_from", ["start", "later"])
def test_an_error_between_two_attempts_loses_nothing(reads_from: str) -> None:
    """Records of one attempt were taken, then reading the next one fails."""
    for failing_read in range(8):
        server = make_server(lag=0.0)
        first = Writer(server, "learner-0", 1).open().write("a1")
        fs = server.node("a")
        follower = Follower(reading_of(fs), first.folder, "learner-0")
        found = follower.poll() if reads_from == "start" else []
        Writer(server, "learner-0", 2).open().write("b1")
        Writer(server, "learner-0", 3).open().write("c1")
        fs.fail("read", *([Fault.HANG] * failing_read), Fault.STALE)
        server.hang_s = 0.0
        for _ in range(3):
            with suppress(OSError):
                found += follower.poll()
        assert texts(found) == ["a1", "b1", "c1"], failing_read


def hang_once(fs: FaultyFS, operation: str, fault: Fault, call: int, meanwhile: Callable[[], None]) -> None:
    """In call number `call` of that operation from now on, `meanwhile` happens before the answer or behind it."""
    calls = count()
    fs.server.meanwhile = lambda seconds: meanwhile() if next(calls) == call else None
    fs.fail(operation, *([fault] * 30))


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STOP])
@pytest.mark.parametrize("operation", ["read", "listdir"])
@pytest.mark.parametrize("reads_from", ["start", "later"])
@pytest.mark.parametrize("attempts", [1, 2])
def test_what_happens_while_a_poll_hangs_brings_nothing_from_behind_a_cut(
    attempts: int, reads_from: str, operation: str, fault: Fault
) -> None:
    """In any call of a poll: a successor takes its lease, cuts, and the zombie writes on."""
    for call in range(10):
        server = make_server(lag=0.0)
        writers = [Writer(server, "learner-0", 1).open().write("a1")]
        fs = server.node("a")
        follower = Follower(reading_of(fs), writers[0].folder, "learner-0")
        found = follower.poll() if reads_from == "start" else []
        if attempts == 2:
            writers.append(Writer(server, "learner-0", 2).open().write("b1"))

        def take_over(server: Server = server, writers: list[Writer] = writers) -> None:
            successor = Writer(server, "learner-0", len(writers) + 1).open()
            writers[-1].write("zombie")
            successor.write("c1")

        hang_once(fs, operation, fault, call, take_over)
        found += poll_until_quiet(server, follower)[0]
        assert texts(found) == [*["a1", "b1"][:attempts], "c1"], call


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STOP])
@pytest.mark.parametrize("operation", ["read", "listdir"])
@pytest.mark.parametrize("attempts", [1, 2])
def test_what_happens_while_a_poll_hangs_brings_no_copy_of_a_zombie(attempts: int, operation: str, fault: Fault) -> None:
    for call in range(10):
        server = make_server(lag=0.0)
        writers = [Writer(server, "orchestrator-0", 1).write("o1")]
        fs = server.node("a")
        reader = CopyReader(reading_of(fs), writers[0].folder, "orchestrator-0")
        found = reader.poll()
        if attempts == 2:
            writers.append(Writer(server, "orchestrator-0", 2).write("p1"))

        def take_over(server: Server = server, writers: list[Writer] = writers) -> None:
            successor = Writer(server, "orchestrator-0", len(writers) + 1)
            writers[-1].write("zombie")
            successor.write("q1")

        hang_once(fs, operation, fault, call, take_over)
        found += poll_until_quiet(server, reader)[0]
        assert "zombie" not in texts(found) and texts(found)[-1] == "q1", call


def test_acting_beyond_a_cut_is_an_error_that_names_the_setting() -> None:
    """A filesystem that is later than visibility_s: the successor missed what others saw."""
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    follower = Follower(reading_of(server.node("a")), first.folder, "learner-0")
    assert texts(follower.poll()) == ["a1"]
    nothing = Cut(writer="learner-0", attempt=1, bytes=0, hash=EMPTY_HASH)
    Writer(server, "learner-0", 2).write(Cuts(cuts=(nothing,)))
    with pytest.raises(JournalCorrupt, match=r"acted upon .* cut at 0; .*Raise timing.visibility_s"):
        follower.poll()


@pytest.mark.parametrize("reads_beyond", [False, True])
def test_a_cut_of_other_bytes_is_refused(reads_beyond: bool) -> None:
    """Also by a reader that has read beyond the cut already."""
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    wrong = Cut(writer="learner-0", attempt=1, bytes=first.journal.bytes, hash="0" * 32)
    follower = Follower(reading_of(server.node("a")), first.folder, "learner-0")
    if reads_beyond:
        follower.poll()
        first.write("zombie")
        follower.pull()
    Writer(server, "learner-0", 2).write(Cuts(cuts=(wrong,)))
    with pytest.raises(JournalCorrupt, match="hashes to"):
        follower.poll()


@pytest.mark.parametrize("excess", [1, 40])
def test_a_cut_that_is_no_record_boundary_is_refused(excess: int) -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    follower = Follower(reading_of(server.node("a")), first.folder, "learner-0")
    follower.poll()
    wrong = Cut(writer="learner-0", attempt=1, bytes=first.journal.bytes + excess, hash="0" * 32)
    first.write("a2")
    follower.pull()
    Writer(server, "learner-0", 2).write(Cuts(cuts=(wrong,)))
    with pytest.raises(JournalCorrupt, match=r"records are|some are missing|cut at byte"):
        for _ in range(3):
            follower.poll()


def test_cut_records_that_never_come_are_an_error_with_a_deadline_and_late_ones_are_not() -> None:
    for comes in (True, False):
        server = make_server(lag=0.0)
        first = Writer(server, "learner-0", 1).open().write("a1", "a2")
        second = Writer(server, "learner-0", 2).open()
        file = server.current(first.folder / segment_name(1, 0))
        assert file is not None
        whole = server.content(file, "a")
        server.clock.advance(VISIBILITY_S)
        server.content(file, "a")
        file.settled[:] = whole[:-5]
        follower = Follower(reading_of(server.node("a")), first.folder, "learner-0")
        assert texts(follower.poll()) == ["a1"] and follower.attempt == 1
        server.clock.advance(follower._reading.patience_s)
        assert follower.poll() == []
        server.clock.advance(1.0)
        if comes:
            file.settled[:] = whole
            assert texts(follower.poll()) == ["a2"] and follower.attempt == second.attempt
        else:
            with pytest.raises(JournalCorrupt, match="some are missing"):
                follower.poll()


def test_a_writer_that_does_not_open_with_its_cuts_is_refused() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).write("a1")
    with pytest.raises(JournalCorrupt, match="opens with 'incident' instead of its cuts"):
        Follower(reading_of(server.node("a")), first.folder, "learner-0").poll()
    second = Writer(server, "learner-0", 2)
    with pytest.raises(JournalCorrupt, match="attempt 1 opens with 'incident'"):
        second.open()


def test_a_record_of_another_version_is_refused_with_its_place() -> None:
    class Unknown(Closed):
        kind: str = "unheard_of"

    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write(Unknown())
    with pytest.raises(JournalCorrupt, match=f"learner-0: attempt 1, the record before byte {first.journal.bytes}"):
        Follower(reading_of(server.node("a")), first.folder, "learner-0").poll()


# --- taking cuts -----------------------------------------------------------------------------------------------------


def test_a_successor_reads_no_sooner_than_twice_visibility_after_its_lease() -> None:
    server = make_server(lag=1.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    began = server.clock()
    second = Writer(server, "learner-0", 2)
    first.write("a2")  # a reader that does not see the lease yet may act upon this
    second.open()
    assert server.clock() - began >= 2 * VISIBILITY_S
    assert first.text_before(second.cuts.cuts[0]) == ["a1", "a2"]


def test_a_cut_reaches_over_all_segments() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open()
    for text in ("a1", "a2", "a3"):
        first.fs.fail("append", Fault.SHORT)
        with pytest.raises(OSError):
            first.write(text)
        first.journal.flush()
    second = Writer(server, "learner-0", 2).open()
    assert (second.cuts.cuts[0].bytes, second.cuts.cuts[0].hash) == (first.journal.bytes, first.journal.hash)
    assert texts(read_cut(second.reading, first.folder, second.cuts.cuts[0])) == ["a1", "a2", "a3"]


def test_errors_while_cutting_are_waited_out_and_a_dead_filesystem_has_a_deadline() -> None:
    server = make_server(lag=0.0)
    Writer(server, "learner-0", 1).open().write("a1")
    second = Writer(server, "learner-0", 2)
    second.fs.fail("listdir", *([Fault.STALE] * 5))
    second.fs.fail("read", *([Fault.STALE] * 5))
    assert second.open().cuts.cuts[0].bytes > 0
    third = Writer(server, "learner-0", 3)
    third.fs.fail("listdir", *([Fault.STALE] * 10_000))
    third.fs.fail("read", *([Fault.STALE] * 10_000))
    with pytest.raises(DeadlineExceeded, match=r"learner-0 attempt 3: waited for what its predecessors wrote"):
        third.open()


def test_a_successor_does_not_cut_in_front_of_a_bad_frame() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "learner-0", 1).open().write("a1", "a2")
    file = server.current(first.folder / segment_name(1, 0))
    assert file is not None
    server.clock.advance(VISIBILITY_S)
    server.content(file, "a")
    file.settled[-len("a1") - 150] ^= 1
    with pytest.raises(JournalCorrupt, match="bad frame"):
        Writer(server, "learner-0", 2).open()


def test_read_cut_waits_for_late_bytes_but_not_for_missing_ones() -> None:
    server = make_server(lag=1.0)
    first = Writer(server, "learner-0", 1).open().write("a1")
    cut = Cut(writer="learner-0", attempt=1, bytes=first.journal.bytes, hash=first.journal.hash)
    fs = server.node("a")
    fs.fail("read", Fault.STALE)
    assert texts(read_cut(reading_of(fs), first.folder, cut)) == ["a1"]
    began = server.clock()
    more = cut.model_copy(update={"bytes": cut.bytes + 100})
    with pytest.raises(JournalCorrupt, match=f"cut at byte {more.bytes}, but its records end at {cut.bytes}"):
        read_cut(reading_of(fs), first.folder, more)
    assert server.clock() - began >= 2 * VISIBILITY_S
    with pytest.raises(JournalCorrupt, match="hashes to"):
        read_cut(reading_of(fs), first.folder, cut.model_copy(update={"hash": "0" * 32}))
    nothing = Cut(writer="learner-0", attempt=7, bytes=0, hash=EMPTY_HASH)
    assert read_cut(reading_of(fs), first.folder, nothing) == []


# --- DecidingFollower: explicit --------------------------------------------------------------------------------------


def test_the_decider_cuts_no_sooner_than_twice_visibility_after_it_saw_the_newer_lease() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "rollout-0", 1).write("x1")
    cuts: list[Cut] = []
    decider = DecidingFollower(reading_of(server.node("a")), first.folder, "rollout-0", cuts={}, on_cut=cuts.append)
    assert decider.attempt == 0 and texts(decider.poll()) == ["x1"] and decider.attempt == 1
    Writer(server, "rollout-0", 2).write("y1")
    first.write("x2")
    assert decider.poll() == []
    server.clock.advance(2 * VISIBILITY_S - 0.1)
    assert decider.poll() == [] and cuts == [] and not decider.is_cut(1)
    server.clock.advance(0.1)
    assert texts(decider.poll()) == ["x2", "y1"]
    assert [(cut.attempt, cut.bytes, cut.hash) for cut in cuts] == [(1, first.journal.bytes, first.journal.hash)]
    first.write("zombie")
    server.clock.advance(VISIBILITY_S)
    assert decider.poll() == [] and decider.is_cut(1) and decider.attempt == 2


def test_a_cut_that_could_not_be_recorded_is_asked_for_again_unchanged() -> None:
    """A second, different cut of one attempt in the orchestrator's journal would split its readers."""
    server = make_server(lag=0.0)
    first = Writer(server, "rollout-0", 1).write("x1")
    asked: list[Cut] = []

    def on_cut(cut: Cut) -> None:
        asked.append(cut)
        if len(asked) < 3:
            raise OSError(28, "disk full")

    decider = DecidingFollower(reading_of(server.node("a")), first.folder, "rollout-0", cuts={}, on_cut=on_cut)
    decider.poll()
    Writer(server, "rollout-0", 2)
    decider.poll()
    server.clock.advance(2 * VISIBILITY_S)
    for number in range(2):
        with pytest.raises(OSError):
            decider.poll()
        assert not decider.is_cut(1)
        first.write(f"zombie {number}")
    assert decider.poll() == [] and decider.is_cut(1)
    assert len(asked) == 3 and len(set(asked)) == 1 and first.text_before(asked[0]) == ["x1"]


def test_a_successor_of_the_decider_follows_the_recorded_cuts() -> None:
    server = make_server(lag=0.0)
    first = Writer(server, "rollout-0", 1).write("x1")
    recorded = Cut(writer="rollout-0", attempt=1, bytes=first.journal.bytes, hash=first.journal.hash)
    first.write("behind the cut")
    Writer(server, "rollout-0", 2).write("y1")
    reading = reading_of(server.node("b"))
    decider = DecidingFollower(reading, first.folder, "rollout-0", cuts={1: recorded}, on_cut=pytest.fail)
    assert texts(decider.poll()) == ["x1", "y1"]
    wrong = recorded.model_copy(update={"hash": "0" * 32})
    with pytest.raises(JournalCorrupt, match="hashes to"):
        DecidingFollower(reading, first.folder, "rollout-0", cuts={1: wrong}, on_cut=pytest.fail).poll()


def test_an_error_while_the_decider_goes_to_the_next_attempt_loses_nothing() -> None:
    for failing_read in range(8):
        server = make_server(lag=0.0)
        server.hang_s = 0.0
        writers = [Writer(server, "rollout-0", number).write(f"x{number}") for number in (1, 2, 3)]
        fs = server.node("a")
        cuts: list[Cut] = []
        decider = DecidingFollower(reading_of(fs), writers[0].folder, "rollout-0", cuts={}, on_cut=cuts.append)
        decider.poll()
        server.clock.advance(2 * VISIBILITY_S)
        fs.fail("read", *([Fault.HANG] * failing_read), Fault.STALE)
        found: list[Delivered] = []
        for _ in range(3):
            with suppress(OSError):
                found += decider.poll()
        assert texts(found) == ["x1", "x2", "x3"], failing_read
        assert [cut.attempt for cut in cuts] == [1, 2]


def test_many_readers_share_one_listing_of_the_leases() -> None:
    server = make_server(lag=0.0)
    writers = [Writer(server, f"rollout-{number}", 1, "a").write(f"x{number}") for number in range(50)]
    fs = server.node("b")
    reading = reading_of(fs)
    readers = [DecidingFollower(reading, writer.folder, writer.writer, cuts={}, on_cut=pytest.fail) for writer in writers]
    found = poll_together(reading, readers)
    assert [texts(one) for one in found] == [[f"x{number}"] for number in range(50)]
    writers[7].write("more")
    fs.calls.clear()
    found = poll_together(reading, readers)
    assert texts(found[7]) == ["more"] and sum(map(len, found)) == 1
    assert fs.calls == {"read": 50, "listdir": 1}


def test_one_reader_in_trouble_does_not_hold_up_the_others() -> None:
    server = make_server(lag=0.0)
    writers = [Writer(server, f"rollout-{number}", 1).write(f"x{number}") for number in range(3)]
    fs = server.node("b")
    reading = reading_of(fs)
    readers = [DecidingFollower(reading, writer.folder, writer.writer, cuts={}, on_cut=pytest.fail) for writer in writers]
    fs.fail("read", Fault.STALE)
    assert [texts(one) for one in poll_together(reading, readers)] == [[], ["x1"], ["x2"]]
    assert [texts(one) for one in poll_together(reading, readers)] == [["x0"], [], []]
    writers[1].write("y")
    fs.fail("listdir", Fault.STALE)
    with pytest.raises(OSError):
        poll_together(reading, readers)
    assert [texts(one) for one in poll_together(reading, readers)] == [[], ["y"], []]


# --- CopyReader ------------------------------------------------------------------------------------------------------


def test_copies_of_an_older_attempt_are_left_and_those_of_the_newest_are_read_from_the_start() -> None:
    server = make_server(lag=0.0)
    old = Writer(server, "orchestrator-0", 1).write("o1")
    reader = CopyReader(reading_of(server.node("a")), old.folder, "orchestrator-0")
    assert texts(reader.poll()) == ["o1"]
    new = Writer(server, "orchestrator-0", 2)
    old.write("zombie")
    assert reader.poll() == []
    new.write("o1", "o2")
    assert texts(reader.poll()) == ["o1", "o2"]
    assert CopyReader(reading_of(server.node("a")), old.folder, "nobody-0").poll() == []
