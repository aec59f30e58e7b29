"""The direction of imports, and what must not be loaded where: a new arrow upwards or a heavy import fails here."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LAYERS = ("miles_core", "cluster", "tasks", "flows")
"""From below: each may import itself and what stands before it."""
FOREIGN = {"miles_core": {"prefect", "submitit"}, "cluster": {"prefect"}, "tasks": {"prefect", "submitit"}}


def imports_of(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add((node.module or "").partition(".")[0])
    return found


def sources(layer: str) -> list[Path]:
    return sorted((REPOSITORY / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_arrows_point_down(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests", "benchmarks"} | FOREIGN.get(layer, set())
    assert sources(layer)
    assert {str(path): found for path in sources(layer) if (found := imports_of(path) & above)} == {}


def test_no_module_leads_back_to_itself() -> None:
    """Neither for types alone nor inside a function. Raises CycleError with the way round."""
    modules = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for name in LAYERS for path in sources(name)}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        arrows[name] = found & modules.keys() - {name}
    assert sum(map(len, arrows.values())) > len(modules)
    graphlib.TopologicalSorter(arrows).prepare()


def test_only_the_store_touches_coordination_files() -> None:
    """No lock that NFS ignores, no mapping that goes stale. A sandbox locks a directory of its own node, which is no NFS."""
    found = [path for path in sources("miles_core") if imports_of(path) & {"fcntl", "mmap"}]
    assert [path.name for path in found] == ["sandbox.py"]


HEAVY = ("torch", "transformers", "deepspeed", "prefect", "submitit", "wandb")


def loaded_by(*modules: str) -> set[str]:
    """Which of the heavy packages are loaded once these modules are."""
    code = f"import sys, {', '.join(modules)}; print(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_light_roles_and_verify_load_nothing_heavy() -> None:
    """A thousand of them start at once, and a laptop verifies a run."""
    light = ("miles_core.roles.orchestrator", "miles_core.orchestrator.loop", "miles_core.roles.grader", "miles_core.verify")
    assert loaded_by(*light, "miles_core.grading.worker", "miles_core.tracking.summary") == set()


def test_the_command_and_the_supervisor_load_nothing_heavy() -> None:
    assert loaded_by("flows.cli", "flows.launch", "flows.display", "flows.logs", "tasks.prepare", "cluster.supervise") == set()
