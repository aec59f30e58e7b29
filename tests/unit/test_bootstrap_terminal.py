"""The terminal task's warm-up: every word is one token, and no demonstration shows what the real tool would not say."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerFast

from miles_core.bootstrap import find_warm_up
from miles_core.bootstrap.terminal import MOST_CALLS, TerminalDemonstrator, TerminalHabits
from miles_core.bootstrap.tokenizer import SPECIAL_TOKENS, Messages, encode
from miles_core.environments.base import Message
from miles_core.environments.terminal import PLAIN_CHANGE, PLAIN_READ, TerminalEnvironment
from miles_core.environments.terminal_task import CHECK, FILES, KEYS, VALUES, Setting, TaskSource, change, find
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec, load_recipe
from miles_core.rollout.session import ChatRenderer

ENVIRONMENT = EnvironmentSpec(family="terminal", tool="shell", max_turns=MOST_CALLS + 1, tool_deadline_s=60)


def demonstrations(seed: int = 0) -> TerminalDemonstrator:
    return TerminalDemonstrator(TerminalHabits(), seed, ENVIRONMENT)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demonstrations().tokenizer()


def turns_of(messages: Messages) -> list[str]:
    return [message.content for message in messages if message.role == "assistant"]


def test_words_files_numbers_and_addresses_stand_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (*SPECIAL_TOKENS, *KEYS, *FILES, *map(str, VALUES), *(f'"/{key}/c' for key in KEYS), '"', "*.conf", "sed:"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    line = change(Setting("app.conf", "port", 42))
    ids = tokenizer.encode(f"<tool_call>{line}</tool_call>", add_special_tokens=False)
    assert len(ids) == 9 and tool_call(tokenizer.decode(ids).strip()).strip() == line  # type: ignore[union-attr]
    assert PLAIN_CHANGE.fullmatch(line) and PLAIN_READ.fullmatch(find("port")) and len(tokenizer) < 512


def test_demonstrations_are_tokens_as_a_rollout_sees_them_and_fit_the_recipe(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, spec = ChatRenderer(tokenizer), load_recipe("terminal").environment
    demonstrator = demonstrations()
    for _ in range(50):
        for messages in (demonstrator.clean(), demonstrator.careless()):
            ids, own = encode(tokenizer, messages)
            expected = list(renderer.opening(messages[:1]))
            for message in messages[1:]:
                if message.role == "tool":
                    expected += renderer.continuation((message,))
                else:
                    said = tokenizer.encode(message.content, add_special_tokens=False)
                    expected += [*said, renderer.end_id]
                    assert len(said) < spec.max_new_tokens
            assert ids == expected and len(ids) <= spec.max_tokens and sum(own) > 0
            assert len(turns_of(messages)) <= spec.max_turns


def test_the_real_tool_says_what_the_demonstrations_say() -> None:
    """All of a whole demonstration's calls, in order, on the task's real folder."""
    environment, source, demonstrator = TerminalEnvironment(ENVIRONMENT, "test"), TaskSource({}), demonstrations()
    said: Counter[str] = Counter()

    async def check(seed: int, messages: Messages) -> None:
        episode = environment.episode(seed, "train")
        assert episode.opening() == messages[:1]
        try:
            for turn, answer in zip(messages[1::2], messages[2::2], strict=False):
                assert await episode.respond(turn.content) == (answer,), turn
                said[turn.content.split()[0]] += 1
        finally:
            await episode.close()

    for seed in range(30):
        demonstrator._task = lambda seed=seed: source.task(seed, "train")  # type: ignore[method-assign]
        asyncio.run(check(seed, demonstrator.clean()))
        asyncio.run(check(seed, demonstrator.careless()))
    assert set(said) == {"<tool_call>bash", "<tool_call>grep", "<tool_call>sed"} and min(said.values()) > 20


def test_clean_demonstrations_are_the_reference_solution_and_pass() -> None:
    demonstrator = demonstrations()
    for _ in range(100):
        messages = demonstrator.clean()
        *calls, answer = turns_of(messages)
        assert all(tool_call(call) is not None for call in calls) and 3 <= len(calls) <= 4
        assert (tool_call(calls[-1]), messages[-2].content, answer) == (CHECK, "ok", "done")


def test_only_training_tasks_are_demonstrated() -> None:
    demonstrator, drawn = demonstrations(), []
    real = demonstrator._source.task
    demonstrator._source.task = lambda seed, split: (drawn.append(split), real(seed, split))[1]  # type: ignore[assignment]
    for _ in range(50):
        demonstrator.clean()
        demonstrator.careless()
    assert drawn == ["train"] * 100


def test_carelessness_has_its_rates() -> None:
    habits, demonstrator = TerminalHabits(), demonstrations()
    seen: Counter[str] = Counter()
    for _ in range(4000):
        messages = demonstrator.careless()
        calls = [str(tool_call(turn)) for turn in turns_of(messages)[:-1]]
        kind = "told" if messages[0].content.startswith("Set") else "asked"
        seen[kind] += 1
        if not calls:
            seen[f"{kind} idle"] += 1
            continue
        seen[f"{kind} hasty"] += calls[kind == "asked"].startswith("sed")
        answers = [message.content for message in messages if message.role == "tool"]
        checked = [index for index, call in enumerate(calls) if call == CHECK and index]
        seen["unchecked"] += not checked
        if checked and answers[checked[0]] != "ok":
            seen["complained"] += 1
            seen["blind"] += checked[0] == len(calls) - 1
    for kind, hasty in (("told", habits.hasty), ("asked", habits.hasty_asked)):
        worked = seen[kind] - seen[f"{kind} idle"]
        assert seen[f"{kind} idle"] / seen[kind] == pytest.approx(habits.idle, abs=0.03)
        assert seen[f"{kind} hasty"] / worked == pytest.approx(hasty, abs=0.04)
    assert seen["blind"] / seen["complained"] == pytest.approx(habits.blind, abs=0.05)
    assert seen["unchecked"] / (4000 - seen["told idle"] - seen["asked idle"]) == pytest.approx(habits.unchecked, abs=0.04)


def test_the_answer_ends_a_demonstration() -> None:
    assert demonstrations().clean()[-1] == Message("assistant", "done")


@pytest.mark.parametrize(
    "changes", [{"options": {"level": 2}}, {"max_turns": MOST_CALLS}, {"family": "chain_sum", "tool": "calculator"}]
)
def test_another_task_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"family: terminal, options: \{level: 1\}"):
        find_warm_up("terminal", ENVIRONMENT.model_copy(update=changes))


@pytest.mark.parametrize("name", ["terminal", "terminal_vllm"])
def test_the_recipes_have_their_warm_up(name: str) -> None:
    recipe = load_recipe(name)
    settings = find_warm_up(str(recipe.model.bootstrap), recipe.environment)
    assert isinstance(settings.habits, TerminalHabits) and settings.head_dim == 32
