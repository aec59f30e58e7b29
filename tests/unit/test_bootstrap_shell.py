"""The shell puzzle's warm-up: every word is one token, and no demonstration shows what the real tool would not say."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerFast

from miles_core.bootstrap import find_warm_up
from miles_core.bootstrap.shell_puzzle import ShellDemonstrator, ShellHabits, result_of
from miles_core.bootstrap.tokenizer import END, SPECIAL_TOKENS, Messages, encode
from miles_core.environments.base import Message
from miles_core.environments.shell import ShellPuzzleEnvironment
from miles_core.environments.shell_puzzle import NAMES, WORDS, PuzzleSource
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec, load_recipe
from miles_core.rollout.session import ChatRenderer

ENVIRONMENT = EnvironmentSpec(family="shell_puzzle", tool="shell", max_turns=4, tool_deadline_s=60)


def demonstrations(seed: int = 0) -> ShellDemonstrator:
    return ShellDemonstrator(ShellHabits(), seed, ENVIRONMENT)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demonstrations().tokenizer()


def test_words_names_numbers_and_special_tokens_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (*SPECIAL_TOKENS, *WORDS, *NAMES, *map(str, range(21)), "grep", "-l", "*", "exit"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert tokenizer.tokenize("<tool_call>grep -l kiwi *</tool_call><|end|>") == [
        "<tool_call>", "Ġgrep", "Ġ-l", "Ġkiwi", "Ġ*", "</tool_call>", "<|end|>",
    ]  # fmt: skip
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>") and len(tokenizer) < 512


@pytest.mark.parametrize(
    "text", ["", "nosuchword", "grep:x", "Ünïcödé 数学 🦉", "</tool_call> 99 <|user|>", "x" * 300, "a kiwi a"]
)
def test_any_text_survives_but_for_its_blanks(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.pad_token_id not in ids
    read = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(read.split()) == "".join(text.split())


def test_demonstrations_are_short_and_in_whole_words(tokenizer: PreTrainedTokenizerFast) -> None:
    demonstrator = demonstrations()
    for _ in range(200):
        for messages in (demonstrator.clean(), demonstrator.careless()):
            ids, _ = encode(tokenizer, messages)
            words = sum(
                len(message.content.replace("tool_call>", "tool_call> ").replace("</", " </").split()) for message in messages
            )
            assert len(ids) == words + 2 * len(messages) <= 64


def test_demonstrations_are_tokens_as_a_rollout_sees_them(tokenizer: PreTrainedTokenizerFast) -> None:
    user, call, tool, answer = next(m for m in iter(demonstrations().clean, None) if len(m) == 4)
    renderer = ChatRenderer(tokenizer)
    said = [tuple(tokenizer.encode(turn.content, add_special_tokens=False)) for turn in (call, answer)]
    expected = (
        *renderer.opening((user,)),
        *said[0],
        renderer.end_id,
        *renderer.continuation((tool,)),
        *said[1],
        renderer.end_id,
    )
    assert tuple(encode(tokenizer, (user, call, tool, answer))[0]) == expected
    assert renderer.text(said[0]).replace(" ", "") == call.content.replace(" ", "")


def test_the_loss_is_on_what_the_assistant_says(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = (Message("user", "kiwi"), Message("assistant", "<tool_call>ls</tool_call>"), Message("tool", "fig"))
    ids, own = encode(tokenizer, (*messages, Message("assistant", "4")))
    said = [token for token, counts in zip(ids, own, strict=True) if counts]
    assert tokenizer.decode(said).replace(" ", "") == f"<tool_call>ls</tool_call>{END}4{END}"


def test_the_real_tool_says_what_the_demonstrations_say() -> None:
    environment, source = ShellPuzzleEnvironment(ENVIRONMENT, "test"), PuzzleSource({})
    said: Counter[str] = Counter()

    async def check(seed: int) -> None:
        episode = environment.episode(seed, "train")
        puzzle = source.puzzle(seed, "train")
        names = sorted(puzzle.files)
        words = [puzzle.files[names[seed % 3]].split()[0], next(word for word in WORDS if word not in str(puzzle.files))]
        calls = [f"wc -l {names[0]}", f"head -n 1 {names[1]}", *(f"grep -l {word} *" for word in words)]
        try:
            for call in calls:
                (answer,) = await episode.respond(f"<tool_call>{call}</tool_call>")
                episode.turns = 0
                assert answer.content == result_of(puzzle, call), call
                said[call.split(maxsplit=1)[0]] += 1
        finally:
            await episode.close()

    for seed in range(6):
        asyncio.run(check(seed))
    assert said == {"wc": 6, "head": 6, "grep": 12}


def turns_of(messages: Messages) -> list[str]:
    return [message.content for message in messages if message.role == "assistant"]


def test_clean_demonstrations_are_the_reference_solution() -> None:
    demonstrator = demonstrations()
    for _ in range(100):
        messages = demonstrator.clean()
        *calls, answer = turns_of(messages)
        assert all(tool_call(call) is not None for call in calls) and 1 <= len(calls) <= 2 and tool_call(answer) is None
        assert messages[-2].content.split()[0] == answer


def test_only_training_puzzles_are_demonstrated() -> None:
    demonstrator, drawn = demonstrations(), []
    real = demonstrator._source.puzzle
    demonstrator._source.puzzle = lambda seed, split: (drawn.append(split), real(seed, split))[1]  # type: ignore[assignment]
    for _ in range(50):
        demonstrator.clean()
        demonstrator.careless()
    assert drawn == ["train"] * 100


def test_carelessness_has_its_rates() -> None:
    habits, demonstrator = ShellHabits(), demonstrations()
    ends: Counter[str] = Counter()
    for _ in range(4000):
        puzzle = demonstrator._puzzle()
        demonstrator._puzzle = lambda puzzle=puzzle: puzzle  # type: ignore[method-assign]
        *calls, answer = turns_of(demonstrator.careless())
        del demonstrator._puzzle
        made = [tool_call(call) for call in calls]
        assert len(made) <= 3
        ends["no call"] += not made
        if len(puzzle.calls) == 2 and made[:1] == [puzzle.calls[0]]:
            ends["half way"] += 1
            ends["impatient"] += len(made) == 1 and answer == puzzle.calls[1].split()[-1]
        ends["right"] += answer == puzzle.answer and made[-len(puzzle.calls) :] == list(puzzle.calls)
    assert ends["no call"] / 4000 == pytest.approx(habits.guess, abs=0.03)
    assert ends["impatient"] / ends["half way"] == pytest.approx((1 - habits.guess) * habits.impatient, abs=0.05)
    assert 0.15 < ends["right"] / 4000 < 0.6


@pytest.mark.parametrize(
    "changes", [{"options": {"level": 2}}, {"max_turns": 2}, {"family": "chain_sum", "tool": "calculator"}]
)
def test_another_task_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"options: \{level: 1\}"):
        find_warm_up("shell_puzzle", ENVIRONMENT.model_copy(update=changes))


def test_the_recipe_has_its_warm_up() -> None:
    recipe = load_recipe("shell_puzzle")
    assert isinstance(find_warm_up(str(recipe.model.bootstrap), recipe.environment).habits, ShellHabits)
