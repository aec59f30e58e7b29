"""The model of orders and of who owns a sample (I6, I10): two orchestrator attempts x two replica attempts that never stop.

Who decides is the code: State and Planner what an orchestrator writes, `orders_to_repeat` what a successor copies again,
`is_mine` which orders a replica does, `may_act` and `cut_is_due` who may read what and when a cut is due. Grading is one step:
a grader that answers at once. The model adds what nobody decides, as in model_batches.py: who goes next, how far a read
reaches, whether all of a decision or only its first record is on disk when its maker dies, and whether a replica seals what it
was ordered or gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest

from miles_core.orchestrator.planner import Planner
from miles_core.orchestrator.state import Receiver, State
from miles_core.records import (
    Batch,
    Cut,
    Cuts,
    Drop,
    GradeOrder,
    Incident,
    Order,
    Returned,
    ShardEntry,
    ShardSealed,
    Version,
    WriterCut,
    sample_id,
    trajectory_id,
)
from miles_core.rollbacks import Rollbacks
from miles_core.runtime.receiver import is_mine
from miles_core.store import follow
from tests.protocol.exploring import Explored, Words, explore
from tests.protocol.model_batches import GRADER, graded
from tests.protocol.simulation import simulated_recipe

pytestmark = pytest.mark.timeout(1200)

Stream = tuple[int, ...]
O1, O2, R1, R2 = range(4)
NAMES = ("O1", "O2", "R1", "R2")
NOT_YET = -1
NO_ROLLBACK = Rollbacks()
WORDS = Words()
RECIPE = simulated_recipe(
    steps=1, rollout__pools=({"name": "main", "replicas": 1, "slots": 9},), grader__replicas=1, orchestrator__prompts=1,
    orchestrator__samples=2, orchestrator__capacity_batches=1.0, rollout__sample_attempts=3,
)  # fmt: skip


class Model(NamedTuple):
    """Everything that was written and what each attempt was delivered."""

    streams: tuple[Stream, ...]
    """By attempt: journals of O1 and O2, manifests of R1 and R2; () until it opened."""
    marks: tuple[int, int]
    """Records of O1 (R1) when the lease of O2 (R2) appeared; NOT_YET before."""
    repeats: Stream
    """Orders that O2 copies again."""
    seen: tuple[tuple[int, int], ...]
    """By attempt: records of R1 and R2 that an orchestrator was delivered; copies of O1 and O2 that a replica was."""


class Action(NamedTuple):
    """What an attempt does: lease, open or cut (number = where), read (prefix; negative: of attempt 2), write (how many),
    seal (word)."""

    what: str
    who: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules themselves: a test breaks one to see the check fail."""

    gives_back: bool = False
    """A replica may return a sample unstarted, and leaves."""
    may_act: Callable[[int, int], bool] = follow.may_act
    cut_is_due: Callable[[int, int, float, float], bool] = follow.cut_is_due
    has_successor: bool = True
    """The replica may be replaced."""
    repeats: bool = True
    """A successor of the orchestrator copies what is open again."""
    cuts_first: bool = True
    """Nobody gets a sample of another attempt before that one is cut."""


START = Model(
    streams=((WORDS.number(1, Cuts()),), (), (WORDS.number(1, Incident(what="opened")),), ()),
    marks=(NOT_YET, NOT_YET), repeats=(), seen=((0, 0),) * 4,
)  # fmt: skip
"""A manifest begins with a record that says nothing, as one that is not opened has none."""


def attempt_of(who: int) -> int:
    return 1 + who % 2


def receiver(who: int) -> Receiver:
    return Receiver("rollout-0", attempt_of(who))


