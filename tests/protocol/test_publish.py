"""Publish on a filesystem that fails, tears and shows things late (I1), and who may touch coordination files at all."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles_core.errors import DigestMismatch
from miles_core.store.fs import FileSystem
from miles_core.store.publish import (
    TEMP_PREFIX,
    Durability,
    check_file,
    digest_bytes,
    digest_file,
    publish_bytes,
    publish_exclusive,
    publish_file,
)
from tests.protocol.faulty_fs import POSSIBLE, PROPERTY, FakeClock, Fault, FaultyFS, Server

VISIBILITY_S = 10.0
TARGET = Path("/run/objects/x")
DATA = b"0123456789" * 40
CHANGES = ("append", "sync", "link", "rename", "mkdir", "unlink")

faults = st.lists(st.sampled_from([(operation, fault) for operation in CHANGES for fault in POSSIBLE[operation]]), max_size=3)


def content(fs: FaultyFS, path: Path = TARGET) -> bytes | None:
    """What a node reads under a name; None while it sees no such name."""
    try:
        return fs.read(path)
    except FileNotFoundError:
        return None


# --- publish ---------------------------------------------------------------------------------------------------------


@settings(PROPERTY, max_examples=150)
@given(seed=st.integers(0, 2**32), planned=faults)
def test_nobody_ever_sees_a_torn_object_under_its_name(seed: int, planned: list[tuple[str, Fault]]) -> None:
    server = Server(FakeClock(), VISIBILITY_S, seed=seed)
    fs, other = server.node("writer"), server.node("reader")
    for operation, fault in planned:
        fs.fail(operation, fault)
    reported = False
    for _ in range(len(planned) + 1):
        try:
            publish_bytes(fs, TARGET, DATA)
        except OSError:
            assert content(fs) in (None, DATA)
        else:
            reported = True
            assert content(fs) == DATA
        for _ in range(5):
            assert content(other) in (None, DATA)
            server.clock.advance(VISIBILITY_S / 4)
    assert reported and content(other) == DATA


def test_without_sync_an_object_may_be_torn_for_visibility_s_so_readers_check_digests() -> None:
    seen = set()
    for seed in range(30):
        server = Server(FakeClock(), VISIBILITY_S, seed=seed)
        fs, other = server.node("writer"), server.node("reader")
        publish_bytes(fs, TARGET, DATA, Durability.RENAMED)
        for _ in range(5):
            found = content(other)
            if found is not None:
                seen.add(found == DATA)
                assert (digest_bytes(found) == digest_bytes(DATA)) is (found == DATA)
            server.clock.advance(VISIBILITY_S / 4)
        assert content(other) == DATA
    assert seen == {True, False}


def test_replacing_an_object_shows_the_old_or_the_new_one() -> None:
    for seed in range(20):
        server = Server(FakeClock(), VISIBILITY_S, seed=seed)
        fs, other = server.node("writer"), server.node("reader")
        publish_bytes(fs, TARGET, b"old")
        server.clock.advance(VISIBILITY_S)
        publish_bytes(fs, TARGET, b"new")
        seen = []
        for _ in range(5):
            seen.append(content(other))
            server.clock.advance(VISIBILITY_S / 4)
        assert seen[-1] == b"new" and set(seen) <= {b"old", b"new"} and seen == sorted(seen, reverse=True)


def test_a_failed_write_leaves_nothing_under_the_name_nor_beside_it(tmp_path: Path) -> None:
    def write(temp: Path) -> None:
        temp.write_bytes(b"half")
        raise ValueError("cannot encode")

    with pytest.raises(ValueError, match="cannot encode"):
        publish_file(FileSystem(), tmp_path / "folder" / "x", write)
    assert os.listdir(tmp_path / "folder") == []


def test_a_temporary_file_that_cannot_be_removed_is_no_failure() -> None:
    fs = Server(FakeClock(), VISIBILITY_S).node("writer")
    fs.fail("unlink", Fault.STALE)
    assert publish_exclusive(fs, TARGET, DATA)
    assert content(fs) == DATA and any(name.startswith(TEMP_PREFIX) for name in fs.listdir(TARGET.parent))


def test_an_announced_file_is_checked_by_size_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "x"
    publish_bytes(FileSystem(), path, DATA)
    check_file(path, len(DATA), digest_bytes(DATA))
    assert digest_file(path) == digest_bytes(DATA)
    path.write_bytes(DATA[:-1])
    with pytest.raises(DigestMismatch, match="399 bytes, announced 400"):
        check_file(path, len(DATA), digest_bytes(DATA))
    path.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(DigestMismatch, match="digest"):
        check_file(path, len(DATA), digest_bytes(DATA))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        check_file(path, len(DATA), digest_bytes(DATA))


# --- exclusive -------------------------------------------------------------------------------------------------------


@settings(PROPERTY, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    racers=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([None, Fault.UNREPORTED, Fault.HANG, Fault.STOP])), min_size=1
    ),
    waits=st.sampled_from([0.0, 0.3, 1.0]),
)
@example(seed=0, racers=[(0, Fault.UNREPORTED)], waits=0.0)
@example(seed=0, racers=[(0, None), (1, Fault.UNREPORTED)], waits=0.0)
def test_exactly_one_racer_wins_also_when_success_is_reported_as_exists(
    seed: int, racers: list[tuple[int, Fault | None]], waits: float
) -> None:
    """All of them write the same bytes: not the content tells whose it is."""
    server = Server(FakeClock(), VISIBILITY_S, seed=seed)
    winners = []
    for index, (node, fault) in enumerate(racers):
        fs = server.node(f"n{node}")
        if fault is not None:
            fs.fail("link", fault)
        if publish_exclusive(fs, TARGET, DATA):
            winners.append(index)
            assert content(fs) == DATA
        server.clock.advance(waits * VISIBILITY_S)
    assert winners == [0]


@settings(PROPERTY, max_examples=150)
@given(seed=st.integers(0, 2**32), racers=st.lists(st.tuples(st.integers(0, 2), faults), min_size=1, max_size=5))
def test_whatever_fails_nobody_wins_twice(seed: int, racers: list[tuple[int, list[tuple[str, Fault]]]]) -> None:
    """After an OSError a racer does not know; then whoever made the object can be read from it."""
    server = Server(FakeClock(), VISIBILITY_S, seed=seed)
    won, unknown = [], []
    for index, (node, planned) in enumerate(racers):
        fs = server.node(f"n{node}")
        for operation, fault in planned:
            fs.fail(operation, fault)
        try:
            if publish_exclusive(fs, TARGET, b"racer %d" % index):
                won.append(b"racer %d" % index)
        except OSError:
            unknown.append(b"racer %d" % index)
    found = server.content(server.current(TARGET) or pytest.fail("nobody made it"), "n0") if won else None
    assert len(won) <= 1 and won == ([found] if found is not None else [])
    server.clock.advance(VISIBILITY_S)
    last = content(server.node("reader"))
    assert last in (None, *won, *unknown) and (won == [] or last == won[0])


# --- the real filesystem ---------------------------------------------------------------------------------------------


def test_the_real_filesystem_behaves_as_the_interface_says(tmp_path: Path) -> None:
    fs, path = FileSystem(), tmp_path / "a" / "b" / "x"
    fs.mkdir(path.parent)
    fs.mkdir(path.parent)
    fs.append(path, b"one")
    fs.append(path, b"two")
    assert (fs.read(path), fs.read(path, 3), fs.read(path, 1, 3), fs.read(path, 99)) == (b"onetwo", b"two", b"net", b"")
    fs.overwrite(path, b"ONE")
    fs.sync(path)
    fs.sync(path.parent)
    fs.link(path, path.with_name("y"))
    with pytest.raises(FileExistsError):
        fs.link(path, path.with_name("y"))
    assert fs.is_same_file(path, path.with_name("y")) and not fs.is_same_file(path, path.with_name("z"))
    fs.rename(path.with_name("y"), path.with_name("z"))
    fs.unlink(path)
    fs.unlink(path)
    assert fs.listdir(path.parent) == ["z"] and fs.read(path.with_name("z")) == b"ONEtwo"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_real_filesystem_reports_a_full_disk() -> None:
    with pytest.raises(OSError, match="No space left"):
        FileSystem().append(Path("/dev/full"), b"x")


# --- guard -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2] / "miles_core"
NOT_COORDINATION = {
    "bootstrap/__init__.py": {"rename"},  # the base model's folder, made before any run
    "environments/sandbox.py": {"flock"},  # directories of one node, never on the shared filesystem
    "tracking/metrics.py": {"open for append"},  # metric shards: nothing decides by them
    "tracking/wandb_tracker.py": {"open for append"},  # what its child process prints
}
APPEND_MODES = ("a", "ab", "a+", "at", "a+b", "ab+")
FORBIDDEN_CALLS = {"rename", "renames", "link", "hardlink_to", "symlink", "symlink_to", "flock", "lockf", "mmap"}


def forbidden_calls(tree: ast.AST) -> set[str]:
    """Calls that only the store may make on files: renames, links, locks, appends."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in FORBIDDEN_CALLS and not _is_store_call(function):
            found.add(name)
        # str.replace takes two arguments and dataclasses.replace keywords; Path.replace takes one, os.replace two.
        if name == "replace" and ((len(node.args) == 1 and not node.keywords) or ast.unparse(function) == "os.replace"):
            found.add("replace")
        modes = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in ("open", "fdopen") and any(isinstance(m, ast.Constant) and m.value in APPEND_MODES for m in modes):
            found.add("open for append")
        if "O_APPEND" in ast.unparse(node):
            found.add("open for append")
    return found


