"""A recipe from a hand-written YAML file and `a.b=value` settings; every refusal names key, value and fix."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from miles_core.errors import RecipeError
from miles_core.recipe.run import Recipe

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def explain(error: ValidationError, where: str, *, keys_in: str = "miles_core/recipe/") -> RecipeError:
    """Turns pydantic's findings into one message: key, value, fix. `keys_in`: the file that documents the keys."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{key}: no such key; {keys_in} has the keys there are, each with its meaning")
        else:
            shown = "" if isinstance(item.get("input"), dict) else f" (got {item.get('input')!r})"
            lines.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return RecipeError(f"{where} is not valid:\n  " + "\n  ".join(lines))


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file. Raises RecipeError."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A ValueError is a file that is not text, or 2026-13-45: YAML takes it for a date.
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a mapping of keys at the top, got {type(data).__name__}")
    return data


def find_config(name: str, folder: str) -> Path:
    """A YAML file by path, or by name below configs/<folder>. Raises RecipeError with the names there are."""
    path, found = Path(name), CONFIGS / folder / f"{name}.yaml"
    try:
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return path
        is_there = found.exists()
    except (OSError, ValueError) as error:
        # A name that is too long, holds a zero byte, or lies in a folder that may not be entered.
        raise RecipeError(f"{folder[:-1]} {name!r} cannot be looked for: {error}") from error
    if not is_there:
        there = sorted(p.stem for p in (CONFIGS / folder).glob("*.yaml"))
        raise RecipeError(f"no {folder[:-1]} named {name!r}: give a YAML file or one of {', '.join(there)}")
    return found


def apply_overrides(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Applies `a.b=value` settings (value in YAML) to a nested mapping and returns the new mapping."""
    result = copy.deepcopy(data)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {text!r}: write it as key.path=value, for example learner.lr=1e-4")
        target = result
        *parents, last = key.split(".")
        for part in parents:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise RecipeError(f"--set {text!r}: {part!r} is not a section")
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise RecipeError(f"--set {text!r}: the value is not YAML: {error}") from error
        target[last] = _number(parsed)
    return result


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; a person means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def load_recipe(name: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Reads a recipe by name (configs/recipes) or file and applies overrides. Raises RecipeError."""
    path = find_config(name, "recipes")
    data = apply_overrides(read_yaml(path), overrides)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise explain(error, f"recipe {path}") from error
