"""The model of act and cut (model_batches.py), explored; each rule broken once; and its paths replayed with the real classes.

The rules are the code's own functions; what the model says about reading, prefixes and cuts is compared here with Follower,
cut_predecessors, JournalWriter and LeaseFolder: every cut and every delivery must be the model's.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from miles_core.records import Cuts, Incident
from miles_core.rollbacks import Rollbacks
from miles_core.store.follow import Follower, Reading, cut_predecessors
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter, segment_name
from miles_core.store.lease import LeaseFolder
from tests.protocol.model_batches import (
    L1,
    NAMES,
    O1,
    WORDS,
    WRITERS,
    Action,
    Rules,
    Stream,
    actions,
    after,
    attempt_of,
    cut_of,
    delivered,
    explored,
    is_complete,
    other_role,
    start,
)

pytestmark = pytest.mark.timeout(1200)

TWO = Rules(2)
BACK = Rules(1, rollback=True)


@pytest.mark.parametrize("rules", [TWO, Rules(1, spare_groups=1)])
def test_no_interleaving_trains_twice_or_gets_stuck(rules: Rules) -> None:
    found = explored(rules)
    found.check()
    assert len(found.came_by) > 20_000, "so few interleavings are not the model that was written"


@pytest.mark.parametrize("rules", [BACK, Rules(2, rollback=True)])
def test_a_rollback_leaves_one_lineage_whoever_goes_on_behind_it(rules: Rules) -> None:
    found = explored(rules)
    found.check()
    assert len(found.came_by) > 5_000


@pytest.mark.parametrize(
    "broken",
    [
        Rules(1, looks_at_leases=False),
        Rules(1, cut_is_due=lambda attempt, newest, seen_s, visibility_s: newest > attempt),
        Rules(1, cut_is_due=lambda attempt, newest, seen_s, visibility_s: newest > attempt and seen_s >= visibility_s),
        Rules(1, deliverable=lambda current, newest, cuts: [(newest, None)]),
        Rules(1, takes_over=False),
        Rules(1, rollback=True, successors=Rollbacks()),
    ],
    ids=["acts behind a newer lease", "cuts at once", "waits half as long", "no cut delivered", "forgets", "knows no rollback"],
)
def test_each_rule_is_needed(broken: Rules) -> None:
    """Without it the same exploration finds a fault or a dead end, so the check can fail."""
    found = explored(broken, until_broken=True)
    assert found.broken or found.trapped


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
        self.followers = [Follower(self.readings[who], self.folder(3 - who), WRITERS[3 - who]) for who in range(4)]
        self.journals: dict[int, JournalWriter] = {}
        self.ends: list[list[int]] = [[], [], [], []]
        """By attempt: bytes of its segment behind each record."""
        for who in (O1, L1):
            self.readings[who].leases.acquire(WRITERS[who], 1, "t")
            self.open(who, 0)
        self.write(L1, said(start().streams[L1][1]))

    def folder(self, who: int) -> Path:
        return Path("/") / WRITERS[who]

    def segment(self, who: int) -> Path:
        return self.folder(who) / segment_name(attempt_of(who), 0)

    def show(self, who: int, of: int, records: int) -> None:
        """Lets a node see that many records of an attempt, and half of the next one."""
        ends = self.ends[of]
        middle = (ends[records - 1] + ends[records]) // 2 if records < len(ends) else ends[records - 1]
        shown = self.nodes[who].shown
        shown[self.segment(of)] = max(shown.get(self.segment(of), 0), middle)

    def open(self, who: int, cut: int) -> int:
        """Opens a journal after seeing `cut` records of the predecessor; returns how many were cut."""
        if cut:
            self.show(who, who - 1, cut)
        folder, attempt = self.folder(who), attempt_of(who)
        cuts = cut_predecessors(self.readings[who], folder, WRITERS[who], attempt, sleep=pytest.fail)
        self.journals[who] = JournalWriter(
            self.nodes[who], folder, run_id="r", writer=WRITERS[who], attempt=attempt, token="t", clock=lambda: 0.0
        )
        self.write(who, cuts)
        if who in (O1, L1):
            return 0
        header = self.ends[who - 1][-1] - self.journals[who - 1].bytes
        return sum(end - header <= cuts.cuts[0].bytes for end in self.ends[who - 1])

    def write(self, who: int, record: Cuts | Incident) -> None:
        self.journals[who].write(record)
        self.ends[who].append(len(self.files[self.segment(who)]))

    def read(self, who: int) -> list[str]:
        """One poll of the real follower: what it delivered."""
        items = [item.record for item in self.followers[who].poll()]
        return [record.what if isinstance(record, Incident) else record.kind for record in items]


def said(word: int) -> Incident:
    """A record of the model in a few bytes."""
    return Incident(what=str(word))


def words(stream: Stream) -> list[str]:
    """As the real follower delivers them; the numbers of Cuts are compared where they are taken."""
    return ["cuts" if isinstance(WORDS.record(word), Cuts) else str(word) for word in stream]


def replay(path: list[Action], rules: Rules) -> None:
    """Carries a path out with the real classes; every cut and every delivery must be the model's."""
    real, state = Real(), start()
    for action in path:
        following, who = after(state, action, rules), action.who
        if action.what == "lease":
            real.readings[who].leases.acquire(WRITERS[who], 2, "t")
        elif action.what == "open":
            assert real.open(who, action.number) == action.number, action
        elif action.what == "write":
            real.write(who, said(action.number))
        else:
            first = other_role(who)
            if action.number > 0:
                real.show(who, first, action.number)
            else:
                real.show(who, first + 1, -action.number)
                real.show(who, first, max(cut_of(state.streams[first + 1]), 1))
            new = delivered(following, who)[len(delivered(state, who)) :]
            assert real.read(who) == words(new), action
        state = following
        for idle in range(4):
            if real.journals.get(idle) is not None:
                assert real.read(idle) == [], f"{NAMES[idle]} acted on more than the model allows after {action}"


def test_the_model_is_what_the_real_readers_do() -> None:
    """Random walks to the end, also over a rollback, and a shortest way to every 400th state."""
    chance = random.Random(7)
    for rules in (TWO, BACK) * 30:
        state, path = start(), list[Action]()
        while found := sorted(actions(state, rules)):
            path.append(chance.choice(found))
            state = after(state, path[-1], rules)
        assert is_complete(state, rules)
        replay(path, rules)
    for state in list(explored(TWO).came_by)[::400]:
        replay(explored(TWO).path(state), TWO)
