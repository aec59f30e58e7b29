"""Act and cut (I5): whatever is late, torn or written by zombies, all readers of a writer accept one and the same sequence.

The scenarios CE1-CE11 are the counterexamples of the explicit-state check of the protocol (test_model.py); here they run
against the real readers and writers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from miles_core.errors import DeadlineExceeded, JournalCorrupt
from miles_core.recipe import Closed
from miles_core.records import Cut, Cuts, Incident
from miles_core.store.follow import (
    EMPTY_HASH,
    CopyReader,
    DecidingFollower,
    Delivered,
    Follower,
    Reading,
    cut_predecessors,
    poll_together,
    read_cut,
)
from miles_core.store.journal import JournalWriter, segment_name
from miles_core.store.lease import LeaseFolder
from tests.protocol.faulty_fs import PROPERTY, FakeClock, Fault, FaultyFS, Server

VISIBILITY_S = 10.0
ROOT = Path("/run")
LEASES = ROOT / "leases"


def note(text: str) -> Incident:
    """Any record."""
    return Incident(what=text)


def texts(delivered: list[Delivered]) -> list[str]:
    """The notes among what was delivered."""
    return [item.record.what for item in delivered if isinstance(item.record, Incident)]


def make_server(seed: int = 0, *, holes: bool = False, lag: float | None = None) -> Server:
    """A server whose folder of leases all nodes see. `lag`: how late all nodes see everything; None = at random."""
    server = Server(FakeClock(), VISIBILITY_S, seed=seed, holes=holes, hang_s=1.5 * VISIBILITY_S)
    server.node("supervisor").mkdir(LEASES)
    server.clock.advance(VISIBILITY_S)
    if lag is not None:
        server.lag = dict.fromkeys(["a", "b", "c", *(f"{role}{number}" for role in "OLRS" for number in range(1, 6))], lag)
    return server


def reading_of(fs: FaultyFS) -> Reading:
    """What a reader on that node needs."""
    return Reading(fs, LeaseFolder(fs, LEASES, "r", fs.clock), VISIBILITY_S, fs.clock, fs.server.clock.advance)


class Writer:
    """One attempt of a writer, on its own node. It holds its lease from the start and is never stopped."""

    def __init__(self, server: Server, writer: str, attempt: int, node: str | None = None) -> None:
        self.server, self.writer, self.attempt = server, writer, attempt
        self.fs = server.node(node or f"{writer[0].upper()}{attempt}")
        self.reading = reading_of(self.fs)
        self.folder = ROOT / writer
        self.reading.leases.acquire(writer, attempt, f"t{attempt}")
        self.frames: list[tuple[int, Closed]] = []
        self.cuts = Cuts()
        self._journal: JournalWriter | None = None

    @property
    def journal(self) -> JournalWriter:
        if self._journal is None:
            self._journal = JournalWriter(
                self.fs, self.folder, run_id="r", writer=self.writer, attempt=self.attempt, token="t", clock=self.fs.clock
            )
        return self._journal

    def open(self, sleep: Any = None) -> Writer:
        """Cuts its predecessors, as a self-cutting writer does."""
        sleep = sleep or self.server.clock.advance
        self.cuts = cut_predecessors(self.reading, self.folder, self.writer, self.attempt, sleep=sleep)
        self.write(self.cuts)
        return self

    def write(self, *records: Closed | str) -> Writer:
        """Appends and flushes, whether or not it is a zombie. OSError."""
        for record in records:
            known = note(record) if isinstance(record, str) else record
            self.frames.append((self.journal.append(known), known))
        self.journal.flush()
        return self

    def follower(self, writer: str) -> Follower:
        """A follower on this writer's node."""
        return Follower(self.reading, ROOT / writer, writer)

    def text_before(self, cut: Cut) -> list[str]:
        """Notes that a cut of this attempt covers."""
        return [record.what for end, record in self.frames if end <= cut.bytes and isinstance(record, Incident)]


