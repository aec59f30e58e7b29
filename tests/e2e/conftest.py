"""One short real run for all tests that only look at a finished run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import FINISHED_RUN, miles


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a completed short run of chain_sum on local processes; all its versions are still there."""
    folder = tmp_path_factory.mktemp("finished")
    done = miles(folder, *FINISHED_RUN)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "short"
