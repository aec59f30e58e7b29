"""Which published versions must stay (I12). Pure: the supervisor's collector deletes what is not named here."""

from __future__ import annotations

from collections.abc import Iterable

from miles_core.policy.lineage import Lineage
from miles_core.records import Version

ANCHORS = 2


def retained(lineage: Lineage, reading: Iterable[Version] = ()) -> set[Version]:
    """The two newest anchors, every version published after the older one, and all that `reading` and their bases need.

    `reading`: versions that somebody says he reads or still will. One that was never published is passed over.
    """
    order = sorted(lineage.published, key=lambda version: (version.attempt, version.step))
    anchors = [index for index, version in enumerate(order) if lineage.published[version].base is None]
    keep = set(order[anchors[-ANCHORS:][0] :]) if anchors else set(order)
    for version in reading:
        following: Version | None = version
        while following in lineage.published and following not in keep:
            keep.add(following)
            following = lineage.published[following].base
    return keep
