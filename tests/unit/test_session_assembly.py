"""Rows of a tree against an oracle that knows nothing of checkpoints; experts; what does not fit together."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.learner.episodes import Rows
from miles_core.records import Version
from miles_core.rollout.chat import ChatMessage
from miles_core.rollout.sessions.assembly import assemble, episode_columns
from miles_core.rollout.sessions.errors import AssemblyFailed, BadMessages, Conflict
from miles_core.rollout.sessions.history import Attachment, Checkpoint, History, Kind, Sampled
from miles_core.trajectories.lines import lines
from miles_core.trajectories.schema import Segment, Trajectory
from miles_core.trajectories.shards import check_trajectory, decode_shard, encode_shard

V0 = Version(0, 0)


@dataclass
class Call:
    """What the oracle remembers of one answered request: whole conversations, no tree."""

    asked: tuple[ChatMessage, ...]
    told: tuple[ChatMessage, ...]
    """`asked` and the reply."""
    tokens: tuple[int, ...]
    """Of the whole conversation, up to and with what was sampled."""
    sampled: Sampled
    origin: int | None
    """Index of the call it went on from."""


class Oracle:
    """An agent that does anything: goes on, tries again, branches, starts over; and what must come of it."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self.rng = random.Random(seed)
        self.history = History(kind)
        self.calls: list[Call] = []
        self.gone: set[int] = set()
        self._token = 0

    def fresh_tokens(self, most: int) -> tuple[int, ...]:
        count = self.rng.randint(1, most)
        self._token += count
        return tuple(range(self._token - count, self._token))

    def step(self) -> None:
        begins = [(), *(call.told for call in self.calls), *(call.asked[:-1] for call in self.calls)]
        begin = (
            begins[self.rng.randrange(len(begins))]
            if self.rng.random() < 0.6
            else begins[-1 if self.rng.random() < 0.3 else len(self.calls)]
        )
        words = tuple(ChatMessage("user", self.rng.choice("abc")) for _ in range(self.rng.randint(1, 2)))
        injected = (ChatMessage("assistant", "put in"), *words) if self.rng.random() < 0.1 else ()
        asked = (*begin, *injected, *words)
        expected = self.expected_origin(asked)
        try:
            at = self.history.attach(asked)
        except (BadMessages, Conflict):
            assert expected is None or self.history.kind == "linear" or not self.calls[expected].sampled.ended
            return
        origin = None if at.parent is None else at.parent.seq
        assert origin == expected, (asked, origin, expected)
        self.answer(asked, at, origin)

    def expected_origin(self, asked: tuple[ChatMessage, ...]) -> int | None:
        fits = [i for i, call in enumerate(self.calls) if i not in self.gone and asked[: len(call.told)] == call.told]
        fits = [i for i in fits if len(asked) > len(self.calls[i].told)]
        return max(fits, key=lambda i: (len(self.calls[i].told), i), default=None)

    def answer(self, asked: tuple[ChatMessage, ...], at: Attachment, origin: int | None) -> None:
        prompt, tokens = self.fresh_tokens(4), self.fresh_tokens(5)
        versions = tuple(Version(self.rng.randrange(3), 1) for _ in tokens)
        # A logprob that no other token has: float32 holds it exactly.
        sampled = Sampled(tokens, tuple(-float(token + 1) for token in tokens), versions, self.rng.random() < 0.85, V0, V0)
        reply = ChatMessage("assistant", self.rng.choice("xyz"))
        self.history.commit(at, prompt, sampled, reply)
        before = () if origin is None else self.calls[origin].tokens
        if at.takes_back is not None:
            self.gone.add(at.takes_back.seq)
        self.calls.append(Call(asked, (*asked, reply), (*before, *prompt, *tokens), sampled, origin))

    def line(self, number: int) -> list[int]:
        found: list[int] = []
        at: int | None = number
        while at is not None:
            found.insert(0, at)
            at = self.calls[at].origin
        return found

    def kept(self) -> list[int]:
        """Leaves, without those that a later call asked the same at the same place."""
        live = [i for i in range(len(self.calls)) if i not in self.gone]
        origins = {self.calls[i].origin for i in live}

        def is_abandoned(number: int) -> bool:
            mine = self.calls[number]
            return any(self.calls[i].asked == mine.asked and self.calls[i].origin == mine.origin for i in live if i > number)

        return [i for i in live if i not in origins and not is_abandoned(i)]


