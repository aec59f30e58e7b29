"""A package that holds no model is refused by name; tests/e2e/test_pretrained.py reads and trains one that does."""

from __future__ import annotations

import pytest

from miles_core.errors import RecipeError
from miles_core.packaged import packaged_name
from miles_core.recipe import ModelSpec


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ("no-such-model", "needs the Python package 'no-such-model', which is not installed here; `make models`"),
        ("numpy", "'numpy' holds 0 GGUF files, exactly one is needed; give a model's folder as model.path"),
        ("", "needs the Python package ''"),
    ],
)
def test_a_package_without_a_model_is_refused(package: str, says: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        packaged_name(package)
    assert says in str(refusal.value)


def test_exactly_one_source_is_given() -> None:
    for fields in ({}, {"path": "x", "package": "y"}, {"bootstrap": "x", "package": "y"}):
        with pytest.raises(ValueError, match="give exactly one of `path`"):
            ModelSpec.model_validate(fields)
