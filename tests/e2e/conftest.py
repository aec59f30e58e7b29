"""One short real run for all tests that only look at a finished run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import miles, short_run_arguments


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a completed short run of chain_sum on local processes."""
    folder = tmp_path_factory.mktemp("finished")
    done = miles(folder, *short_run_arguments("short"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "short"
