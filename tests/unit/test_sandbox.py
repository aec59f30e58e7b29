"""Attempts to get out of the sandbox, to exhaust the machine and to outlive a call, all against the real one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.environments import sandbox as sandbox_module
from miles_core.environments.sandbox import Limits, Result, Sandbox, SandboxBroken, remove, sandbox_root, sweep
from miles_core.environments.sandbox_kind import SandboxKind, best_of, candidates, sandbox_kind

REPOSITORY = Path(__file__).resolve().parents[2]
DEEP = "d/" * 1500
"""Deeper than Python recurses; two of them are longer than a path may be."""
PATIENT_S = 60.0
"""Deadline of commands that end by themselves, on however busy a machine."""
MARK = f"4242.{os.getpid()}"
"""An argument of `sleep` by which a test finds what it left."""


@pytest.fixture(autouse=True)
def held() -> None:
    """These tests are about bubblewrap; where it cannot run they are skipped, but on CI."""
    kind = sandbox_kind()
    if kind.missing and not os.environ.get("CI"):
        pytest.skip(f"bubblewrap does not work here: {'; '.join(kind.reasons)}")
    assert not kind.missing, kind.reasons


@pytest.fixture
def box() -> Iterator[Sandbox]:
    made = Sandbox("test.sandbox")
    made.fill({"a.txt": "kiwi\nplum\n", "deep/er/b.txt": "fig\n"})
    try:
        yield made
    finally:
        made.close()
        assert not made.path.exists()


def run(box: Sandbox, command: str, deadline_s: float = PATIENT_S) -> Result:
    return box.run(command, deadline_s)


def living(argument: str) -> list[int]:
    """Processes of this machine with such an argument."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and argument.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = PATIENT_S) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.02)


# What it is for


def test_commands_read_and_write_the_directory_and_nothing_of_the_shell_stays(box: Sandbox) -> None:
    assert run(box, "grep -l kiwi *").output == "a.txt\n" or "a.txt" in run(box, "grep -l kiwi *").output
    assert run(box, "x=1; cd deep; echo new > c.txt; pwd").output == "/work/deep\n"
    assert run(box, 'echo "[$x]"; pwd; cat deep/c.txt').output == "[]\n/work\nnew\n"
    assert box.files() == {"a.txt": b"kiwi\nplum\n", "deep/er/b.txt": b"fig\n", "deep/c.txt": b"new\n"}


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("exit 3", 3, ""),
        ("echo out; echo err >&2; false", 1, "out\nerr\n"),
        ("kill -SEGV $$", 139, ""),
        ("printf 'a\\377b'", 0, "a\ufffdb"),
        ("printf 'a\\0b'", 0, "a\0b"),
        ("true | cat -", 0, ""),
        ("read line || echo no input", 0, "no input\n"),
        ("", 0, ""),
    ],
)
def test_a_result_says_how_a_command_ended(box: Sandbox, command: str, code: int, output: str) -> None:
    result = run(box, command)
    assert (result.exit_code, result.output, result.stopped, result.truncated, result.timed_out) == (
        code,
        output,
        "",
        False,
        False,
    )


@pytest.mark.parametrize("command", ["if", "echo 'open", "$(", "cat <<X"])
def test_what_is_no_shell_is_an_error_of_the_command(box: Sandbox, command: str) -> None:
    assert run(box, command).stopped == ""
    assert run(box, "cat a.txt").exit_code == 0


@pytest.mark.parametrize("command", ["ls\0id", "x" * (1 << 17), "echo \ud800", "echo ☃"])
def test_any_text_may_come(box: Sandbox, command: str) -> None:
    result = run(box, command)
    assert result.exit_code == (0 if command.startswith("echo") else 126)


