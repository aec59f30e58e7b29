"""Reads a published policy version and believes nothing that its digests do not prove (I1, I11).

A copy that names another run or another version is refused with both names; so are a manifest or a file of another size or
digest, and tensors that do not make up the announced weights. A file that is not visible (ENOENT) or whose handle went stale
is tried again until a deadline. Files are read into memory: no mmap, which on NFS can change or fault under the reader.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from miles_core.errors import DeadlineExceeded, DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.manifest import MANIFEST_NAME, SCHEMA_VERSION, PolicyManifest, digest_entries, tensor_entries
from miles_core.records import FileDigest, Published, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes

if TYPE_CHECKING:
    import torch

RETRY_S = 0.2
_PASSING = (errno.ENOENT, errno.ESTALE)


def read_version(
    paths: RunPaths,
    run_id: str,
    published: Published,
    *,
    fs: FileSystem | None = None,
    deadline_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[dict[str, torch.Tensor], PolicyManifest]:
    """The tensors (CPU) and the manifest that an accepted `published` record announces.

    Raises DigestMismatch, RunDirectoryError (another run's or version's copy), DeadlineExceeded (not visible in time),
    OSError (any other failure of the filesystem).
    """
    fs = fs or FileSystem()
    folder = paths.resolve(published.folder)
    deadline = clock() + deadline_s
    while True:
        try:
            manifest = _read_manifest(fs, folder / MANIFEST_NAME, run_id, published)
            data = [_read_file(fs, folder, file) for file in manifest.files]
            break
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            if clock() >= deadline:
                raise DeadlineExceeded(
                    f"policy version {tuple(published.version)} was announced, but {error.filename or folder} did not become "
                    f"readable in {deadline_s:g} s ({error.strerror}); was it deleted, or is the filesystem slow?"
                ) from error
            sleep(RETRY_S)
    return _tensors(folder, data, manifest), manifest


def _read_manifest(fs: FileSystem, path: Path, run_id: str, published: Published) -> PolicyManifest:
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


def _tensors(folder: Path, data: list[bytes], manifest: PolicyManifest) -> dict[str, torch.Tensor]:
    """All tensors, each compared with its entry, and their sum with the weights digest."""
    import safetensors.torch

    tensors = {name: tensor for piece in data for name, tensor in safetensors.torch.load(piece).items()}
    found = {entry.name: entry for entry in tensor_entries(tensors)}
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
    """Compares an engine's logprobs of `manifest.probe.prompts` with the learner's; returns the largest gap in nats.

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
    worst = max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)
    if worst > probe.tolerance:
        raise DigestMismatch(
            f"probe of policy version {version}: the engine's logprobs differ from the learner's by up to {worst:.3g} nats, "
            f"tolerance {probe.tolerance:g} ({probe.dtype}); the weights are right on disk but not in the engine, or the "
            f"engine computes another model. It must not serve"
        )
    return worst
