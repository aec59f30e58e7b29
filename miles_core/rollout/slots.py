"""KV cache in slots, and attention over a pack: the tokens of many sessions behind one another in one forward pass.

A pack has no padding outside attention: projections and experts see N tokens, whichever sessions they belong to. Each
session's newest token attends in one batch (decoding is a pack of nothing else); sessions with more tokens attend in a
second, padded one. Hugging Face's modelling code runs unchanged, its attention function is `slot_attention`.

Shapes: B sessions in the pack, N tokens, H query heads, G key-value heads, D head size, S positions of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "miles_slots"
Ints = npt.NDArray[np.int64]


class SlotCache:
    """Keys and values of all slots: one tensor [layers, 2, slots, G, S, D]."""

    def __init__(self, config: Any, *, slots: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots, heads, positions, size)
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def clear(self, slot: int, first: int = 0) -> None:
        """Zeroes a slot from a position on: masked ones weigh 0, but 0 times a NaN left by an earlier session is NaN."""
        self.data[:, :, slot, :, first:].zero_()

    def copy(self, source: int, target: int, positions: int) -> None:
        """Gives slot `target` the first positions of slot `source`."""
        self.data[:, :, target, :, :positions] = self.data[:, :, source, :, :positions]


@dataclass(frozen=True)
class _Rows:
    """Sessions that attend together."""

    slots: slice | torch.Tensor
    """[B] slots; a slice when they are the first B, which saves the copy."""
    source: torch.Tensor
    """[B, T] index into the pack; padded by repeating the last."""
    mask: torch.Tensor
    """[B, 1, T, L] bool: True where a key is visible."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """query [N, H, D], keys and values [slots, G, S, D] -> [B, T, H, D]."""
        batch, length = self.source.shape
        seen = self.mask.shape[-1]
        keys, values = keys[:, :, :seen][self.slots], values[:, :, :seen][self.slots]
        groups, size = keys.shape[1], keys.shape[3]
        # The query heads of a group lie behind one another as further queries, so keys are not repeated per head.
        query = query[self.source].view(batch, length, groups, -1, size).permute(0, 2, 3, 1, 4)
        per_group = query.shape[2]
        mask = self.mask if length == 1 else self.mask.repeat(1, 1, per_group, 1)
        out = scaled_dot_product_attention(
            query.reshape(batch, groups, per_group * length, size), keys, values, attn_mask=mask, scale=scale
        )
        return out.view(batch, groups, per_group, length, size).permute(0, 3, 1, 2, 4).reshape(batch, length, -1, size)


class Pack:
    """The index tensors of one forward pass.

    `slots` [B] ascending, `cached` [B] tokens each already in the cache, `new` [B] >= 1 tokens each to feed.
    """

    def __init__(self, cache: SlotCache, slots: Ints, cached: Ints, new: Ints) -> None:
        self._cache = cache
        device = cache.data.device
        _, _, _, heads, positions, _ = cache.data.shape
        self.last = np.cumsum(new) - 1
        self.slots = np.repeat(slots, new)
        """[N] slot of each token."""
        self.positions = np.arange(len(self.slots)) - np.repeat(self.last + 1 - new - cached, new)
        """[N] position of each token in its session."""
        write = (self.slots * heads + np.arange(heads)[:, None]) * positions + self.positions
        self._write = torch.from_numpy(write.reshape(-1)).to(device)
        dense = slots[-1] == len(slots) - 1
        self._newest = _Rows(
            slots=slice(0, len(slots)) if dense else torch.from_numpy(slots).to(device),
            source=torch.from_numpy(self.last[:, None]).to(device),
            mask=_visible((cached + new)[:, None], device),
        )
        many = np.flatnonzero(new > 1)
        self._extend = self._padded(slots[many], cached[many], new[many], self.last[many], device) if len(many) else None

    def _padded(self, slots: Ints, cached: Ints, new: Ints, last: Ints, device: torch.device) -> tuple[_Rows, torch.Tensor]:
        """The rows that feed more than one token, and which entries [M] of their padded [B * T] are tokens."""
        steps = np.arange(new.max())
        first = last + 1 - new
        source = np.minimum(first[:, None] + steps, last[:, None])
        rows = _Rows(
            slots=torch.from_numpy(slots).to(device),
            source=torch.from_numpy(source).to(device),
            mask=_visible(np.minimum(cached[:, None] + steps, (cached + new)[:, None] - 1) + 1, device),
        )
        real = np.flatnonzero(steps < new[:, None])
        return rows, torch.from_numpy(real).to(device)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Writes key and value [1, G, N, D] into the slots and attends; query [1, H, N, D] -> [1, N, H, D]."""
        keys, values = self._cache.data[layer, 0], self._cache.data[layer, 1]
        size = query.shape[-1]
        keys.view(-1, size).index_copy_(0, self._write, key.reshape(-1, size))
        values.view(-1, size).index_copy_(0, self._write, value.reshape(-1, size))
        query = query[0].transpose(0, 1)
        newest = self._newest.attend(query, keys, values, scale)[:, 0]
        if self._extend is None:
            return newest[None]
        rows, real = self._extend
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        extended = rows.attend(query, keys, values, scale).flatten(0, 1)
        out[rows.source.flatten()[real]] = extended[real]
        out[self._newest.source[:, 0]] = newest
        return out[None]


def _visible(counts: Ints, device: torch.device) -> torch.Tensor:
    """[B, T] numbers of visible keys -> [B, 1, T, L] bool with L the largest of them."""
    return torch.from_numpy(np.arange(counts.max()) < counts[:, None, :, None]).to(device)


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    pack: Pack | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the slots of `pack`; without one, the ordinary attention of a full forward pass."""
    if pack is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    return pack.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
