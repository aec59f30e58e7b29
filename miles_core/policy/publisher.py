"""Publishes a policy version (I1): weights first, then the manifest, then the caller's journal record.

Both files appear by rename after fsync, and nobody looks at them before a journal record names the manifest's digest. So a
crash at any point leaves nothing believed, and publishing the same (step, attempt) again replaces what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.paths import RunPaths
from miles_core.policy.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    PolicyManifest,
    Probe,
    digest_entries,
    tensor_entries,
)
from miles_core.records import FileDigest, Published, Version
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes, publish_bytes, publish_file

if TYPE_CHECKING:
    import torch

_WRITE_BYTES = 256 << 20
"""One write call takes no more than 2 GiB on Linux."""


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
    """Writes a full anchor and returns the record that announces it, for the caller's journal.

    `tensors`: contiguous, under their Hugging Face names, of tied weights one name. `after_data` runs when the weights are
    on disk and the manifest is not (crash tests). Raises OSError; then it may be called again.
    """
    folder = paths.version(version.step, version.attempt)
    data = _write_weights(fs, folder / WEIGHTS_NAME, tensors)
    after_data()
    entries = tensor_entries(tensors)
    manifest = PolicyManifest(
        run_id=run_id,
        version=version,
        weights_digest=digest_entries(entries),
        files=(data,),
        tensors=entries,
        probe=probe,
        learner_token=learner_token,
    )
    content = manifest.model_dump_json().encode()
    publish_bytes(fs, folder / MANIFEST_NAME, content)
    for parent in (folder.parent, folder.parent.parent):
        fs.sync(parent)  # The folders are new, too: without this a power loss may take them back.
    return Published(
        version=version,
        weights_digest=manifest.weights_digest,
        folder=paths.relative(folder),
        manifest_digest=digest_bytes(content),
        size_bytes=data.size_bytes + len(content),
    )


def _write_weights(fs: FileSystem, path: Path, tensors: dict[str, torch.Tensor]) -> FileDigest:
    """One safetensors file. Its digest is that of the bytes in memory, so a disk that loses some is found out."""
    import safetensors.torch

    data = safetensors.torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, {"format": "pt"})

    def write(temp: Path) -> None:
        for start in range(0, len(data), _WRITE_BYTES):
            fs.append(temp, data[start : start + _WRITE_BYTES])

    publish_file(fs, path, write)
    return FileDigest(name=path.name, size_bytes=len(data), digest=digest_bytes(data))