def check(oracle: Oracle, max_tokens: int) -> None:
    rows = assemble(oracle.history, max_tokens)
    kept = oracle.kept()
    fitting = {leaf: [i for i in oracle.line(leaf) if len(oracle.calls[i].tokens) <= max_tokens] for leaf in kept}
    wanted = {i for line in fitting.values() for i in line}
    trained: list[int] = []
    for row in rows:
        columns = row.columns()
        leaf_tokens = oracle.calls[row.path[-1].seq].tokens
        assert columns["tokens"].tolist() == list(leaf_tokens) and len(leaf_tokens) <= max_tokens
        mask = columns["loss_mask"].astype(bool)
        trained += columns["tokens"][mask].tolist()
        assert columns["logprobs"].tolist() == [-float(t + 1) if own else 0.0 for t, own in zip(leaf_tokens, mask, strict=True)]
        known = {
            t: v
            for i in range(len(oracle.calls))
            for t, v in zip(oracle.calls[i].sampled.tokens, oracle.calls[i].sampled.versions, strict=True)
        }
        runs = columns["versions"]
        for at in np.flatnonzero(mask):
            assert next(run for run in reversed(runs) if run.start <= at)[1:] == known[leaf_tokens[at]]
        assert row.is_cut == (not oracle.calls[row.path[-1].seq].sampled.ended or row.path[-1].seq not in kept)
        check_trajectory(as_trajectory(columns))
    check_episode(oracle, max_tokens)
    # Every sampled token of a kept line once, and nothing else.
    assert sorted(trained) == sorted(token for i in wanted for token in oracle.calls[i].sampled.tokens)
    assert [row.path[-1].seq for row in assemble(oracle.history, max_tokens)] == [row.path[-1].seq for row in rows]


def check_episode(oracle: Oracle, max_tokens: int) -> None:
    """The one row of an episode, once more cut into lines by the learner, is the rows."""
    rows = sorted(assemble(oracle.history, max_tokens), key=lambda row: row.path[-1].seq)
    whole = as_trajectory(episode_columns(oracle.history, max_tokens))
    check_trajectory(whole)
    assert whole.num_sampled == sum(int(row.columns()["loss_mask"].sum()) for row in rows)
    found = lines(whole) if rows else []
    assert len(found) == len(rows) and len({line.trajectory_id for line in found}) == len(found)
    for line, row in zip(found, rows, strict=True):
        check_trajectory(line)
        for name, column in row.columns().items():
            assert np.array_equal(getattr(line, name), column), name


def as_trajectory(columns: dict[str, object]) -> Trajectory:
    return Trajectory("g/0@r.a1", "g/0", "g", "o", "rollout-0", 1, 5, temperature=1.0, status="complete", **columns)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", range(8))
def test_every_sampled_token_is_trained_once_whatever_an_agent_does(part: int) -> None:
    """520 trees and lines."""
    for seed in range(part * 65, part * 65 + 65):
        oracle = Oracle(seed, "linear" if seed % 4 == 0 else "branching")
        for _ in range(oracle.rng.randint(1, 25)):
            oracle.step()
        longest = max(len(call.tokens) for call in oracle.calls)
        for max_tokens in (longest, oracle.rng.randint(1, longest)):
            check(oracle, max_tokens)


def turn(parent: Checkpoint | None, history: History, number: int, length: int = 3, experts: int | None = None) -> Checkpoint:
    record = None if experts is None else np.full((experts, 2, 1), number, dtype=np.uint8)
    sampled = Sampled((number,) * length, (-1.0,) * length, (V0,) * length, True, V0, V0, record)
    return history.commit(
        Attachment(parent, (ChatMessage("user", str(number)),)), (0, 0), sampled, ChatMessage("assistant", "x")
    )


def test_the_longest_line_comes_first_then_the_newest_and_owns_what_came_first() -> None:
    history = History("branching")
    root = turn(None, history, 1)
    left = turn(root, history, 2)
    turn(left, history, 3)
    turn(root, history, 4)
    turn(root, history, 5)
    rows = assemble(history, 100)
    assert [[node.seq for node in row.path] for row in rows] == [[0, 1, 2], [0, 4], [0, 3]]
    assert [sorted(row.owned) for row in rows] == [[0, 1, 2], [4], [3]]


def test_a_line_that_is_cut_to_what_another_trains_is_no_row() -> None:
    history = History("branching")
    root = turn(None, history, 1)
    turn(root, history, 2, length=2)
    turn(root, history, 3, length=50)
    rows = assemble(history, 20)
    assert [[node.seq for node in row.path] for row in rows] == [[0, 1]]
    assert assemble(history, 4) == [] and assemble(History(), 4) == []


