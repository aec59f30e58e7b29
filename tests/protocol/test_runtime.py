"""RoleContext: a holder that was stopped or cut off re-reads its lease before it publishes, and nothing else ends it (I4)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import JournalCorrupt, LeaseLost
from miles_core.paths import RunPaths
from miles_core.recipe import EnvironmentSpec, GraderSpec, ModelSpec, Recipe, RolloutSpec, Timing
from miles_core.records import Done, Incident
from miles_core.run import RunConfig
from miles_core.runtime.context import DRAINED_EXIT_CODE, RoleContext, run_role
from miles_core.store.journal import list_segments
from miles_core.store.lease import LeaseFolder, read_heartbeat
from tests.protocol.faulty_fs import PROPERTY, FakeClock, Fault, FaultyFS, Server

VISIBILITY_S, LEASE_S, ORPHAN_S = 10.0, 40.0, 3600.0
TIMING = Timing(visibility_s=VISIBILITY_S, lease_s=LEASE_S, poll_s=1.0, sync_s=1.0, orphan_s=ORPHAN_S)
PATHS = RunPaths(Path("/run"))


def run_config(timing: Timing = TIMING) -> RunConfig:
    """A run of nothing in particular."""
    recipe = Recipe(
        name="test", steps=3, model=ModelSpec(path="none"), grader=GraderSpec(), rollout=RolloutSpec(),
        environment=EnvironmentSpec(family="none"),
    )  # fmt: skip
    return RunConfig(
        run_id="r", recipe=recipe, timing=timing, cluster={}, code_digest="c", base_model_digest="b", created_s=0.0
    )


def context(server: Server, writer: str = "learner-0", attempt: int = 1, *, holds: bool = True) -> RoleContext:
    """An attempt on its own node, without the heartbeat's thread."""
    fs = server.node(f"{writer}.a{attempt}")
    made = RoleContext(run_config(), PATHS, writer, attempt, token="t", fs=fs, clock=fs.clock, sleep=server.clock.advance)
    fs.mkdir(PATHS.heartbeats)
    if holds:
        made.leases.acquire(writer, attempt, "t")
        made.beat()
    return made


def server(seed: int = 0) -> Server:
    """A server on which everything stands still for twice a lease when it hangs."""
    return Server(FakeClock(), VISIBILITY_S, seed=seed, hang_s=2 * LEASE_S)


def faulty(role: RoleContext) -> FaultyFS:
    """The role's filesystem."""
    assert isinstance(role.fs, FaultyFS)
    return role.fs


def listings(role: RoleContext) -> int:
    """How often the role listed anything."""
    return faulty(role).calls["listdir"]


def supersede(world: Server, writer: str = "learner-0", attempt: int = 2) -> None:
    """A newer attempt takes its lease, and everybody sees it."""
    context(world, writer, attempt)
    world.clock.advance(VISIBILITY_S)


# --- gaps ------------------------------------------------------------------------------------------------------------


def test_a_holder_that_renews_writes_without_reading_any_lease() -> None:
    world = server()
    role = context(world)
    before = listings(role)
    for _ in range(100):
        world.clock.advance(LEASE_S / 8)
        role.beat()
        role.before_write()
    assert listings(role) == before


@pytest.mark.parametrize("beats_first", [False, True], ids=["main thread first", "heartbeat first"])
def test_after_a_stop_a_superseded_holder_leaves_and_another_goes_on(beats_first: bool) -> None:
    for superseded in (False, True):
        world = server()
        role = context(world)
        if superseded:
            supersede(world)
        world.clock.advance(LEASE_S)
        if beats_first:
            role.beat()
        if superseded:
            with pytest.raises(LeaseLost, match="superseded by attempt 2"):
                role.before_write()
        else:
            before = listings(role)
            role.before_write()
            assert listings(role) == before + 1
            role.beat()
            role.before_write()
            settled = listings(role)
            role.beat()
            role.before_write()
            assert listings(role) == settled, "renewals end the gap"


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STOP])
def test_a_renewal_that_itself_hangs_is_a_gap(fault: Fault) -> None:
    world = server()
    role = context(world)
    faulty(role).fail("overwrite", fault)
    supersede(world)
    role.beat()
    with pytest.raises(LeaseLost):
        role.before_write()


