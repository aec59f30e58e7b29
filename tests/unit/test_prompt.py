"""A prompt's solved examples and wording: the same everywhere, never trained or evaluated, and refused where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.environments.base import Message
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment, TaskSource
from miles_core.environments.splits import in_eval_split
from miles_core.errors import RecipeError
from miles_core.grading.rules import make_verifier
from miles_core.recipe import EnvironmentSpec, PromptSpec, Recipe, load_recipe

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
PROMPT = PromptSpec(system="Answer with the final answer only.", shots=4, wording="What is {expression}?")
SPEC = EnvironmentSpec(family="chain_sum", options=DIGITS, prompt=PROMPT)


def test_solved_examples_stand_in_front_and_are_the_same_for_every_question() -> None:
    one, other = ReasoningGymEnvironment(SPEC), ReasoningGymEnvironment(SPEC)
    openings = [one.episode(seed, split).opening() for seed in range(5) for split in ("train", "eval")]
    assert [message.role for message in openings[0]] == ["system", *["user", "assistant"] * 4, "user"]
    assert {opening[:-1] for opening in openings} == {other.episode(9, "train").opening()[:-1]}
    assert openings[0][0].content == PROMPT.system
    for question, answer in zip(openings[0][1:-1:2], openings[0][2::2], strict=True):
        expression = question.content.removeprefix("What is ").removesuffix("?")
        assert eval(expression) == int(answer.content), "a solved example is right"


def test_examples_are_in_neither_split_and_the_splits_share_no_question() -> None:
    source = TaskSource("chain_sum", DIGITS, PROMPT)
    shown = {shot.question for shot in source.shots}
    asked: dict[Any, set[str]] = {
        split: {source.task(seed, split).question for seed in range(400)} for split in ("train", "eval")
    }
    assert len(shown) == 4 and not shown & (asked["train"] | asked["eval"]) and not asked["train"] & asked["eval"]
    # 200 questions in all: without the rule the examples would have been drawn.
    bare = TaskSource("chain_sum", DIGITS, PromptSpec(wording=PROMPT.wording))
    assert shown & {bare.task(seed, split).question for seed in range(400) for split in ("train", "eval")}
    assert all(in_eval_split(source.task(seed, "eval").digest) for seed in range(20))


def test_the_grader_judges_the_question_as_it_was_asked() -> None:
    episode = ReasoningGymEnvironment(SPEC).episode(3, "eval")
    answer = episode.task.entry["answer"]
    facts = episode.facts() | {"final_answer": answer}
    assert make_verifier(SPEC).value(3, facts) == 1.0
    assert make_verifier(SPEC).value(3, facts | {"final_answer": "x"}) == 0.0
    other = SPEC.model_copy(update={"prompt": None})
    with pytest.raises(ValueError, match="question_md5"):
        make_verifier(other).value(3, facts)


def test_without_a_prompt_the_library_asks() -> None:
    (message,) = ReasoningGymEnvironment(EnvironmentSpec(family="chain_sum", options=DIGITS)).episode(3, "train").opening()
    assert message.role == "user" and message.content.startswith("State the final answer")
    lead = EnvironmentSpec(family="chain_sum", options=DIGITS, prompt=PromptSpec(system="Be brief."))
    assert ReasoningGymEnvironment(lead).episode(3, "train").opening() == (Message("system", "Be brief."), message)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (PromptSpec(wording="What is {sum}?"), r"cannot be filled in \(KeyError.*Fields of .chain_sum. are: .*expression"),
        (PromptSpec(wording="What is {}?"), "cannot be filled in"),
        (PromptSpec(wording="What is {expression"), "cannot be filled in"),
        (PromptSpec(wording="Always the same?", shots=2), "256 draws of 'chain_sum' .* gave 1 different questions"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused_when_the_environment_is_made(prompt: PromptSpec, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ReasoningGymEnvironment(EnvironmentSpec(family="chain_sum", options=DIGITS, prompt=prompt))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"family": "a:B", "prompt": {}}, "prompt is for reasoning-gym families, 'a:B'"),
        ({"family": "shell_puzzle", "tool": "shell", "prompt": {}}, "prompt is for reasoning-gym families"),
        ({"family": "terminal", "tool": "shell", "prompt": {}}, "prompt is for reasoning-gym families"),
        ({"family": "chain_sum", "tool": "calculator", "prompt": {"shots": 1}}, "shots are answered without a tool"),
    ],
)
def test_a_prompt_that_goes_with_nothing_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        EnvironmentSpec.model_validate(fields)


def test_a_made_model_knows_bare_questions_only() -> None:
    fields = load_recipe("chain_sum").model_dump()
    with pytest.raises(ValidationError, match=r"knows bare questions only; remove environment\.prompt"):
        Recipe.model_validate({**fields, "environment": {**fields["environment"], "prompt": {"system": "Hello."}}})
