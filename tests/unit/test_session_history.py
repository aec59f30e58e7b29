"""Where a request attaches, in a line and in a tree, and that nothing else than what was recorded goes on."""

from __future__ import annotations

import json

import pytest

from miles_core.records import Version
from miles_core.rollout.chat import ChatMessage, ToolCall
from miles_core.rollout.sessions import history as module
from miles_core.rollout.sessions.errors import BadMessages, Conflict
from miles_core.rollout.sessions.history import Attachment, Checkpoint, History, Kind, Sampled, same_json

V0 = Version(0, 0)
END = 9


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def model(text: str, *arguments: str) -> ChatMessage:
    return ChatMessage("assistant", text, tuple(ToolCall(f"c{i}", "look", given) for i, given in enumerate(arguments)))


def sampled(*tokens: int, ended: bool = True) -> Sampled:
    return Sampled(tokens or (1, END), (-0.5,) * len(tokens or (1, END)), (V0,) * len(tokens or (1, END)), ended, V0, V0)


def say(history: History, reply: ChatMessage, *messages: ChatMessage, ended: bool = True) -> Checkpoint:
    """A request, answered."""
    at = history.attach(messages)
    return history.commit(at, (7,) * len(at.messages), sampled(ended=ended), reply)


A, B, C = user("a"), user("b"), user("c")
X, Y, Z = model("x"), model("y"), model("z")


def three_turns(kind: Kind = "linear") -> History:
    history = History(kind)
    say(history, X, A)
    say(history, Y, A, X, B)
    say(history, Z, A, X, B, Y, C)
    return history


def state(history: History) -> tuple[list[int], int]:
    return [node.seq for node in history.checkpoints], history.taken_back


def test_a_line_grows_at_its_end() -> None:
    history = three_turns()
    first, second, third = history.checkpoints
    assert (first.parent, second.parent, third.parent) == (None, first, second)
    assert [(node.start, node.sampled_at, node.end) for node in history.checkpoints] == [(0, 1, 3), (3, 4, 6), (6, 7, 9)]
    assert third.tokens() == (7, 1, END) * 3 and [node.depth for node in third.path()] == [1, 2, 3]
    assert history.attach((A, X, B, Y, C, Z, user("d"))) == Attachment(third, (user("d"),))


def test_the_last_turn_may_be_tried_again_with_the_same_or_with_other_words() -> None:
    for again in (C, user("c, please")):
        history = three_turns()
        node = say(history, model("other"), A, X, B, Y, again)
        assert state(history) == ([0, 1, 3], 1) and node.parent is history.checkpoints[1] and node.messages == (again,)
        assert history.attach((A, X, B, Y, again, model("other"), A)).parent is node


def test_the_first_turn_may_be_tried_again_from_an_empty_line() -> None:
    history = History()
    say(history, X, A)
    node = say(history, Y, ChatMessage("system", "short"), B)
    assert state(history) == ([1], 1) and (node.parent, node.start) == (None, 0)


def test_nothing_is_taken_back_before_another_turn_is_there() -> None:
    history = three_turns()
    history.attach((A, X, B, Y, user("other")))
    assert state(history) == ([0, 1, 2], 0)


@pytest.mark.parametrize(
    ("sent", "number"),
    [
        ((A, X, user("other")), 2),
        ((A, X, B, model("changed"), C), 3),
        ((A, model("changed"), B, Y, C, Z, A), 1),
        ((user("other"),), 0),
        ((A, X, B, Y, C, model("changed"), A), 5),
        ((A, X, B), 3),
    ],
)
def test_another_past_is_refused_and_changes_nothing(sent: tuple[ChatMessage, ...], number: int) -> None:
    history = three_turns()
    with pytest.raises(BadMessages, match=rf"messages\[{number}\] is not what this session holds.*as they came"):
        history.attach(sent)
    assert state(history) == ([0, 1, 2], 0)


def test_a_reply_whose_thinking_was_cut_out_is_not_merged() -> None:
    history = History()
    say(history, model("<think>why</think>x"), A)
    with pytest.raises(BadMessages, match=r"turn 1 said '<think>why</think>x', the request has 'x'"):
        history.attach((A, X, B))
    branching = History("branching")
    say(branching, model("<think>why</think>x"), A)
    assert branching.attach((A, X, B)) == Attachment(None, (A, X, B))


def test_words_put_into_the_models_mouth_are_no_checkpoint() -> None:
    history = History()
    say(history, Y, A, X, B)
    assert len(history.checkpoints) == 1 and history.checkpoints[0].messages == (A, X, B)
    say(history, Z, A, X, B, Y, A, X, C)
    assert [node.depth for node in history.checkpoints] == [1, 2]
    say(history, model("again"), A, X, B, Y, C)
    assert state(history) == ([0, 2], 1)


def test_a_cut_turn_cannot_be_extended_but_tried_again() -> None:
    history = History()
    say(history, X, A, ended=False)
    with pytest.raises(Conflict, match="turn 1 was cut by a limit"):
        history.attach((A, X, B))
    assert say(history, Y, A).seq == 1
    branching = History("branching")
    say(branching, X, A, ended=False)
    with pytest.raises(Conflict, match="turn 1 was cut by a limit"):
        branching.attach((A, X, B))


