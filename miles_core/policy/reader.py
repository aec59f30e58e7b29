"""Reads the files of a published policy version and believes nothing that its digests do not prove (I1, I11).

A copy that names another run or another version is refused with both names; so are a manifest or a file of another size or
digest, and tensors that do not make up the announced weights. Files are read into memory: no mmap, which on NFS can change
or fault under the reader. What is not visible yet raises OSError here; PolicyCopy waits, and follows deltas.

Module level imports no torch: verify proves weights with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.manifest import MANIFEST_NAME, SCHEMA_VERSION, PolicyManifest, digest_entries, raw_entries
from miles_core.policy.tensors import RawTensor, read_safetensors
from miles_core.records import FileDigest, Published, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes


def read_manifest(fs: FileSystem, paths: RunPaths, run_id: str, published: Published) -> PolicyManifest:
    """The manifest that an accepted record announces. Raises DigestMismatch, RunDirectoryError, OSError."""
    path = paths.resolve(published.folder) / MANIFEST_NAME
    data = fs.read(path)
    digest = digest_bytes(data)
    try:
        manifest = PolicyManifest.model_validate_json(data)
    except ValidationError as error:
        raise DigestMismatch(
            f"{path}: digest {digest}, announced {published.manifest_digest}, and it is no policy manifest of schema "
            f"{SCHEMA_VERSION}: {error}"
        ) from error
    # Identity before digest: whoever mixed up two copies learns which ones.
    _check_identity(path, manifest, run_id, published.version)
    if digest != published.manifest_digest:
        raise DigestMismatch(f"{path}: digest {digest}, announced {published.manifest_digest}; the manifest was changed")
    if manifest.weights_digest != published.weights_digest:
        raise DigestMismatch(
            f"{path} describes weights {manifest.weights_digest}, the learner's journal announced {published.weights_digest}"
        )
    base = None if manifest.base is None else manifest.base.version
    if base != published.base:
        raise DigestMismatch(f"{path} applies to {base}, the learner's journal announced {published.base}")
    return manifest


def _check_identity(path: Path, manifest: PolicyManifest, run_id: str, version: Version) -> None:
    if manifest.run_id != run_id:
        raise RunDirectoryError(
            f"{path} is a policy of run {manifest.run_id}, this is run {run_id}: weights of another run are never loaded; "
            f"remove the copy"
        )
    if manifest.version != version:
        raise RunDirectoryError(
            f"{path} is policy version {tuple(manifest.version)}, wanted {tuple(version)} (step, attempt): the folder holds "
            f"another version's copy"
        )


def read_files(fs: FileSystem, folder: Path, manifest: PolicyManifest) -> list[bytes]:
    """A version's files, each of the announced size and digest. Raises DigestMismatch, RunDirectoryError, OSError."""
    return [_read_file(fs, folder, file) for file in manifest.files]


def _read_file(fs: FileSystem, folder: Path, file: FileDigest) -> bytes:
    if Path(file.name).name != file.name:
        raise RunDirectoryError(f"{folder / MANIFEST_NAME} names a file outside its folder: {file.name!r}")
    data = fs.read(folder / file.name)
    if len(data) != file.size_bytes:
        raise DigestMismatch(f"{folder / file.name}: {len(data)} bytes, announced {file.size_bytes}; torn or changed")
    found = digest_bytes(data)
    if found != file.digest:
        raise DigestMismatch(f"{folder / file.name}: digest {found}, announced {file.digest}; changed or corrupt")
    return data


def read_anchor(fs: FileSystem, folder: Path, manifest: PolicyManifest) -> dict[str, RawTensor]:
    """All tensors of an anchor, each compared with its entry, and their sum with the weights digest. Raises as `read_files`."""
    pieces = read_files(fs, folder, manifest)
    tensors = {name: tensor for piece in pieces for name, tensor in read_safetensors(piece).items()}
    found = {entry.name: entry for entry in raw_entries(tensors)}
    announced = {entry.name: entry for entry in manifest.tensors}
    wrong = sorted(name for name in found.keys() | announced.keys() if found.get(name) != announced.get(name))
    if wrong:
        name = wrong[0]
        raise DigestMismatch(
            f"{folder}: {len(wrong)} tensors differ from the manifest, first {name}: {found.get(name, 'missing')}, announced "
            f"{announced.get(name, 'nothing')}"
        )
    if digest_entries(manifest.tensors) != manifest.weights_digest:
        raise DigestMismatch(
            f"{folder}: the tensors make up weights {digest_entries(manifest.tensors)}, the manifest says "
            f"{manifest.weights_digest}"
        )
    return tensors


def check_probe(manifest: PolicyManifest, logprobs: Sequence[Sequence[float] | npt.NDArray[np.float32]]) -> float:
    """Compares an engine's logprobs of `manifest.probe.prompts` with the learner's; returns the mean absolute gap in nats.

    Raises DigestMismatch when it is over the tolerance or not a number: the bytes are right, what was loaded is not.
    """
    probe = manifest.probe
    version = tuple(manifest.version)
    if [len(row) for row in logprobs] != [len(row) for row in probe.logprobs]:
        raise DigestMismatch(
            f"probe of policy version {version}: the engine answered with lengths {[len(row) for row in logprobs]}, the "
            f"learner with {[len(row) for row in probe.logprobs]}"
        )
    gaps = [
        abs(float(a) - b)
        for mine, theirs in zip(logprobs, probe.logprobs, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    mean = sum(gap if math.isfinite(gap) else math.inf for gap in gaps) / max(1, len(gaps))
    if mean > probe.tolerance:
        raise DigestMismatch(
            f"probe of policy version {version}: the engine's logprobs differ from the learner's by a mean {mean:.3g} nats, "
            f"tolerance {probe.tolerance:g} ({probe.dtype}); the weights are right on disk but not in the engine, or the "
            f"engine computes another model. It must not serve"
        )
    return mean
