"""What a recipe names of one's own is loaded or refused in one way, and told at submit by the interpreters of the jobs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.own_code import names_of, unloadable
from cluster.profile import ClusterProfile
from miles_core.environments import calculator_agent
from miles_core.errors import RecipeError
from miles_core.named import load_named, main
from miles_core.recipe import Recipe
from tests.protocol.simulation import simulated_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
AGENT = "miles_core.environments.calculator_agent:run"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the researcher's modules, importable here and, by PYTHONPATH, in jobs."""
    (tmp_path / "lab_good.py").write_text("print('hello')\ndef run(): pass\nNUMBER = 3\n")
    (tmp_path / "lab_broken.py").write_text("def run(): pass\n\n1 / 0\n")
    (tmp_path / "lab_garbled.py").write_text("def run(:\n")
    (tmp_path / "lab_leaves.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "lab_dies.py").write_text("import os\nos._exit(0)\n")
    (tmp_path / "lab_waves.py").write_text("import atexit\natexit.register(print, 'bye')\ndef run(): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_name_is_what_it_names(lab: Path) -> None:
    assert load_named("environment.agent.run", AGENT) is calculator_agent.run
    assert load_named("x", "lab_good:run").__name__ == "run"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "no.module:run",
            r"environment\.family: 'no\.module:run' cannot be imported here \(No module named 'no'\).*PYTHONPATH",
        ),
        ("lab_good:nobody", "module lab_good has no class or function 'nobody'"),
        ("lab_good:NUMBER", "has no class or function 'NUMBER'"),
        ("lab_good", "has no class or function ''"),
        (":run", "breaks while it is imported"),
        ("lab_broken:run", r"ZeroDivisionError: division by zero; .*lab_broken\.py:3\); mend it"),
        ("lab_garbled:run", "breaks while it is imported .SyntaxError"),
        ("lab_leaves:run", r"breaks while it is imported \(SystemExit: 0; .*lab_leaves\.py:2\); mend it"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_the_key(lab: Path, name: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_named("environment.family", name)


def test_asked_as_a_program_it_says_each_fault_in_a_line(lab: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"a={AGENT}", "b=lab_good:run"]) == 0 and capfd.readouterr().out == ""
    assert main(["a=lab_good:nobody", "b=lab_good:run", "c=no.module:x"]) == 1
    first, second = capfd.readouterr().out.split("\n")
    assert first.startswith("a: 'lab_good:nobody'") and second.startswith("c: 'no.module:x'")


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate(simulated_recipe().model_dump() | fields)


def environment(**fields: Any) -> dict[str, Any]:
    return {"environment": {"family": "chain_sum", **fields}}


def test_what_a_recipe_names() -> None:
    assert names_of(recipe(**environment())) == {}
    named = recipe(**environment(family="a:B", agent={"run": "c:d"}), grader={"ranking": "e:f"})
    assert names_of(named) == {"environment.family": "a:B", "environment.agent.run": "c:d", "grader.ranking": "e:f"}
    assert names_of(recipe(grader={"ranking": "brevity"}, **environment())) == {}


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", "kind": "local"} | fields)


def test_an_agent_that_jobs_cannot_import_is_told_before_anything_is_submitted(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The submitting process has it in its path, jobs have not."""
    good, bad = (recipe(**environment(agent={"run": f"lab_{name}:run"})) for name in ("good", "broken"))
    assert unloadable(good, profile(), REPOSITORY) is None
    assert "lab_broken.py:3" in (unloadable(bad, profile(), REPOSITORY) or "")
    waves, leaves, dies = (recipe(**environment(agent={"run": f"lab_{name}:run"})) for name in ("waves", "leaves", "dies"))
    assert unloadable(waves, profile(), REPOSITORY) is None
    assert "SystemExit: 0" in (unloadable(leaves, profile(), REPOSITORY) or "")
    assert unloadable(dies, profile(), REPOSITORY) == (
        "environment.agent.run: 'lab_dies:run': a process that imported it ended with code 0 and said nothing"
    )
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    slurm = {"kind": "slurm", "slurm": {"setup": ["export PYTHONPATH=/lab"]}}
    for where in (profile(), profile(kind="slurm")):
        fault = unloadable(good, where, REPOSITORY)
        assert fault == (
            "environment.agent.run: 'lab_good:run' cannot be imported here (No module named 'lab_good'); install it, or put "
            "it into PYTHONPATH of the jobs"
        )
    with caplog.at_level(logging.WARNING):
        assert unloadable(good, profile(**slurm), REPOSITORY) is None
    assert "No module named 'lab_good'" in caplog.text and "slurm.setup" in caplog.text
    assert unloadable(good, profile(), lab) is None  # code of a version that cannot be asked


def test_a_pool_with_an_interpreter_of_its_own_is_asked_too(lab: Path) -> None:
    """Its path comes from a script that stands for another environment."""
    other = lab / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} "$@"\n')
    os.chmod(other, 0o755)
    pools = {"rollout": {"pools": [{"name": "fast", "engine": "vllm"}]}}
    wanted = recipe(**environment(agent={"run": "lab_good:run"}), **pools)
    fault = unloadable(wanted, profile(vllm_python=str(other)), REPOSITORY) or ""
    assert "lab_good" in fault and fault.endswith(f"(asked of {other})")
    other.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY}:{lab} exec {sys.executable} "$@"\n')
    assert unloadable(wanted, profile(vllm_python=str(other)), REPOSITORY) is None


def test_a_ranking_is_asked_of_the_graders_interpreter_alone(lab: Path) -> None:
    other = lab / "python"
    other.write_text("#!/bin/sh\necho nobody asks me >&2\nexit 1\n")
    os.chmod(other, 0o755)
    wanted = recipe(grader={"ranking": "lab_good:run"}, rollout={"pools": [{"name": "fast", "engine": "vllm"}]})
    assert unloadable(wanted, profile(vllm_python=str(other)), REPOSITORY) is None
    wanted = recipe(grader={"ranking": "lab_good:nobody"}, rollout={"pools": [{"name": "fast", "engine": "vllm"}]})
    assert "grader.ranking" in (unloadable(wanted, profile(vllm_python=str(other)), REPOSITORY) or "")
