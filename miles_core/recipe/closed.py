"""What every section of a recipe or of a cluster profile is: typed, closed, frozen."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Closed(BaseModel):
    """A frozen model that refuses unknown keys, and numbers that JSON has no word for: run.json would hold null for them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def is_none(value: Any) -> bool:
    """For `exclude_if`: a field that is not written where it says nothing."""
    return value is None
