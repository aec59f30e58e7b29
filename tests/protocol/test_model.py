"""Explicit-state check of act and cut (I5, I7): two orchestrator attempts x two learner attempts, none of which ever stops.

The model is a few rules over tuples, so that every interleaving is visited: any attempt may go on behind its successor's
back, every read may return any prefix that is not shorter than before, and a cut covers what was written when the newer lease
appeared (which is what waiting for 2 x visibility_s is for; test_follow.py shows that with time). Leases are seen at once. It
is not the real code: the last test replays its paths against Follower, cut_predecessors, JournalWriter and LeaseFolder, and
compares every cut and every delivery.

With a rollback (I8) the second attempts begin behind one to the base model, when both roles were retired, and the first ones
know nothing of it, ever.

Not modelled: checkpoints behind the last step, retention, replicas and graders, Slurm. At most two batches of one group each.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from miles_core.records import Cuts, Incident
from miles_core.store.follow import Follower, Reading, cut_predecessors
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter, segment_name
from miles_core.store.lease import LeaseFolder

# --- the model -------------------------------------------------------------------------------------------------------

Record = tuple[str, int, str]
"""("cuts", records of the predecessor that count, "") | ("batch", k, maker and group) | ("step", k, maker and group)."""
Stream = tuple[Record, ...]
O1, O2, L1, L2 = range(4)
NAMES = ("O1", "O2", "L1", "L2")
PREDECESSOR = {O2: O1, L2: L1}
NOT_YET = -1


class State(NamedTuple):
    """Everything that was written and what each attempt was delivered."""

    streams: tuple[Stream, ...]
    """By attempt; () until it opened."""
    marks: tuple[int, int]
    """Records of O1 (L1) when the lease of O2 (L2) appeared; NOT_YET before."""
    seen: tuple[tuple[int, int], ...]
    """By attempt: records of the other role's attempt 1 and 2 that it was delivered."""


class Action(NamedTuple):
    """What an attempt does: lease, open (number = cut), read (number = prefix of attempt 1, negative: of attempt 2), write."""

    what: str
    who: int
    number: int = 0
    record: Record | None = None


@dataclass(frozen=True)
class Rules:
    """The protocol, and what is left out of it to see the check fail."""

    batches: int
    lag: int = 0
    """Batch k is made when step k - 1 - lag was delivered."""
    rollback: bool = False
    """O2 and L2 begin behind a rollback: what O1 and L1 wrote does not count, their groups are dropped."""
    successors_know_of_it: bool = True
    act_only_without_newer_lease: bool = True
    cut_covers_what_was_written_before_the_lease: bool = True


START = State(streams=((("cuts", 0, ""),), (), (("cuts", 0, ""),), ()), marks=(NOT_YET, NOT_YET), seen=((0, 0),) * 4)


def mark_of(state: State, who: int) -> int:
    """When the newer lease of that attempt's role appeared."""
    return state.marks[0] if who in (O1, O2) else state.marks[1]


def accepted(state: State, first: int, rules: Rules) -> Stream | None:
    """Accepted records of a role (`first`: O1 or L1) that count; None between its newer lease and the cut."""
    old, new = state.streams[first], state.streams[first + 1]
    if mark_of(state, first) == NOT_YET:
        return old
    if not new:
        return None
    return new if rules.rollback else old[: new[0][1]] + new


def delivered(state: State, who: int) -> Stream:
    """What an attempt was delivered of the other role, in order."""
    first = L1 if who in (O1, O2) else O1
    old, new = state.seen[who]
    return state.streams[first][:old] + state.streams[first + 1][:new]


def heard(state: State, who: int, rules: Rules) -> Stream:
    """What of that it takes as counting."""
    if rules.rollback and rules.successors_know_of_it and who in PREDECESSOR:
        first = L1 if who == O2 else O1
        return state.streams[first + 1][: state.seen[who][1]]
    return delivered(state, who)


def own(state: State, who: int) -> Stream:
    """What an attempt knows of its own role: its own records behind what it accepted of its predecessor."""
    stream = state.streams[who]
    return state.streams[PREDECESSOR[who]][: stream[0][1]] + stream if who in PREDECESSOR else stream


def groups(state: State, rules: Rules) -> list[str]:
    """Groups that anybody named, and one that nobody did: which of those is without meaning."""
    named = {record[2][-2:] for stream in state.streams[:L1] for record in stream if record[0] == "batch"}
    most = rules.batches * (2 if rules.rollback else 1)
    return [f"g{number}" for number in range(1, min(len(named) + 1, most) + 1)]


