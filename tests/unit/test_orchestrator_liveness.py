"""Who may get work, what the table says, and copies that the filesystem refuses: against real files and a fake clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.orchestrator.copies import Outbox
from miles_core.orchestrator.liveness import LivenessWatch
from miles_core.orchestrator.state import Receiver
from miles_core.records import LivenessTable, Stop, parse_record
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.store.lease import Heartbeat, write_heartbeat
from tests.protocol.simulation import SimCluster

WRITERS = ("rollout-0", "rollout-1")


class Desk:
    """An orchestrator's context, and holders that renew when the test says so."""

    def __init__(self, folder: Path, fs: FileSystem | None = None) -> None:
        self.cluster = SimCluster(folder / "run", hidden_s=0.0)
        self.clock = self.cluster.clock
        self.context = RoleContext(
            self.cluster.run, self.cluster.paths, "orchestrator-0", 1, fs=fs or FileSystem(), clock=self.clock,
            sleep=self.clock.advance,
        )  # fmt: skip
        self.context.leases.acquire("orchestrator-0", 1, "")
        self.watch = LivenessWatch(self.context, WRITERS)
        self._counter = 0

    def lease(self, writer: str, attempt: int = 1) -> None:
        self.context.leases.acquire(writer, attempt, "")

    def beat(self, writer: str, state: str, attempt: int = 1, **more: object) -> None:
        self._counter += 1
        heartbeat = Heartbeat.model_validate(
            {"writer": writer, "attempt": attempt, "counter": self._counter, "state": state, **more}
        )
        write_heartbeat(FileSystem(), self.context.paths.heartbeats, heartbeat)

    def look(self, seconds: float = 1.0) -> None:
        """Time passes, the leases are listed, the heartbeats are read."""
        self.clock.advance(seconds)
        self.context.leases.refresh()
        self.watch.observe()

    def serving(self, leaving: set[Receiver] | None = None) -> list[Receiver]:
        return self.watch.serving(WRITERS, leaving or set())

    def table(self) -> LivenessTable:
        return LivenessTable.model_validate_json(self.context.paths.liveness_table.read_bytes())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_work_goes_to_the_newest_attempt_that_lives_and_serves(desk: Desk) -> None:
    desk.look()
    assert desk.serving() == []
    desk.lease("rollout-0")
    desk.look()
    assert desk.serving() == []  # no heartbeat yet
    for state in ("starting", "waiting: first policy version", "leaving"):
        desk.beat("rollout-0", state)
        desk.look()
        assert desk.serving() == []
    desk.beat("rollout-0", "serving version 3")
    desk.look()
    assert desk.serving() == [Receiver("rollout-0", 1)]
    assert desk.serving(leaving={Receiver("rollout-0", 1)}) == []


def test_a_silent_one_gets_no_work_and_is_said_to_be_dead(desk: Desk) -> None:
    desk.lease("rollout-0")
    desk.beat("rollout-0", "serving")
    for _ in range(int(desk.context.timing.lease_s)):
        desk.look()
        assert desk.serving() == [Receiver("rollout-0", 1)]
    desk.look()
    assert desk.serving() == []
    desk.watch.publish()
    (entry,) = desk.table().entries
    assert (entry.writer, entry.attempt, entry.verdict, entry.silent_s) == ("rollout-0", 1, "dead", desk.context.timing.lease_s)


def test_a_tombstone_takes_the_work_away_before_a_successor_is_there(desk: Desk) -> None:
    desk.lease("rollout-0")
    desk.beat("rollout-0", "serving")
    desk.look()
    desk.context.leases.tombstone("rollout-0", 2, "")
    desk.beat("rollout-0", "serving")
    desk.look()
    assert desk.serving() == []
    desk.lease("rollout-0", 3)
    desk.beat("rollout-0", "serving", attempt=3)
    desk.look()
    assert desk.serving() == [Receiver("rollout-0", 3)]


def test_heartbeats_are_read_eight_times_in_a_lease_and_the_table_follows_a_verdict_at_once(desk: Desk) -> None:
    desk.lease("rollout-0")
    desk.look()
    desk.watch.publish()
    assert [(entry.writer, entry.verdict) for entry in desk.table().entries] == [("rollout-0", "unknown")]
    desk.beat("rollout-0", "waiting: first policy version")
    desk.look()
    desk.beat("rollout-0", "serving", progress=7, load=2, version=(3, 1))
    desk.look(seconds=0.5)
    assert desk.serving() == []  # not yet due
    desk.look(seconds=0.5)
    desk.watch.publish()
    second = desk.table()
    (entry,) = second.entries
    assert (entry.verdict, entry.state, entry.progress, entry.load, entry.version) == ("alive", "serving", 7, 2, (3, 1))
    desk.watch.publish()
    assert desk.table().counter == second.counter  # nothing changed within a second
    desk.clock.advance(1.0)
    desk.watch.publish()
    assert desk.table().counter == second.counter + 1


def test_one_that_has_not_served_yet_is_looked_for_more_often(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.context.timing = desk.context.timing.model_copy(update={"lease_s": 300.0})
    desk.lease("rollout-0")
    desk.lease("rollout-1")
    desk.beat("rollout-1", "serving")
    desk.look()
    for state, expected in (("starting", []), ("serving", [Receiver("rollout-0", 1)])):
        desk.beat("rollout-0", state)
        desk.beat("rollout-1", "leaving")
        desk.look(seconds=0.1)
        desk.look(seconds=0.5)
        assert desk.serving() == [*expected, Receiver("rollout-1", 1)]  # what the second says now is not looked for yet


class _Refusing(FileSystem):
    """Refuses writes below orders/ while `refuses`."""

    refuses = False

    def append(self, path: Path, data: bytes) -> None:
        if self.refuses and "orders" in path.parts:
            raise OSError(28, "no space left", str(path))
        super().append(path, data)


def stops_in(desk: Desk, receiver: str) -> list[str]:
    """Reasons of the stops in a receiver's folder."""
    tail = desk.context.reading.tail(desk.context.paths.orders(receiver), 1)
    found = []
    while frames := tail.read(list_now=True):
        found += [parse_record(frame.payload).reason for frame in frames]
    return found


def test_copies_wait_for_their_original_and_outlive_a_full_disk(tmp_path: Path) -> None:
    fs = _Refusing()
    desk = Desk(tmp_path, fs)
    outbox = Outbox(desk.context)
    outbox.add(10, "rollout-0", Stop(reason="a"))
    outbox.add(20, "rollout-1", Stop(reason="b"))
    assert outbox.send(9) == [] and not outbox.is_empty
    fs.refuses = True
    assert outbox.send(10) == [Stop(reason="a")]
    outbox.send(20)
    assert not outbox.is_empty
    fs.refuses = False
    desk.clock.advance(120.0)
    outbox.send(20)
    assert outbox.is_empty
    assert (stops_in(desk, "rollout-0"), stops_in(desk, "rollout-1")) == (["a"], ["b"])
