"""The `miles` command in this process, for tests of what a person types and reads."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows import cli
from tests.protocol.simulation import finished_run


@dataclass
class Outcome:
    """What a person sees."""

    code: int
    out: str
    err: str


Miles = Callable[..., Outcome]


@pytest.fixture
def miles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Miles]:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILES_RUNS", raising=False)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["miles", *argv])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    yield run


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run that ended, made once; take `finished` to change something."""
    return finished_run(tmp_path_factory.mktemp("simulated") / "one")


@pytest.fixture
def finished(tmp_path: Path, simulated: Path) -> Path:
    """Run `one` below ./runs of the test's folder."""
    (tmp_path / "runs").mkdir()
    return Path(shutil.copytree(simulated, tmp_path / "runs" / "one", symlinks=True))
