"""Fixtures of the tests that need a real Slurm: one throw-away cluster for the whole session.

Where Slurm is missing these tests are skipped with the sentence that says how to get it; with CI=true they fail, so that
a pipeline cannot pass without them. All carry the marker `slurm` and share one xdist group: one worker owns the cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm.devslurm import DevSlurm, slurm_available

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder; first, because xdist reads the group in the same hook."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.xdist_group("slurm"))


@pytest.fixture(scope="session", autouse=True)
def slurm_installed() -> None:
    """Skips every test of this folder where Slurm is missing; fails it under CI=true."""
    missing = slurm_available()
    if missing is not None and os.environ.get("CI") == "true":
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def devslurm(slurm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevSlurm]:
    """The session's cluster: 7 nodes of 4 CPUs and 4 fake GPUs. A test that breaks something mends it."""
    cluster = DevSlurm(tmp_path_factory.mktemp("devslurm"))
    cluster.up()
    yield cluster
    cluster.down()
