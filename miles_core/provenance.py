"""provenance.json: what a run was made from, written once beside run.json, so that two runs can be compared a month later.

run.json holds the resolved recipe and cluster profile; here is the rest of what decides results: git state, files of the
base model, source of the tasks, installed packages, the machine and the person. Nothing reads it to decide anything, so
what cannot be had is UNKNOWN and stops no run. `provenance.diff` holds what git did not know of the code, as text.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.records import FileDigest
from miles_core.store.lease import UNKNOWN, Machine


class Git(Closed):
    """State of the checkout that the code snapshot was taken from."""

    commit: str = UNKNOWN
    dirty: bool | Literal["UNKNOWN"] = UNKNOWN
    """Whether the snapshot holds anything that is not in the commit."""
    why: str = ""
    """Why something is UNKNOWN."""


class Data(Closed):
    """Where tasks come from."""

    family: str
    options: dict[str, Any]
    library: str = UNKNOWN
    """Name and version of the distribution that makes the tasks."""
    source_digest: str = UNKNOWN
    """xxh3-128 over names and contents of the Python files of the package that makes the tasks."""
    files: tuple[FileDigest, ...] = ()
    """Data files that the options name."""


class Submitter(Closed):
    """Who made the run, where and how."""

    user: str = UNKNOWN
    host: str = UNKNOWN
    command: tuple[str, ...] = ()
    """With secrets masked."""


class Provenance(Closed):
    """Content of provenance.json."""

    schema_version: Literal[1] = 1
    git: Git = Git()
    data: Data
    base_model: tuple[FileDigest, ...]
    """Weights, tokenizer, configuration and code files of the base model's folder, by name."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Version of every installed distribution and of python, by name, where the run was made."""
    machine: Machine = Machine()
    """Where the run was made; each attempt's lease says where that one ran."""
    submitted: Submitter = Submitter()


def read_provenance(paths: RunPaths) -> Provenance | None:
    """The record of a run; None for a run that was made without one, or where it cannot be read: all of it is UNKNOWN."""
    try:
        return Provenance.model_validate_json(paths.provenance.read_bytes())
    except (OSError, ValidationError):
        return None