def test_experts_of_turns_rebuild_the_record_of_the_line() -> None:
    """A root of 5 tokens has 4 known positions; a turn behind it computes 5 more, or all 9 if it was read anew."""
    for second in (5, 9):
        history = History()
        root = turn(None, history, 1, experts=4)
        turn(root, history, 2, experts=second)
        experts = assemble(history, 100)[0].columns()["experts"]
        assert experts[:, 0, 0].tolist() == [1] * 4 + [2] * 5


@pytest.mark.parametrize("second", [0, 4, 6, 8, 10])
def test_experts_with_a_gap_or_an_overlap_are_refused(second: int) -> None:
    history = History()
    turn(turn(None, history, 1, experts=4), history, 2, experts=second)
    with pytest.raises(AssemblyFailed, match=f"turn 2: experts of {second} positions behind 4 known ones"):
        assemble(history, 100)[0].columns()


def test_a_line_with_a_turn_without_experts_has_none() -> None:
    history = History()
    turn(turn(None, history, 1, experts=4), history, 2)
    assert assemble(history, 100)[0].columns()["experts"] is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start": 4}, "turn 2 begins at token 4, but its conversation has 5 tokens there"),
        ({"sampled": Sampled((1, 2), (-1.0,), (V0, V0), True, V0, V0)}, "turn 2 has 2 tokens, 1 logprobs and 2 versions"),
        ({"sampled": Sampled((), (), (), True, V0, V0)}, "turn 2 has 0 tokens"),
    ],
)
def test_turns_that_do_not_fit_together_are_refused(change: dict[str, object], says: str) -> None:
    history = History()
    node = turn(turn(None, history, 1), history, 2)
    history.checkpoints[1] = replace(node, **change)  # type: ignore[arg-type]
    with pytest.raises(AssemblyFailed, match=says):
        assemble(history, 100)[0].columns()


def test_an_episode_goes_through_a_shard_as_it_is() -> None:
    history = History("branching")
    root = turn(None, history, 1)
    turn(root, history, 2)
    turn(root, history, 3)
    whole = as_trajectory(episode_columns(history, 100))
    assert whole.segments == ((0, 5, -1), (5, 10, 0), (10, 15, 0)) and whole.num_sampled == 9
    (back,) = decode_shard(encode_shard([whole]), Path("x"))
    assert back.segments == whole.segments and [len(line.tokens) for line in lines(back)] == [10, 10]
    assert [line.num_sampled for line in lines(back)] == [6, 3]


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        (((0, 5, -1), (6, 15, 0)), "segment 1 is \\(6, 15, 0\\)"),
        (((0, 5, 0), (5, 15, 0)), "segment 0 is \\(0, 5, 0\\)"),
        (((0, 5, -1), (5, 5, 0), (5, 15, 0)), "segment 1 is"),
        (((0, 5, -1), (5, 10, 0)), "its segments end at 10, its 15 tokens do not"),
        (((0, 4, -1), (4, 15, 0)), "a segment starts at 4, within a turn"),
    ],
)
def test_segments_that_make_no_tree_are_refused(segments: tuple[tuple[int, int, int], ...], says: str) -> None:
    history = History("branching")
    root = turn(None, history, 1)
    turn(root, history, 2)
    turn(root, history, 3)
    whole = as_trajectory(episode_columns(history, 100))
    with pytest.raises(ValueError, match=says):
        check_trajectory(replace(whole, segments=tuple(Segment(*segment) for segment in segments)))
    with pytest.raises(ValueError, match="no record of experts"):
        check_trajectory(replace(whole, experts=np.zeros((14, 1, 1), dtype=np.uint8)))


def test_the_learner_gives_every_conversation_of_an_episode_its_reward() -> None:
    history = History("branching")
    root = turn(None, history, 1)
    turn(root, history, 2)
    turn(root, history, 3)
    branching = as_trajectory(episode_columns(history, 100))
    line = replace(branching, sample_id="g/1", trajectory_id="g/1@r.a1", **lines_of_one())
    ones = np.ones((1, 2))
    rows = Rows([branching, line], np.array([0, 1]), np.array([[1.0, 0.0]]), ones, ones * np.nan).as_lines()
    assert [row.trajectory_id for row in rows.trajectories] == ["g/0@r.a1#0", "g/0@r.a1#1", "g/1@r.a1"]
    assert rows.by_row(rows.rewards).tolist() == [1.0, 1.0, 0.0] and rows.mean_reward == 0.5
    assert rows.total([row.num_sampled for row in rows.trajectories]).tolist() == [[9.0, 3.0]]


def lines_of_one() -> dict[str, Any]:
    history = History()
    turn(None, history, 1)
    return {"segments": (), **episode_columns(history, 100)}