# Out of it


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Listens on all addresses of this machine."""
    with socket.create_server(("0.0.0.0", 0)) as listening:
        listening.settimeout(0.3)
        yield listening


def test_no_network(box: Sandbox, server: socket.socket) -> None:
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()
    server.accept()[0].close()
    addresses = {"127.0.0.1", socket.gethostbyname(socket.gethostname())}
    for address in addresses:
        assert "connected" not in run(box, f"exec 3<>/dev/tcp/{address}/{port} && echo connected").output
    with pytest.raises(TimeoutError):
        server.accept()


def test_no_datagrams_no_interfaces(box: Sandbox) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("0.0.0.0", 0))
        listening.settimeout(0.3)
        run(box, f"echo hello > /dev/udp/127.0.0.1/{listening.getsockname()[1]}")
        with pytest.raises(TimeoutError):
            listening.recv(16)
    devices = [line.split(":")[0].strip() for line in run(box, "cat /proc/net/dev").output.splitlines()[2:]]
    assert devices == ["lo"]


def test_no_abstract_socket_of_the_host(box: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0miles-test-abstract")
        listening.listen()
        assert "miles-test-abstract" in Path("/proc/net/unix").read_text()
        assert "miles-test-abstract" not in run(box, "cat /proc/net/unix").output


@pytest.mark.parametrize(
    "target",
    ["/x", "/usr/x", "/usr/bin/ls", "/bin/x", "/lib/x", "/etc/x", "/dev/x", "/dev/shm/x", "/proc/sys/kernel/hostname",
     "/work/../x", "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/sys/x", "/run/x", "/var/x", "/home/x", "/root/x"],
)  # fmt: skip
def test_nothing_outside_can_be_written(box: Sandbox, target: str) -> None:
    before = Path("/usr/bin/ls").stat()
    result = run(box, f"echo x > {target} && echo written")
    assert "written" not in result.output and result.exit_code != 0
    after = Path("/usr/bin/ls").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("place", ["/etc/passwd", "/root", "/home", "/var", "/sys", "/run", "/dev/mem", "/proc/kcore", "/boot"])
def test_nothing_of_the_host_can_be_read(box: Sandbox, place: str) -> None:
    assert run(box, f"head -c 16 {place} 2>/dev/null || ls {place}/*").exit_code != 0


def test_files_of_the_host_and_of_other_sandboxes_are_not_there(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    other = Sandbox("test.other")
    try:
        for path in (tmp_path / "secret", REPOSITORY / "README.md", other.path, box.path):
            assert "No such file" in run(box, f"ls {path}").output
    finally:
        other.close()


def test_the_environment_of_the_host_is_not_there(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_TEST_SECRET", "hunter2")
    shown = run(box, "env; cat /proc/*/environ | tr '\\0' '\\n'").output
    assert "hunter2" not in shown and "PATH=" in shown and "VIRTUAL_ENV" not in shown


def test_no_process_of_the_host_is_seen_or_signalled(box: Sandbox) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            seen = [int(name) for name in run(box, "cd /proc; echo [0-9]*").output.split()]
            assert 0 < len(seen) < 10 and max(seen) < 100
            assert "No such process" in run(box, f"kill -9 {sleeper.pid}").output or sleeper.pid < 100
            run(box, "kill -9 -1")
            assert sleeper.poll() is None
        finally:
            sleeper.kill()
    assert run(box, "cat a.txt").exit_code == 0


def test_no_privilege_and_no_way_to_one(box: Sandbox) -> None:
    status = dict(line.split(":\t", 1) for line in run(box, "cat /proc/self/status").output.splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        assert sandbox_kind().uid not in (None, 0)
    for attempt in (
        "unshare --user --map-root-user true",
        "mount -t tmpfs none /tmp",
        "mknod d c 1 3",
        "chroot / true",
        "nice -n -5 true",
    ):
        result = run(box, f"{attempt} && echo done")
        assert "done" not in result.output or "cannot set niceness" in result.output, attempt


def test_no_terminal_to_type_into(box: Sandbox) -> None:
    assert run(box, "echo x > /dev/tty").exit_code != 0


def test_limits_cannot_be_raised(box: Sandbox) -> None:
    for limit in ("-u", "-v", "-f", "-t"):
        assert run(box, f"ulimit {limit} unlimited").exit_code != 0, limit


def test_a_link_out_leads_nowhere_and_is_not_followed_by_the_host(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    run(box, f"ln -s {tmp_path} out; ln -s /etc/passwd pw; ln -s {tmp_path}/kept kept; ln a.txt hard; mkfifo pipe")
    assert run(box, "cat kept").exit_code != 0 and run(box, "echo x > out/kept").exit_code != 0
    seen = box.files()
    assert {name: seen[name] for name in ("out", "pw", "kept", "pipe")} == dict.fromkeys(("out", "pw", "kept", "pipe"))
    assert seen["hard"] == b"kiwi\nplum\n"
    box.close()
    assert (tmp_path / "kept").read_text() == "kept"


def test_the_lock_of_the_owner_cannot_be_taken_from_inside(box: Sandbox) -> None:
    assert "got" not in run(box, "flock -n . echo got").output
    assert box.path.name not in sweep()
    assert run(box, "cat a.txt").exit_code == 0


# Exhaustion


def test_a_fork_bomb_ends_and_the_next_command_runs(box: Sandbox) -> None:
    result = run(box, "bomb() { bomb | bomb & }; bomb; sleep 600", 2.0)
    assert result.timed_out or result.stopped == "processes" or "Resource temporarily" in result.output
    assert run(box, "cat a.txt").output == "kiwi\nplum\n"


def test_many_processes_are_stopped_also_where_the_kernel_does_not_count_them(box: Sandbox) -> None:
    box._kind = replace(box._kind, counts_processes=False)
    result = run(box, f"for i in $(seq 300); do sleep {MARK} & done; wait")
    assert (result.stopped, result.exit_code) == ("processes", 137)
    wait_until("all of them to be gone", lambda: not living(MARK))


def test_memory_of_one_process(box: Sandbox) -> None:
    box._limits = replace(box._limits, memory_bytes=64 << 20)
    result = run(box, "x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done")
    assert result.exit_code not in (0, 124) and result.stopped in ("", "memory")


def test_memory_of_many_processes(box: Sandbox) -> None:
    box._limits = replace(box._limits, memory_bytes=96 << 20)
    hog = "x=$(head -c 8000000 /dev/zero | tr '\\0' a); sleep 600"
    result = run(box, f"for i in $(seq 20); do ({hog}) & done; wait")
    assert result.stopped == "memory"


@pytest.mark.parametrize(
    "command", ["head -c 1000000000 /dev/zero > big", "yes > big", "head -c 1000000000 /dev/zero > /tmp/big"]
)
def test_a_huge_file(box: Sandbox, command: str) -> None:
    run(box, command)
    assert max((len(content or b"") for content in box.files().values()), default=0) <= Limits().file_bytes
    assert used(box.path) <= 2 * Limits().file_bytes


def used(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "command",
    [
        "for i in $(seq 400); do head -c 1000000 /dev/zero > f$i; done",
        "for i in $(seq 100000); do : > f$i; done",
        f"mkdir -p {DEEP}; cd -P {DEEP}; mkdir -p {DEEP}",
        "i=0; while mkdir -p d$((i++))/$(printf 'e/%.0s' {1..40}); do :; done",
    ],
)
def test_a_full_directory_ends_the_sandbox(box: Sandbox, command: str) -> None:
    assert run(box, command).stopped == "disk"
    assert run(box, "cat a.txt").stopped == "disk", "it stays full"
    assert used_bound(box.path)


def used_bound(folder: Path) -> bool:
    """A watch looks 20 times a second; what fits between two looks is bounded by the machine's speed, not by the model."""
    return shutil.disk_usage(folder).used < 2 << 30


