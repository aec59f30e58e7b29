"""Checkpoints: only folders that are exactly what the journal announced are handed to anything that unpickles (I17)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_core.errors import DigestMismatch
from miles_core.learner.checkpoints import list_files, newest_valid, save_checkpoint, verify_checkpoint
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.records import CheckpointSaved, FileDigest, Version
from miles_core.store.follow import Delivered
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes


def fill(folder: Path) -> tuple[FileDigest, ...]:
    (folder / "global_step").mkdir()
    (folder / "latest").write_text("global_step")
    (folder / "global_step" / "optimizer.pt").write_bytes(bytes(range(256)))
    return ()


def save(
    paths: RunPaths, step: int, attempt: int = 1, write: Callable[[Path], tuple[FileDigest, ...]] = fill
) -> CheckpointSaved:
    return save_checkpoint(FileSystem(), paths, Version(step, attempt), f"weights-{step}", write)


def lineage_of(*saved: tuple[CheckpointSaved, int]) -> Lineage:
    lineage = Lineage()
    for record, attempt in saved:
        lineage.fold(Delivered(attempt, 0, record))
    return lineage


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_a_checkpoint_names_every_file_also_in_folders(paths):
    record = save(paths, 4)
    folder = paths.checkpoint(4, 1)
    assert verify_checkpoint(paths, record) == folder
    assert [(file.name, file.size_bytes) for file in record.files] == [("global_step/optimizer.pt", 256), ("latest", 11)]
    assert list_files(folder) == [file.name for file in record.files]
    assert os.listdir(paths.checkpoints) == [folder.name]


def test_a_save_that_fails_leaves_nothing_and_a_second_one_replaces_a_torn_first(paths):
    def fail(folder: Path) -> tuple[FileDigest, ...]:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        save(paths, 4, write=fail)
    assert os.listdir(paths.checkpoints) == []
    paths.checkpoint(4, 1).mkdir()
    (paths.checkpoint(4, 1) / "half").write_bytes(b"x")
    assert verify_checkpoint(paths, save(paths, 4)) == paths.checkpoint(4, 1)


def test_files_that_other_ranks_sealed_are_announced_as_they_say_also_while_they_are_not_visible_here(paths):
    others = tuple(FileDigest(name=f"global_step/rank{rank}.pt", size_bytes=1, digest=digest_bytes(b"x")) for rank in (1, 2))

    def fill_with_others(folder: Path) -> tuple[FileDigest, ...]:
        fill(folder)
        (folder / "global_step" / "rank1.pt").write_bytes(b"x")
        return others

    record = save(paths, 4, write=fill_with_others)
    assert [file.name for file in record.files] == [
        "global_step/optimizer.pt", "global_step/rank1.pt", "global_step/rank2.pt", "latest",
    ]  # fmt: skip
    assert set(others) < set(record.files)
    (paths.checkpoint(4, 1) / "global_step" / "rank2.pt").write_bytes(b"x")
    assert verify_checkpoint(paths, record) == paths.checkpoint(4, 1)


def shorten(folder: Path) -> None:
    path = folder / "global_step" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "global_step" / "optimizer.pt"
    path.write_bytes(bytes([255]) + path.read_bytes()[1:])


def remove(folder: Path) -> None:
    (folder / "latest").unlink()


def plant(folder: Path) -> None:
    (folder / "global_step" / "extra.pkl").write_bytes(b"cos\nsystem\n")


@pytest.mark.parametrize("damage", [shorten, flip, remove, plant])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_taken(paths, damage):
    older, newer = save(paths, 2), save(paths, 4)
    damage(paths.checkpoint(4, 1))
    with pytest.raises((DigestMismatch, FileNotFoundError)):
        verify_checkpoint(paths, newer)
    assert newest_valid(paths, lineage_of((older, 1), (newer, 1))) == (older, paths.checkpoint(2, 1))
    damage(paths.checkpoint(2, 1))
    assert newest_valid(paths, lineage_of((older, 1), (newer, 1))) is None


def test_the_newest_is_of_the_highest_step_and_of_that_the_highest_attempt(paths):
    saved = [(save(paths, step, attempt), attempt) for step, attempt in ((4, 1), (4, 2), (2, 3))]
    found = newest_valid(paths, lineage_of(*saved))
    assert found is not None and found[1] == paths.checkpoint(4, 2)


def test_only_announced_folders_are_looked_at(paths):
    save(paths, 6)
    assert newest_valid(paths, Lineage()) is None