def test_a_stop_within_the_look_at_the_leases_asks_for_another_look() -> None:
    world = server()
    role = context(world)
    world.clock.advance(LEASE_S)
    faulty(role).fail("listdir", Fault.STOP)
    role.before_write()
    role.beat()
    supersede(world)
    with pytest.raises(LeaseLost):
        role.before_write()


EVENTS = ("short", "long", "beat", "beat hangs", "beat fails", "write", "listing fails", "listing stops", "supersede")


@settings(PROPERTY, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    events=st.lists(st.sampled_from(EVENTS), min_size=3, max_size=25),
)
def test_no_write_is_allowed_behind_a_gap_in_which_a_visible_lease_appeared(seed: int, events: list[str]) -> None:
    world = server(seed)
    role = context(world)
    fs = faulty(role)
    renewed_at, visible_at, must_leave = world.clock(), None, False
    for event in events:
        if event in ("short", "long"):
            world.clock.advance(LEASE_S * (0.2 if event == "short" else 0.8))
        elif event == "supersede" and visible_at is None:
            supersede(world)
            visible_at = world.clock()
        elif event == "listing fails":
            fs.fail("listdir", Fault.STALE)
        elif event == "listing stops":
            fs.fail("listdir", Fault.STOP)
        elif event.startswith("beat"):
            fault = {"beat": None, "beat hangs": Fault.HANG, "beat fails": Fault.ERROR}[event]
            if fault is not None:
                fs.fail("overwrite", fault)
            began = world.clock()
            with suppress(OSError):
                role.beat()
                must_leave |= visible_at is not None and visible_at <= began and world.clock() - renewed_at > LEASE_S / 2
                renewed_at = world.clock()
        must_leave |= visible_at is not None and world.clock() - max(renewed_at, visible_at) > LEASE_S / 2
        try:
            role.before_write()
        except LeaseLost:
            assert visible_at is not None
            return
        except OSError:
            continue
        assert not must_leave


# --- a filesystem that hangs or fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["overwrite", "append", "sync", "listdir", "read"])
@pytest.mark.parametrize("fault", [Fault.HANG, Fault.STOP])
def test_a_filesystem_that_hangs_for_twice_the_lease_ends_nobody(operation: str, fault: Fault) -> None:
    world = server()
    learner, orchestrator = context(world), context(world, "orchestrator-0")
    roles = (learner, orchestrator)
    journals = [role.journal() for role in roles]
    follower = orchestrator.follow("learner-0")
    journals[0].write(learner.cut_predecessors())
    for role in roles:
        faulty(role).fail(operation, fault)
    for number in range(5):
        for role, journal in zip(roles, journals, strict=True):
            role.beat()
            journal.write(Incident(what=f"{number}"))
            role.pause()
        follower.poll()
    world.clock.advance(VISIBILITY_S)
    follower.poll()
    assert follower.attempt == 1 and not any(role.leave.is_set() for role in roles)
    assert [journal.synced_bytes for journal in journals] == [journal.bytes for journal in journals]


def test_a_filesystem_that_fails_for_twice_the_lease_stops_publishing_only() -> None:
    world = server()
    role = context(world)
    journal = role.journal()
    faulty(role).rate = 0.0
    for number in range(20):
        world.clock.advance(LEASE_S / 10)
        faulty(role).fail("overwrite", Fault.ERROR)
        with pytest.raises(OSError):
            role.beat()
        faulty(role).fail("listdir", Fault.STALE)
        journal.append(Incident(what=f"{number}"))
        if number > 5:
            with pytest.raises(OSError):
                journal.flush()
        faulty(role).heal()
    role.beat()
    journal.flush()
    assert journal.synced_bytes == journal.bytes and not role.leave.is_set()
    heartbeat = read_heartbeat(faulty(role), PATHS.heartbeats, "learner-0", 1)
    assert heartbeat is not None and heartbeat.counter == 22


def test_a_stopped_zombie_keeps_its_records_and_publishes_nothing() -> None:
    world = server()
    role = context(world)
    journal = role.journal()
    journal.append(Incident(what="unwritten"))
    supersede(world)
    world.clock.advance(LEASE_S)
    with pytest.raises(LeaseLost):
        role.finish(journal, "completed")
    assert world.current(PATHS.done("learner-0")) is None and journal.synced_bytes == 0


# --- heartbeat -------------------------------------------------------------------------------------------------------


