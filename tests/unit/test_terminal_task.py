"""Terminal tasks are reproducible and solvable through the real tool at every level; none is solved as it is made."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.environments.terminal import judgeable
from miles_core.environments.terminal_task import FILES, KEYS, KINDS, LEVELS, MOST_CALLS, VALUES, TaskSource
from miles_core.errors import RecipeError
from miles_core.grading.rules import make_verifier
from tests.unit.terminal_world import call, environment_of, first_of_each_kind, play, spec_of


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_is_a_function_of_seed_level_and_split(level: int) -> None:
    one, other = TaskSource({"level": level}), TaskSource({"level": level})
    first = [one.task(seed, split) for seed in range(40) for split in ("train", "eval")]
    assert [other.task(seed, split) for seed in range(40) for split in ("train", "eval")] == first
    assert {task.digest for task in first[::2]}.isdisjoint(task.digest for task in first[1::2])
    assert all(len(task.calls) <= MOST_CALLS and judgeable(as_found(task.files)).fault is None for task in first)


def as_found(files: Any) -> dict[str, bytes | None]:
    return {name: text.encode() for name, text in files.items()}


@pytest.mark.parametrize(
    ("level", "digest"),
    [
        (1, "3a3ca5f19265e35f3453780bc9dff8c2"),
        (2, "4c42d8826c0b6b6784d47fee2983a712"),
        (3, "49e5557bd0e1a55fbb793cb1ae75a2c5"),
        (4, "1bda01c2ecbda993db236520d6117d52"),
    ],
)
def test_a_seed_gives_the_same_task_on_every_machine(level: int, digest: str) -> None:
    assert TaskSource({"level": level}).task(7, "train").digest == digest


def test_no_key_is_part_of_another_or_of_what_stands_beside_it() -> None:
    """A search for one key must not find another."""
    everything = [*KEYS, *map(str, VALUES), *FILES]
    assert len(set(everything)) == len(everything)
    assert not [(key, other) for key in KEYS for other in everything if key != other and key in other]


@pytest.mark.parametrize("level", LEVELS)
def test_the_reference_solution_of_every_kind_earns_the_reward_through_the_real_tool(level: int) -> None:
    environment, verifier = environment_of(level), make_verifier(spec_of(level))
    for kind, seed in first_of_each_kind(level).items():
        episode = environment.episode(seed, "train")
        task = episode.task
        answers = play(episode, *map(call, task.calls), "done")
        facts = episode.facts()
        assert (facts["kind"], facts["turns"], facts["final_answer"]) == (kind, len(task.calls) + 1, "done")
        ended = {ran["exit_code"] for ran in facts["tool_calls"] if not ran["command"].startswith("bash check.sh")}
        assert ended == {0} and answers[len(task.calls) - 1][0].content == "ok", facts
        assert facts["files_fault"] is None and verifier.value(seed, facts) == 1.0, facts
        assert verifier.value(seed, facts | {"final_answer": None}) == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_half_a_solution_earns_nothing(level: int) -> None:
    """Neither the folder as it was found nor one that lacks the last change."""
    environment, verifier = environment_of(level), make_verifier(spec_of(level))
    for kind, seed in first_of_each_kind(level).items():
        task = environment.episode(seed, "train").task
        changing = [line for line in task.calls if not line.startswith(("bash check.sh", "grep", "cat data", "ls"))]
        for lines in ((), changing[:-1]):
            episode = environment.episode(seed, "train")
            play(episode, *map(call, lines), "done")
            assert verifier.value(seed, episode.facts()) == 0.0, (kind, lines)


@pytest.mark.parametrize("level", (3, 4))
def test_every_fault_of_a_script_is_shown_by_its_test(level: int) -> None:
    """The hidden data tell the right script from the wrong one, and from one that knows a single answer or is off by one."""
    source, seen = TaskSource({"level": level}), set()
    for seed in range(90):
        task = source.task(seed, "train")
        script = next(name for name in task.files if name.endswith(".sh") and name != "check.sh")
        seen.add(task.files[script])
        assert f"{script} " in task.question and len(task.cases) == 2
        assert len({case.prints for case in task.cases}) == 2
        if script == "over.sh":
            assert all({"50", "51"} <= set(case.command.replace("'", " ").split()) for case in task.cases)
    assert len(seen) == 12 and len(KINDS[level]) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 5}, "levels 1, 2, 3 and 4, not 5"),
        ({"level": "2"}, "not '2'"),
        ({"level": True}, "not True"),
        ({"levels": 1}, "no option levels"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        environment_of(1, options=options)
    with pytest.raises(RecipeError, match=says):
        make_verifier(spec_of(1, options=options))
