"""PolicyManifest: what a published policy version consists of, and the digests that prove it.

A version's identity is (run, step, learner attempt, weights digest). The weights digest depends on names, dtypes, shapes
and raw bytes of the tensors alone, not on files or their layout, so a delta (to come, behind the same manifest) and an
anchor of one version agree. It is a digest over the tensors' own digests: who changes a few tensors hashes only those.

Module level imports no torch: verify reads manifests, too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

import xxhash

from miles_core.recipe import Closed
from miles_core.records import FileDigest, Version
from miles_core.store.publish import digest_bytes

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "model.safetensors"
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest gap between two right computations of one logprob (nats), by the dtype of the forward pass."""


class TensorEntry(Closed):
    """One tensor of a version."""

    name: str
    """Hugging Face name."""
    dtype: str
    """torch's name without the module: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of its bytes, row-major, little-endian."""


class Probe(Closed):
    """A prompt with the learner's answer: an engine serves only weights that give the same (I11)."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[tuple[float, ...], ...]
    """[len - 1] each: log softmax(logits) at temperature 1 of every next token."""
    dtype: str
    """Dtype of the learner's forward pass."""
    tolerance: float
    """Largest absolute gap that is not an error, in nats."""


class PolicyManifest(Closed):
    """`manifest.json` of a version folder; believed only through the Published record that names its digest."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    version: Version
    weights_digest: str
    kind: Literal["anchor"] = "anchor"
    base: Version | None = None
    """The version a delta applies to; None for an anchor."""
    files: tuple[FileDigest, ...]
    """Names below the version's folder."""
    tensors: tuple[TensorEntry, ...]
    """By name, ascending."""
    probe: Probe
    learner_token: str
    """Token of the learner attempt that published it."""


def tensor_entries(tensors: dict[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """Name, dtype, shape and digest of every tensor, by name."""
    return tuple(
        TensorEntry(
            name=name,
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            shape=tuple(tensors[name].shape),
            digest=tensor_digest(tensors[name]),
        )
        for name in sorted(tensors)
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes, row-major, whatever its dtype (numpy has no bfloat16, bytes have no dtype)."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def digest_entries(entries: tuple[TensorEntry, ...]) -> str:
    """The weights digest of tensors described by `entries`, in any order."""
    lines = sorted(f"{e.name}\0{e.dtype}\0{','.join(map(str, e.shape))}\0{e.digest}\n" for e in entries)
    return digest_bytes("".join(lines).encode())


def weights_digest(tensors: dict[str, torch.Tensor]) -> str:
    """The digest of a policy's weights: names, dtypes, shapes, raw bytes; independent of order and files."""
    return digest_entries(tensor_entries(tensors))


def probe_prompts(vocabulary: int, *, count: int = 2, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """The same few token lists on every machine: ids drawn over the whole vocabulary, so that no embedding row is special."""
    draw = random.Random(vocabulary)
    return tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count))
