"""What README and docs/ show can be typed: recipes and profiles are valid, commands and options exist, links lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from cluster.faults.plan import Plan
from cluster.profile import ClusterProfile
from flows.cli import app
from miles_core.environments.registry import make_environment
from miles_core.grading.rules import make_verifier
from miles_core.recipe import CONFIGS, EnvironmentSpec, Recipe

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
DEPLOYMENTS = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All fenced blocks of these languages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        assert text.count("```") % 2 == 0, f"{page}: a fence is not closed"
        for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            if match[1] in languages:
                found.append(Block(page.name, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


# --- YAML ------------------------------------------------------------------------------------------------------------


def as_model(data: dict[str, Any]) -> Recipe | ClusterProfile | Plan | None:
    """The recipe, profile or plan of a drill that a block shows, whole or in part; None for a part of prefect.yaml."""
    if "faults" in data:
        return Plan.model_validate(data)
    if "kind" in data:
        return ClusterProfile.model_validate(data)
    if "steps" in data and "model" in data:
        return Recipe.model_validate(data)
    if data.keys() <= ClusterProfile.model_fields.keys() - Recipe.model_fields.keys():
        return ClusterProfile.model_validate({"name": "part", "kind": "slurm", **data})
    if data.keys() <= Recipe.model_fields.keys():
        whole = yaml.safe_load((CONFIGS / "recipes" / "chain_sum.yaml").read_text())
        return Recipe.model_validate({**whole, **data})
    assert data.keys() <= {"schedules", "parameters"}, f"no recipe, cluster profile, plan or deployment: {sorted(data)}"
    return None


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_what_it_says(block: Block) -> None:
    data = yaml.safe_load(block.text)
    assert isinstance(data, dict) and data, block
    as_model(data)


def test_a_wrong_key_in_a_page_would_be_seen() -> None:
    for part in ({"learner": {"learning_rate": 1.0}}, {"kind": "slurm", "name": "x", "queue": "q"}, {"nonsense": 1}):
        with pytest.raises((ValueError, AssertionError)):
            as_model(part)


# --- commands --------------------------------------------------------------------------------------------------------


def shell_words(lines: list[str]) -> Iterator[list[str]]:
    """Words of each line; a quoted text may go over several lines."""
    held = ""
    for line in lines:
        lexer = shlex.shlex(held + line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            held += line + "\n"
            continue
        held = ""
        yield words
    assert not held, f"a quotation is not closed: {held}"


def commands(text: str, name: str) -> Iterator[list[str]]:
    """Arguments of every call of a program in a shell text: comments, assignments and other programs left out."""
    for line in shell_words(text.replace("\\\n", " ").splitlines()):
        words: list[str] = []
        for word in [*line, ";"]:
            if not set(word) <= set(";|&()<>"):
                words.append(word)
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*|\$|time|nohup|sudo", words[0]):
                words.pop(0)
            if words and Path(words[0]).name == name:
                yield words[1:]
            words = []


def check_miles(arguments: list[str]) -> None:
    """The command and all its options exist, and no argument is too much."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, click.Group) or hasattr(command, "commands"):
        if not arguments or arguments[0].startswith("-"):
            return
        name, *arguments = arguments
        assert name in command.commands, f"no command {name!r}; there are {sorted(command.commands)}"
        command = command.commands[name]
    options = {option: parameter for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    places = sum(1 for parameter in command.params if parameter.param_type_name == "argument")
    while arguments:
        word = arguments.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            places -= 1
            assert places >= 0, f"{command.name}: one argument too many: {word!r}"
        elif word != "--help":
            assert name in options, f"{command.name} has no option {name}; there are {sorted(options)}"
            if not options[name].is_flag and not equals:
                assert arguments, f"{command.name} {name} needs a value"
                arguments.pop(0)


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_shell_blocks_name_what_there_is(block: Block) -> None:
    for arguments in commands(block.text, "miles"):
        check_miles(arguments)
    for arguments in commands(block.text, "make"):
        for target in [word for word in arguments if "=" not in word and not word.startswith("-")]:
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"{block}: no make target {target}"
    for arguments in commands(block.text, "prefect"):
        check_prefect(arguments)


def check_prefect(arguments: list[str]) -> None:
    """Deployments that are run exist, and their flow takes the parameters."""
    if arguments[:2] != ["deployment", "run"]:
        return
    flow_name, _, deployment_name = arguments[2].partition("/")
    found = next((one for one in DEPLOYMENTS if one["name"] == deployment_name), None)
    assert found is not None, f"prefect.yaml has no deployment {arguments[2]}"
    path, _, function = found["entrypoint"].partition(":")
    assert function == flow_name
    tree = ast.parse((REPOSITORY / path).read_text())
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    known = {argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)}
    given = {value.partition("=")[0] for name, value in itertools.pairwise(arguments) if name in ("-p", "--param")}
    assert given <= known, f"{function} takes {sorted(known)}"


def inline_commands() -> list[tuple[str, str]]:
    """(page, text) of every `miles ...` in the running text and in tables; one that is marked *(later)* is not there yet."""
    found = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [(page.name, match[1]) for match in re.finditer(r"`(?:\.venv/bin/)?miles ([^`]+)`(?! \*\(later)", text)]
    return found


@pytest.mark.parametrize(("page", "text"), inline_commands())
def test_commands_in_the_text_exist(page: str, text: str) -> None:
    """`miles run RECIPE [--cluster NAME]`, `miles devslurm up\\|down`: every alternative and every option."""
    plain = re.sub(r"\[([^]]*)\]", r"\1", text).replace("...", "").replace("\\|", "|")
    words = plain.split()
    first = words[1].split("|") if len(words) > 1 and "|" in words[1] else [None]
    for alternative in first:
        check_miles([words[0], alternative, *words[2:]] if alternative else words)


@pytest.mark.parametrize(
    "text", ["miles runn x", "cd y && miles run x --clutser local", "miles status a b", "X=1 .venv/bin/miles devslurm over"]
)
def test_a_wrong_command_in_a_page_would_be_seen(text: str) -> None:
    with pytest.raises(AssertionError):
        for arguments in commands(text, "miles"):
            check_miles(arguments)


# --- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_can_be_read(block: Block) -> None:
    ast.parse(block.text)


def test_the_environment_that_a_researcher_copies_is_played_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "researcher.md"
    (code,) = (block.text for block in blocks("python") if block.page == page)
    (recipe,) = (block.text for block in blocks("yaml") if block.page == page)
    (tmp_path / "my_sums.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = yaml.safe_load(recipe)["environment"]
    spec = EnvironmentSpec.model_validate({**shown, "family": shown["family"].replace("miles_core.environments.", "")})
    environment, verifier = make_environment(spec), make_verifier(spec)
    rewards = []
    for turns in (["<tool_call>{0} + {1}</tool_call>", "{2}"], ["{2}"], ["0"], []):
        episode: Any = environment.episode(7, "train")
        first, second = map(int, re.findall(r"\d+", episode.opening()[0].content))
        for turn in turns:
            asyncio.run(episode.respond(turn.format(first, second, first + second)))
        rewards.append(verifier.value(7, episode.facts()))
    assert rewards == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
