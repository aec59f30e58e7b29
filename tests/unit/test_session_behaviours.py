"""Behaviours 1 to 11 that a token-exact session server should pass: which test shows each, and those that are not shown there.

Two read otherwise here, for reasons that docs/agents.md gives: no token is ever trimmed at a turn's end (1, 2), and samples are
assembled by the replica itself, so the codec (11) is that of the shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.records import Version
from miles_core.rollout.chat import ChatMessage
from miles_core.rollout.sessions.assembly import assemble
from miles_core.rollout.sessions.history import Attachment, History, Sampled
from miles_core.rollout.sessions.live import LiveSession
from miles_core.rollout.sessions.messages import RequestReader
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import check_trajectory, decode_shard, encode_shard
from tests.unit.session_world import RENDERER, SPEC

SHOWN_BY = {
    "1 end tokens of three turns": (__name__, "test_behaviour_1_every_turn_keeps_and_trains_its_end_token"),
    "2 tokens that do not fit together": ("test_session_assembly", "test_turns_that_do_not_fit_together_are_refused"),
    "3 thinking cut out": ("test_session_history", "test_a_reply_whose_thinking_was_cut_out_is_not_merged"),
    "4 a retry takes back one": (
        "test_session_history", "test_the_last_turn_may_be_tried_again_with_the_same_or_with_other_words",
        "test_the_first_turn_may_be_tried_again_from_an_empty_line", "test_another_past_is_refused_and_changes_nothing",
        "test_words_put_into_the_models_mouth_are_no_checkpoint",
    ),
    "5 the stored spelling stays": (
        "test_session_history", "test_arguments_that_are_the_same_json_match_if_asked_and_the_stored_spelling_stays",
    ),
    "6 stream, headers, 502, 400": (
        "test_session_server", "test_a_stream_is_the_finished_turn", "test_an_engine_that_gives_no_turn_is_not_recorded",
        "test_a_malformed_request_is_refused_with_what_to_do",
    ),
    "7 calls at once, deletes": (
        "test_session_server", "test_of_two_calls_at_once_on_a_line_one_is_recorded",
        "test_a_delete_in_the_middle_of_a_turn_ends_the_call", "test_a_session_that_was_deleted_is_gone",
        "test_sessions_beyond_the_slots_take_turns_and_stay_apart",
    ),
    "8 where a request attaches": (
        "test_session_history", "test_a_request_attaches_to_the_deepest_turn_it_goes_on_from",
        "test_a_history_is_as_deep_as_it_may_be_and_then_says_so", "test_a_cut_turn_cannot_be_extended_but_tried_again",
    ),
    "9 forest oracle": ("test_session_assembly", "test_every_sampled_token_is_trained_once_whatever_an_agent_does"),
    "10 patches of experts": (
        "test_session_assembly", "test_experts_of_turns_rebuild_the_record_of_the_line",
        "test_experts_with_a_gap_or_an_overlap_are_refused",
    ),
    "11 codec": (
        __name__, "test_behaviour_11_arrays_that_are_not_contiguous_come_back_as_they_are",
        "test_behaviour_11_other_types_are_refused_and_nothing_wraps",
        "test_behaviour_11_nothing_recorded_is_not_a_record_of_nothing",
    ),
    "11 what is malformed": (
        "test_shards", "test_a_truncated_file_is_named", "test_no_flipped_byte_passes_the_announced_digest",
    ),
}  # fmt: skip
"""Behaviour -> a module of this folder and its tests."""

V0 = Version(0, 0)
STOP = 9


def test_every_behaviour_has_its_tests() -> None:
    assert {name.split()[0] for name in SHOWN_BY} == {str(number) for number in range(1, 12)}
    for module, *names in SHOWN_BY.values():
        text = (Path(__file__).parent / f"{module.rpartition('.')[2]}.py").read_text()
        assert names and all(f"def {name}(" in text for name in names), module


def sampled(*tokens: int, ended: bool = True) -> Sampled:
    return Sampled(tokens, (-1.0,) * len(tokens), (V0,) * len(tokens), ended, V0, V0)


def test_behaviour_1_every_turn_keeps_and_trains_its_end_token() -> None:
    history = History()
    parent = None
    for number, prompt in ((10, (1, 2, 3)), (20, (4, 5, 6)), (30, (7, 8))):
        at = Attachment(parent, (ChatMessage("user", str(number)),))
        parent = history.commit(at, prompt, sampled(number, STOP), ChatMessage("assistant", str(number)))
    (row,) = assemble(history, 100)
    columns = row.columns()
    assert columns["tokens"].tolist() == [1, 2, 3, 10, STOP, 4, 5, 6, 20, STOP, 7, 8, 30, STOP]
    assert columns["tokens"][columns["loss_mask"] == 1].tolist() == [10, STOP, 20, STOP, 30, STOP]


def request(*words: str) -> Any:
    roles = ("user", "assistant") * len(words)
    sent = [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]
    return RequestReader(1.0).read({"messages": sent})


def test_behaviours_1_and_4_the_end_token_is_the_boundary_and_a_first_turn_is_rendered_anew() -> None:
    """What the format writes behind the end token belongs to the next prompt; a second try has the first one's prompt."""
    session = LiveSession("s", "key", RENDERER, SPEC)
    first = session.prepare(request("go"))
    ids = (*RENDERER.opening((ChatMessage("user", "yes"),))[-4:-3], RENDERER.end_id)
    session.commit(first, sampled(*ids))
    reply = session.history.checkpoints[0].reply.content
    behind = session.prepare(request("go", reply, "on"))
    assert RENDERER.text(behind.prompt).startswith("\n<|im_start|>user\non")
    again = session.prepare(request("go"))
    assert again.prompt == first.prompt and again.at.takes_back is session.history.checkpoints[0]
    assert again.seed != first.seed and len(session.history.checkpoints) == 1


