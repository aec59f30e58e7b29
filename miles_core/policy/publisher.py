"""Publishes policy versions (I1): data first, then the manifest, then the caller's journal record; anchors and deltas (I11).

All files appear by rename after fsync, and nobody looks at them before a journal record names the manifest's digest. So a
crash at any point leaves nothing believed, and publishing the same (step, attempt) again replaces what is there.

A Publisher lives as long as its learner attempt. It keeps the tensors it published last, in memory, and writes the change
from them unless this is its first version (after a recovery nobody need know what came before: I8), the recipe asks for an
anchor, or the change is not worth it. So a chain of deltas begins with an anchor of its own attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from miles_core.paths import RunPaths
from miles_core.policy.delta import Codec, encode
from miles_core.policy.manifest import (
    DELTA_NAME,
    MANIFEST_NAME,
    WEIGHTS_NAME,
    AdapterEntry,
    Base,
    Change,
    PolicyManifest,
    Probe,
    TensorEntry,
    digest_entries,
    tensor_entries,
)
from miles_core.policy.tensors import RawTensor, safetensors_header, to_raw
from miles_core.recipe import PolicySpec
from miles_core.records import FileDigest, Published, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes, publish_bytes, publish_file

if TYPE_CHECKING:
    import torch

WORTH_IT = 0.8
"""A delta that takes more than this share of an anchor is published as one: readers start from it at once."""
_WRITE_BYTES = 64 << 20
"""One write call takes no more than 2 GiB on Linux; many small ones are slow on NFS, where each closes the file."""


@dataclass(frozen=True)
class _Chain:
    """Where the next delta would begin."""

    base: Base
    entries: dict[str, TensorEntry]
    tensors: dict[str, RawTensor]
    num_deltas: int
    """Since the last anchor ..."""
    delta_bytes: int
    """... and what they took."""


@dataclass(frozen=True)
class Prepared:
    """A version that is coded and hashed, to be written as often as it takes."""

    manifest: PolicyManifest
    content: bytes
    """The manifest's file."""
    data: tuple[memoryview, ...]
    """The other file, in pieces."""
    full_bytes: int
    chain: _Chain | None

    @property
    def size_bytes(self) -> int:
        """What is written for it."""
        return len(self.content) + self.manifest.files[0].size_bytes


class Publisher:
    """The versions of one learner attempt, one after the other."""

    def __init__(
        self,
        fs: FileSystem,
        paths: RunPaths,
        spec: PolicySpec,
        *,
        run_id: str,
        learner_token: str,
        adapter: AdapterEntry | None = None,
    ) -> None:
        """`adapter`: what the tensors are an adapter of; None: they are the whole model."""
        self._fs, self._paths, self._spec = fs, paths, spec
        self._run_id, self._learner_token, self._adapter = run_id, learner_token, adapter
        self._chain: _Chain | None = None

    def prepare(
        self, version: Version, tensors: dict[str, torch.Tensor], entries: tuple[TensorEntry, ...], probe: Probe
    ) -> Prepared:
        """Codes a version as what is cheaper to follow. Touches no file.

        `tensors`: under their Hugging Face names, of tied weights one name; they must not change any more. `entries`: theirs.
        """
        raw = {name: to_raw(tensor) for name, tensor in tensors.items()}
        plain = PolicyManifest(
            run_id=self._run_id, version=version, weights_digest=digest_entries(entries), tensors=entries, probe=probe,
            files=(), learner_token=self._learner_token, adapter=self._adapter,
        )  # fmt: skip
        full_bytes = _full_bytes(plain, raw)
        delta = self._delta(plain, raw, full_bytes)
        return delta if delta is not None else self._anchor(plain, raw, full_bytes)

    def write(self, prepared: Prepared, after_data: Callable[[], None] = lambda: None) -> Published:
        """Writes both files and returns the record that announces them, for the caller's journal.

        `after_data` runs when the data are on disk and the manifest is not (crash tests). Raises OSError; then it may be
        called again.
        """
        manifest = prepared.manifest
        folder = self._paths.version(*manifest.version)
        publish_file(self._fs, folder / manifest.files[0].name, lambda temp: self._append_all(temp, prepared.data))
        after_data()
        publish_bytes(self._fs, folder / MANIFEST_NAME, prepared.content)
        for parent in (folder.parent, folder.parent.parent):
            self._fs.sync(parent)  # The folders are new, too: without this a power loss may take them back.
        self._chain = prepared.chain
        return Published(
            version=manifest.version,
            weights_digest=manifest.weights_digest,
            folder=self._paths.relative(folder),
            manifest_digest=digest_bytes(prepared.content),
            size_bytes=prepared.size_bytes,
            full_bytes=prepared.full_bytes,
            base=None if manifest.base is None else manifest.base.version,
        )

    def _anchor(self, plain: PolicyManifest, raw: dict[str, RawTensor], full_bytes: int) -> Prepared:
        header, order = safetensors_header(raw)
        data = (memoryview(header), *(raw[name].data.data for name in order))
        manifest = plain.model_copy(update={"files": (_describe(WEIGHTS_NAME, data),)})
        return self._prepared(manifest, raw, data, full_bytes, num_deltas=0, delta_bytes=0)

    def _delta(self, plain: PolicyManifest, raw: dict[str, RawTensor], full_bytes: int) -> Prepared | None:
        """None when an anchor is due or cheaper. Its file's digest is that of the bytes in memory: a bad disk is found out."""
        chain = self._chain
        if chain is None or chain.num_deltas + 1 >= self._spec.anchor_every:
            return None
        coded = [_change(entry, raw[entry.name], chain) for entry in plain.tensors if chain.entries.get(entry.name) != entry]
        data = tuple(memoryview(payload) for _, payload in coded)
        changes = {"kind": "delta", "base": chain.base, "changes": tuple(change for change, _ in coded)}
        manifest = plain.model_copy(update={"files": (_describe(DELTA_NAME, data),), **changes})
        content_bytes = len(manifest.model_dump_json()) + manifest.files[0].size_bytes
        delta_bytes = chain.delta_bytes + content_bytes
        if content_bytes > WORTH_IT * full_bytes or delta_bytes > self._spec.anchor_ratio * full_bytes:
            return None
        return self._prepared(manifest, raw, data, full_bytes, num_deltas=chain.num_deltas + 1, delta_bytes=delta_bytes)

    def _prepared(
        self, manifest: PolicyManifest, raw: dict[str, RawTensor], data: tuple[memoryview, ...], full_bytes: int,
        *, num_deltas: int, delta_bytes: int,
    ) -> Prepared:  # fmt: skip
        base = Base(version=manifest.version, weights_digest=manifest.weights_digest)
        entries = {entry.name: entry for entry in manifest.tensors}
        chain = _Chain(base, entries, raw, num_deltas, delta_bytes) if self._spec.deltas else None
        return Prepared(manifest, manifest.model_dump_json().encode(), data, full_bytes, chain)

    def _append_all(self, temp: Path, data: Iterable[memoryview]) -> None:
        for piece in _joined(data):
            self._fs.append(temp, piece)


