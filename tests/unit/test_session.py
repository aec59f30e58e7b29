"""The history only grows, token for token, for a plain template and for ChatML alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from miles_core.environments.base import Message
from miles_core.errors import RecipeError
from miles_core.records import Version
from miles_core.rollout.session import ChatRenderer, ContextOverflow, Session
from miles_core.trajectories.schema import Turn, VersionRun
from tests.unit.tiny_models import CHATML_TEMPLATE, chatml_tokenizer, tiny_tokenizer

QUESTION = (Message("user", "12 + 7 - 3 ="),)
V1, V2 = Version(1, 1), Version(2, 1)
TOKENIZERS = {"plain": tiny_tokenizer, "chatml": chatml_tokenizer}


def rendered(tokenizer: PreTrainedTokenizerFast, messages: tuple[Message, ...]) -> list[int]:
    """What the template makes of a whole conversation at once."""
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def sampled(session: Session, ids: list[int], version: Version = V1) -> str:
    return session.record(ids, [-0.5] * len(ids), [version] * len(ids))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_appended_turns_read_as_if_the_whole_conversation_were_rendered(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    renderer = ChatRenderer(tokenizer)
    session = Session(renderer, QUESTION, 400)
    history = QUESTION
    for call, result in (("12 + 7", "19"), ("19 - 3", "16")):
        sampled(session, [*tokenizer(call, add_special_tokens=False).input_ids, renderer.end_id])
        session.append((Message("tool", result),))
        history += (Message("assistant", call), Message("tool", result))
        assert session.tokens == rendered(tokenizer, history)


def test_chatml_puts_the_newline_behind_the_models_own_end_token() -> None:
    tokenizer = chatml_tokenizer()
    renderer = ChatRenderer(tokenizer)
    assert tokenizer.decode([renderer.end_id]) == "<|im_end|>"  # not the tokenizer's eos
    text = tokenizer.decode(renderer.continuation((Message("tool", "19"),)))
    assert text == "\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n"


@given(data=st.data())
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_history_is_a_bit_exact_prefix_of_the_next(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]()
    renderer = ChatRenderer(tokenizer)
    text = st.text(max_size=12)
    session = Session(renderer, (Message("user", data.draw(text)),), 10_000)
    before: list[int] = []
    own: list[tuple[int, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        assert session.tokens[: len(before)] == before
        # Any ids at all: also sequences that no text would be tokenised to.
        ids = [*data.draw(st.lists(st.integers(7, len(tokenizer) - 1), max_size=8)), renderer.end_id]
        own.append((len(session.tokens), ids))
        sampled(session, ids)
        assert session.ended
        before = list(session.tokens)
        session.append((Message("tool", data.draw(text)),))
    columns = session.columns()
    for start, ids in own:
        assert columns["tokens"][start : start + len(ids)].tolist() == ids
    assert columns["loss_mask"].sum() == sum(len(ids) for _, ids in own)
    assert np.array_equal(columns["logprobs"], np.where(columns["loss_mask"] == 1, np.float32(-0.5), np.float32(0)))


def test_the_columns_say_who_wrote_what_and_which_version_sampled_it() -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    session = Session(renderer, QUESTION, 200)
    opening = len(session.tokens)
    session.record([20, 21, renderer.end_id], [-1.0, -2.0, -3.0], [V1, V2, V2])
    session.append((Message("tool", "19"),))
    middle = len(session.tokens)
    session.record([22, 23], [-4.0, -5.0], [V2, V1])
    columns = session.columns()
    assert columns["versions"] == (VersionRun(opening, *V1), VersionRun(opening + 1, *V2), VersionRun(middle + 1, *V1))
    spans = [("user", 0, opening), ("assistant", opening, opening + 3), ("tool", opening + 3, middle)]
    assert columns["turns"] == (*(Turn(*span) for span in spans), Turn("assistant", middle, middle + 2))
    assert columns["logprobs"][opening : opening + 3].tolist() == [-1.0, -2.0, -3.0]
    assert [columns[name].dtype.name for name in ("tokens", "loss_mask", "logprobs")] == ["int32", "uint8", "float32"]
    assert not session.ended


def test_the_text_of_a_turn_keeps_special_tokens_but_for_its_end() -> None:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    ids = tokenizer("<tool_call>12 + 7</tool_call><|end|>", add_special_tokens=False).input_ids
    assert sampled(Session(renderer, QUESTION, 200), ids) == "<tool_call>12 + 7</tool_call>"
    assert sampled(Session(renderer, QUESTION, 200), ids[:-2]) == "<tool_call>12 + 7"


def test_a_message_that_does_not_fit_changes_nothing() -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    opening = len(renderer.opening(QUESTION))
    with pytest.raises(ContextOverflow, match=f"max_tokens={opening}"):
        Session(renderer, QUESTION, opening)
    session = Session(renderer, QUESTION, opening + 6)
    sampled(session, [20, renderer.end_id])
    before = session.columns()
    with pytest.raises(ContextOverflow):
        session.append((Message("tool", "123456"),))
    assert all(np.array_equal(before[name], value) for name, value in session.columns().items())


def test_text_that_has_no_end_is_refused_before_it_is_tokenised() -> None:
    class Never(ChatRenderer):
        def __init__(self, tokenizer: Any) -> None:
            super().__init__(tokenizer)
            self.continuation = lambda messages: pytest.fail("was tokenised")

    session = Session(Never(tiny_tokenizer()), QUESTION, 100)
    sampled(session, [session._renderer.end_id])
    with pytest.raises(ContextOverflow, match=r"1000000 characters of \['tool'\] leave no room to answer"):
        session.append((Message("tool", "y" * 1_000_000),))
    with pytest.raises(ContextOverflow, match="characters"):
        Session(ChatRenderer(tiny_tokenizer()), (Message("user", "y" * 1_000_000),), 100)


def test_turns_must_alternate_and_fit() -> None:
    renderer = ChatRenderer(tiny_tokenizer())
    session = Session(renderer, QUESTION, len(renderer.opening(QUESTION)) + 8)
    with pytest.raises(ValueError, match="model turn that ended"):
        session.append((Message("tool", "1"),))
    with pytest.raises(ValueError, match="not a turn"):
        sampled(session, [])
    with pytest.raises(ValueError, match="not a turn"):
        sampled(session, [20] * 9)
    sampled(session, [20])
    with pytest.raises(ValueError, match="model turn that ended"):
        session.append((Message("tool", "1"),))
    with pytest.raises(ValueError, match="not a turn"):
        sampled(session, [20])


def with_template(template: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "must end in a special token"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "followed by an end token"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}<|end|>{% endfor %}", "followed by an end token"),
        ("{{ raise_exception('not today') }}", "refuses the roles .*not today"),
    ],
)
def test_a_template_that_cannot_be_spliced_is_refused(template: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ChatRenderer(with_template(template))


def test_a_role_the_template_refuses_is_named() -> None:
    guard = "{% for m in messages if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}"
    renderer = ChatRenderer(with_template(guard + CHATML_TEMPLATE.replace("<|im_end|>", "<|end|>")))
    with pytest.raises(RecipeError, match=r"\['user', 'assistant', 'tool'\]: no tools here"):
        renderer.continuation((Message("tool", "1"),))