def _is_store_call(function: ast.expr) -> bool:
    """`fs.rename(...)`, `self.fs.link(...)`: through the store's FileSystem."""
    return isinstance(function, ast.Attribute) and ast.unparse(function.value).split(".")[-1] in ("fs", "_fs")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("os.rename(a, b)", {"rename"}),
        ("path.replace(other)", {"replace"}),
        ("os.replace(a, b)", {"replace"}),
        ("fcntl.flock(f, 2)", {"flock"}),
        ("open(p, 'a')", {"open for append"}),
        ("os.open(p, os.O_WRONLY | os.O_APPEND)", {"open for append"}),
        ("p.open(mode='ab')", {"open for append"}),
        ("text.replace('a', 'b'); dataclasses.replace(x, y=1); self._fs.rename(a, b); open(p, 'rb')", set()),
    ],
)
def test_the_guard_sees_what_it_forbids(code: str, found: set[str]) -> None:
    assert forbidden_calls(ast.parse(code)) == found


def test_only_the_store_renames_links_locks_or_appends() -> None:
    offenders = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith("store/"):
            found = forbidden_calls(ast.parse(path.read_text())) - NOT_COORDINATION.get(name, set())
            if found:
                offenders[name] = found
    assert offenders == {}, "go through miles_core.store, or add to NOT_COORDINATION with the reason"


def test_the_store_knows_no_wall_clock_and_no_lock() -> None:
    paths = sorted((ROOT / "store").glob("*.py"))
    assert len(paths) >= 6
    for path in paths:
        tree = ast.parse(path.read_text())
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"time.time", "time.time_ns", "datetime.now", "os.stat", "path.stat().st_mtime"}, path
        assert not any(name.endswith((".flock", ".lockf", ".st_mtime", ".st_mtime_ns")) for name in names), path