def publish_version(
    fs: FileSystem,
    paths: RunPaths,
    *,
    run_id: str,
    version: Version,
    tensors: dict[str, torch.Tensor],
    probe: Probe,
    learner_token: str,
    after_data: Callable[[], None] = lambda: None,
) -> Published:
    """Publishes one version as a full anchor."""
    publisher = Publisher(fs, paths, PolicySpec(deltas=False), run_id=run_id, learner_token=learner_token)
    return publisher.write(publisher.prepare(version, tensors, tensor_entries(tensors), probe), after_data)


def _change(entry: TensorEntry, new: RawTensor, chain: _Chain) -> tuple[Change, bytes]:
    old = chain.entries.get(entry.name)
    codec: Codec
    if old is None or (old.dtype, old.shape) != (entry.dtype, entry.shape):
        old_digest, codec, payload = None, "full", new.data.tobytes()
    else:
        old_digest = old.digest
        codec, payload = encode(chain.tensors[entry.name].data, new.data, new.width)
    change = Change(
        name=entry.name, old_digest=old_digest, new_digest=entry.digest, codec=codec, size_bytes=len(payload),
        full_bytes=new.data.nbytes,
    )  # fmt: skip
    return change, payload


def _full_bytes(plain: PolicyManifest, raw: dict[str, RawTensor]) -> int:
    """What an anchor takes, to the byte: its digest is not known yet, but how long it is."""
    header, _ = safetensors_header(raw)
    size_bytes = len(header) + sum(tensor.data.nbytes for tensor in raw.values())
    file = FileDigest(name=WEIGHTS_NAME, size_bytes=size_bytes, digest=digest_bytes(b""))
    return size_bytes + len(plain.model_copy(update={"files": (file,)}).model_dump_json())


def _describe(name: str, data: tuple[memoryview, ...]) -> FileDigest:
    state = xxhash.xxh3_128()
    for piece in data:
        state.update(piece)
    return FileDigest(name=name, size_bytes=sum(piece.nbytes for piece in data), digest=state.hexdigest())


def _joined(data: Iterable[memoryview]) -> Iterator[bytes]:
    """The same bytes in few pieces, each at most _WRITE_BYTES; one empty piece if there are none, so that the file exists."""
    waiting = bytearray()
    for buffer in data:
        for start in range(0, buffer.nbytes, _WRITE_BYTES):
            part = buffer[start : start + _WRITE_BYTES]
            if len(waiting) + part.nbytes > _WRITE_BYTES:
                yield bytes(waiting)
                waiting.clear()
            waiting += part
    yield bytes(waiting)
