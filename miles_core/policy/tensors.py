"""Tensors as bytes: what digests, deltas and files are made of. numpy knows no bfloat16, and bytes have no dtype.

Reads and writes the safetensors layout itself, so that verify proves weights without torch and an anchor is written without
a second copy of the model in memory. Failure: a file that is no safetensors file raises DigestMismatch naming what is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from miles_core.errors import DigestMismatch

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

_DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2), "uint16": ("U16", 2), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int32": ("I32", 4), "uint32": ("U32", 4), "float32": ("F32", 4),
    "int64": ("I64", 8), "uint64": ("U64", 8), "float64": ("F64", 8), "complex64": ("C64", 8),
}  # fmt: skip
"""torch's name: safetensors' name, bytes of one element."""
_TORCH_NAMES = {code: name for name, (code, _) in _DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class RawTensor:
    """One tensor: `data` is its bytes, row-major, little-endian, [elements x width]."""

    dtype: str
    """torch's name without the module: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    data: Bytes

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return _DTYPES[self.dtype][1]

    def digest(self) -> str:
        """xxh3-128 of its bytes, in hex."""
        return xxhash.xxh3_128_hexdigest(self.data.data)


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """A view of a CPU tensor's bytes; a copy of one that lies elsewhere or is not contiguous. Raises ValueError."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"a tensor of dtype {name} cannot be published; known are {', '.join(_DTYPES)}")
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return RawTensor(name, tuple(tensor.shape), data.numpy())


def to_torch(raw: RawTensor) -> torch.Tensor:
    """A tensor over the same memory."""
    import torch

    dtype: torch.dtype = getattr(torch, raw.dtype)
    if raw.data.nbytes == 0:
        return torch.empty(raw.shape, dtype=dtype)  # numpy gives an empty array a stride that torch cannot view.
    return torch.from_numpy(raw.data).view(dtype).reshape(raw.shape)


def safetensors_header(tensors: Mapping[str, RawTensor]) -> tuple[bytes, list[str]]:
    """Everything in front of the data, and the names in the order in which their data must follow it."""
    # Wide elements first: so each tensor's data is aligned to its own element, as readers expect.
    order = sorted(tensors, key=lambda name: (-tensors[name].width, name))
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.data.nbytes
        described[name] = {"dtype": _DTYPES[tensor.dtype][0], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def read_safetensors(data: bytes) -> dict[str, RawTensor]:
    """The tensors of a file, each with memory of its own. Raises DigestMismatch."""
    try:
        length = int.from_bytes(data[:8], "little")
        described = json.loads(data[8 : 8 + length])
        described.pop("__metadata__", None)
        body = np.frombuffer(data, np.uint8)[8 + length :]
        return {name: _read_one(body, entry) for name, entry in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DigestMismatch(f"no safetensors file ({len(data)} bytes): {error!r}") from error


def _read_one(body: Bytes, entry: dict[str, Any]) -> RawTensor:
    name, shape, (start, end) = _TORCH_NAMES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    expected = math.prod(shape) * _DTYPES[name][1]
    if not 0 <= start <= end <= body.nbytes or end - start != expected:
        raise ValueError(f"{name} {shape} takes {expected} bytes, its data are {start}:{end} of {body.nbytes}")
    return RawTensor(name, shape, body[start:end].copy())
