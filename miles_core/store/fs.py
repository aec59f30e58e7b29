"""The filesystem calls that coordination is built from, in one small object so that tests can make each of them fail.

Nothing else in miles_core opens, renames or lists coordination files. There is no flock (a silent no-op on many Lustre and
NFS mounts), no mmap, and no descriptor is held between calls (NFS close-to-open). After an OSError of a call that changes
something, nobody knows whether it took effect: a write may have left a prefix, a link may be there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


class FileSystem:
    """POSIX calls, each of which opens and closes. All raise OSError."""

    def append(self, path: Path, data: bytes) -> None:
        """Appends all of `data`, creating the file; a short write raises."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        _check_whole(path, written, data)

    def overwrite(self, path: Path, data: bytes) -> None:
        """Writes all of `data` in place from offset 0 (heartbeats: always of one length); a short write raises."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            written = os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)
        _check_whole(path, written, data)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        """Bytes from `offset`, at most `limit` (all when negative)."""
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read(limit) if limit >= 0 else file.read()

    def sync(self, path: Path) -> None:
        """fsync of a file or a folder."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: Path, target: Path) -> None:
        """A second name for `source`; FileExistsError when `target` exists."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Moves `source` over `target`, atomically within a folder."""
        os.rename(source, target)

    def listdir(self, path: Path) -> list[str]:
        """Names in a folder."""
        return os.listdir(path)

    def mkdir(self, path: Path) -> None:
        """Makes a folder and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def unlink(self, path: Path) -> None:
        """Removes a name; one that is gone is fine."""
        path.unlink(missing_ok=True)

    def is_same_file(self, first: Path, second: Path) -> bool:
        """True if both names lead to one inode; False if one of them leads nowhere."""
        try:
            return os.path.samefile(first, second)
        except FileNotFoundError:
            return False


def _check_whole(path: Path, written: int, data: bytes) -> None:
    if written != len(data):
        raise OSError(errno.ENOSPC, f"short write: {written} of {len(data)} bytes", str(path))