def test_of_two_calls_at_once_one_writes_a_line_and_both_write_a_tree() -> None:
    history = three_turns()
    asked = (A, X, B, Y, C, Z, A)
    one, other = history.attach(asked), history.attach(asked)
    history.commit(one, (7,), sampled(), X)
    with pytest.raises(Conflict, match="another call on this session was answered first"):
        history.commit(other, (7,), sampled(), Y)
    assert len(history.checkpoints) == 4
    tree = three_turns("branching")
    one, other = tree.attach(asked), tree.attach(asked)
    assert tree.commit(one, (7,), sampled(), X).parent is tree.commit(other, (7,), sampled(), Y).parent


def test_two_tries_at_once_take_back_one_turn() -> None:
    history = three_turns()
    one, other = history.attach((A, X, B, Y, A)), history.attach((A, X, B, Y, B))
    history.commit(one, (7,), sampled(), X)
    with pytest.raises(Conflict):
        history.commit(other, (7,), sampled(), X)
    assert state(history) == ([0, 1, 3], 1)


@pytest.mark.parametrize("sent", [(), (X,), (A, X)])
@pytest.mark.parametrize("kind", ["linear", "branching"])
def test_there_must_be_something_to_answer(kind: Kind, sent: tuple[ChatMessage, ...]) -> None:
    with pytest.raises(BadMessages, match="the model writes that one"):
        three_turns(kind).attach(sent)


def test_arguments_that_are_the_same_json_match_if_asked_and_the_stored_spelling_stays() -> None:
    stored, sent = model("", '{"a": 1, "b": [2.0]}'), model("", '{"b":[2],"a":1}')
    for replay, matches in (("strict", False), ("json", True)):
        history = History(replay=replay)  # type: ignore[arg-type]
        say(history, stored, A)
        if not matches:
            with pytest.raises(BadMessages):
                history.attach((A, sent, B))
            continue
        node = say(history, X, A, sent, B)
        assert node.parent is not None and node.parent.reply == stored
        assert history.attach((A, stored, B, X, C)).parent is history.attach((A, sent, B, X, C)).parent is node
        for other in (model("", '{"a": 1}'), model("x", '{"a": 1, "b": [2]}'), model("")):
            with pytest.raises(BadMessages):
                history.attach((A, other, B, X, C))


def test_the_same_json() -> None:
    assert same_json('{"a": 1.0}', '{"a": 1}') and same_json("no json", "no json")
    for one, other in (("1", "true"), ("no", "json"), ('{"a": 1}', '{"a": "1"}'), ("[" * 100_000, "[")):
        assert not same_json(one, other)


# --- a tree ------------------------------------------------------------------------------------------------------------


def tree() -> tuple[History, dict[str, Checkpoint]]:
    """a-x-b-y-c-z, beside it a-x-c-z, a twin of the first turn, and a second root b-y."""
    history = History("branching")
    nodes = {"x": say(history, X, A)}
    nodes["xy"] = say(history, Y, A, X, B)
    nodes["xyz"] = say(history, Z, A, X, B, Y, C)
    nodes["xz"] = say(history, Z, A, X, C)
    nodes["y"] = say(history, Y, B)
    nodes["twin"] = say(history, X, A)
    return history, nodes


@pytest.mark.parametrize(
    ("sent", "parent", "appended"),
    [
        ((C,), None, 1),
        ((A,), None, 1),
        ((A, C), None, 2),
        ((A, X, user("d")), "twin", 1),
        ((A, X, B), "twin", 1),
        ((A, X, B, Y, user("d")), "xy", 1),
        ((A, X, B, Y, C), "xy", 1),
        ((A, X, B, Y, C, Z, A), "xyz", 1),
        ((A, X, B, Y, C, X, A), "xy", 3),
        ((A, X, C, Z, A, X, B), "xz", 3),
        ((B, Y, A), "y", 1),
        ((B, X, A), None, 3),
        ((A, Y, B), None, 3),
        ((ChatMessage("system", "sum: a x"), B), None, 2),
    ],
)
def test_a_request_attaches_to_the_deepest_turn_it_goes_on_from(
    sent: tuple[ChatMessage, ...], parent: str | None, appended: int
) -> None:
    history, nodes = tree()
    before = list(history.checkpoints)
    found = history.attach(sent)
    assert found == Attachment(None if parent is None else nodes[parent], sent[len(sent) - appended :])
    assert history.checkpoints == before


def test_the_leaves_of_a_tree() -> None:
    history, nodes = tree()
    assert list(history.leaves()) == [nodes["xyz"], nodes["xz"], nodes["y"], nodes["twin"]]


@pytest.mark.parametrize("kind", ["linear", "branching"])
def test_a_history_is_as_deep_as_it_may_be_and_then_says_so(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHECKPOINTS", 1200)  # beyond the recursion limit
    history = History(kind)
    messages: list[ChatMessage] = []
    parent = None
    for number in range(1200):
        ask, reply = user(str(number)), model(str(number))
        parent = history.commit(Attachment(parent, (ask,)), (7,), sampled(), reply)
        messages += [ask, reply]
    assert history.attach((*messages, A)).parent is parent and len(parent.tokens()) == 3600  # type: ignore[union-attr]
    with pytest.raises(Conflict, match="has 1200 turns, which is the most"):
        history.commit(Attachment(parent, (A,)), (7,), sampled(), X)
    assert json.dumps([node.seq for node in history.leaves()]) == "[1199]"
