"""Publish: an immutable object appears whole or not at all (I1).

A temporary name in the same folder, write, sync, rename. Of many files the data goes first, then the manifest that names
sizes and digests, then the journal record that announces it; readers believe only what a journal record announces.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import xxhash

from miles_core.errors import DigestMismatch
from miles_core.store.fs import FileSystem

log = logging.getLogger("miles")

TEMP_PREFIX = ".tmp."


class Durability(Enum):
    """How much a published object must survive."""

    SYNCED = "synced"
    """Control, weights, checkpoints: fsync of file and folder."""
    RENAMED = "renamed"
    """Trajectories: re-creatable, no fsync."""


def digest_bytes(data: bytes) -> str:
    """xxh3-128 of `data`, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> str:
    """xxh3-128 of a file, in hex, read in pieces."""
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
    return state.hexdigest()


def temp_path(path: Path) -> Path:
    """A name beside `path` that no reader believes."""
    return path.with_name(f"{TEMP_PREFIX}{path.name}.{secrets.token_hex(6)}")


def publish_file(fs: FileSystem, path: Path, write: Callable[[Path], None], durability: Durability = Durability.SYNCED) -> None:
    """Lets `write` fill a temporary file, then renames it to `path`.

    After an OSError the object is whole under its name or not there at all; publishing it again is right in both cases.
    """
    fs.mkdir(path.parent)
    temp = temp_path(path)
    try:
        write(temp)
        if durability is Durability.SYNCED:
            fs.sync(temp)
        fs.rename(temp, path)
        if durability is Durability.SYNCED:
            fs.sync(path.parent)
    finally:
        _discard(fs, temp)


def publish_bytes(fs: FileSystem, path: Path, data: bytes, durability: Durability = Durability.SYNCED) -> None:
    """Publishes `data` as `path`, replacing what was there."""
    publish_file(fs, path, lambda temp: fs.append(temp, data), durability)


def publish_exclusive(fs: FileSystem, path: Path, data: bytes) -> bool:
    """Creates `path` with `data` unless it exists; True if this call made it, also where that was reported as EEXIST.

    After an OSError nobody knows; `data` that is unlike anybody else's (a nonce) lets the caller read who made it.
    """
    fs.mkdir(path.parent)
    temp = temp_path(path)
    try:
        fs.append(temp, data)
        fs.sync(temp)
        try:
            fs.link(temp, path)
        except FileExistsError:
            # An NFS client that repeats a link whose answer was lost sees its own link. A link count may be cached, an inode
            # number never changes.
            if not fs.is_same_file(temp, path):
                return False
        fs.sync(path.parent)
        return True
    finally:
        _discard(fs, temp)


def _discard(fs: FileSystem, temp: Path) -> None:
    """Removes a temporary file. Nobody believes its name, so one that stays behind costs space only."""
    try:
        fs.unlink(temp)
    except OSError as error:
        log.warning("%s stays behind: %s", temp, error)


def check_file(path: Path, size_bytes: int, digest: str) -> None:
    """Raises DigestMismatch unless `path` has this size and digest; a missing file raises FileNotFoundError."""
    seen = path.stat().st_size
    if seen != size_bytes:
        raise DigestMismatch(f"{path}: {seen} bytes, announced {size_bytes}; the file is torn or was changed")
    found = digest_file(path)
    if found != digest:
        raise DigestMismatch(f"{path}: digest {found}, announced {digest}; the file was changed or is corrupt")