def mark_of(state: Model, who: int) -> int:
    return state.marks[who // 2]


def newest(state: Model, who: int) -> int:
    """The highest lease of that attempt's role."""
    return 1 if mark_of(state, who) == NOT_YET else 2


def inherited(state: Model, who: int) -> Stream:
    """Records of O1 that count for O2."""
    if who != O2 or not state.streams[O2]:
        return ()
    return state.streams[O1][: WORDS.record(state.streams[O2][0]).cuts[0].bytes]


def cut_of_replica(*streams: Stream) -> int | None:
    """Of R1, as an orchestrator that knows these records has it; the first one counts."""
    found = [record.cut.bytes for record in map(WORDS.record, sum(streams, ())) if isinstance(record, WriterCut)]
    return found[0] if found else None


def orders_of(stream: Stream) -> Stream:
    return tuple(word for word in stream if isinstance(WORDS.record(word), Order))


def copies_of(state: Model, who: int) -> Stream:
    """All copies that an orchestrator has written or will write, in order."""
    return (state.repeats if who == O2 else ()) + orders_of(state.streams[who])


# --- decisions -------------------------------------------------------------------------------------------------------


@cache
def state_of(old: Stream, own: Stream, first: Stream, is_cut: bool, second: Stream) -> State:
    """What an orchestrator knows: its journal, then the manifests, as a successor folds them."""
    state = State()
    state.take_over(WORDS.items(old), NO_ROLLBACK)
    for item in WORDS.items(own):
        state.apply(item.record)
    for who, stream in ((R1, first), (R2, second)):
        for item in WORDS.items(stream):
            state.fold(receiver(who), item.record)
        if who == R1 and is_cut:
            state.end(receiver(R1))
    return state


@cache
def orchestrator_writes(
    rules: Rules, who: int, old: Stream, own: Stream, first: Stream, is_cut: bool, second: Stream, serving: tuple[int, ...]
) -> Stream:
    """All that the Planner decides in one round."""
    state, emitted = state_of.__wrapped__(old, own, first, is_cut or not rules.cuts_first, second), list[Any]()

    def emit(record: Any) -> None:
        emitted.append(record)
        state.apply(record)

    for order in [record for record in map(WORDS.record, old + own) if isinstance(record, GradeOrder)]:
        state.fold(GRADER, graded(order))
    planner = Planner(RECIPE, attempt_of(who), state, knows=lambda version: True, emit=emit)
    receivers = [receiver(each) for each in serving if receiver(each) not in state.leaving]
    planner.decide(0.0, receivers, (GRADER,))
    for order in [record for record in emitted if isinstance(record, GradeOrder)]:
        state.fold(GRADER, graded(order))
    planner.decide(0.0, receivers, (GRADER,))
    return tuple(WORDS.number(attempt_of(who), record) for record in emitted)


def deliveries(state: Model, who: int, cut: int | None) -> tuple[Stream, bool, Stream]:
    """What an orchestrator was delivered of R1, whether that is all up to its cut, and of R2."""
    old, new = state.seen[who]
    return state.streams[R1][:old], cut is not None and old == cut, state.streams[R2][:new]


def decisions(state: Model, who: int, rules: Rules) -> Stream:
    old, own = inherited(state, who), state.streams[who]
    serving = (R1,) if newest(state, R1) == 1 else ((R2,) if state.streams[R2] else ())
    first, is_cut, second = deliveries(state, who, cut_of_replica(old, own))
    return orchestrator_writes(rules, who, old, own, first, is_cut, second, serving)


@cache
def replica_writes(rules: Rules, who: int, own: Stream, copies: Stream) -> Stream:
    """What a replica may make of its orders: a shard, or the sample as it was."""
    made = [WORDS.record(word) for word in own[1:]]
    known = {record.order_id if isinstance(record, Returned) else record.rows[0].order_id for record in made}
    has_left = any(isinstance(record, Returned) for record in made)
    found = []
    for order in map(WORDS.record, copies):
        if has_left or not is_mine(order, attempt_of(who), known):
            continue
        found.append(WORDS.number(attempt_of(who), shard_of(who, order, len(own))))
        if rules.gives_back and who == R1:
            found.append(WORDS.number(attempt_of(who), Returned(order_id=order.order_id, samples=order.samples)))
        break
    return tuple(found)


def shard_of(who: int, order: Order, number: int) -> ShardSealed:
    rows = tuple(
        ShardEntry(
            trajectory_id=trajectory_id(name, *receiver(who)), sample_id=name, group_id=order.group_id,
            order_id=order.order_id, row=row, status="complete", versions=(Version(0, 1),), num_tokens=2, num_sampled_tokens=1,
        )
        for row, name in enumerate(sample_id(order.group_id, nth) for nth in order.samples)
    )  # fmt: skip
    return ShardSealed(path=f"{NAMES[who]}/{number}", size_bytes=1, digest="d", rows=rows)


# --- what may happen -------------------------------------------------------------------------------------------------


def moves(state: Model, rules: Rules) -> Iterator[tuple[Action, Model, bool]]:
    for action in actions(state, rules):
        has_left = any(isinstance(WORDS.record(word), Returned) for word in state.streams[R1][1:])
        is_newest = action.what != "lease" and (action.who in (O2, R2) or newest(state, action.who) == 1)
        # A replica that left is replaced; one that works need not be.
        yield action, after(state, action, rules), is_newest or (action == Action("lease", R2) and has_left)


def actions(state: Model, rules: Rules) -> Iterator[Action]:
    for who, stream in enumerate(state.streams):
        if not stream:
            if mark_of(state, who) == NOT_YET:
                yield from [Action("lease", who)] if who == O2 or rules.has_successor else []
            elif who == R2:
                yield Action("open", who)
            else:
                yield from (Action("open", who, cut) for cut in range(shown(state, O2, rules), len(state.streams[O1]) + 1))
        elif who in (O1, O2):
            yield from orchestrator_actions(state, who, rules)
        else:
            yield from replica_actions(state, who, rules)


def shown(state: Model, who: int, rules: Rules) -> int:
    """Records of attempt 1 that whoever cuts it surely sees when the code lets it; the waits are in visibility_s."""
    waited_s = next(seconds for seconds in (0.0, 0.5, 1.0, 1.5, 2.0) if rules.cut_is_due(1, 2, seconds, 1.0))
    return mark_of(state, who) if waited_s >= 2.0 else 0


def orchestrator_actions(state: Model, who: int, rules: Rules) -> Iterator[Action]:
    old, new = state.seen[who]
    cut = cut_of_replica(inherited(state, who), state.streams[who])
    if rules.may_act(1, newest(state, R1)) and cut is None:
        yield from (Action("read", who, read) for read in range(old + 1, len(state.streams[R1]) + 1))
    elif cut is None:
        yield from (Action("cut", who, at) for at in range(max(old, shown(state, R2, rules)), len(state.streams[R1]) + 1))
    elif old < cut:
        yield Action("read", who, cut)
    else:
        yield from (Action("read", who, -read) for read in range(new + 1, len(state.streams[R2]) + 1))
    decided = decisions(state, who, rules)
    # A maker that dies over it leaves less; whoever lives decides the rest again.
    yield from (Action("write", who, number) for number in {1, len(decided)} if decided)


def replica_actions(state: Model, who: int, rules: Rules) -> Iterator[Action]:
    seen = state.seen[who]
    for attempt in (1, 2):
        if rules.may_act(attempt, newest(state, O1)) and (attempt == 1 or newest(state, O1) == 2):
            # A copy that is not written yet is one that is not read yet.
            for read in range(seen[attempt - 1] + 1, len(copies_of(state, attempt - 1)) + 1):
                yield Action("read", who, read if attempt == 1 else -read)
    copies = copies_of(state, O1)[: seen[0]] + copies_of(state, O2)[: seen[1]]
    yield from (Action("seal", who, word) for word in replica_writes(rules, who, state.streams[who], copies))


def after(state: Model, action: Action, rules: Rules) -> Model:
    who, number = action.who, action.number
    if action.what == "lease":
        marks = list(state.marks)
        marks[who // 2] = len(state.streams[who - 1])
        return state._replace(marks=(marks[0], marks[1]))
    if action.what == "read":
        old, new = state.seen[who]
        now = (number, new) if number > 0 else (old, -number)
        return state._replace(seen=(*state.seen[:who], now, *state.seen[who + 1 :]))
    if action.what == "open":
        return open_journal(state, who, number, rules)
    if action.what == "cut":
        cut = Cut(writer="rollout-0", attempt=1, bytes=number, hash="")
        return appended(state, who, (WORDS.number(attempt_of(who), WriterCut(cut=cut)),))
    if action.what == "write":
        return appended(state, who, decisions(state, who, rules)[:number])
    return appended(state, who, (number,))


def open_journal(state: Model, who: int, number: int, rules: Rules) -> Model:
    if who == R2:
        return appended(state, who, START.streams[R1])
    cut = Cut(writer="orchestrator-0", attempt=1, bytes=number, hash="")
    opened = appended(state, who, (WORDS.number(2, Cuts(cuts=(cut,))),))
    known = state_of.__wrapped__(inherited(opened, O2), (), (), False, ())
    again = known.orders_to_repeat(lambda writer: newest(state, R1))
    return opened._replace(
        repeats=() if not rules.repeats else tuple(WORDS.number(1, order) for order in again if isinstance(order, Order))
    )


def appended(state: Model, who: int, words: Stream) -> Model:
    return state._replace(streams=(*state.streams[:who], state.streams[who] + words, *state.streams[who + 1 :]))


# --- what must never be ----------------------------------------------------------------------------------------------


def violations(state: Model) -> set[str]:
    known = state.streams[O1] if newest(state, O1) == 1 else inherited(state, O2) + state.streams[O2]
    found = set(_of_what_counts(known, state.streams[R1], state.streams[R2]))
    cut = cut_of_replica(known)
    for who in (O1, O2):
        if cut is not None and (who == O2 or newest(state, O1) == 1) and state.seen[who][0] > cut:
            found.add("the orchestrator that counts acted beyond the cut of a replica")
    return found


@cache
def _of_what_counts(known: Stream, first: Stream, second: Stream) -> set[str]:
    found, records = set[str](), [WORDS.record(word) for word in known]
    cut = cut_of_replica(known)
    announced = {row.trajectory_id: row for word in (first[:cut], second) for row in rows_of(word)}
    orders = {record.order_id: record for record in records if isinstance(record, Order)}
    ends = [group for record in records for group in ends_of(record)]
    if len(set(ends)) < len(ends):
        found.add("a group in two batches, or in one and dropped")
    for batch in [record for record in records if isinstance(record, Batch)]:
        members = [member.ref.trajectory_id for group in batch.groups for member in group.members]
        if any(name not in announced or announced[name].order_id not in orders for name in members):
            found.add("a trajectory is trained that nobody announced before his cut, or that nobody ordered")
        if len({name.partition("@")[0] for name in members}) < 2:
            found.add("a sample counts twice")
    owner = ""
    for nth, record in enumerate(records):
        if isinstance(record, Order):
            is_free = any(isinstance(earlier, WriterCut) for earlier in records[:nth]) or returned(first[:cut])
            if owner and not is_free:
                found.add("a sample changed its owner, who was not cut and did not return it")
            owner = record.receiver
    if any(isinstance(record, Drop) for record in records):
        found.add("a group was dropped, though nothing failed")
    return found


def rows_of(stream: Stream) -> Iterator[ShardEntry]:
    for record in map(WORDS.record, stream):
        if isinstance(record, ShardSealed):
            yield from record.rows


def ends_of(record: Any) -> list[str]:
    if isinstance(record, Batch):
        return [group.group_id for group in record.groups]
    return [record.group_id] if isinstance(record, Drop) else []


def returned(stream: Stream) -> bool:
    return any(isinstance(WORDS.record(word), Returned) for word in stream[1:])


def is_complete(state: Model) -> bool:
    """The newest orchestrator has its batch."""
    known = state.streams[O1] if newest(state, O1) == 1 else inherited(state, O2) + state.streams[O2]
    return any(isinstance(WORDS.record(word), Batch) for word in known)


def explored(rules: Rules, *, until_broken: bool = False) -> Explored[Model, Action]:
    return explore(START, lambda state: moves(state, rules), violations, is_complete, until_broken=until_broken)


def test_no_interleaving_counts_a_sample_twice_moves_it_too_early_or_gets_stuck() -> None:
    found = explored(Rules(gives_back=True))
    found.check()
    assert len(found.came_by) > 50_000, "so few interleavings are not the model that was written"


@pytest.mark.parametrize(
    "broken",
    [
        Rules(may_act=lambda attempt, newest: True),
        Rules(cut_is_due=lambda attempt, newest, seen_s, visibility_s: newest > attempt),
        Rules(cuts_first=False),
        Rules(repeats=False, has_successor=False),
    ],
    ids=["acts behind a newer lease", "cuts at once", "moves before the cut", "repeats nothing"],
)
def test_each_rule_of_orders_is_needed(broken: Rules) -> None:
    """Without it the same exploration finds a fault or a dead end, so the check can fail."""
    found = explored(broken, until_broken=True)
    assert found.broken or found.trapped