def test_behaviour_2_a_turn_without_its_end_gives_no_token_away() -> None:
    """Two tokens too many are neither trimmed nor merged: the row holds them, as the turn that was cut."""
    history = History()
    at = Attachment(None, (ChatMessage("user", "a"),))
    history.commit(at, (1,), sampled(10, STOP, 11, 12, ended=False), ChatMessage("assistant", "x"))
    (row,) = assemble(history, 100)
    assert row.is_cut and row.columns()["tokens"].tolist() == [1, 10, STOP, 11, 12]


def trajectory(**changes: Any) -> Trajectory:
    columns: dict[str, Any] = {
        "tokens": np.array([5, 6, 7], np.int32),
        "loss_mask": np.array([0, 1, 1], np.uint8),
        "logprobs": np.array([0, -1, -2], np.float32),
        "versions": (VersionRun(1, 0, 0),),
        "turns": (Turn("user", 0, 1), Turn("assistant", 1, 3)),
    }
    return Trajectory("g/0@r.a1", "g/0", "g", "o", "rollout-0", 1, 5, temperature=1.0, status="complete", **(columns | changes))


def through(row: Trajectory) -> Trajectory:
    check_trajectory(row)
    (back,) = decode_shard(encode_shard([row]), Path("shard"))
    return back


def test_behaviour_11_arrays_that_are_not_contiguous_come_back_as_they_are() -> None:
    wide = np.arange(6 * 4, dtype=np.uint8).reshape(2, 3, 4)
    row = trajectory(
        tokens=np.array([5, 0, 6, 0, 7, 0], np.int32)[::2],
        logprobs=np.array([-2, -1, 0], np.float32)[::-1],
        experts=wide[:, ::-1, ::2].transpose(0, 2, 1),
    )
    back = through(row)
    assert back.tokens.tolist() == [5, 6, 7] and back.logprobs.tolist() == [0, -1, -2]
    assert back.experts is not None and np.array_equal(back.experts, wide[:, ::-1, ::2].transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": np.array([5, 6, 7], np.int64)}, "tokens is int64"),
        ({"tokens": np.array([5, 6, 7], np.float32)}, "tokens is float32"),
        ({"logprobs": np.array([0, -1, -2], np.float64)}, "logprobs is float64"),
        ({"loss_mask": np.array([0, 1, 257], np.int32)}, "loss_mask is int32"),
        ({"loss_mask": np.array([0, 1, 2], np.uint8)}, "loss_mask holds 2"),
        ({"experts": np.zeros((2, 1, 1), np.int32)}, "experts is int32"),
        ({"experts": np.zeros((2, 1), np.uint8)}, r"experts is uint8\[2, 1\]"),
        ({"experts": np.zeros((3, 1, 1), np.uint8)}, "experts has 3 positions for 3 tokens"),
    ],
)
def test_behaviour_11_other_types_are_refused_and_nothing_wraps(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_trajectory(trajectory(**changes))


def test_behaviour_11_nothing_recorded_is_not_a_record_of_nothing() -> None:
    one = {
        "tokens": np.array([5], np.int32), "loss_mask": np.array([0], np.uint8), "logprobs": np.array([0], np.float32),
        "versions": (), "turns": (Turn("user", 0, 1),),
    }  # fmt: skip
    empty = through(trajectory(**one, experts=np.zeros((0, 2, 4), np.uint16))).experts
    assert empty is not None and (empty.shape, empty.dtype) == ((0, 2, 4), np.uint16)
    assert through(trajectory(**one)).experts is None
