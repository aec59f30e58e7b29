"""Bad input: one clear message with what, value, where and next step; non-zero exit; no traceback; nothing lost."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_core.errors import RunDirectoryError
from miles_core.run import read_run
from tests.e2e.runs import miles
from tests.e2e.tamper import journal_file

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("run", "nothing"), 2, ("'nothing'", "chain_sum")),
        (("run", "chain_sum", "--set", "learner.lx=1"), 2, ("learner.lx", "no such key")),
        (("run", "chain_sum", "--set", "steps=0"), 2, ("steps", "0")),
        (("run", "chain_sum", "--set", "steps"), 2, ("key.path=value",)),
        (("run", "chain_sum", "--set", "environment.family=nope"), 2, ("nope",)),
        (("run", "shell_puzzle", "--set", "environment.options={level: 7}"), 2, ("levels 1, 2, 3 and 4",)),
        (("run", "chain_sum", "--set", "orchestrator.capacity_batches=9"), 2, ("capacity_batches", "max_staleness")),
        (("run", "chain_sum", "--set", "model.bootstrap=null", "--set", "model.path=/no/such/model"), 2, ("/no/such/model",)),
        (("run", "chain_sum_agent", "--set", "environment.agent.run=no.such:agent"), 2, ("no.such:agent", "imported")),
        (("run", "chain_sum", "--cluster", "nowhere"), 2, ("'nowhere'", "local")),
        (("run", "chain_sum", "--run-id", "a/b"), 2, ("a/b",)),
        (("status", "no-such-run"), 2, ("no-such-run", "MILES_RUNS")),
        (("verify", "/"), 2, ("run.json",)),
        (("cancel", "no-such-run"), 2, ("no-such-run",)),
    ],
)
def test_one_message_and_an_exit_code(tmp_path: Path, argv: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = miles(tmp_path, *argv)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr.startswith("miles: ")
    assert "Traceback" not in done.stderr + done.stdout
    assert all(word in done.stderr for word in words), done.stderr


def writable_by_others(root: Path) -> None:
    root.chmod(0o777)


def torn_run_file(root: Path) -> None:
    path = root / "run.json"
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(("damage", "words"), [(writable_by_others, ("chmod go-w",)), (torn_run_file, ("run.json",))])
@pytest.mark.parametrize("command", ["status", "verify", "logs", "cancel"])
def test_a_run_directory_that_cannot_be_trusted(
    finished_run: Path, tmp_path: Path, command: str, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(finished_run, copy, symlinks=True)
    damage(copy)
    done = miles(tmp_path, command, "copy")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root reads everything, so root becomes nobody for a moment; anybody else stays."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_an_unreadable_run_directory_or_run_file(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    (root / "run.json").touch(mode=0o000)
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(path.stat().st_mode | 0o055)
    for mode in (0o755, 0o000):
        root.chmod(mode)
        with as_somebody_else(), pytest.raises(RunDirectoryError, match="not readable by you"):
            read_run(root)


def test_a_truncated_journal_is_said_and_hides_nothing_else(finished_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(finished_run, copy, symlinks=True)
    path = journal_file(copy, "orchestrator/journal")
    path.write_bytes(path.read_bytes()[:-30])
    done = miles(tmp_path, "verify", "copy")
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "journal_torn" in done.stdout and "orchestrator/journal" in done.stdout


def test_no_slurm_is_one_sentence(tmp_path: Path) -> None:
    """Without the binaries in PATH."""
    (tmp_path / "bin").mkdir()
    done = miles(tmp_path, "run", "chain_sum", "--cluster", "devslurm", PATH=str(tmp_path / "bin"))
    assert done.returncode in (2, 7) and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
