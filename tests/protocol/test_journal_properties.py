"""A journal under any faults (I2), as a property."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.protocol.faulty_fs import PROPERTY, FakeClock, Fault, Server
from tests.protocol.journal_world import (
    VISIBILITY_S,
    Note,
    tail,
    writer,
)

# --- property --------------------------------------------------------------------------------------------------------


class JournalMachine(RuleBasedStateMachine):
    """One writer, three readers, any faults: every reader reads what was appended, in order, once, and all that was flushed."""

    @initialize(seed=st.integers(0, 2**32), holes=st.booleans())
    def start(self, seed: int, holes: bool) -> None:
        self.server = Server(FakeClock(), VISIBILITY_S, seed=seed, holes=holes)
        self.fs = self.server.node("writer")
        self.readers = [tail(self.server.node(name)) for name in ("a", "b", "writer")]
        self.found: list[list[bytes]] = [[] for _ in self.readers]
        self.appended: list[bytes] = []
        self.journal = writer(self.fs, clock=self.fs.clock)

    @rule(length=st.sampled_from([0, 3, 200]), count=st.integers(1, 4))
    def append(self, length: int, count: int) -> None:
        for _ in range(count):
            note = Note(number=len(self.appended), text="z" * length)
            self.journal.append(note)
            self.appended.append(note.model_dump_json().encode())

    @rule(
        operation=st.sampled_from(["append", "sync", "mkdir"]),
        later=st.booleans(),
        fault=st.sampled_from([Fault.ERROR, Fault.FULL, Fault.SHORT, Fault.ZEROS, Fault.UNREPORTED, Fault.HANG, Fault.STOP]),
    )
    def fail_next(self, operation: str, later: bool, fault: Fault) -> None:
        self.fs.fail(operation, *([None] if later else []), fault)

    @rule()
    def flush(self) -> None:
        try:
            self.journal.flush()
        except OSError:
            assert self.journal.synced_bytes <= self.journal.bytes
        else:
            assert self.journal.synced_bytes == self.journal.bytes

    @rule(index=st.integers(0, 2), fault=st.sampled_from([None, None, Fault.STALE, Fault.HANG, Fault.STOP]))
    def read(self, index: int, fault: Fault | None) -> None:
        reader = self.readers[index]
        if fault is not None:
            reader._fs.fail("read", fault)  # type: ignore[attr-defined]
        self._read(index)

    @rule(share=st.sampled_from([0.01, 0.3, 1.0, 3.0]))
    def wait(self, share: float) -> None:
        self.server.clock.advance(share * VISIBILITY_S)

    def _read(self, index: int) -> bool:
        try:
            frames = self.readers[index].read()
        except OSError:
            return True
        self.found[index] += [frame.payload for frame in frames]
        return bool(frames)

    @invariant()
    def readers_hold_prefixes(self) -> None:
        for found in getattr(self, "found", []):
            assert found == self.appended[: len(found)]

    def teardown(self) -> None:
        if not hasattr(self, "journal"):
            return
        self.fs.heal()
        self.journal.flush()
        for _ in range(30):
            self.server.clock.advance(VISIBILITY_S)
            if not any([self._read(index) for index in range(3)]):
                break
        for index, reader in enumerate(self.readers):
            assert self.found[index] == self.appended
            assert (reader.bytes, reader.hash) == (self.journal.bytes, self.journal.hash)


def test_every_record_is_read_once_in_order_by_every_reader_whatever_fails() -> None:
    run_state_machine_as_test(JournalMachine, settings=settings(PROPERTY, max_examples=150, stateful_step_count=30))
