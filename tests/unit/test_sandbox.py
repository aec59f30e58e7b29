"""Attempts to get out of the sandbox, to exhaust the machine and to outlive a call, all against the real one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.environments.sandbox import Limits, Sandbox, sweep
from miles_core.environments.sandbox_kind import INSIDE, sandbox_kind
from tests.unit.sandbox_world import (
    DEEP,
    MARK,
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


# What it is for


def test_commands_read_and_write_the_directory_and_nothing_of_the_shell_stays(box: Sandbox) -> None:
    assert run(box, "grep -l kiwi *").output == "a.txt\n" or "a.txt" in run(box, "grep -l kiwi *").output
    assert run(box, "x=1; cd deep; echo new > c.txt; pwd").output == f"{INSIDE}/deep\n"
    assert run(box, 'echo "[$x]"; pwd; cat deep/c.txt').output == f"[]\n{INSIDE}\nnew\n"
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
     f"{INSIDE}/../x", "/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/sys/x", "/run/x", "/var/x", "/home/x", "/root/x"],
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
    hog = "printf -v x %8000000s a; sleep 600; :"  # without the last one bash would become sleep, and the memory free
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


def test_files_that_are_open_and_have_no_name_count(box: Sandbox) -> None:
    keep = "for i in $(seq 30); do exec {fd}> f; head -c 1000000 /dev/zero >&$fd; rm f; done; exec sleep 600"
    assert run(box, keep).stopped == "disk"
    assert run(box, "cat a.txt").output == "kiwi\nplum\n", "they went with the command"


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
        "sleep MARK &",
        "sleep MARK >/dev/null 2>&1 & disown",
        "setsid sleep MARK >/dev/null 2>&1 < /dev/null &",
        "(setsid nohup sleep MARK > log 2>&1 &) ; exec 1>&- 2>&-",
        "trap '' HUP TERM; (sleep MARK; sleep MARK) & echo started",
    ],
)
def test_nothing_outlives_its_call(box: Sandbox, command: str) -> None:
    assert run(box, command.replace("MARK", MARK)).stopped == ""
    wait_until("what went into the background to be gone", lambda: not living(MARK))
