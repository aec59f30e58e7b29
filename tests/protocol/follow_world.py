"""Attempts of writers and readers on nodes of a filesystem that is late and fails, for tests of store/follow.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.recipe import Closed
from miles_core.records import Cut, Cuts, Incident
from miles_core.store.follow import (
    Delivered,
    Follower,
    Reading,
    cut_predecessors,
)
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder
from tests.protocol.faulty_fs import FakeClock, FaultyFS, Server

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
