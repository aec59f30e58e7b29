"""`miles runs` and `miles recipes`: what there is, one line each; what cannot be read is named and hides nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from flows.damage import bad_frames
from flows.output import columns, print_json, print_text
from flows.places import RUN_FILE
from miles_core.errors import MilesError
from miles_core.recipe import CONFIGS, Recipe, load_recipe

Row = dict[str, Any]


def print_runs(root: Path, *, as_json: bool) -> None:
    """The runs below a folder."""
    rows = [run_row(path.parent) for path in sorted(root.glob(f"*/{RUN_FILE}"))] if root.is_dir() else []
    if as_json:
        print_json(rows)
    elif not rows:
        print_text(f"no runs below {root.resolve()}")
    else:
        print_text("\n".join(columns([_run_cells(row) for row in rows])))


def run_row(folder: Path) -> Row:
    """What a script reads of one run; of one that cannot be read the reason. `folder` is its name in commands: a copy has the
    run id of what it was copied from."""
    from miles_core.run import read_run
    from miles_core.tracking.ledger import read_ledger

    try:
        run, paths = read_run(folder)
        ledger = read_ledger(run, paths)
        damage = bad_frames(paths, ("supervisor-0", "learner-0"))
    except (MilesError, OSError) as error:
        where = {"run_id": folder.name, "folder": folder.name, "root": str(folder.resolve())}
        return {**where, "state": "UNREADABLE", "error": str(error)}
    return {
        "run_id": run.run_id, "folder": folder.name, "root": str(folder.resolve()), "state": ledger.state,
        "step": max(ledger.steps.newest_step, 0), "steps": run.recipe.steps, "recipe": run.recipe.name,
        "cluster": run.cluster.get("name"), "created_unix_s": run.created_s, "damage": damage,
    }  # fmt: skip


def _run_cells(row: Row) -> tuple[str, str, str]:
    if row["state"] == "UNREADABLE":
        return row["folder"], row["state"], row["error"].partition("\n")[0]
    damage = f"  ! {row['damage'][0]}" if row["damage"] else ""
    return row["folder"], row["state"], f"step {row['step']}/{row['steps']}  {row['recipe']} on {row['cluster']}{damage}"


def print_recipes(*, as_json: bool) -> None:
    """The recipes of this checkout."""
    rows = [recipe_row(path) for path in sorted((CONFIGS / "recipes").glob("*.yaml"))]
    if as_json:
        print_json(rows)
        return
    head = ("name", "model", "environment", "steps", "what it is for")
    print_text("\n".join(columns([head, *(_recipe_cells(row) for row in rows)])))


def print_recipe(name: str, *, as_json: bool) -> None:
    """One recipe with every default filled in. Raises RecipeError."""
    resolved = json.loads(load_recipe(name).model_dump_json())
    if as_json:
        print_json(resolved)
    else:
        print_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).rstrip())


def recipe_row(path: Path) -> Row:
    """What a person chooses by; of a recipe that is not valid the reason."""
    try:
        recipe = load_recipe(str(path))
    except MilesError as error:
        return {"name": path.stem, "error": str(error)}
    return {
        "name": path.stem, "model": _model(recipe), "environment": recipe.environment.family, "steps": recipe.steps,
        "purpose": first_comment(path.read_text()),
    }  # fmt: skip


def first_comment(text: str) -> str:
    """The comment that a YAML file begins with, up to its first full stop or colon at the end of a line; empty without one."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("#").strip())
        if line.rstrip().endswith("."):
            break
    return " ".join(words)


def _model(recipe: Recipe) -> str:
    model = recipe.model
    return f"made: {model.bootstrap}" if model.bootstrap is not None else str(model.path or model.package)


def _recipe_cells(row: Row) -> tuple[str, ...]:
    if "error" in row:
        return row["name"], "INVALID", "-", "-", row["error"].partition("\n")[0]
    return row["name"], row["model"], row["environment"], str(row["steps"]), row["purpose"]
