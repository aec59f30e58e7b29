"""Several engines behind one: where sessions go, and that no token is lost, told twice or sampled by the wrong weights,
wherever an engine dies."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import DigestMismatch, MilesError
from miles_core.records import Version
from miles_core.rollout.engine import Counts, Finished, Request
from miles_core.rollout.meter import MeteredEngine
from miles_core.rollout.router import FIRST_MEND_S, HAND_ONS, LONGEST_MAKING_S, RoutedEngine
from tests.e2e.runs import wait_for
from tests.protocol.faulty_fs import PROPERTY
from tests.unit.session_world import ASK
from tests.unit.session_world import World as SessionWorld
from tests.unit.test_sampler import FakeEnvironment, ScriptedEngine, sampler_of
from tests.unit.test_sampler import request as sample_request
from tests.unit.test_sampler import run as run_sampler
from tests.unit.toy_engines import POINTS, Toy, toy_turn

V0, V1 = Version(0, 1), Version(1, 1)
SLOTS = 3


@dataclass
class Fleet:
    """A RoutedEngine over Toys, and the time."""

    engines: int = 2
    slots: int = SLOTS
    settings: dict[str, Any] = field(default_factory=dict)
    made: list[Toy] = field(default_factory=list)
    """All that ever were, in their order."""
    now: float = 0.0
    may_make: threading.Event = field(default_factory=threading.Event)
    """Engines that are made again wait for it."""
    fault: Exception | None = None
    """What making one again raises."""

    def __post_init__(self) -> None:
        self.may_make.set()
        self.routed = RoutedEngine(self._make, self.engines, clock=lambda: self.now, **self.settings)

    def _make(self, index: int) -> Toy:
        is_first = len(self.made) < self.engines
        if self.fault is not None:
            raise self.fault
        assert self.may_make.wait(30)
        self.made.append(Toy(self.slots, V0 if is_first else Version(-1, 0), f"engine {index}"))
        return self.made[-1]

    @property
    def living(self) -> list[Toy]:
        return [toy for toy in self.made if not toy.is_dead and not toy.is_closed]

    def ask(self, key: str, tokens: tuple[int, ...] = (1, 2), limit: int = 4, seed: int = 5) -> Request:
        request = Request(key, tokens, limit, 1.0, seed)
        self.routed.add(request)
        return request

    def mend(self, weights: float = 0.0) -> None:
        """What the worker does, with a probe that expects 0."""

        def verify(engine: Any) -> None:
            engine.load_weights({"weights": weights}, self.routed.version)
            assert engine.logprobs([[1, 2]])[0][0] == 0, "the probe"

        self.routed.mend(verify)


def gap_of(engine: Any) -> float:
    """A probe that expects 0."""
    gap = float(engine.logprobs([[1, 2]])[0][0])
    if gap:
        raise DigestMismatch(f"wrong in {engine.name}")
    return gap


def where(fleet: Fleet, key: str) -> list[str]:
    return [toy.name for toy in fleet.living if key in toy.held]


def finish(routed: RoutedEngine) -> list[Finished]:
    turns = []
    while routed.running:
        turns += routed.step()
    return turns


# --- routing ---------------------------------------------------------------------------------------------------------


def test_a_new_session_goes_where_fewest_turns_are_sampled_and_its_later_turns_to_the_same_engine() -> None:
    fleet = Fleet()
    for key in "abc":
        fleet.ask(key)
    assert [where(fleet, key) for key in "abc"] == [["engine 0"], ["engine 1"], ["engine 0"]]
    finish(fleet.routed)
    fleet.ask("d", limit=1)
    fleet.ask("e")
    assert (where(fleet, "d"), where(fleet, "e")) == (["engine 0"], ["engine 1"]), "what waits does not count"
    fleet.ask("b")
    fleet.ask("a")
    assert where(fleet, "a") == ["engine 0"] and where(fleet, "b") == ["engine 1"]
    assert fleet.made[0].counts == Counts(prompt_tokens=2 + 2 + 2 + len(toy_turn(Request("a", (1, 2), 4, 1.0, 5), 0)) + 4)
    fleet.ask("f")
    assert where(fleet, "f") == ["engine 1"], "the other has no slot"
    assert fleet.routed.free_slots == 0 and fleet.routed.running == 5
    with pytest.raises(ValueError, match="session g: all 6 slots are taken"):
        fleet.ask("g")


def test_without_affinity_a_later_turn_goes_where_fewest_turns_are_sampled() -> None:
    fleet = Fleet(settings={"affinity": False})
    fleet.ask("a")
    (first,) = finish(fleet.routed)
    fleet.ask("b")
    fleet.ask("a")
    assert where(fleet, "a") == ["engine 1"] and fleet.routed.free_slots == 2 * SLOTS - 2
    turns = {turn.session_key: turn for turn in finish(fleet.routed)}
    assert turns["a"].tokens.tolist() == toy_turn(Request("a", (1, 2), 4, 1.0, 5), 2 + len(first.tokens))


def test_a_refused_turn_changes_nothing() -> None:
    fleet = Fleet()
    for _ in range(2):
        with pytest.raises(ValueError, match="engine 0 refuses"):
            fleet.ask("a", ())
        assert fleet.routed.free_slots == 2 * SLOTS
        with pytest.raises(KeyError):
            fleet.routed.release("a")
    fleet.ask("b", (1,))
    (turn,) = finish(fleet.routed)
    with pytest.raises(ValueError, match="engine 0 refuses"):
        fleet.ask("b", ())
    fleet.ask("b", (1,))
    (later,) = finish(fleet.routed)
    assert later.tokens.tolist() == toy_turn(Request("b", (1,), 4, 1.0, 5), 1 + len(turn.tokens))
    with pytest.raises(ValueError, match="weights refused"):
        fleet.routed.load_weights({}, V1)
    assert len(fleet.living) == 2 and fleet.routed.version == V0


def test_figures_name_the_load_of_each_engine_and_the_sum_is_metered() -> None:
    fleet = Fleet()
    metered = MeteredEngine(fleet.routed, lambda: fleet.now)
    for key in "abc":
        metered.add(Request(key, (1,), 1 if key == "a" else 9, 1.0, 7))
    metered.step()
    assert fleet.routed.figures() == {
        "engine_active": [1, 1], "engine_waiting": [1, 0], "engine_deaths": 0, "handed_on": 0,
    }  # fmt: skip
    fleet.made[1].dies_at = "step"
    metered.step()
    assert fleet.routed.figures() == {
        "engine_active": [2, None], "engine_waiting": [1, None], "engine_deaths": 1, "handed_on": 1,
    }  # fmt: skip
    fleet.now += 10
    assert metered.figures()["slots_filled"] == 0.5


# --- death -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_an_engine_that_dies_is_closed_and_its_sessions_go_on_elsewhere(point: str) -> None:
    fleet = Fleet(slots=6)
    asked = {key: fleet.ask(key, (1,) * (2 + number), 8, seed=number) for number, key in enumerate("abc")}
    fleet.routed.step()
    fleet.made[0].dies_at = point
    if point in ("add", "added"):
        asked |= {key: fleet.ask(key, seed=9) for key in "de"}
    if point == "release":
        fleet.routed.release("a")
        del asked["a"]
    if point == "load":
        fleet.routed.load_weights({"weights": 0.0}, V1)
    if point == "probe":
        assert fleet.routed.prove(gap_of) == 0
    turns = {turn.session_key: turn for turn in finish(fleet.routed)}
    assert fleet.living == [fleet.made[1]] and fleet.made[0].is_closed and not fleet.made[0].misused
    assert {key: turn.tokens.tolist() for key, turn in turns.items()} == {key: toy_turn(r, 0) for key, r in asked.items()}
    assert all(turn.reason in ("end", "length") for turn in turns.values())


def test_an_engine_that_alone_fails_the_probe_has_died_and_what_all_fail_is_the_versions_fault() -> None:
    fleet = Fleet(engines=3, slots=6)
    asked = {key: fleet.ask(key, (1, 2), 8, seed=number) for number, key in enumerate("abc")}
    fleet.made[0].weights = 1.0
    assert fleet.routed.prove(gap_of) == 0
    assert fleet.living == fleet.made[1:] and fleet.made[0].is_closed
    for toy in fleet.living:
        toy.weights = 1.0
    with pytest.raises(DigestMismatch, match="wrong in engine 1"):
        fleet.routed.prove(gap_of)
    assert fleet.living == fleet.made[1:], "the next version may be right"
    fleet.made[1].dies_at = "probe"
    with pytest.raises(DigestMismatch, match="wrong in engine 2"):
        fleet.routed.prove(gap_of)
    assert fleet.living == fleet.made[2:]
    turns = {turn.session_key: turn.tokens.tolist() for turn in finish(fleet.routed)}
    assert turns == {key: toy_turn(request, 0) for key, request in asked.items()}


def test_a_turn_without_a_slot_waits_for_one_and_nobody_new_comes_between() -> None:
    fleet = Fleet(slots=1)
    fleet.ask("a", limit=9, seed=1)
    fleet.ask("b", limit=1)
    fleet.made[0].dies_at = "step"
    (turn,) = fleet.routed.step()
    assert turn.session_key == "b" and fleet.routed.free_slots == 0
    assert fleet.routed.step() == [] and where(fleet, "a") == []
    fleet.routed.release("b")
    assert fleet.routed.free_slots == 0, "the slot is the waiting session's"
    with pytest.raises(ValueError, match="session c: all 1 slots are taken"):
        fleet.ask("c")
    fleet.routed.step()
    assert where(fleet, "a") == ["engine 1"]
    (turn,) = finish(fleet.routed)
    assert turn.tokens.tolist() == toy_turn(Request("a", (1, 2), 9, 1.0, 1), 0)


@pytest.mark.parametrize("hands_on", [True, False])
def test_a_session_that_is_not_handed_on_ends_broken_now_or_with_its_next_turn(hands_on: bool) -> None:
    fleet = Fleet(engines=HAND_ONS + 2, settings={"hands_on": hands_on})
    fleet.ask("runs", limit=99, seed=4)
    fleet.ask("waits", limit=1)
    fleet.routed.step()
    for _ in range(HAND_ONS + 1 if hands_on else 1):
        (held,) = [toy for toy in fleet.living if "runs" in toy.held]
        held.dies_at = "step"
        turns = fleet.routed.step()
    assert [(turn.session_key, len(turn.tokens), turn.reason) for turn in turns] == [("runs", 0, "broken")]
    fleet.ask("runs")
    assert fleet.routed.running, "somebody must ask for the next step"
    assert [(turn.session_key, turn.reason) for turn in fleet.routed.step()] == [("runs", "broken")]
    before = fleet.routed.free_slots
    fleet.routed.release("runs")
    assert fleet.routed.free_slots == before, "it had no slot"


def test_a_replica_without_engines_ends_and_says_what_the_last_one_died_of() -> None:
    fleet = Fleet()
    fleet.ask("a")
    for toy in fleet.made:
        toy.dies_at = "step"
    fleet.routed.step()
    with pytest.raises(
        MilesError, match=r"all 2 engines .* have died, the last one, engine 1, of ToyDied: engine 1 died at step"
    ):
        fleet.routed.step()


def test_one_that_refuses_what_another_has_taken_is_dead() -> None:
    fleet = Fleet()

    def refuse(tensors: Any, version: Version) -> None:
        raise ValueError("weights refused")

    fleet.made[1].load_weights = refuse  # type: ignore[method-assign]
    fleet.routed.load_weights({"weights": 0.0}, V1)
    assert fleet.routed.version == V1 and fleet.made[1].is_closed and not fleet.made[0].is_closed


# --- return ----------------------------------------------------------------------------------------------------------


def test_a_dead_engine_serves_again_when_its_weights_were_loaded_and_verified() -> None:
    fleet = Fleet(slots=1)
    fleet.ask("a", limit=9, seed=1)
    fleet.ask("b", limit=9, seed=1)
    fleet.routed.load_weights({"weights": 0.0}, V1)
    fleet.made[0].dies_at = "step"
    fleet.routed.step()
    assert not fleet.routed.is_mendable
    fleet.now += FIRST_MEND_S
    assert fleet.routed.is_mendable
    fleet.mend(weights=-1.0)
    assert fleet.made[2].is_closed and not fleet.routed.is_mendable
    fleet.now += FIRST_MEND_S
    assert not fleet.routed.is_mendable, "a failure doubles the wait"
    fleet.now += FIRST_MEND_S
    fleet.mend()
    assert len(fleet.living) == 2 and fleet.made[3].version == V1 and not fleet.routed.is_mendable
    turns = {turn.session_key: turn for turn in finish(fleet.routed)}
    assert turns["a"].tokens.tolist() == turns["b"].tokens.tolist() and turns["a"].versions[-1] == V1


def test_where_engines_step_in_threads_the_others_go_on_while_one_is_made_again() -> None:
    fleet = Fleet(slots=1, settings={"is_parallel": True})
    fleet.ask("a", limit=40, seed=1)
    fleet.ask("b", limit=40, seed=1)
    fleet.made[0].dies_at = "step"
    fleet.routed.step()
    fleet.now += FIRST_MEND_S
    fleet.may_make.clear()
    fleet.mend()
    assert not fleet.routed.is_mendable and len(fleet.living) == 1
    before = fleet.routed.running
    fleet.routed.load_weights({"weights": 0.0}, V1)
    fleet.routed.step()
    assert before == fleet.routed.running == 1, "they go on"
    fleet.may_make.set()
    wait_for("the engine", lambda: fleet.routed.is_mendable, 30)
    fleet.mend()
    assert len(fleet.living) == 2 and fleet.made[2].version == V1
    assert {turn.session_key for turn in finish(fleet.routed)} == {"a", "b"}


def test_an_engine_that_never_starts_in_its_thread_ends_the_replica() -> None:
    fleet = Fleet(settings={"is_parallel": True})
    fleet.ask("a")
    fleet.made[0].dies_at = "step"
    fleet.routed.step()
    fleet.now += FIRST_MEND_S
    fleet.may_make.clear()
    fleet.mend()
    fleet.now += LONGEST_MAKING_S + 1
    assert fleet.routed.is_mendable
    with pytest.raises(MilesError, match="engine 0 was not made again within 1801 s"):
        fleet.mend()
    fleet.may_make.set()


def test_an_engine_that_cannot_be_made_in_its_thread_is_tried_again_later() -> None:
    fleet = Fleet(settings={"is_parallel": True})
    fleet.ask("a", limit=40, seed=1)
    fleet.made[0].dies_at = "step"
    fleet.routed.step()
    fleet.now += FIRST_MEND_S
    fleet.fault = OSError("no GPU")
    fleet.mend()
    wait_for("its failure", lambda: fleet.routed.is_mendable, 30)
    fleet.mend()
    assert not fleet.routed.is_mendable and len(fleet.living) == 1
    fleet.fault, fleet.now = None, fleet.now + 2 * FIRST_MEND_S
    fleet.mend()
    wait_for("the engine", lambda: fleet.routed.is_mendable, 30)
    fleet.mend()
    assert len(fleet.living) == 2


# --- whatever happens ------------------------------------------------------------------------------------------------


class Driver:
    """Does what drivers of an engine do, and checks every turn that comes against what one engine would have sampled."""

    def __init__(self, engines: int, slots: int, hands_on: bool) -> None:
        self.fleet = Fleet(engines, slots, {"hands_on": hands_on})
        self.routed, self.hands_on = self.fleet.routed, hands_on
        self.tokens: dict[str, int] = {}
        """Of each session, how many it has."""
        self.rows: dict[str, list[int]] = {}
        self.open: dict[str, tuple[Request, Version]] = {}
        """Turns that were asked for, and the version of then."""
        self.lost: set[str] = set()
        self.made = 0

    def new(self, tokens: int, limit: int) -> None:
        if self.routed.free_slots:
            self.made += 1
            key = f"s{self.made}"
            self.tokens[key], self.rows[key] = 0, []
            self.ask(key, tokens, limit)

    def idle(self) -> list[str]:
        return [key for key in self.tokens if key not in self.open]

    def ask(self, key: str, tokens: int, limit: int) -> None:
        self.open[key] = self.fleet.ask(key, (1,) * tokens, limit, self.made), self.routed.version

    def step(self) -> None:
        for turn in self.routed.step():
            self.told(turn)

    def told(self, turn: Finished) -> None:
        key = turn.session_key
        request, since = self.open.pop(key)
        if turn.reason == "broken":
            deaths = sum(toy.is_dead for toy in self.fleet.made)
            assert key in self.lost or deaths > (HAND_ONS if self.hands_on else 0)
            self.lost.add(key)
            return
        assert key not in self.lost
        assert turn.tokens.tolist() == toy_turn(request, self.tokens[key])
        start = self.tokens[key] + len(request.tokens)
        self.tokens[key] = start + len(turn.tokens)
        assert turn.logprobs.tolist() == [-position for position in range(start, self.tokens[key])]
        assert len(turn.versions) == len(turn.tokens)
        assert [since, *turn.versions, self.routed.version] == sorted([since, *turn.versions, self.routed.version])
        assert turn.experts is not None
        self.rows[key] += turn.experts.flatten().tolist()
        assert self.rows[key] == list(range(self.tokens[key] - 1))

    def release(self, key: str) -> None:
        self.routed.release(key)
        for known in (self.tokens, self.rows, self.open):
            known.pop(key, None)  # type: ignore[attr-defined]

    def end(self) -> None:
        """Every turn is told while an engine lives; sessions that are through leave, so those that wait have their turn."""
        for _ in range(500):
            if not self.open:
                break
            for key in self.idle():
                self.release(key)
            self.step()
        assert not self.open
        for key in list(self.tokens):
            self.release(key)
        living = self.fleet.living
        assert self.routed.free_slots == sum(toy.free_slots for toy in living) == len(living) * self.fleet.slots


@settings(PROPERTY, max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_whatever_dies_no_token_is_lost_or_told_twice(data: st.DataObject, engines: int, slots: int, hands_on: bool) -> None:
    driver = Driver(engines, slots, hands_on)
    moves = ["new", "ask", "step", "step", "step", "release", "die", "load", "mend"]
    try:
        for move in data.draw(st.lists(st.sampled_from(moves), max_size=40)):
            living = driver.fleet.living
            if move == "new":
                driver.new(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6)))
            elif move == "ask" and driver.idle():
                driver.ask(
                    data.draw(st.sampled_from(driver.idle())), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
                )
            elif move == "step":
                driver.step()
            elif move == "release" and driver.tokens:
                driver.release(data.draw(st.sampled_from(sorted(driver.tokens))))
            elif move == "die":
                toy = data.draw(st.sampled_from(living))
                toy.dies_at, toy.is_mute = data.draw(st.sampled_from(POINTS)), data.draw(st.booleans())
            elif move == "load":
                driver.routed.load_weights({"weights": 0.0}, Version(driver.routed.version.step + 1, 1))
            elif move == "mend":
                driver.fleet.now += 1e6
                if driver.routed.is_mendable:
                    driver.fleet.mend(weights=data.draw(st.sampled_from([0.0, 1.0])))
        driver.end()
    except MilesError as error:
        assert "engines of this replica have died" in str(error) and not driver.fleet.living
    assert [toy.misused for toy in driver.fleet.made if toy.misused] == []
    assert all(toy.is_closed for toy in driver.fleet.made if toy.is_dead)


# --- what becomes of a broken turn -----------------------------------------------------------------------------------


def broken(turn: Finished) -> Finished:
    return dataclasses.replace(turn, tokens=turn.tokens[:0], logprobs=turn.logprobs[:0], versions=(), reason="broken")


async def test_a_broken_turn_fails_its_sample_as_infrastructure_and_frees_the_slot() -> None:
    class Breaking(ScriptedEngine):
        def step(self) -> list[Finished]:
            return [broken(turn) if turn.session_key == "g/0" else turn for turn in super().step()]

    engine = Breaking({"g/0": ["2"], "g/1": ["2"]})
    sampler = sampler_of(engine, FakeEnvironment())
    for key in ("g/0", "g/1"):
        sampler.submit(sample_request(key))
    found = {key: (row.status, row.failure_kind) for key, row in (await run_sampler(sampler)).items()}
    assert found == {"g/0": ("failed", "infrastructure"), "g/1": ("complete", "none")}
    assert engine.free_slots == 4


def test_a_broken_turn_of_an_agent_is_502_and_frees_the_slot() -> None:
    world = SessionWorld()
    try:
        world.engine.spoil = broken
        answer = world.open().post(ASK)
        assert answer.status_code == 502 and "the engine died" in answer.text
        assert world.engine.free_slots == 4
    finally:
        world.close()