def poll_until_quiet(server: Server, *readers: Any) -> list[list[Delivered]]:
    """Everything that readers deliver while time passes."""
    found: list[list[Delivered]] = [[] for _ in readers]
    for _ in range(12):
        for index, reader in enumerate(readers):
            found[index] += reader.poll()
        server.clock.advance(VISIBILITY_S / 3)
    return found


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


# --- the counterexamples of the model --------------------------------------------------------------------------------


def test_ce1_what_a_zombie_orchestrator_writes_behind_its_cut_reaches_nobody() -> None:
    server = make_server(lag=1.0)
    old = Writer(server, "orchestrator-0", 1).open().write("batch 1: g1")
    learner, late = (Follower(reading_of(server.node(node)), old.folder, "orchestrator-0") for node in "ab")
    server.clock.advance(VISIBILITY_S)
    seen = learner.poll()
    new = Writer(server, "orchestrator-0", 2).open()
    old.write("batch 2: g2")
    new.write("batch 2: g3")
    found = poll_until_quiet(server, learner, late)
    assert texts(seen + found[0]) == texts(found[1]) == ["batch 1: g1", "batch 2: g3"]


def test_ce2_a_successor_knows_every_batch_that_a_learner_may_have_trained() -> None:
    """The learner acts at the last moment at which the newer lease may be hidden from it; the successor sees all late."""
    server = make_server()
    server.lag = {"L1": 0.0, "O2": 1.0}
    old = Writer(server, "orchestrator-0", 1).open()
    learner = Writer(server, "learner-0", 1, "L1").follower("orchestrator-0")
    learner.poll()
    server.lag["L1"] = 1.0
    new = Writer(server, "orchestrator-0", 2)
    server.lag["L1"] = 0.0
    hidden = server.names[LEASES / "orchestrator-0.a2"][-1]
    hidden.seen_s |= {"L1list": hidden.at_s + VISIBILITY_S, "L1open": hidden.at_s + VISIBILITY_S}
    server.clock.advance(VISIBILITY_S - 0.01)
    old.write("batch 1: g1")
    assert texts(learner.poll()) == ["batch 1: g1"]
    new.open()
    assert old.text_before(new.cuts.cuts[0]) == ["batch 1: g1"], "so it never drops g1"


def test_ce3_ce6_a_successor_waits_for_no_receiver_and_for_no_segment() -> None:
    """Both successors open while neither the other role nor their predecessors do anything."""
    server = make_server(lag=1.0)
    Writer(server, "orchestrator-0", 1).open()
    Writer(server, "learner-0", 1)
    new_learner = Writer(server, "learner-0", 2)
    new_orchestrator = Writer(server, "orchestrator-0", 2)
    new_learner.open().write("step 1")
    new_orchestrator.open().write("batch 1")
    server.clock.advance(VISIBILITY_S)
    assert texts(new_orchestrator.follower("learner-0").poll()) == ["step 1"]
    assert texts(new_learner.follower("orchestrator-0").poll()) == ["batch 1"]


def test_ce4_a_third_attempt_takes_over_the_cut_of_the_first_and_takes_none_of_its_own() -> None:
    server = make_server(lag=1.0)
    first = Writer(server, "orchestrator-0", 1).open().write("batch 1: g1")
    second = Writer(server, "orchestrator-0", 2).open()
    first.write("batch 2: g2")
    second.write("batch 2: g3")
    third = Writer(server, "orchestrator-0", 3).open()
    assert third.cuts.cuts[0] == second.cuts.cuts[0]
    second.write("batch 3: g2")
    third.write("batch 3: g4")
    found = poll_until_quiet(server, Follower(reading_of(server.node("a")), first.folder, "orchestrator-0"))
    assert texts(found[0]) == ["batch 1: g1", "batch 2: g3", "batch 3: g4"]


