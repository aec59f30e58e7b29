"""What is left of a sandbox: nothing, also of a killed owner's; and what runs where bubblewrap does not."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.environments import sandbox as sandbox_module
from miles_core.environments.sandbox import Result, Sandbox, SandboxBroken, remove, sweep
from miles_core.environments.sandbox_kind import SandboxKind, best_of, candidates, sandbox_root
from tests.unit.sandbox_world import (
    DEEP,
    MARK,
    PATIENT_S,
    REPOSITORY,
    living,
    need_bubblewrap,
    open_box,
    open_server,
    run,
    wait_until,
)


@pytest.fixture(autouse=True)
def held() -> None:
    need_bubblewrap()


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with open_box() as made:
        yield made


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with open_server() as listening:
        yield listening


# The end


def test_close_ends_what_runs(box: Sandbox) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(run(box, f"sleep {MARK}", 600)))
    thread.start()
    wait_until("the command to run", lambda: bool(living(MARK)))
    box.close()
    thread.join(PATIENT_S)
    assert results[0].stopped == "closed" and not box.path.exists()
    wait_until("it to be gone", lambda: not living(MARK))
    box.close()


def test_a_directory_that_resists_is_removed(box: Sandbox) -> None:
    run(box, "mkdir -p x/y; touch x/y/z; chmod 000 x/y x; chmod 000 a.txt")
    run(box, f"mkdir -p {DEEP}")
    box.close()
    assert not box.path.exists()


def test_what_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.setattr(sandbox_module.shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("busy")))
    monkeypatch.setattr(
        sandbox_module.subprocess, "run", lambda *args, **kw: subprocess.CompletedProcess(args, 1, "", "rm: busy")
    )
    with pytest.raises(SandboxBroken, match="cannot be removed: rm: busy"):
        remove(tmp_path / "x")


OWNER = f"""
import sys
import tempfile
from miles_core.environments.sandbox import Sandbox
box = Sandbox("killed.rollout-0")
print(box.path, flush=True)
box.run("touch left; sleep {MARK}", 600)
"""


def test_after_kill_9_of_the_owner_no_process_lives_and_the_next_start_sweeps_the_directory() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert path.name.startswith(f"miles-box-killed.rollout-0.{owner.pid}.") and path.parent == sandbox_root()
        wait_until("the command to run", lambda: bool(living(MARK)) and (path / "left").exists())
        assert path.name not in sweep(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    wait_until("its processes to be gone", lambda: not living(MARK))
    assert path.exists()
    wait_until("the directory to be swept", lambda: path.name in sweep())
    assert not path.exists()


def test_what_others_put_there_is_not_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox_module, "sandbox_root", lambda: tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "miles-box-link").symlink_to(tmp_path / "target")
    (tmp_path / "miles-box-file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "miles-box-dead.1.x").mkdir()
    assert sweep() == ["miles-box-dead.1.x"]
    assert sorted(os.listdir(tmp_path)) == ["miles-box-file", "miles-box-link", "other", "target"]


# Where less works


def fallback(name: str) -> SandboxKind:
    return next(kind for kind in candidates() if kind.name == name and best_or_none(kind) is not None)


def best_or_none(kind: SandboxKind) -> SandboxKind | None:
    with contextlib.suppress(OSError):
        return best_of([kind])
    return None


@pytest.mark.parametrize("name", ["unshare", "process group"])
def test_a_fallback_runs_commands_within_limits(name: str) -> None:
    box = Sandbox("test.fallback", kind=fallback(name))
    try:
        box.fill({"a.txt": "kiwi\n"})
        assert run(box, "cat a.txt; exit 3").output == "kiwi\n"
        assert run(box, f"sleep {MARK}", 0.5).timed_out
        assert run(box, "yes").truncated
        assert run(box, f"sleep {MARK} & echo on").output == "on\n"
        assert run(box, "for i in $(seq 400); do head -c 1000000 /dev/zero > f$i; done").stopped == "disk"
        wait_until("what it started to be gone", lambda: not living(MARK))
    finally:
        box.close()
    assert not box.path.exists()


def test_unshare_has_no_network_and_no_survivors(server: socket.socket) -> None:
    box = Sandbox("test.fallback", kind=fallback("unshare"))
    try:
        assert "connected" not in run(box, f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo connected").output
        run(box, f"setsid sleep {MARK} >/dev/null 2>&1 &")
        wait_until("the survivor to be gone", lambda: not living(MARK))
    finally:
        box.close()


def test_a_fallback_warns_once_and_says_what_is_not_held(caplog: pytest.LogCaptureFixture) -> None:
    kind = replace(fallback("process group"), reasons=("bubblewrap: no bwrap in PATH",))
    sandbox_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="miles"):
        for _ in range(3):
            Sandbox("test.fallback", kind=kind).close()
        Sandbox("test.held").close()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "SANDBOX" in warning and "NOT HELD" in warning and "network" in warning and "no bwrap in PATH" in warning


def test_the_best_kind_that_works_is_taken_and_says_why_not_a_better_one() -> None:
    absent = SandboxKind("bubblewrap", ("bwrap-that-is-not-there",))
    broken = SandboxKind("unshare", ("setpriv", "--no-such-option"), ("files",))
    refusing = SandboxKind("unshare", ("false",), ("files",))
    works = SandboxKind("process group", ("env",), ("files",))
    found = best_of([absent, broken, refusing, works])
    assert (found.name, found.prefix) == ("process group", ("env",))
    assert [reason.split(":")[0] for reason in found.reasons] == ["bubblewrap", "unshare", "unshare"]
    assert "no bwrap-that-is-not-there in PATH" in found.reasons[0] and "exit code 1" in found.reasons[2]
    with pytest.raises(OSError, match="no command can be run"):
        best_of([absent, broken])


@pytest.fixture
def old_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bwrap that does not know what 0.8 brought, first in PATH, in a folder that `nobody` may enter."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "bwrap"
        refuse = "--size|--disable-userns) echo Unknown option $word >&2; exit 1"
        path.write_text(f'#!/bin/sh\nfor word; do case $word in {refuse};; esac; done\nexec {shutil.which("bwrap")} "$@"\n')
        path.chmod(0o755)
        path.parent.chmod(0o755)
        monkeypatch.setenv("PATH", f"{name}:{os.environ['PATH']}")
        yield


def test_bubblewrap_before_0_8_is_used_and_says_what_it_does_not_hold(old_bubblewrap: None) -> None:
    kind = best_of(candidates())
    assert kind.name == "bubblewrap" and "namespaces of its own" in kind.missing[0] and "Unknown option" in kind.reasons[0]
    made = Sandbox("test.old", kind=kind)
    try:
        assert run(made, "echo x > y; cat y").output == "x\n"
        assert run(made, "echo x > /tmp/y").exit_code != 0
    finally:
        made.close()


def test_without_bwrap_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else real(name))
    found = best_of(candidates())
    assert found.name == "unshare" and "install the package bubblewrap" in found.reasons[0]


def test_it_holds_inside_a_node_that_keeps_capabilities() -> None:
    """A node of a throw-away cluster is a user and process namespace whose processes inherit capabilities."""
    code = (
        "from miles_core.environments.sandbox import Sandbox\n"
        "from miles_core.environments.sandbox_kind import sandbox_kind\n"
        "box = Sandbox('test.node'); result = box.run('echo $(echo held)', 60); box.close()\n"
        "print(sandbox_kind().name, result.output.strip(), box.path.exists(), sandbox_kind().reasons)\n"
    )
    user = ["--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else ["--map-current-user"]
    node = ["unshare", "--user", *user, "--keep-caps", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*node, sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, timeout=PATIENT_S
    )
    assert done.stdout.startswith("bubblewrap held False"), done.stdout + done.stderr


def test_a_sandbox_that_stops_working_is_told_from_a_command_that_fails(box: Sandbox) -> None:
    box._kind = replace(box._kind, prefix=("false",))
    with pytest.raises(SandboxBroken, match="did not start a command, exit code 1"):
        run(box, "cat a.txt")
    box._kind = replace(box._kind, prefix=("/no/such/program",))
    with pytest.raises(SandboxBroken, match="could not be started"):
        run(box, "cat a.txt")