def writes(state: State, who: int, rules: Rules) -> Iterator[Record]:
    """Records that an attempt may append now."""
    if who in (O1, O2):
        known = [record for record in own(state, who) if record[0] == "batch"]
        voids = rules.rollback and rules.successors_know_of_it and who == O2
        made = [record for record in state.streams[who] if record[0] == "batch"] if voids else known
        steps = sum(record[0] == "step" for record in {record[:2]: record for record in heard(state, who, rules)}.values())
        k = len(made) + 1
        if k <= rules.batches and k - 1 - steps <= rules.lag:
            used = {record[2][-2:] for record in known}
            yield from (("batch", k, f"{NAMES[who]}:{group}") for group in groups(state, rules) if group not in used)
    else:
        # A new learner trains all steps again (its checkpoint is the base model), the recorded batches first.
        k = sum(record[0] == "step" for record in state.streams[who]) + 1
        yield from (("step", k, record[2]) for record in heard(state, who, rules) if record[:2] == ("batch", k))


def actions(state: State, rules: Rules) -> Iterator[Action]:
    """All that may happen next."""
    for who, stream in enumerate(state.streams):
        if not stream:
            mark = mark_of(state, who)
            if mark == NOT_YET:
                yield Action("lease", who)
            elif not rules.rollback or NOT_YET not in state.marks:
                lowest = mark if rules.cut_covers_what_was_written_before_the_lease else 0
                yield from (Action("open", who, cut) for cut in range(lowest, len(state.streams[PREDECESSOR[who]]) + 1))
            continue
        yield from (Action("write", who, record=record) for record in writes(state, who, rules))
        first = L1 if who in (O1, O2) else O1
        old, new = state.seen[who]
        if new == 0 and (mark_of(state, first) == NOT_YET or not rules.act_only_without_newer_lease):
            yield from (Action("read", who, prefix) for prefix in range(old + 1, len(state.streams[first]) + 1))
        if mark_of(state, first) != NOT_YET:
            yield from (Action("read", who, -prefix) for prefix in range(new + 1, len(state.streams[first + 1]) + 1))