def fast_context(world: Server, lease_s: float = 0.08) -> RoleContext:
    """A role whose heartbeat's thread renews every 10 ms of real time."""
    fs = world.node("role")
    timing = Timing(visibility_s=0.0, lease_s=lease_s)
    return RoleContext(run_config(timing), PATHS, "learner-0", 1, token="t", fs=fs, clock=fs.clock)


def until(reached: Callable[[], bool]) -> bool:
    """Waits, much longer than it takes, for the other thread."""
    tick = threading.Event()
    for _ in range(3000):
        if reached():
            return True
        tick.wait(0.01)
    return False


@pytest.fixture
def started() -> Iterator[list[RoleContext]]:
    """Contexts that are stopped afterwards."""
    contexts: list[RoleContext] = []
    yield contexts
    for role in contexts:
        role.stop()


def test_errors_at_the_start_and_later_do_not_end_the_heartbeat(started: list[RoleContext]) -> None:
    world = server()
    role = fast_context(world)
    started.append(role)
    faulty(role).fail("overwrite", Fault.ERROR, Fault.FULL, Fault.SHORT, Fault.ERROR)
    role.start()

    def beats() -> bool:
        with suppress(OSError):
            heartbeat = read_heartbeat(faulty(role), PATHS.heartbeats, "learner-0", 1)
            return heartbeat is not None and heartbeat.counter > 6
        return False

    assert until(beats) and not role.leave.is_set()


def test_who_begins_to_serve_says_so_long_before_the_next_renewal_is_due(started: list[RoleContext]) -> None:
    role = fast_context(server(), lease_s=8e5)
    started.append(role)
    role.start()

    def said() -> str | None:
        heartbeat = read_heartbeat(faulty(role), PATHS.heartbeats, "learner-0", 1)
        return None if heartbeat is None else f"{heartbeat.counter} {heartbeat.state}"

    for state, expected in (("waiting", "1 starting"), ("serving", "2 serving"), ("serving, waiting: version 3", "2 serving")):
        role.say(state)
        assert until(lambda expected=expected: said() == expected)  # type: ignore[misc]
    role.say("leaving")
    role.say("serving")
    assert until(lambda: said() == "3 serving")


