"""PolicyManifest: what a published policy version consists of, and the digests that prove it.

A version's identity is (run, step, learner attempt, weights digest). The weights digest depends on names, dtypes, shapes
and raw bytes of the tensors alone, not on files or their layout, so a delta and an anchor of one version agree. It is a
digest over the tensors' own digests: who changes a few tensors hashes only those. Both kinds name all tensors of the
version; a delta says in addition which version it applies to and how each tensor that changed is coded.

Module level imports no torch: verify reads manifests, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from miles_core.policy.delta import Codec
from miles_core.policy.tensors import RawTensor, to_raw
from miles_core.recipe import Closed
from miles_core.records import FileDigest, Version
from miles_core.run import RunConfig
from miles_core.store.publish import digest_bytes

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "model.safetensors"
DELTA_NAME = "delta.bin"
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.4}
"""Largest mean gap between two right computations of a probe's logprobs (nats), by the coarser dtype of the two.

Measured on CPU, learner float32 against engine bfloat16, 2000 probes of random tokens at each of 8 versions of chain_sum_moe:
mean gap 0.014 in the median, 0.20 in the worst probe, which is doubled; dense 0.08. A router that chooses other experts
moves single tokens by up to 3.2 nats, so the largest gap tells nothing. float32 on both sides differs by 1e-6."""


class TensorEntry(Closed):
    """One tensor of a version."""

    name: str
    """Hugging Face name."""
    dtype: str
    """torch's name without the module: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of its bytes, row-major, little-endian."""


class Base(Closed):
    """What a delta applies to."""

    version: Version
    weights_digest: str


class AdapterEntry(Closed):
    """What a version is an adapter of: its tensors are A and B of miles_core/adapters.py."""

    rank: int
    alpha: float
    base_digest: str
    """Of the base model's weight files, as run.json names them."""


class Change(Closed):
    """One tensor in a delta's file: its payload follows that of the change before it."""

    name: str
    old_digest: str | None
    """Of the base's tensor of this name; None when there is none of this dtype and shape, then the codec is `full`."""
    new_digest: str
    codec: Codec
    size_bytes: int
    """Of its payload."""
    full_bytes: int
    """Of the tensor."""


class Probe(Closed):
    """A prompt with the learner's answer: an engine serves only weights that give the same (I11)."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    logprobs: tuple[tuple[float, ...], ...]
    """[len - 1] each: log softmax(logits) at temperature 1 of every next token."""
    dtype: str
    """The coarser of the learner's and the engines' dtypes, which sets the tolerance."""
    tolerance: float
    """Largest mean of absolute gaps that is not an error, in nats."""


class PolicyManifest(Closed):
    """`manifest.json` of a version folder; believed only through the Published record that names its digest."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    version: Version
    weights_digest: str
    kind: Literal["anchor", "delta"] = "anchor"
    base: Base | None = None
    """None for an anchor."""
    files: tuple[FileDigest, ...]
    """Names below the version's folder."""
    tensors: tuple[TensorEntry, ...]
    """All tensors of the version, by name, ascending; what of the base is not named is removed."""
    changes: tuple[Change, ...] = ()
    """Of a delta: the tensors that the base does not have exactly so, by name, ascending."""
    probe: Probe
    learner_token: str
    """Token of the learner attempt that published it."""
    adapter: AdapterEntry | None = None
    """None: the tensors are the whole model."""

    @model_validator(mode="after")
    def _delta_is_whole(self) -> Self:
        if (self.kind == "delta") != (self.base is not None) or (self.kind == "anchor" and self.changes):
            raise ValueError(f"{self.kind} with base {self.base} and {len(self.changes)} changes")
        if self.kind == "delta" and [file.size_bytes for file in self.files] != [sum(c.size_bytes for c in self.changes)]:
            raise ValueError("a delta has one file, as long as its changes")
        digests = {entry.name: entry.digest for entry in self.tensors}
        strange = [change.name for change in self.changes if digests.get(change.name) != change.new_digest]
        if strange:
            raise ValueError(f"{strange[0]} changes into something that is not this version's")
        return self


def adapter_of(run: RunConfig) -> AdapterEntry | None:
    """What every version of a run is an adapter of; None if a version is the whole model."""
    lora = run.recipe.model.lora
    return None if lora is None else AdapterEntry(rank=lora.rank, alpha=lora.alpha, base_digest=run.base_model_digest)


def raw_entries(tensors: Mapping[str, RawTensor]) -> tuple[TensorEntry, ...]:
    """Name, dtype, shape and digest of every tensor, by name."""
    return tuple(entry_of(name, tensors[name]) for name in sorted(tensors))


def entry_of(name: str, tensor: RawTensor) -> TensorEntry:
    """Hashes one tensor."""
    return TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, digest=tensor.digest())


def tensor_entries(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """The same of torch's tensors."""
    return raw_entries({name: to_raw(tensor) for name, tensor in tensors.items()})


def digest_entries(entries: tuple[TensorEntry, ...]) -> str:
    """The weights digest of tensors described by `entries`, in any order."""
    lines = sorted(f"{e.name}\0{e.dtype}\0{','.join(map(str, e.shape))}\0{e.digest}\n" for e in entries)
    return digest_bytes("".join(lines).encode())


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of a policy's weights: names, dtypes, shapes, raw bytes; independent of order and files."""
    return digest_entries(tensor_entries(tensors))


def probe_dtype(learner: str, engine: str) -> str:
    """The dtype whose rounding a probe has to forgive: the coarser one."""
    return max(learner, engine, key=PROBE_TOLERANCE.__getitem__)


def probe_prompts(vocabulary: int, *, count: int = 2, length: int = 16) -> tuple[tuple[int, ...], ...]:
    """The same few token lists on every machine: ids drawn over the whole vocabulary, so that no embedding row is special."""
    draw = random.Random(vocabulary)
    return tuple(tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count))