def after(state: State, action: Action) -> State:
    """The state behind an action."""
    who = action.who
    if action.what == "lease":
        marks = list(state.marks)
        marks[who // 2] = len(state.streams[PREDECESSOR[who]])
        return state._replace(marks=(marks[0], marks[1]))
    if action.what == "read":
        first = L1 if who in (O1, O2) else O1
        old, new = state.seen[who]
        cut = state.streams[first + 1][0][1] if action.number < 0 else 0
        now = (max(old, cut), -action.number) if action.number < 0 else (action.number, new)
        return state._replace(seen=(*state.seen[:who], now, *state.seen[who + 1 :]))
    record = ("cuts", action.number, "") if action.what == "open" else action.record
    assert record is not None
    grown = (*state.streams[who], record)
    return state._replace(streams=(*state.streams[:who], grown, *state.streams[who + 1 :]))


def violations(state: State, rules: Rules) -> set[str]:
    """What must never be."""
    found = set()
    batches, steps = accepted(state, O1, rules), accepted(state, L1, rules)
    if batches is not None:
        made = [record for record in batches if record[0] == "batch"]
        ends = [record[2][-2:] for record in made]
        if rules.rollback and state.streams[O2]:
            ends += [record[2][-2:] for record in own(state, O2) if record[0] == "batch" and record not in made]
        if len({record[1] for record in made}) < len(made) or len(set(ends)) < len(ends):
            found.add("a group or a step in two accepted batches")
        # While one role was rolled back and the other was not yet, nobody who knows has begun.
        has_begun = not rules.rollback or (mark_of(state, O1) == NOT_YET) == (mark_of(state, L1) == NOT_YET)
        trained = [record[1:] for record in steps or () if record[0] == "step" and has_begun]
        if not set(trained) <= {record[1:] for record in made}:
            found.add("an accepted step of a batch that is not accepted")
        if len({k for k, _ in trained}) < len(set(trained)):
            found.add("two manifests of an accepted step")
    everything = {record[1:] for stream in state.streams[L1:] for record in stream if record[0] == "step"}
    steps_differ = len({k for k, _ in everything}) == len(everything) or rules.rollback
    if not steps_differ or len({m[-2:] for _, m in everything}) < len(everything):
        found.add("a step or a group trained twice, accepted or not")
    for who in PREDECESSOR if rules.rollback else range(4):
        told = [record[:2] for record in heard(state, who, rules) if record[0] == "batch"]
        if len(set(told)) < len(told):
            found.add("one reader was delivered two batches of a step")
    return found


def is_complete(state: State, rules: Rules) -> bool:
    """All batches are made and trained, by the newest attempts."""
    wanted = set(range(1, rules.batches + 1))
    batches, steps = accepted(state, O1, rules), accepted(state, L1, rules)
    return (
        batches is not None
        and steps is not None
        and {record[1] for record in batches if record[0] == "batch"} == wanted
        and {record[1] for record in steps if record[0] == "step"} == wanted
    )


@dataclass
class Explored:
    """All reachable states, with the action that first led there."""

    rules: Rules
    came_by: dict[State, tuple[State, Action] | None]
    broken: dict[str, State]
    trapped: list[State]

    def path(self, state: State) -> list[Action]:
        """A shortest way to a state."""
        found: list[Action] = []
        while (step := self.came_by[state]) is not None:
            state, action = step
            found.append(action)
        return found[::-1]


@cache
def explore(rules: Rules, *, until_broken: bool = False) -> Explored:
    """Breadth first over all states; trapped: states from which the newest attempts alone cannot complete."""
    came_by: dict[State, tuple[State, Action] | None] = {START: None}
    queue, broken = [START], {}
    alive_from: dict[State, list[State]] = {}
    for state in queue:
        for violation in violations(state, rules):
            broken.setdefault(violation, state)
        if broken and until_broken:
            return Explored(rules, came_by, broken, [])
        for action in actions(state, rules):
            following = after(state, action)
            if following not in came_by:
                came_by[following] = (state, action)
                queue.append(following)
            is_newest = action.what != "lease" and (action.who in (O2, L2) or mark_of(state, action.who) == NOT_YET)
            is_newest = is_newest or (rules.rollback and action.what == "lease")  # Whoever retired one role retires the other.
            if is_newest:
                alive_from.setdefault(following, []).append(state)
    live = {state for state in queue if is_complete(state, rules)}
    spread = list(live)
    for state in spread:
        for before in alive_from.get(state, ()):
            if before not in live:
                live.add(before)
                spread.append(before)
    return Explored(rules, came_by, broken, [state for state in queue if state not in live])


@pytest.mark.parametrize(("batches", "lag", "states"), [(1, 0, 2299), (2, 0, 13246), (2, 1, 36798)])
def test_no_interleaving_trains_twice_or_gets_stuck(batches: int, lag: int, states: int) -> None:
    explored = explore(Rules(batches, lag))
    assert {what: explored.path(state) for what, state in explored.broken.items()} == {}
    assert [explored.path(state) for state in explored.trapped[:1]] == []
    assert len(explored.came_by) == states, "fewer or more interleavings than when this was written: say why"


@pytest.mark.parametrize(("batches", "lag", "states"), [(1, 0, 2001), (2, 0, 9347), (2, 1, 69742)])
def test_a_rollback_leaves_one_lineage_whoever_goes_on_behind_it(batches: int, lag: int, states: int) -> None:
    explored = explore(Rules(batches, lag, rollback=True))
    assert {what: explored.path(state) for what, state in explored.broken.items()} == {}
    assert [explored.path(state) for state in explored.trapped[:1]] == []
    assert len(explored.came_by) == states, "fewer or more interleavings than when this was written: say why"


def test_whoever_does_not_know_of_a_rollback_breaks_it() -> None:
    assert explore(Rules(1, rollback=True, successors_know_of_it=False), until_broken=True).broken


@pytest.mark.parametrize("left_out", ["act_only_without_newer_lease", "cut_covers_what_was_written_before_the_lease"])
def test_each_rule_is_needed(left_out: str) -> None:
    """Without it the same exploration finds a fault, so the check can fail."""
    assert explore(Rules(1, **{left_out: False}), until_broken=True).broken


# --- the model against the real classes ------------------------------------------------------------------------------


class PrefixFS(FileSystem):
    """One node's view of files in memory: names at once, bytes of other nodes as far as the test shows them."""

    def __init__(self, files: dict[Path, bytes]) -> None:
        self.files = files
        self.shown: dict[Path, int] = {}
        """Bytes that this node sees, by file; a file that is not here it wrote itself, or sees nothing of."""
        self.written: set[Path] = set()

    def append(self, path: Path, data: bytes) -> None:
        self.files[path] = self.files.get(path, b"") + data
        self.written.add(path)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        end = len(self.files[path]) if path in self.written else self.shown.get(path, 0)
        return self.files[path][offset : end if limit < 0 else min(end, offset + limit)]

    def listdir(self, path: Path) -> list[str]:
        return [name.name for name in self.files if name.parent == path]

    def link(self, source: Path, target: Path) -> None:
        self.files[target] = self.files[source]

    def sync(self, path: Path) -> None: ...

    def mkdir(self, path: Path) -> None: ...

    def unlink(self, path: Path) -> None:
        self.files.pop(path, None)


class Real:
    """The four attempts, made of the real classes, driven by the model's actions."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}
        self.nodes = [PrefixFS(self.files) for _ in range(4)]
        self.readings = [Reading(fs, LeaseFolder(fs, Path("/leases"), "r"), 0.0, lambda: 0.0) for fs in self.nodes]
        self.followers = [Follower(self.readings[who], self.folder(3 - who), self.writer(3 - who)) for who in range(4)]
        self.journals: dict[int, JournalWriter] = {}
        self.ends: list[list[int]] = [[], [], [], []]
        """By attempt: bytes of its segment behind each record."""
        for who in (O1, L1):
            self.readings[who].leases.acquire(self.writer(who), 1, "t")
            self.open(who, 0)

    @staticmethod
    def writer(who: int) -> str:
        return "orchestrator-0" if who in (O1, O2) else "learner-0"

    def folder(self, who: int) -> Path:
        return Path("/") / self.writer(who)

    def segment(self, who: int) -> Path:
        return self.folder(who) / segment_name(1 + who % 2, 0)

    def show(self, who: int, of: int, records: int) -> None:
        """Lets a node see that many records of an attempt, and half of the next one."""
        ends = self.ends[of]
        middle = (ends[records - 1] + ends[records]) // 2 if records < len(ends) else ends[records - 1]
        shown = self.nodes[who].shown
        shown[self.segment(of)] = max(shown.get(self.segment(of), 0), middle)

    def open(self, who: int, cut: int) -> int:
        """Opens a journal after seeing `cut` records of the predecessor; returns how many were cut."""
        if who in PREDECESSOR and cut:
            self.show(who, PREDECESSOR[who], cut)
        folder, attempt = self.folder(who), 1 + who % 2
        cuts = cut_predecessors(self.readings[who], folder, self.writer(who), attempt, sleep=pytest.fail)
        self.journals[who] = JournalWriter(
            self.nodes[who], folder, run_id="r", writer=self.writer(who), attempt=attempt, token="t", clock=lambda: 0.0
        )
        self.write(who, cuts)
        if who not in PREDECESSOR:
            return 0
        old = self.journals[PREDECESSOR[who]]
        header = self.ends[PREDECESSOR[who]][-1] - old.bytes
        return sum(end - header <= cuts.cuts[0].bytes for end in self.ends[PREDECESSOR[who]])

    def write(self, who: int, record: Cuts | Incident) -> None:
        self.journals[who].write(record)
        self.ends[who].append(len(self.files[self.segment(who)]))

    def read(self, who: int) -> Stream:
        """One poll of the real follower, in the model's words."""
        found: list[Record] = []
        for item in self.followers[who].poll():
            kind, k, text = item.record.what.split("|") if isinstance(item.record, Incident) else ("cuts", "-1", "")
            found.append((kind, int(k), text))
        return tuple(found)


def without_cuts(stream: Stream) -> Stream:
    """The numbers of Cuts are compared where they are taken."""
    return tuple(("cuts", -1, "") if record[0] == "cuts" else record for record in stream)


def replay(path: list[Action]) -> None:
    """Carries a path out with the real classes; every cut and every delivery must be the model's."""
    real, state = Real(), START
    for action in path:
        following, who = after(state, action), action.who
        other = O1 if who in (L1, L2) else L1
        if action.what == "lease":
            real.readings[who].leases.acquire(real.writer(who), 2, "t")
        elif action.what == "open":
            assert real.open(who, action.number) == action.number, action
        elif action.what == "write":
            assert action.record is not None
            real.write(who, Incident(what="|".join(map(str, action.record))))
        else:
            if action.number > 0:
                real.show(who, other, action.number)
            else:
                real.show(who, other + 1, -action.number)
                real.show(who, other, max(state.streams[other + 1][0][1], 1))
            new = delivered(following, who)[len(delivered(state, who)) :]
            assert real.read(who) == without_cuts(new), action
        state = following
        for idle in range(4):
            if real.journals.get(idle) is not None:
                assert real.read(idle) == (), f"{NAMES[idle]} acted on more than the model allows after {action}"


def test_the_model_is_what_the_real_readers_do() -> None:
    """Random walks to the end, also over a rollback, and a shortest way to every 400th state."""
    explored = explore(Rules(2, 1))
    chance = random.Random(7)
    for rules in (explored.rules, Rules(2, 1, rollback=True)) * 30:
        state, path = START, []
        while found := sorted(actions(state, rules), key=repr):
            path.append(chance.choice(found))
            state = after(state, path[-1])
        assert is_complete(state, rules)
        replay(path)
    for state in list(explored.came_by)[::400]:
        replay(explored.path(state))