def test_ce5_two_zombies_together_add_no_second_manifest_to_a_step() -> None:
    """O1 and L1 go on behind their successors' backs and agree with each other; all others accept one step 1."""
    server = make_server(lag=0.0)
    o1, l1 = Writer(server, "orchestrator-0", 1).open(), Writer(server, "learner-0", 1).open()
    o2, l2 = Writer(server, "orchestrator-0", 2).open(), Writer(server, "learner-0", 2).open()
    o1.write("batch 1: zombie")
    l1.write("step 1: zombie")
    o2.write("batch 1: g1")
    follower = l2.follower("orchestrator-0")
    assert texts(follower.poll()) == ["batch 1: g1"]
    l2.write("step 1: g1")
    readers = [Follower(reading_of(server.node(node)), ROOT / "learner-0", "learner-0") for node in ("a", "O1", "O2")]
    assert all(texts(found) == ["step 1: g1"] for found in poll_until_quiet(server, *readers))


@pytest.mark.parametrize("late", ["O1", "O2", "L2", "a"])
def test_ce5_prime_a_node_that_sees_a_shorter_prefix_changes_no_cut(late: str) -> None:
    """One run of batch 1 by O1 and L1, both die; whoever sees things late, step 1 keeps its manifest."""
    server = make_server(lag=0.0)
    server.lag[late] = 1.0
    o1, l1 = Writer(server, "orchestrator-0", 1).open(), Writer(server, "learner-0", 1).open()
    o1.write("batch 1: g1")
    l1.write("step 1: g1")
    o2, l2 = Writer(server, "orchestrator-0", 2), Writer(server, "learner-0", 2)
    o2.open()
    l2.open()
    assert o1.text_before(o2.cuts.cuts[0]) == ["batch 1: g1"] and l1.text_before(l2.cuts.cuts[0]) == ["step 1: g1"]
    evaluator = Writer(server, "evaluator-0", 1, "a")
    found = poll_until_quiet(server, o2.follower("learner-0"), l2.follower("orchestrator-0"), evaluator.follower("learner-0"))
    assert [texts(one) for one in found] == [["step 1: g1"], ["batch 1: g1"], ["step 1: g1"]]


def test_ce8_a_copied_order_is_acted_upon_only_where_the_successor_knows_its_original() -> None:
    """O1 copies an order once before and once after its successor's read. Journal first, then the copy (I6)."""
    for hidden_s in (0.0, VISIBILITY_S):
        server = make_server(lag=0.0)
        o1 = Writer(server, "orchestrator-0", 1).open()
        copies = JournalWriter(
            o1.fs, ROOT / "orders", run_id="r", writer="orchestrator-0", attempt=1, token="t", clock=o1.fs.clock
        )
        replica = CopyReader(reading_of(server.node("R1")), ROOT / "orders", "orchestrator-0")
        assert replica.poll() == []
        o2 = Writer(server, "orchestrator-0", 2)
        lease = server.names[LEASES / "orchestrator-0.a2"][-1]
        lease.seen_s |= {"R1list": lease.at_s + hidden_s, "R1open": lease.at_s + hidden_s}
        o1.write("order 1")
        copies.write(note("order 1"))
        acted = texts(replica.poll())
        o2.open()
        o1.write("order 2")
        copies.write(note("order 2"))
        acted += texts(replica.poll())
        assert acted == (["order 1"] if hidden_s else [])
        assert o1.text_before(o2.cuts.cuts[0]) == ["order 1"]


def test_ce11_a_retired_replica_is_cut_though_no_successor_ever_comes() -> None:
    server = make_server(lag=0.0)
    replica = Writer(server, "rollout-0", 1).write("x1")
    cuts: list[Cut] = []
    reader = DecidingFollower(reading_of(server.node("a")), replica.folder, "rollout-0", cuts={}, on_cut=cuts.append)
    reader.poll()
    assert Writer(server, "supervisor-0", 1).reading.leases.tombstone("rollout-0", 2, "t")
    poll_until_quiet(server, reader)
    assert reader.is_cut(1) and cuts[0].bytes == replica.journal.bytes
    back = Writer(server, "rollout-0", 3).write("z1")
    assert texts(poll_until_quiet(server, reader)[0]) == ["z1"] and back.attempt == reader.attempt


