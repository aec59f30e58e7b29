"""Act and cut (I5) as properties: any schedule of attempts, readers and faults gives all readers one and the same sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from miles_core.records import Cut
from miles_core.store.follow import (
    DecidingFollower,
    Delivered,
    Follower,
)
from tests.protocol.faulty_fs import PROPERTY, Fault, FaultyFS
from tests.protocol.follow_world import (
    ROOT,
    VISIBILITY_S,
    Writer,
    make_server,
    reading_of,
)

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
