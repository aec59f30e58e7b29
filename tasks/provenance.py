"""Gathers provenance.json: git state, base model files, task source, packages, machine, person.

Failure: whatever cannot be had is UNKNOWN; a run starts without it all the same. No line that looks like a secret is kept.
"""

from __future__ import annotations

import difflib
import getpass
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from miles_core.base_model import describe_file
from miles_core.environments.verifiers_env import FAMILY as VERIFIERS
from miles_core.environments.verifiers_env import module_of
from miles_core.masking import mask_arguments, mask_lines, secret_values
from miles_core.provenance import Data, Git, Provenance, Submitter
from miles_core.recipe import EnvironmentSpec
from miles_core.recipe.environment import SHELL_FAMILIES
from miles_core.records import FileDigest
from miles_core.runtime.machine import read_machine
from miles_core.store.lease import UNKNOWN

MAX_DIFF_CHARACTERS = 256 << 10
_GIT_S = 30.0
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--relative")


def gather(
    environment: EnvironmentSpec, base_model: tuple[FileDigest, ...], source: Path, names: Sequence[Path], *, is_snapshot: bool
) -> tuple[Provenance, str]:
    """The record, and the dirty diff of `names` below `source` (empty if there is none).

    `is_snapshot`: those files are what the run's code snapshot holds; else git has nothing to say of it.
    """
    secrets = secret_values(os.environ)
    if is_snapshot:
        git, diff = read_git(source, names, secrets)
    else:
        git, diff = Git(why="the code snapshot is of an earlier start, and the source has changed since"), ""
    record = Provenance(
        git=git, data=read_data(environment), base_model=base_model, packages=installed_packages(), machine=read_machine(),
        submitted=Submitter(user=_user(), host=socket.gethostname(), command=mask_arguments(sys.argv, secrets)),
    )  # fmt: skip
    return record, diff


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this uid
        return str(os.getuid())


def installed_packages() -> dict[str, str]:
    """Version of every distribution that can be imported here, and of python, by lower-case name, sorted."""
    found = {
        str(distribution.metadata["Name"]).lower().replace("_", "-"): distribution.version
        for distribution in reversed(list(importlib.metadata.distributions()))
        if distribution.metadata["Name"]
    }
    return dict(sorted({**found, "python": platform.python_version()}.items()))


# --- data ------------------------------------------------------------------------------------------------------------

_PACKAGES = dict.fromkeys(SHELL_FAMILIES, "miles_core")
"""Of families that are not reasoning-gym's."""
_DISTRIBUTIONS = {"miles_core": "miles-slurm"}
"""Of packages with another name, where it is known; else it is looked for, which takes a second."""


def read_data(environment: EnvironmentSpec) -> Data:
    """What makes the tasks of an environment; nothing is imported for it."""
    own = environment.family.partition(":")[0].partition(".")[0]
    package = own if ":" in environment.family else _PACKAGES.get(environment.family, "reasoning_gym")
    if environment.family == VERIFIERS:
        package = module_of(str(environment.options.get("environment")))
    return Data(
        family=environment.family,
        options=environment.options,
        library=_library(package),
        source_digest=_source_digest(package),
        files=tuple(_named_files(environment.options)),
    )


def _library(package: str) -> str:
    """Name and version of the distribution that a package is of; UNKNOWN for one that was never installed."""
    name = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(package)
        return f"{names[0]} {importlib.metadata.version(names[0])}" if names else UNKNOWN


def _source_digest(package: str) -> str:
    """Over all Python files of a top-level package, or over its one file; of our own, over its environments alone."""
    try:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return UNKNOWN
        folders = list(spec.submodule_search_locations or ())
        top = Path(folders[0]) if folders else Path(spec.origin).parent
        top /= "environments" if package == "miles_core" else ""
        files = sorted(top.rglob("*.py")) if folders else [Path(spec.origin)]
        state = xxhash.xxh3_128()
        for path in files:
            state.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes())
        return state.hexdigest()
    except (OSError, ImportError, ValueError):
        return UNKNOWN


def _named_files(value: Any) -> Iterator[FileDigest]:
    """Digests of the files that a text anywhere in the options names."""
    if isinstance(value, dict):
        for part in value.values():
            yield from _named_files(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _named_files(part)
    elif isinstance(value, str):
        try:
            path = Path(value).expanduser()
            if path.is_file():
                yield describe_file(path)
        except (OSError, RuntimeError, ValueError):  # no path at all, or one that may not be read
            return


# --- git -------------------------------------------------------------------------------------------------------------


class _NoGit(Exception):
    """git did not answer; the text says why."""


def read_git(source: Path, names: Sequence[Path], secrets: Sequence[str] = ()) -> tuple[Git, str]:
    """Commit of `source`, and how the files `names` below it differ from that commit (unified, bounded, without secrets)."""
    try:
        tracked = set(_git(source, "ls-files", "-z").split("\0"))
        if not any(str(name) in tracked for name in names):
            return Git(why="git does not know the code"), ""
        commit = _git(source, "rev-parse", "HEAD").strip()
        diff = _git(source, *_DIFF, "HEAD", "--", *sorted({name.parts[0] for name in names}))
    except _NoGit as error:
        return Git(why=str(error)), ""
    diff += "".join(_added(source, name) for name in names if str(name) not in tracked)
    return Git(commit=commit, dirty=bool(diff)), _bounded(mask_lines(diff, secrets))


def _git(source: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, timeout=_GIT_S, stdin=subprocess.DEVNULL,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise _NoGit(f"git {arguments[0]} did not answer within {_GIT_S:g} s") from error
    except OSError as error:
        raise _NoGit(f"git cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _NoGit(f"git {arguments[0]}: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def _added(source: Path, name: Path) -> str:
    """A file that git does not know, as a diff."""
    lines = (source / name).read_text(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return f"diff --git a/{name} b/{name}\nnew file mode 100644\n" + "".join(
        difflib.unified_diff([], lines, "/dev/null", f"b/{name}")
    )


def _bounded(diff: str) -> str:
    if len(diff) <= MAX_DIFF_CHARACTERS:
        return diff
    kept = diff[:MAX_DIFF_CHARACTERS].rpartition("\n")[0]
    return f"{kept}\n<{len(diff) - len(kept)} more characters; the code snapshot has everything>\n"