# --- properties ------------------------------------------------------------------------------------------------------

READ_FAULTS = st.sampled_from([None, None, None, Fault.STALE, Fault.HANG, Fault.STOP])
WRITE_FAULTS = st.sampled_from([None, None, Fault.FULL, Fault.SHORT, Fault.ZEROS, Fault.UNREPORTED, Fault.HANG, Fault.STOP])


class ActAndCut(RuleBasedStateMachine):
    """Attempts of one writer, none of which ever stops, and readers on many nodes that come at any time."""

    WRITER = "learner-0"

    @initialize(seed=st.integers(0, 2**32), holes=st.booleans())
    def start(self, seed: int, holes: bool) -> None:
        self.server = make_server(seed, holes=holes)
        self.server.meanwhile = self.sleep
        self.is_asleep = False
        self.in_call: set[Any] = set()
        """Attempts and indices of readers that are within a call: they do nothing else meanwhile."""
        self.attempts: list[Writer] = []
        self.opened: set[int] = set()
        self.readers: list[tuple[FaultyFS, Any]] = []
        self.found: list[list[Delivered]] = []
        self.number = 0
        self.next_attempt()
        self.new_reader()

    @precondition(lambda self: len(self.attempts) < 3)
    @rule()
    def next_attempt(self) -> None:
        self.attempts.append(Writer(self.server, self.WRITER, len(self.attempts) + 1))

    @precondition(lambda self: len(self.readers) < 4)
    @rule()
    def new_reader(self) -> None:
        fs = self.server.node(f"reader{len(self.readers)}")
        self.readers.append((fs, self.make_reader(fs)))
        self.found.append([])

    def make_reader(self, fs: FaultyFS) -> Any:
        return Follower(reading_of(fs), ROOT / self.WRITER, self.WRITER)

    @rule(index=st.integers(0, 2), count=st.integers(1, 3), operation=st.sampled_from(["append", "sync"]), fault=WRITE_FAULTS)
    def write(self, index: int, count: int, operation: str, fault: Fault | None) -> None:
        writer = self.attempts[index % len(self.attempts)]
        if writer.attempt not in self.opened:
            self.open(writer, fault)
        if fault is not None:
            writer.fs.fail(operation, fault)
        self.append(writer, *(f"{writer.attempt}-{self.number + step}" for step in range(count)))
        self.number += count

    def append(self, writer: Writer, *records: str) -> None:
        self.in_call.add(writer)
        with suppress(OSError):
            writer.write(*records)
        self.in_call.discard(writer)

    def open(self, writer: Writer, fault: Fault | None) -> None:
        """Opens a journal, with its cuts first; all others go on while it waits."""
        if fault is not None:
            writer.fs.fail("listdir", fault)
        self.in_call.add(writer)
        writer.open(self.sleep)
        self.in_call.discard(writer)
        self.opened.add(writer.attempt)

    def sleep(self, seconds: float) -> None:
        """What goes on while one call hangs or a successor waits: any attempt but those that are in a call themselves."""
        if self.is_asleep:
            self.server.clock.advance(seconds)
            return
        self.is_asleep = True
        for part in range(3):
            self.server.clock.advance(seconds / 3)
            if len(self.attempts) < 3 and self.server.random.random() < 0.2:
                self.next_attempt()
            for writer in self.attempts:
                if writer not in self.in_call and self.server.random.random() < 0.5:
                    if writer.attempt not in self.opened:
                        self.open(writer, None)
                    self.append(writer, f"{writer.attempt}-meanwhile-{self.number}-{part}")
            for index in range(len(self.readers)):
                if index not in self.in_call:
                    self.poll(index, None)
        self.is_asleep = False

    @rule(index=st.integers(0, 3), fault=READ_FAULTS, operation=st.sampled_from(["read", "listdir"]))
    def read(self, index: int, fault: Fault | None, operation: str) -> None:
        fs, _ = self.readers[index % len(self.readers)]
        if fault is not None:
            fs.fail(operation, fault)
        self.poll(index % len(self.readers), fault)

    def poll(self, index: int, fault: Fault | None) -> bool:
        self.in_call.add(index)
        delivered: list[Delivered] | None = None
        with suppress(OSError):
            delivered = self.readers[index][1].poll()
        self.in_call.discard(index)
        self.found[index] += delivered or []
        return delivered != []

    @rule(share=st.sampled_from([0.01, 0.3, 1.0, 3.0]))
    def wait(self, share: float) -> None:
        self.server.clock.advance(share * VISIBILITY_S)

    @invariant()
    def readers_hold_prefixes_of_one_sequence(self) -> None:
        longest = max(getattr(self, "found", []), key=len, default=[])
        for found in getattr(self, "found", []):
            assert found == longest[: len(found)]

    def finish(self) -> None:
        """All faults end; the newest attempt opens and writes a last record; all readers catch up."""
        for fs, _ in self.readers:
            fs.heal()
        self.is_asleep = True  # nobody else acts any more
        newest = self.attempts[-1]
        newest.fs.heal()
        if newest.attempt not in self.opened:
            self.open(newest, None)
        newest.write("last")
        quiet = 0
        while quiet < 4:
            self.server.clock.advance(VISIBILITY_S)
            delivered = [self.poll(index, None) for index in range(len(self.readers))]
            quiet = 0 if any(delivered) else quiet + 1

    def expected(self, cuts: dict[int, Cut]) -> list[Delivered]:
        newest = self.attempts[-1].attempt
        return [
            Delivered(writer.attempt, end, record)
            for writer in self.attempts
            for end, record in writer.frames
            if writer.attempt == newest or end <= cuts[writer.attempt].bytes
        ]

    def teardown(self) -> None:
        if not hasattr(self, "attempts"):
            return
        self.finish()
        cuts = {cut.attempt: cut for cut in self.attempts[-1].cuts.cuts}
        assert sorted(cuts) == list(range(1, len(self.attempts)))
        for found in self.found:
            assert found == self.expected(cuts)


