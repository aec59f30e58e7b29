"""How patient roles are: the part of a cluster profile that they read."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from miles_core.recipe.closed import Closed


class Timing(Closed):
    """How the filesystem of a cluster behaves, and how patient roles are. The part of a cluster profile that roles read."""

    visibility_s: float = Field(default=1.0, ge=0)
    """How late a name or bytes written by one node may appear on another (local 0.5, NFS 60)."""
    lease_s: float = Field(default=10.0, gt=0)
    """A holder unseen for this long is dead."""
    poll_s: float = Field(default=0.05, gt=0)
    """Pause between two polls of a journal by a role."""
    sync_s: float = Field(default=0.05, gt=0)
    """A journal groups records and syncs at most once in this time."""
    orphan_s: float = Field(default=86400.0, gt=0)
    """Roles leave when no supervisor was seen for this long."""
    stall_s: float = Field(default=600.0, gt=0)
    """A role that lives but has made no progress for this long, and does not say what it waits for, is named; after three times
    as long it is replaced. So it must be longer than any training step, save or load takes."""

    @model_validator(mode="after")
    def _lease_covers_visibility(self) -> Self:
        if self.lease_s < 3 * self.visibility_s:
            raise ValueError(
                f"timing.lease_s={self.lease_s} is under 3 x visibility_s={self.visibility_s}: a slow filesystem would "
                f"kill healthy roles; set lease_s to at least {3 * self.visibility_s}"
            )
        return self