def test_a_heartbeat_that_ends_by_a_fault_of_ours_makes_the_role_leave(
    started: list[RoleContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    role = fast_context(server())
    started.append(role)
    role.start()
    role.progress = "many"  # type: ignore[assignment]
    assert role.leave.wait(30) and until(lambda: len(reported) == 1)


def test_stopping_the_heartbeat_is_no_reason_to_leave(started: list[RoleContext]) -> None:
    role = fast_context(server())
    started.append(role)
    role.start()
    role.stop()
    assert not role.leave.is_set()


def test_an_idle_zombie_notices_and_leaves() -> None:
    world = server()
    role = context(world)
    role.leases_check_in_background()
    role.pause()
    supersede(world)
    faulty(role).fail("listdir", Fault.STALE)
    role.leases_check_in_background()
    role.pause()
    assert not role.leave.is_set()
    role.leases_check_in_background()
    assert role.leave.is_set()
    with pytest.raises(LeaseLost, match="superseded by attempt 2"):
        role.pause()
    before = listings(role)
    with pytest.raises(LeaseLost):
        role.before_write()
    assert listings(role) == before


# --- orphans ---------------------------------------------------------------------------------------------------------


def orphan_after(role: RoleContext, world: Server, seconds: float, each: Callable[[], object] = lambda: None) -> bool:
    """Whether the role is an orphan after looking for that long, ten times in orphan_s."""
    found = False
    end = world.clock() + seconds
    while world.clock() < end:
        world.clock.advance(ORPHAN_S / 10)
        each()
        found = role.check_orphaned()
    return found


def test_an_orphan_is_one_whose_supervisor_was_silent_for_orphan_s() -> None:
    world = server()
    role = context(world)
    assert not orphan_after(role, world, 3 * ORPHAN_S), "started by hand: there is no supervisor to miss"
    supervisor = context(world, "supervisor-0")
    assert not orphan_after(role, world, 3 * ORPHAN_S, supervisor.beat)
    assert not orphan_after(role, world, 0.9 * ORPHAN_S)
    supervisor.beat()
    assert not orphan_after(role, world, ORPHAN_S)
    context(world, "supervisor-0", 2)
    assert not orphan_after(role, world, 0.9 * ORPHAN_S), "a new epoch counts anew"
    assert orphan_after(role, world, 0.3 * ORPHAN_S)


def test_a_supervisor_that_left_a_tombstone_is_missed_after_orphan_s() -> None:
    world = server()
    role = context(world)
    supervisor = context(world, "supervisor-0")
    supervisor.leases.tombstone("supervisor-0", 2, "t")
    assert not orphan_after(role, world, 0.9 * ORPHAN_S)
    assert orphan_after(role, world, 0.3 * ORPHAN_S)


def test_leases_that_cannot_be_listed_make_no_orphan() -> None:
    world = server()
    role = context(world)
    context(world, "supervisor-0")
    role.check_orphaned()
    assert not orphan_after(role, world, 3 * ORPHAN_S, lambda: faulty(role).fail("listdir", Fault.STALE))


# --- beginning and end -----------------------------------------------------------------------------------------------


def test_finish_flushes_and_says_where_the_journal_ends() -> None:
    world = server()
    role = context(world)
    journal = role.journal()
    journal.append(Incident(what="last"))
    role.finish(journal, "completed", "all steps")
    done = Done.model_validate_json(faulty(role).read(PATHS.done("learner-0")))
    assert (done.attempt, done.outcome, done.detail) == (1, "completed", "all steps")
    assert (done.journal_bytes, done.journal_hash) == (journal.synced_bytes, journal.hash)


def test_a_successor_cuts_and_its_readers_follow() -> None:
    world = server()
    first = context(world)
    reader = context(world, "orchestrator-0").follow("learner-0")
    journal = first.journal()
    journal.write(first.cut_predecessors())
    journal.write(Incident(what="one"))
    second = context(world, attempt=2)
    cuts = second.cut_predecessors()
    second.journal().write(cuts)
    journal.write(Incident(what="zombie"))
    world.clock.advance(VISIBILITY_S)
    assert [item.record.what for item in reader.poll() if isinstance(item.record, Incident)] == ["one"]
    assert list_segments(faulty(second), PATHS.journal("learner-0")) == {1: [0], 2: [0]}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory on the real filesystem; signal handlers are put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    RunPaths(tmp_path).run_file.write_text(run_config().model_dump_json())
    tmp_path.chmod(0o755)
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def arguments(run_dir: Path, attempt: int = 1) -> list[str]:
    """The command line of a role."""
    return ["--run-dir", str(run_dir), "--replica", "0", "--attempt", str(attempt)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (LeaseLost("superseded", why="superseded"), 0),
        (JournalCorrupt("bad frame"), 9),
        (OSError(28, "disk full"), 1),
        (ValueError("ours"), 1),
    ],
    ids=["done", "superseded", "named error", "disk", "bug"],
)
def test_exit_codes(run_dir: Path, error: Exception | None, code: int) -> None:
    def main(role: RoleContext) -> None:
        assert role.leases.newest("learner-0") == 1
        if error is not None:
            raise error

    assert run_role("learner", main, arguments(run_dir)) == code


def test_a_twin_and_a_superseded_attempt_leave_without_failure_and_do_nothing(run_dir: Path) -> None:
    leases = LeaseFolder(RoleContext(run_config(), RunPaths(run_dir), "learner-0", 1).fs, RunPaths(run_dir).leases, "r")
    leases.acquire("learner-0", 2, "t")
    for attempt in (1, 2):
        assert run_role("learner", pytest.fail, arguments(run_dir, attempt)) == 0


def test_a_folder_that_is_no_run_and_a_lease_that_cannot_be_taken_are_failures(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o755)
    assert run_role("learner", pytest.fail, arguments(tmp_path / "empty")) == 2
    RunPaths(run_dir).leases.write_text("a file where the folder should be")
    assert run_role("learner", pytest.fail, arguments(run_dir)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_asks_the_role_to_leave(run_dir: Path, number: signal.Signals) -> None:
    def main(role: RoleContext) -> None:
        assert not role.leave.is_set()
        os.kill(os.getpid(), number)
        assert role.leave.wait(30)

    assert run_role("learner", main, arguments(run_dir)) == DRAINED_EXIT_CODE


def test_a_role_that_finished_is_done_though_a_signal_came(run_dir: Path) -> None:
    def main(role: RoleContext) -> None:
        role.leave.set()
        role.finish(role.journal(), "completed")

    assert run_role("learner", main, arguments(run_dir)) == 0
