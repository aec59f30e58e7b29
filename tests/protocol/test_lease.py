"""Leases, heartbeats and the judgement of who is alive (I3, I4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import LeaseLost, RunDirectoryError
from miles_core.store.lease import (
    RENEWALS_PER_LEASE,
    Heartbeat,
    LeaseFolder,
    LivenessJudge,
    heartbeat_path,
    read_heartbeat,
    write_heartbeat,
)
from tests.protocol.faulty_fs import PROPERTY, FakeClock, Fault, FaultyFS, Server

VISIBILITY_S = 10.0
LEASE_S = 3 * VISIBILITY_S
LEASES, HEARTBEATS = Path("/run/leases"), Path("/run/heartbeats")


def server(seed: int = 0) -> Server:
    """A server with the folder of heartbeats; what is made before the first second is seen by all."""
    made = Server(FakeClock(), VISIBILITY_S, seed=seed)
    fs = made.node("supervisor")
    fs.mkdir(HEARTBEATS)
    fs.mkdir(LEASES)
    made.clock.advance(VISIBILITY_S)
    return made


def leases(fs: FaultyFS, run_id: str = "r") -> LeaseFolder:
    """The leases as one node sees them."""
    return LeaseFolder(fs, LEASES, run_id, fs.clock)


def beat(fs: FaultyFS, counter: int, writer: str = "rollout-0", attempt: int = 1) -> None:
    """One renewal."""
    write_heartbeat(fs, HEARTBEATS, Heartbeat(writer=writer, attempt=attempt, counter=counter))


def judge(fs: FaultyFS) -> LivenessJudge:
    """An observer."""
    return LivenessJudge(fs, HEARTBEATS, LEASE_S, fs.clock)


# --- leases ----------------------------------------------------------------------------------------------------------


def test_the_second_process_of_an_attempt_is_a_twin_and_learns_who_holds_it() -> None:
    world = server()
    leases(world.node("a")).acquire("rollout-0", 1, "t", host="n1", pid=7, job_id="42")
    with pytest.raises(LeaseLost, match=r"job 42 \(pid 7 on n1\)") as lost:
        world.clock.advance(VISIBILITY_S)
        leases(world.node("b")).acquire("rollout-0", 1, "t")
    assert lost.value.why == "twin"


def test_a_twin_leaves_also_while_it_cannot_read_whose_lease_it_is() -> None:
    for seed in range(10):
        world = server(seed)
        leases(world.node("a")).acquire("rollout-0", 1, "t")
        with pytest.raises(LeaseLost) as lost:
            leases(world.node("b")).acquire("rollout-0", 1, "t")
        assert lost.value.why == "twin"


@pytest.mark.parametrize("content", [b"", b'{"kind":"lease","run', bytes(200)], ids=["empty", "half", "zeros"])
def test_a_half_written_lease_is_held_by_somebody_and_reading_it_is_tried_again(content: bytes) -> None:
    world = server()
    fs = world.node("a")
    fs.append(LEASES / "rollout-0.a1", content)
    view = leases(fs)
    with pytest.raises(LeaseLost) as lost:
        view.acquire("rollout-0", 1, "t")
    assert lost.value.why == "twin" and view.newest("rollout-0") == 0
    with pytest.raises(OSError, match="not whole"):
        view.read("rollout-0", 1)
    assert view.acquire("rollout-0", 2, "t").attempt == 2


def test_a_false_eexist_is_no_twin() -> None:
    fs = server().node("a")
    fs.fail("link", Fault.UNREPORTED)
    assert leases(fs).acquire("rollout-0", 1, "t").attempt == 1


def test_a_lower_attempt_that_starts_late_is_superseded() -> None:
    world = server()
    leases(world.node("a")).acquire("rollout-0", 3, "t")
    world.clock.advance(VISIBILITY_S)
    late = leases(world.node("b"))
    with pytest.raises(LeaseLost, match="superseded by attempt 3") as lost:
        late.acquire("rollout-0", 2, "t")
    assert lost.value.why == "superseded" and late.attempts("rollout-0") == [2, 3]


def test_a_tombstone_retires_the_attempts_below_it_and_cannot_be_held() -> None:
    world = server()
    supervisor, holder = leases(world.node("supervisor")), leases(world.node("a"))
    holder.acquire("rollout-0", 1, "t")
    assert supervisor.tombstone("rollout-0", 2, "t") and not supervisor.tombstone("rollout-0", 2, "t")
    world.clock.advance(VISIBILITY_S)
    with pytest.raises(LeaseLost) as lost:
        holder.check("rollout-0", 1)
    assert lost.value.why == "superseded"
    with pytest.raises(LeaseLost, match="retired up to attempt 2") as lost:
        leases(world.node("b")).acquire("rollout-0", 2, "t")
    assert lost.value.why == "superseded"
    assert leases(world.node("b")).acquire("rollout-0", 3, "t").attempt == 3


def test_a_lease_of_another_run_is_refused() -> None:
    world = server()
    leases(world.node("a"), "other").acquire("rollout-0", 1, "t")
    world.clock.advance(VISIBILITY_S)
    with pytest.raises(RunDirectoryError, match="belongs to run other"):
        leases(world.node("b")).acquire("rollout-0", 1, "t")


def test_a_lease_once_seen_stays_seen() -> None:
    class Forgetful(FaultyFS):
        names: tuple[str, ...] = ()

        def listdir(self, path: Path) -> list[str]:
            return list(self.names)

    fs = Forgetful(server(), "a")
    view = leases(fs)
    for names, newest in ((("learner-0.a1", "learner-0.a2", ".tmp.learner-0.a3.x"), 2), (("learner-0.a1",), 2), ((), 2)):
        fs.names = names
        view.refresh()
        assert view.newest("learner-0") == newest and view.attempts("learner-0") == [1, 2]


def test_the_age_of_a_lease_counts_from_the_first_listing_that_showed_it() -> None:
    world = server()
    view = leases(world.node("a"))
    view.acquire("learner-0", 1, "t")
    assert view.superseded_for_s("learner-0", 1) == 0.0
    world.clock.advance(5.0)
    leases(world.node("a")).tombstone("learner-0", 4, "t")
    view.refresh()
    world.clock.advance(3.0)
    leases(world.node("a")).tombstone("learner-0", 2, "t")
    view.refresh()
    assert view.seen_for_s("learner-0", 1) == pytest.approx(8.0)
    assert view.seen_for_s("learner-0", 2) == 0.0 and view.seen_for_s("learner-0", 9) == 0.0
    assert view.superseded_for_s("learner-0", 1) == pytest.approx(3.0), "since the first higher one, not the next higher one"


def test_a_failed_listing_keeps_the_old_view() -> None:
    world = server()
    fs = world.node("a")
    view = leases(fs)
    view.acquire("learner-0", 2, "t")
    fs.fail("listdir", Fault.STALE)
    with pytest.raises(OSError):
        view.refresh()
    assert view.newest("learner-0") == 2


@settings(PROPERTY, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    starts=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([None, Fault.UNREPORTED, Fault.HANG])), min_size=1, max_size=8
    ),
    wait_s=st.sampled_from([0.0, 3.0, VISIBILITY_S]),
)
def test_every_attempt_has_one_holder_and_the_highest_one_stays(
    seed: int, starts: list[tuple[int, Fault | None]], wait_s: float
) -> None:
    world = server(seed)
    holders: dict[int, LeaseFolder] = {}
    for number, (attempt, fault) in enumerate(starts):
        fs = world.node(f"n{number}")
        if fault is not None:
            fs.fail("link", fault)
        view = leases(fs)
        try:
            view.acquire("learner-0", attempt, "t")
        except LeaseLost as lost:
            assert lost.why == "twin" if attempt in holders else max(holders) > attempt
            holders.setdefault(attempt, view)  # superseded: it made its lease before it saw the higher one
        else:
            assert attempt not in holders
            holders[attempt] = view
        world.clock.advance(wait_s)
    world.clock.advance(VISIBILITY_S)
    for attempt, view in holders.items():
        if attempt == max(holders):
            view.check("learner-0", attempt)
        else:
            with pytest.raises(LeaseLost):
                view.check("learner-0", attempt)


# --- heartbeats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "shown"),
    [
        ("x" * 5000, "xxxxx"),
        ("ä" * 900, "äääää"),
        ("\x01" * 300, "?????"),
        ("at \udcff", "at ?"),
        ("", ""),
        ("\U0001f600" * 300, "\U0001f600" * 5),
    ],
)
def test_a_heartbeat_has_one_length_whatever_its_state_says(state: str, shown: str) -> None:
    fs = server().node("a")
    for counter, text, start in ((2**62, state, shown), (2**62 + 1, "serving", "serving")):
        beating = Heartbeat(
            writer="orchestrator-0", attempt=10**6, counter=counter, state=text, progress=2**62, load=2**62,
            version=(10**9, 10**6),
        )  # fmt: skip
        write_heartbeat(fs, HEARTBEATS, beating)
        assert len(fs.read(heartbeat_path(HEARTBEATS, "orchestrator-0", 10**6))) == 1024
        found = read_heartbeat(fs, HEARTBEATS, "orchestrator-0", 10**6)
        assert found is not None and found.counter == counter and found.state.startswith(start)


def test_a_torn_heartbeat_is_no_heartbeat() -> None:
    fs = server().node("a")
    beat(fs, 1)
    path = heartbeat_path(HEARTBEATS, "rollout-0", 1)
    whole = fs.read(path)
    for end in (0, 10, 60, 90):
        fs.overwrite(path, whole[:end] + bytes(1024 - end))
        assert read_heartbeat(fs, HEARTBEATS, "rollout-0", 1) is None


# --- liveness --------------------------------------------------------------------------------------------------------

POLL_S = LEASE_S / 20
BEAT_S = LEASE_S / RENEWALS_PER_LEASE


class Pair:
    """A holder and an observer on two nodes. Time passes in small steps; a stall stops what it is said to stop."""

    def __init__(self, seed: int) -> None:
        self.world = server(seed)
        self.holder, self.observer = self.world.node("holder"), self.world.node("observer")
        self.judge = judge(self.observer)
        self.counter = 0
        self.next_beat = 0.0
        self.verdicts: list[str] = []

    def run(self, seconds: float, *, holds: bool = True, observes: bool = True, fails: bool = False) -> None:
        end = self.world.clock() + seconds
        while self.world.clock() < end:
            self.world.clock.advance(min(POLL_S, end - self.world.clock()))
            if holds and self.world.clock() >= self.next_beat:
                self.counter += 1
                self.next_beat = self.world.clock() + BEAT_S
                beat(self.holder, self.counter)
            if observes:
                if fails:
                    self.observer.fail("read", Fault.STALE)
                self.verdicts.append(self.judge.observe("rollout-0", 1))


@settings(PROPERTY, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    spans=st.lists(
        st.tuples(st.sampled_from(["well", "observer stopped", "everything stopped", "reads fail"]), st.floats(0.05, 4.0)),
        max_size=8,
    ),
)
def test_no_stall_of_observer_or_filesystem_kills_a_living_holder(seed: int, spans: list[tuple[str, float]]) -> None:
    pair = Pair(seed)
    pair.run(LEASE_S)
    for what, share in spans:
        seconds = share * LEASE_S
        if what == "well":
            pair.run(seconds)
        elif what == "observer stopped":
            pair.run(seconds, observes=False)
        elif what == "everything stopped":
            pair.world.clock.advance(seconds)
            # The observer may be the first to go on.
            pair.next_beat = pair.world.clock() + BEAT_S
        else:
            pair.run(seconds, fails=True)
    assert "dead" not in pair.verdicts
    pair.run(LEASE_S)
    assert pair.verdicts[-1] == "alive"


@settings(PROPERTY, max_examples=100)
@given(seed=st.integers(0, 2**32), alive_s=st.floats(0.0, 3 * LEASE_S), torn=st.sampled_from([None, 0, 100, 1024]))
def test_a_dead_holder_is_judged_dead_also_when_it_died_in_a_write(seed: int, alive_s: float, torn: int | None) -> None:
    pair = Pair(seed)
    pair.run(alive_s)
    if torn is not None:
        pair.holder.overwrite(heartbeat_path(HEARTBEATS, "rollout-0", 1), bytes(torn))
    pair.run(LEASE_S + VISIBILITY_S + 2 * POLL_S, holds=False)
    assert pair.verdicts[-1] == "dead" and pair.judge.silent_s("rollout-0", 1) >= LEASE_S


@pytest.mark.parametrize("stall", [0.2, 0.33, 0.34, 0.45, 0.6, 0.9, 2.0])
def test_the_longest_silence_of_a_living_holder_is_shorter_than_a_lease(stall: float) -> None:
    """Its last bytes came at once, then all stands still just before its next renewal, whose bytes come at their latest."""
    pair = Pair(0)
    pair.world.lag["observer"] = 0.0
    pair.run(2 * LEASE_S)
    pair.run(pair.next_beat - pair.world.clock() - 0.001)
    pair.world.lag["observer"] = 1.0
    pair.world.clock.advance(stall * LEASE_S)
    pair.next_beat = pair.world.clock() + BEAT_S
    pair.run(LEASE_S)
    assert "dead" not in pair.verdicts and pair.verdicts[-1] == "alive"


def test_a_dead_holder_seen_through_flickering_reads_is_dead() -> None:
    """A reading that finds nothing, between readings of one counter, is no sign of life."""
    pair = Pair(0)
    pair.run(LEASE_S)
    path = heartbeat_path(HEARTBEATS, "rollout-0", 1)
    whole = pair.holder.read(path)
    for index in range(30):
        pair.holder.overwrite(path, whole if index % 2 else bytes(1024))
        pair.run(LEASE_S / 15, holds=False)
    assert pair.verdicts[-1] == "dead"


def test_a_holder_that_goes_on_is_alive_again_and_one_that_never_began_is_unknown_then_dead() -> None:
    pair = Pair(0)
    pair.run(LEASE_S / 2, holds=False)
    assert set(pair.verdicts) == {"unknown"} and pair.judge.heartbeat("rollout-0", 1) is None
    pair.run(LEASE_S, holds=False)
    assert pair.verdicts[-1] == "dead"
    pair.run(2 * VISIBILITY_S)
    assert pair.verdicts[-1] == "alive" and pair.judge.silent_s("rollout-0", 1) < LEASE_S
    pair.judge.forget("rollout-0", 1)
    assert pair.judge.last_verdict(("rollout-0", 1)) == "unknown"


def test_a_zombie_cannot_keep_its_successor_alive() -> None:
    world = server()
    fs = world.node("a")
    observer = judge(world.node("a"))
    verdict = ""
    beat(fs, 1, attempt=2)
    for counter in range(40):
        beat(fs, counter, attempt=1)
        world.clock.advance(POLL_S)
        verdict = observer.observe("rollout-0", 2)
    assert verdict == "dead"