@pytest.mark.parametrize("command", ["yes", "cat /dev/zero", "yes >&2", "while :; do echo a; echo b >&2; done"])
def test_a_flood_of_output_is_cut(box: Sandbox, command: str) -> None:
    result = run(box, command)
    assert (result.stopped, result.truncated, len(result.output)) == ("output", True, Limits().output_bytes)


def test_output_up_to_the_limit_is_whole(box: Sandbox) -> None:
    for size, cut in ((Limits().output_bytes, False), (Limits().output_bytes + 1, True)):
        result = run(box, f"head -c {size} /dev/zero | tr '\\0' a")
        assert (len(result.output), result.truncated) == (Limits().output_bytes, cut)


@pytest.mark.parametrize(
    "command",
    [
        "sleep 600",
        "while :; do :; done",
        "trap '' TERM INT HUP QUIT; while :; do sleep 600; done",
        "setsid sleep 600",
        "sleep 600 | sleep 600",
        "exec sleep 600",
        "kill -STOP $$",
        "cat < <(sleep 600)",
    ],
)
def test_what_does_not_end_is_ended_at_the_deadline(box: Sandbox, command: str) -> None:
    result = run(box, command, 0.5)
    assert (result.timed_out, result.exit_code, result.stopped) == (True, 124, "time")
    assert run(box, "cat a.txt").output == "kiwi\nplum\n"


@pytest.mark.parametrize(
    "command",
    [
        f"sleep {MARK} &",
        f"sleep {MARK} >/dev/null 2>&1 & disown",
        f"setsid sleep {MARK} >/dev/null 2>&1 < /dev/null &",
        f"(setsid nohup sleep {MARK} > log 2>&1 &) ; exec 1>&- 2>&-",
        f"trap '' HUP TERM; (sleep {MARK}; sleep {MARK}) & echo started",
    ],
)
def test_nothing_outlives_its_call(box: Sandbox, command: str) -> None:
    assert run(box, command).stopped == ""
    wait_until("what went into the background to be gone", lambda: not living(MARK))


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
