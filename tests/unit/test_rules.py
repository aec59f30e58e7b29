"""A grade is the library's own judgement of the same question, or no grade."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.grading.rules import ReasoningGymVerifier, make_verifier
from miles_core.recipe import EnvironmentSpec

SPEC = EnvironmentSpec(family="chain_sum", options={"max_terms": 3})


def facts_of(spec: EnvironmentSpec, seed: int, answer: str, split: str = "train") -> dict[str, Any]:
    episode: Any = ReasoningGymEnvironment(spec).episode(seed, split)  # type: ignore[arg-type]
    asyncio.run(episode.respond(answer.replace("TRUE", str(episode.task.entry["answer"]))))
    return episode.facts()


@pytest.mark.parametrize(("answer", "value"), [("TRUE", 1.0), ("0TRUE", 1.0), ("7", 0.0), ("", 0.0), ("none", 0.0)])
def test_answers_are_judged_by_the_library(answer: str, value: float) -> None:
    assert make_verifier(SPEC).value(11, facts_of(SPEC, 11, answer)) == value


def test_an_answer_that_contains_the_right_one_gets_the_librarys_partial_credit() -> None:
    assert 0.0 < make_verifier(SPEC).value(11, facts_of(SPEC, 11, "so it is TRUE")) < 0.5


def test_the_held_out_split_is_judged_on_its_own_question() -> None:
    verifier = make_verifier(SPEC)
    assert [verifier.value(seed, facts_of(SPEC, seed, "TRUE", "eval")) for seed in range(5)] == [1.0] * 5


def test_any_family_can_be_judged() -> None:
    for family in ("word_sorting", "survo", "number_sorting"):
        spec = EnvironmentSpec(family=family)
        assert make_verifier(spec).value(2, facts_of(spec, 2, "TRUE")) == 1.0


def test_no_final_answer_is_the_models_failure() -> None:
    assert make_verifier(SPEC).value(3, facts_of(SPEC, 3, "1") | {"final_answer": None}) == 0.0


@pytest.mark.parametrize("change", [{"family": "word_sorting"}, {"question_md5": "0" * 32}, {"split": "eval"}])
def test_facts_of_another_question_get_no_grade(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="same recipe and reasoning-gym version"):
        make_verifier(SPEC).value(5, facts_of(SPEC, 5, "TRUE") | change)


def test_a_verifier_that_breaks_gives_no_grade() -> None:
    verifier = ReasoningGymVerifier(SPEC)
    dataset = verifier._tasks.task(6, "train").dataset
    dataset.score_answer = lambda answer, entry: 1 / 0
    with pytest.raises(ZeroDivisionError):
        verifier.value(6, facts_of(SPEC, 6, "TRUE"))
    dataset.score_answer = lambda answer, entry: 1.5
    with pytest.raises(ValueError, match=r"scored 1\.5"):
        verifier.value(6, facts_of(SPEC, 6, "TRUE"))


def test_the_source_names_family_and_version() -> None:
    assert make_verifier(SPEC).source.startswith("reasoning_gym/chain_sum@")
