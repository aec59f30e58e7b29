"""PolicyCopy: one host's copy of the weights, brought to a published version by deltas or from an anchor (I11).

The way to a version is read from the accepted `Published` records alone, never by listing: back along the bases until what
the copy holds, or an anchor. Invariants: the copy is of one run; `read` returns only tensors that make up the announced
weights digest; tensors that change are hashed when they change, those that do not were hashed when they came.

Failure: a delta is applied tensor by tensor, each by its own digests (already new: skip; old: apply), so that one broken off
at any point is taken up again. A copy that fits neither is dropped and made again from the newest anchor. What is not
visible is tried again until a deadline; a caller that polls comes back with a newer version, whose way begins at a newer
anchor when old deltas are gone. Tensors are replaced, never changed in place: an engine may go on reading the old ones.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from miles_core.errors import DeadlineExceeded, DigestMismatch
from miles_core.paths import RunPaths
from miles_core.policy.delta import decode
from miles_core.policy.lineage import Lineage
from miles_core.policy.manifest import Base, Change, PolicyManifest, TensorEntry, digest_entries, entry_of
from miles_core.policy.reader import read_anchor, read_files, read_manifest
from miles_core.policy.tensors import RawTensor, to_torch
from miles_core.records import Published, Version
from miles_core.store.fs import FileSystem

if TYPE_CHECKING:
    import torch

log = logging.getLogger("miles")

RETRY_S = 0.2
_PASSING = (errno.ENOENT, errno.ESTALE)
_EMPTY = np.zeros(0, np.uint8)


class _Astray(Exception):
    """What the copy holds is not what a delta applies to; the anchor will do."""


class PolicyCopy:
    """A copy in memory. Not safe to share between threads."""

    def __init__(
        self,
        paths: RunPaths,
        run_id: str,
        lineage: Lineage,
        *,
        fs: FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths, self._run_id, self._lineage = paths, run_id, lineage
        self._fs, self._clock, self._sleep = fs or FileSystem(), clock, sleep
        self._held: dict[str, RawTensor] = {}
        self._entries: dict[str, TensorEntry] = {}
        """Of `_held`, by hashing."""
        self._at: Published | None = None
        """The last version that was complete here. Some tensors are newer after a delta that broke off."""
        self._manifest: PolicyManifest | None = None
        """Of `_at`."""

    @property
    def version(self) -> Version | None:
        """The version held, complete."""
        return None if self._at is None else self._at.version

    def read(self, published: Published, *, deadline_s: float = 0.0) -> tuple[dict[str, torch.Tensor], PolicyManifest]:
        """The tensors (CPU) and the manifest of an accepted version. Raises as `reach`."""
        manifest = self.reach(published, deadline_s=deadline_s)
        return {name: to_torch(tensor) for name, tensor in self._held.items()}, manifest

    def reach(self, published: Published, *, deadline_s: float = 0.0) -> PolicyManifest:
        """Brings the copy to an accepted version and returns the version's manifest.

        Raises DigestMismatch, RunDirectoryError (another run's or version's copy), DeadlineExceeded (not visible in time),
        OSError (any other failure of the filesystem).
        """
        deadline = self._clock() + deadline_s
        while True:
            try:
                return self._reach(published)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                if self._clock() >= deadline:
                    raise DeadlineExceeded(
                        f"policy version {tuple(published.version)} was announced, but "
                        f"{error.filename or published.folder} did not become readable in {deadline_s:g} s "
                        f"({error.strerror}); was it deleted, or is the filesystem slow?"
                    ) from error
                self._sleep(RETRY_S)

    def _reach(self, published: Published) -> PolicyManifest:
        try:
            return self._follow(self._way(published))
        except _Astray as astray:
            log.info("making the copy again from an anchor: %s", astray)
        self._drop()
        try:
            return self._follow(self._way(published))
        except _Astray as astray:
            raise DigestMismatch(f"policy version {tuple(published.version)} from its anchor: {astray}") from astray

    def _way(self, published: Published) -> list[Published]:
        """What to read, in order: an anchor and the deltas after it, or the deltas after what is held."""
        if self._at == published:
            return []
        way = [published]
        while (base := way[-1].base) is not None and (self._at is None or base != self._at.version):
            found = self._lineage.published.get(base)
            if found is None or not (base.attempt == published.version.attempt and base.step < way[-1].version.step):
                raise DigestMismatch(
                    f"policy version {tuple(way[-1].version)} applies to {tuple(base)}, which is no accepted version before "
                    f"it; run `miles verify`"
                )
            way.append(found)
        return way[::-1]

    def _follow(self, way: list[Published]) -> PolicyManifest:
        for published in way:
            manifest = read_manifest(self._fs, self._paths, self._run_id, published)
            if manifest.base is None:
                self._load(published, manifest)
            else:
                self._apply(published, manifest, manifest.base)
            self._at, self._manifest = published, manifest
        assert self._at is not None and self._manifest is not None
        if digest_entries(tuple(self._entries.values())) != self._at.weights_digest:
            raise _Astray(f"a delta after {tuple(self._at.version)} broke off")
        return self._manifest

    def _drop(self) -> None:
        self._held, self._entries, self._at, self._manifest = {}, {}, None, None

    def _load(self, published: Published, manifest: PolicyManifest) -> None:
        self._drop()  # Two copies of a large model need not fit.
        held = read_anchor(self._fs, self._paths.resolve(published.folder), manifest)
        self._held, self._entries = held, {entry.name: entry for entry in manifest.tensors}

    def _apply(self, published: Published, manifest: PolicyManifest, base: Base) -> None:
        if self._at is None or self._at.weights_digest != base.weights_digest:
            raise _Astray(f"{tuple(published.version)} applies to weights {base.weights_digest}, not to these")
        [data] = read_files(self._fs, self._paths.resolve(published.folder), manifest)
        target = {entry.name: entry for entry in manifest.tensors}
        start = 0
        for change in manifest.changes:
            payload = data[start : start + change.size_bytes]
            start += change.size_bytes
            if self._entries.get(change.name) != target[change.name]:
                self._change(change, target[change.name], payload)
        for name in self._entries.keys() - target.keys():
            del self._entries[name], self._held[name]
        if self._entries != target:
            raise _Astray(f"{tuple(published.version)} does not lead to its own tensors")

    def _change(self, change: Change, target: TensorEntry, payload: bytes) -> None:
        held = self._entries.get(change.name)
        if change.codec != "full" and (held is None or held.digest != change.old_digest):
            raise _Astray(f"{change.name} is neither the old nor the new tensor of a delta")
        old = self._held[change.name].data if held is not None else _EMPTY
        width = RawTensor(target.dtype, target.shape, _EMPTY).width
        tensor = RawTensor(target.dtype, target.shape, decode(change.codec, payload, old, width))
        entry = entry_of(change.name, tensor)
        if tensor.data.nbytes != change.full_bytes or entry != target:
            raise _Astray(f"{change.name} became {entry.digest}, announced {target.digest}")
        self._held[change.name], self._entries[change.name] = tensor, entry


def read_version(
    paths: RunPaths,
    run_id: str,
    published: Published,
    lineage: Lineage | None = None,
    *,
    fs: FileSystem | None = None,
    deadline_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[dict[str, torch.Tensor], PolicyManifest]:
    """One version, by a copy that is made for it; `lineage` is needed where it is a delta. Raises as PolicyCopy.read."""
    copy = PolicyCopy(paths, run_id, lineage or Lineage(), fs=fs, clock=clock, sleep=sleep)
    return copy.read(published, deadline_s=deadline_s)
