"""The delta codec of one tensor: what turns its old bytes into its new ones, exact for any dtype.

Two codes of the XOR of old and new; the smaller one is taken, and raw bytes when neither helps:

- `gap`: changed elements only. Unchanged elements in front of each as a run of 255s and one byte below 255, then the XOR of
  the elements by byte planes; best where few elements changed.
- `xor`: the whole tensor by byte planes.

Byte planes put exponents beside exponents, which halves the size. Everything is compressed by zstd, level 1. Failure: a
payload that does not describe a change of a tensor of this size raises DigestMismatch; whether the result is right is for
the caller's digest to say.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import zstandard

from miles_core.errors import DigestMismatch
from miles_core.policy.tensors import Bytes

Codec = Literal["gap", "xor", "full"]

LEVEL = 1
SPARSE = 0.1
"""Below this share of changed elements `gap` was always the smaller code (benchmarks/delta.py), and `xor` is not tried."""
_RUN = 255
_COUNT_BYTES = 8
_Words = npt.NDArray[np.unsignedinteger]


def encode(old: Bytes, new: Bytes, width: int) -> tuple[Codec, bytes]:
    """The smallest code of the change from `old` to `new`, both [elements x width] bytes."""
    before, after = _words(old, width), _words(new, width)
    changed = np.flatnonzero(before != after)
    codes: list[tuple[Codec, bytes]] = [("gap", _encode_gaps(before, after, changed, width))]
    if changed.size >= SPARSE * before.size:
        codes.append(("xor", _compress(_planes(before ^ after, width))))
    codec, payload = min(codes, key=lambda code: len(code[1]))
    return (codec, payload) if len(payload) < new.nbytes else ("full", new.tobytes())


def decode(codec: Codec, payload: bytes, old: Bytes, width: int) -> Bytes:
    """The new bytes, in memory of their own; `old` stays as it is. Raises DigestMismatch. `full` needs no old bytes."""
    if codec == "full":
        return np.frombuffer(payload, np.uint8).copy()
    if codec == "xor":
        difference = _unplane(_decompress(payload, old.nbytes), width)
        _require(difference.nbytes == old.nbytes, f"{difference.nbytes} bytes of difference for {old.nbytes}")
        result: Bytes = old ^ difference.view(np.uint8)
        return result
    words = _words(old, width).copy()
    # A gap byte below 255 per element, and at most one 255 for every 255 elements.
    plain = _decompress(payload, _COUNT_BYTES + words.size * (width + 1) + words.size // _RUN)
    _require(plain.size >= _COUNT_BYTES, f"{plain.size} bytes are no list of changes")
    count = int.from_bytes(plain[:_COUNT_BYTES].tobytes(), "little")
    middle = plain.size - count * width
    _require(middle >= _COUNT_BYTES, f"{count} changes in {plain.size} bytes")
    changed = _decode_gaps(plain[_COUNT_BYTES:middle])
    in_range = changed.size == count and (count == 0 or int(changed[-1]) < words.size)
    _require(in_range, f"{changed.size} of {count} changes lie in {words.size} elements")
    words[changed] ^= _unplane(plain[middle:], width)
    return words.view(np.uint8)


def _encode_gaps(before: _Words, after: _Words, changed: npt.NDArray[np.int64], width: int) -> bytes:
    gaps = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gaps // _RUN + 1)
    stream = np.full(int(ends[-1]) if ends.size else 0, _RUN, np.uint8)
    stream[ends - 1] = gaps % _RUN
    planes = _planes(before[changed] ^ after[changed], width)
    return _compress(np.concatenate([_count(changed.size), stream, planes]))


def _decode_gaps(stream: Bytes) -> npt.NDArray[np.int64]:
    """[changes] positions, ascending."""
    ends = np.flatnonzero(stream != _RUN)
    runs = np.diff(ends, prepend=-1) - 1
    return np.cumsum(runs * _RUN + stream[ends].astype(np.int64) + 1) - 1


def _count(number: int) -> Bytes:
    return np.frombuffer(number.to_bytes(_COUNT_BYTES, "little"), np.uint8)


def _words(data: Bytes, width: int) -> _Words:
    return data.view(f"<u{width}")


def _planes(words: _Words, width: int) -> Bytes:
    """[n x width] bytes -> [width x n]: all first bytes, then all second bytes, ..."""
    if width == 1:
        return words.view(np.uint8)
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, width).T).reshape(-1)


def _unplane(planes: Bytes, width: int) -> _Words:
    """The inverse of `_planes`. Raises DigestMismatch when the bytes are no whole number of elements."""
    _require(planes.size % width == 0, f"{planes.size} bytes are no elements of {width} bytes")
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(f"<u{width}")


def _compress(data: Bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data.data)


def _decompress(payload: bytes, most_bytes: int) -> Bytes:
    """Never more than `most_bytes`, whatever the payload says."""
    try:
        size = zstandard.frame_content_size(payload)
        _require(0 <= size <= most_bytes, f"it claims {size} bytes, at most {most_bytes} are possible")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
    except zstandard.ZstdError as error:
        raise DigestMismatch(f"delta payload of {len(payload)} bytes: {error}") from error


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise DigestMismatch(f"delta payload is inconsistent: {problem}")
