"""Which row each of a microbatch's flat tokens belongs to, and sums and means over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segments:
    """N tokens of `number` rows."""

    index: torch.Tensor
    """[N] int64: the token's row."""
    number: int
    counted: torch.Tensor
    """[N] bool: tokens that enter sums and means; the others' values are never read."""

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N] to [N]: each token gets the sum over its row's counted tokens."""
        sums = values.new_zeros(self.number).index_add(0, self.index, values.where(self.counted, values.new_zeros(())))
        return sums[self.index]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Values [N] to [N]: each token gets the mean over its row's counted tokens; 0 for a row that has none."""
        return self.total(values) / self.total(torch.ones_like(values)).clamp(min=1)
