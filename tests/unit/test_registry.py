"""The family's name decides the environment and its verifier; a class of one's own needs two small protocols."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.environments.base import Message
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.environments.registry import check_environment, make_environment
from miles_core.environments.shell import ShellPuzzleEnvironment
from miles_core.environments.terminal import TerminalEnvironment
from miles_core.errors import RecipeError
from miles_core.grading.rules import ReasoningGymVerifier, ShellPuzzleVerifier, make_verifier
from miles_core.grading.terminal import TerminalVerifier
from miles_core.recipe import EnvironmentSpec

OWN = '''
from miles_core.environments.base import Message


class Echo:
    """Asks for a word; saying it earns spec.options["worth"]."""

    source = "echo@1"

    def __init__(self, spec):
        self.worth = spec.options["worth"]

    def episode(self, seed, split):
        return EchoEpisode(f"{split}{seed}")

    def verifier(self):
        return self

    def value(self, task_seed, facts):
        return self.worth * (facts["said"] == f"{facts['split']}{task_seed}")


class EchoEpisode:
    def __init__(self, word):
        self.word, self.said = word, None

    def opening(self):
        return (Message("user", self.word),)

    async def respond(self, content):
        self.said = content
        return ()

    def facts(self):
        return {"said": self.said, "split": "train"}

    async def close(self):
        pass


class NoEpisodes:
    def __init__(self, spec):
        pass


class NoReward(Echo):
    def verifier(self):
        return object()
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of the researcher's."""
    (tmp_path / "lab_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "lab_of_mine"


def test_names_mean_environments_and_their_verifiers() -> None:
    shell = EnvironmentSpec(family="shell_puzzle", tool="shell", max_turns=4)
    assert type(make_environment(shell)) is ShellPuzzleEnvironment and type(make_verifier(shell)) is ShellPuzzleVerifier
    terminal = EnvironmentSpec(family="terminal", tool="shell", max_turns=8)
    assert type(make_environment(terminal)) is TerminalEnvironment and type(make_verifier(terminal)) is TerminalVerifier
    sums = EnvironmentSpec(family="chain_sum", tool="calculator", max_turns=3)
    assert type(make_environment(sums)) is ReasoningGymEnvironment and type(make_verifier(sums)) is ReasoningGymVerifier


def test_an_environment_of_ones_own_is_played_and_judged(own: str) -> None:
    spec = EnvironmentSpec(family=f"{own}:Echo", options={"worth": 0.5}, max_turns=9)
    episode: Any = make_environment(spec).episode(7, "train")
    assert episode.opening() == (Message("user", "train7"),)
    assert asyncio.run(episode.respond("train7")) == ()
    verifier = make_verifier(spec)
    assert (verifier.source, verifier.value(7, episode.facts()), verifier.value(8, episode.facts())) == ("echo@1", 0.5, 0.0)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("no.such.module:Echo", r"cannot be imported here \(No module named 'no'\).*PYTHONPATH"),
        ("lab_of_mine:Ecco", "module lab_of_mine has no class or function 'Ecco'"),
        ("lab_of_mine:", "module lab_of_mine has no class or function ''"),
        ("lab_of_mine:NoEpisodes", r"has no method episode\(\)"),
    ],
)
def test_what_is_missing_in_ones_own_environment_is_named(own: str, family: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_environment(EnvironmentSpec(family=family, options={"worth": 1}))


@pytest.mark.parametrize(
    ("name", "says"), [("NoEpisodes", r"has no method verifier\(\)"), ("NoReward", "object without source and value")]
)
def test_what_is_missing_in_ones_own_verifier_is_named(own: str, name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make_verifier(EnvironmentSpec(family=f"{own}:{name}", options={"worth": 1}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"family": "shell_puzzle"}, "need tool: shell"),
        ({"family": "terminal"}, "need tool: shell"),
        ({"family": "shell_puzzle", "tool": "calculator", "max_turns": 2}, "need tool: shell"),
        ({"family": "chain_sum", "tool": "shell", "max_turns": 2}, "no other family has it"),
        ({"family": "chain_sum", "max_turns": 2}, "needs a tool"),
    ],
)
def test_a_tool_that_does_not_fit_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        EnvironmentSpec(**fields)


@pytest.mark.parametrize("family", ["shell_puzzle", "terminal"])
def test_options_of_a_family_with_a_shell_are_checked_before_anything_runs(family: str) -> None:
    with pytest.raises(RecipeError, match=f"{family} has the levels 1, 2, 3 and 4"):
        check_environment(EnvironmentSpec(family=family, tool="shell", options={"level": 9}))
    check_environment(EnvironmentSpec(family="chain_sum", options={"level": 9}))
