"""Checkpoints: folders that the learner's journal names file by file, with size and digest (I17).

A folder is filled under a temporary name, synced and renamed; it counts from its CheckpointSaved record on. Before anything
is unpickled the folder must hold exactly the announced files with the announced bytes; otherwise the next older checkpoint
is taken. Nothing is deleted here.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_core.errors import DigestMismatch
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.records import CheckpointSaved, FileDigest, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import check_file, digest_file, temp_path

log = logging.getLogger("miles")


def save_checkpoint(
    fs: FileSystem, paths: RunPaths, version: Version, weights_digest: str, save: Callable[[Path], Sequence[FileDigest]]
) -> CheckpointSaved:
    """Lets `save` fill a folder and returns the record that announces it. Raises OSError; then it may be called again.

    `save` returns the files that other ranks wrote and sealed on their own nodes: this node may not see them in the folder yet.
    """
    folder = paths.checkpoint(version.step, version.attempt)
    temp = temp_path(folder)
    try:
        fs.mkdir(temp)
        others = {file.name: file for file in save(temp)}
        own = [seal(fs, temp, name) for name in list_files(temp) if name not in others]
        files = tuple(sorted([*own, *others.values()], key=lambda file: file.name))
        for inner, _, _ in os.walk(temp):
            fs.sync(Path(inner))
        # Only a try of this same attempt whose record was never written can be there.
        shutil.rmtree(folder, ignore_errors=True)
        fs.rename(temp, folder)
        fs.sync(folder.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return CheckpointSaved(step=version.step, folder=paths.relative(folder), files=files, weights_digest=weights_digest)


def seal(fs: FileSystem, folder: Path, name: str) -> FileDigest:
    """A file of `folder`, synced, with size and digest. Raises OSError."""
    path = folder / name
    fs.sync(path)
    return FileDigest(name=name, size_bytes=path.stat().st_size, digest=digest_file(path))


def list_files(folder: Path) -> list[str]:
    """All files below a folder, as names relative to it, ascending."""
    return sorted(str((Path(where) / name).relative_to(folder)) for where, _, names in os.walk(folder) for name in names)


def verify_checkpoint(paths: RunPaths, checkpoint: CheckpointSaved) -> Path:
    """The folder, once it holds exactly the announced files. Raises DigestMismatch, OSError (a file is gone)."""
    folder = paths.resolve(checkpoint.folder)
    announced = {file.name: file for file in checkpoint.files}
    extra = sorted(set(list_files(folder)) - announced.keys())
    if extra:
        raise DigestMismatch(f"{folder}: {extra[0]} is not among the announced files; nothing in there is loaded")
    for file in checkpoint.files:
        check_file(folder / file.name, file.size_bytes, file.digest)
    return folder


def newest_valid(paths: RunPaths, lineage: Lineage) -> tuple[CheckpointSaved, Path] | None:
    """The newest accepted checkpoint whose files are right, with its folder; None if there is none. Refused ones are logged."""
    for version in sorted(lineage.checkpoints, reverse=True):
        checkpoint = lineage.checkpoints[version]
        try:
            return checkpoint, verify_checkpoint(paths, checkpoint)
        except (OSError, DigestMismatch) as error:
            log.warning("checkpoint of step %d (attempt %d) is not usable: %s", *version, error)
    return None