class DecideAndCut(ActAndCut):
    """The same for a writer that the reader cuts. One reader decides at a time; a later one follows the recorded cuts."""

    WRITER = "rollout-0"

    def make_reader(self, fs: FaultyFS) -> Any:
        if not self.readers:
            self.recorded: dict[int, Cut] = {}
            self.asked: list[Cut] = []
        cuts = dict(self.recorded)
        return DecidingFollower(reading_of(fs), ROOT / self.WRITER, self.WRITER, cuts=cuts, on_cut=self.record)

    def record(self, cut: Cut) -> None:
        self.asked.append(cut)
        if self.server.random.random() < 0.3:
            raise OSError(28, "disk full")
        self.recorded[cut.attempt] = cut

    def open(self, writer: Writer, fault: Fault | None) -> None:
        self.opened.add(writer.attempt)

    def poll(self, index: int, fault: Fault | None) -> bool:
        """Only the newest reader: its predecessor is a dead orchestrator."""
        return index == len(self.readers) - 1 and super().poll(index, fault)

    def teardown(self) -> None:
        if not hasattr(self, "attempts"):
            return
        self.finish()
        for attempt, cut in self.recorded.items():
            frames = [(end, record) for end, record in self.attempts[attempt - 1].frames if end <= cut.bytes]
            assert (frames[-1][0] if frames else 0) == cut.bytes
        assert sorted(self.recorded) == list(range(1, len(self.attempts)))
        assert self.found[-1] == self.expected(self.recorded)
        decider = self.readers[-1][1]
        for attempt in range(1, len(self.attempts)):
            acted = [item.end_bytes for item in self.found[-1] if item.attempt == attempt]
            assert (acted[-1] if acted else 0) == self.recorded[attempt].bytes and decider.is_cut(attempt)


