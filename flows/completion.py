"""What the shell offers behind a command: runs, recipes, clusters. Quick: it reads names of files and nothing else."""

from __future__ import annotations

from pathlib import Path

from flows.places import run_ids
from miles_core.recipe import CONFIGS


def complete_run(incomplete: str) -> list[str]:
    """Run ids below the runs folder, the newest first."""
    return [name for name in run_ids() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Names in configs/recipes and YAML files."""
    return _configs("recipes", incomplete)


def complete_cluster(incomplete: str) -> list[str]:
    """Names in configs/clusters and YAML files."""
    return _configs("clusters", incomplete)


def complete_plan(incomplete: str) -> list[str]:
    """Names in configs/drills and YAML files."""
    return _configs("drills", incomplete)


def _configs(folder: str, incomplete: str) -> list[str]:
    names = sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))
    return [name for name in [*names, *_yaml_files(incomplete)] if name.startswith(incomplete)]


def _yaml_files(incomplete: str) -> list[str]:
    """Files and folders that the text so far leads to, as a shell would offer them."""
    head, slash, _ = incomplete.rpartition("/")
    folder = Path(head or ("/" if slash else "."))
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    shown = [path for path in found if path.suffix in (".yaml", ".yml") or path.is_dir()]
    return [f"{head}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in shown if not path.name.startswith(".")]
