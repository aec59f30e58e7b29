"""Tasks are reproducible, the splits share no question, the calculator computes and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.environments.base import EpisodeFailed, Message
from miles_core.environments.calculator import MAX_EXPRESSION_CHARS, calculate
from miles_core.environments.reasoning_gym import UNREPRODUCIBLE, ReasoningGymEnvironment, TaskSource
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

SPEC = EnvironmentSpec(
    family="chain_sum", options={"min_terms": 2, "max_terms": 3, "max_digits": 2}, tool="calculator", max_turns=3
)


def episode(spec: EnvironmentSpec = SPEC, seed: int = 7) -> Any:
    return ReasoningGymEnvironment(spec).episode(seed, "train")


def play(episode: Any, *turns: str) -> list[tuple[Message, ...]]:
    async def run() -> list[tuple[Message, ...]]:
        return [await episode.respond(turn) for turn in turns]

    return asyncio.run(run())


def test_a_task_is_the_same_in_every_environment_whatever_was_drawn_before() -> None:
    one, other = ReasoningGymEnvironment(SPEC), ReasoningGymEnvironment(SPEC)
    seeds = list(range(40))
    first = {seed: one.episode(seed, "train").opening() for seed in seeds}
    assert {seed: other.episode(seed, "train").opening() for seed in reversed(seeds)} == first
    assert len(set(first.values())) > 30


@pytest.mark.parametrize("family", ["chain_sum", "survo", "acre", "gsm_symbolic"])
def test_families_that_cannot_be_reseeded_draw_as_if_made_anew(family: str) -> None:
    source, other = TaskSource(family, {}), TaskSource(family, {})
    questions = [source.task(seed, "train").question for seed in range(6)]
    assert [other.task(seed, "train").question for seed in reversed(range(6))] == questions[::-1]
    task = source.task(3, "train")
    assert task.dataset.score_answer(task.entry["answer"], task.entry) == 1.0


def test_splits_share_no_question_although_the_family_is_small() -> None:
    environment = ReasoningGymEnvironment(EnvironmentSpec(family="chain_sum", options={"max_terms": 2, "max_digits": 1}))
    questions = {
        split: {environment.episode(seed, split).opening()[0].content for seed in range(300)} for split in ("train", "eval")
    }
    # 200 questions in all, so that both splits would meet if the seed alone decided.
    assert len(questions["train"]) > 100 and len(questions["eval"]) > 25
    assert not questions["train"] & questions["eval"]
    for split, drawn in questions.items():
        held_out = {int(hashlib.md5(question.encode()).hexdigest(), 16) % 4 == 0 for question in drawn}
        assert held_out == {split == "eval"}, "the rule that warm-up data follow too"


def test_a_split_without_questions_ends_with_an_explanation() -> None:
    environment = ReasoningGymEnvironment(EnvironmentSpec(family="chain_sum"))
    question = environment.episode(1, "train").opening()[0].content
    source = environment._source
    source._shared = type("OneQuestion", (), {"__getitem__": lambda self, index: {"question": question, "answer": "0"}})()
    with pytest.raises(EpisodeFailed, match=r"no question of split 'eval'.*widen environment.options") as failure:
        environment.episode(1, "eval")
    assert failure.value.kind == "environment"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"family": "chain_sun"}, "no family 'chain_sun'; close names: chain_sum"),
        ({"options": {"max_term": 3}}, "has no option max_term .*There are: .*max_terms"),
        ({"options": {"seed": 3}}, "has no option seed"),
        ({"options": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ({"options": {"max_terms": "many"}}, "reasoning-gym refuses"),
        ({"family": sorted(UNREPRODUCIBLE)[0]}, "different processes"),
    ],
)
def test_a_wrong_recipe_is_refused_when_the_environment_is_made(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ReasoningGymEnvironment(EnvironmentSpec(**({"family": "chain_sum"} | changes)))


def test_a_call_is_answered_and_other_text_is_the_final_answer() -> None:
    one = episode()
    answers = play(one, "<tool_call>12 + 7 - 3</tool_call>", " 16 ")
    assert answers == [(Message("tool", "16"),), ()]
    facts = one.facts()
    assert facts["final_answer"] == "16" and facts["turns"] == 2
    assert facts["tool_calls"] == [{"expression": "12 + 7 - 3", "result": "16"}]
    assert (facts["question_seed"], facts["split"], facts["family"]) == (7, "train", "chain_sum")


def test_the_turns_end_although_the_model_goes_on_calling() -> None:
    one = episode()
    assert play(one, *["<tool_call>1 + 1</tool_call>"] * 3)[-1] == ()
    assert one.facts()["final_answer"] is None and one.facts()["turns"] == 3


def test_without_a_tool_a_call_is_just_text() -> None:
    one = episode(EnvironmentSpec(family="chain_sum"))
    assert play(one, "<tool_call>1 + 1</tool_call>") == [()]
    assert one.facts()["final_answer"] == "<tool_call>1 + 1</tool_call>" and one.facts()["tool_calls"] == []


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("<tool_call>1 + 2</tool_call>", "1 + 2"),
        ("Let me see. <tool_call>1</tool_call>\n", "1"),
        ("<tool_call>a</tool_call> <tool_call>b</tool_call>", "b"),
        ("<tool_call><tool_call>5</tool_call>", "5"),
        ("<tool_call></tool_call>", ""),
        ("<tool_call>1 + 2", None),
        ("<tool_call>1 + 2</tool_call> so 3", None),
        ("3", None),
    ],
)
def test_only_a_turn_that_ends_in_a_closed_call_is_a_call(text: str, expression: str | None) -> None:
    assert tool_call(text) == expression


@given(st.lists(st.tuples(st.sampled_from("+-*"), st.integers(-999, 999)), max_size=8), st.integers(-999, 999))
def test_the_calculator_agrees_with_python(steps: list[tuple[str, int]], first: int) -> None:
    expression = " ".join([str(first), *(f"{sign} {number}" for sign, number in steps)])
    total, product = 0, first
    for sign, number in steps:
        if sign == "*":
            product = operator.mul(product, number)
        else:
            total, product = total + product, number if sign == "+" else -number
    assert calculate(expression) == str(total + product)
    assert calculate(expression.replace(" ", "")) == str(total + product)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        " ",
        "12 +",
        "+ 3",
        "1 2",
        "2 ** 9",
        "1 // 2",
        "(1)",
        "x",
        "__import__('os')",
        "1\n+ 1",
        "9" * 13,
        "1 + ٣",
        "1" + "+1" * 80,
    ],
)
def test_anything_else_is_answered_with_a_short_error(expression: str) -> None:
    answer = calculate(expression)
    assert answer.startswith("error: ") and len(answer) < 40


def test_the_longest_product_stays_short() -> None:
    expression = "*".join(["9" * 7] * 16)
    assert len(expression) <= MAX_EXPRESSION_CHARS and len(calculate(expression)) <= MAX_EXPRESSION_CHARS


@given(st.text(max_size=200))
def test_no_text_breaks_the_calculator(text: str) -> None:
    assert calculate(text)