class Timeline:
    """Attempts that write and readers that poll all the time, so that every narrow window is hit; one queue of events.

    A sleep or a hang of one actor runs the others' events that fall into it.
    """

    STEP_S = VISIBILITY_S / 8

    def __init__(self, seed: int, lease_times: list[float], hang_rate: float) -> None:
        self.server = make_server(seed)
        self.server.meanwhile = self.pass_time
        self.chance = self.server.random
        self.hang_rate = hang_rate
        self.attempts: list[Writer] = []
        self.readers = [Follower(reading_of(self.server.node(f"r{n}")), ROOT / "learner-0", "learner-0") for n in range(3)]
        self.found: list[list[Delivered]] = [[] for _ in self.readers]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.number = count()
        began = self.server.clock()
        for lease_s in (0.0, *lease_times):
            self.at(began + lease_s, self.begin)
        for index in range(len(self.readers)):
            self.at(began + self.STEP_S * self.chance.random(), self.poller(index))

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heappush(self.events, (when_s, next(self.order), event))

    def pass_time(self, seconds: float) -> None:
        until = self.server.clock() + seconds
        while self.events and self.events[0][0] <= until:
            when_s, _, event = heappop(self.events)
            self.server.clock.now_s = max(self.server.clock.now_s, when_s)
            event()
        self.server.clock.now_s = max(self.server.clock.now_s, until)

    def begin(self) -> None:
        """A new attempt: lease, cut, then records for ever."""
        writer = Writer(self.server, "learner-0", len(self.attempts) + 1)
        self.attempts.append(writer)
        writer.open(self.pass_time)
        self.write(writer)

    def write(self, writer: Writer) -> None:
        writer.write(f"{writer.attempt}-{next(self.number)}")
        self.at(self.server.clock() + self.STEP_S * self.chance.uniform(0.5, 1.5), lambda: self.write(writer))

    def poller(self, index: int) -> Callable[[], None]:
        fs = self.readers[index]._reading.fs
        assert isinstance(fs, FaultyFS)

        def poll() -> None:
            if self.chance.random() < self.hang_rate:
                fs.fail(self.chance.choice(["read", "listdir"]), self.chance.choice([Fault.HANG, Fault.STOP]))
            self.found[index] += self.readers[index].poll()
            self.at(self.server.clock() + self.STEP_S * self.chance.uniform(0.5, 1.5), poll)

        return poll


@settings(PROPERTY, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    lease_times=st.lists(st.floats(0.5 * VISIBILITY_S, 5 * VISIBILITY_S), min_size=1, max_size=2),
    hang_rate=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_in_every_window_around_a_succession_readers_accept_one_sequence(
    seed: int, lease_times: list[float], hang_rate: float
) -> None:
    line = Timeline(seed, lease_times, hang_rate)
    line.pass_time(9 * VISIBILITY_S)
    line.hang_rate = 0.0
    line.pass_time(3 * VISIBILITY_S)
    newest = line.attempts[-1]
    cuts = {cut.attempt: cut.bytes for cut in newest.cuts.cuts}
    truth = [
        (writer.attempt, end)
        for writer in line.attempts
        for end, _ in writer.frames
        if writer is newest or end <= cuts[writer.attempt]
    ]
    for found in line.found:
        assert [(item.attempt, item.end_bytes) for item in found] == truth[: len(found)]
        assert len(found) > len(truth) / 2


def test_all_readers_of_a_self_cutting_writer_accept_one_sequence() -> None:
    run_state_machine_as_test(ActAndCut, settings=settings(PROPERTY, max_examples=120, stateful_step_count=25))


def test_what_the_decider_delivered_is_what_it_cut() -> None:
    run_state_machine_as_test(DecideAndCut, settings=settings(PROPERTY, max_examples=120, stateful_step_count=25))
