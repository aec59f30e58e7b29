"""What must stay of what the learner published (I12). Pure; cluster/collector.py deletes what is not named here.

Nobody writes that a version retired: it follows from the learner's accepted records alone, so there is no second statement
that could disagree with them. What is retired stays so, whatever is published later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from miles_core.records import Batch, CheckpointSaved, Drop, GroupIssued, Published, Version, number_of

log = logging.getLogger("miles")

ANCHORS = 2


def retained(published: Mapping[Version, Published], reading: Iterable[Version] = ()) -> set[Version]:
    """The two newest anchors, every version published after the older one, and all that `reading` and their bases need.

    `published`: accepted versions; retired ones may be left out. `reading`: versions that somebody says he reads or still
    will. One that is not in `published` is passed over.
    """
    order = sorted(published, key=lambda version: (version.attempt, version.step))
    anchors = [index for index, version in enumerate(order) if published[version].base is None]
    keep = set(order[anchors[-ANCHORS:][0] :]) if anchors else set(order)
    for version in reading:
        following: Version | None = version
        while following is not None and following in published and following not in keep:
            keep.add(following)
            following = published[following].base
    return keep


def oldest_kept_checkpoint(
    checkpoints: Mapping[Version, CheckpointSaved], count: int, is_whole: Callable[[CheckpointSaved], bool]
) -> Version | None:
    """The `count`th newest whole checkpoint, of each step the newest attempt's: those below it are retired.

    None while there are fewer. `is_whole`: whether the files are there; asked of the newest ones only.
    """
    steps: set[int] = set()
    for version in sorted(checkpoints, reverse=True):
        if version.step not in steps and is_whole(checkpoints[version]):
            steps.add(version.step)
            if len(steps) == count:
                return version
    return None


class OpenGroups:
    """Which groups a recovery may still need, folded from the orchestrator's accepted records.

    Groups are numbered in issue order, so one number says it: nobody will ever need a row of a group below `watermark`. After
    an id without a number nothing is known of any group, so all are needed.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._batches: dict[int, list[int]] = {}
        self._next = 0
        self._is_lost = False

    def fold(self, record: object) -> None:
        """Takes one accepted record."""
        try:
            self._fold(record)
        except ValueError as error:
            if not self._is_lost:
                log.warning(
                    "a group of the orchestrator's journal has no number (%s): all shards stay; run `miles verify`", error
                )
            self._is_lost = True

    def _fold(self, record: object) -> None:
        if isinstance(record, GroupIssued):
            number = number_of(record.group_id)
            self._open.add(number)
            self._next = max(self._next, number + 1)
        elif isinstance(record, Batch):
            numbers = [number_of(group.group_id) for group in record.groups]
            self._open.difference_update(numbers)
            self._batches[record.step] = numbers
        elif isinstance(record, Drop):
            self._open.discard(number_of(record.group_id))

    def watermark(self, step: int) -> int:
        """The lowest group number that is open or in a batch behind `step`, which every recovery begins at or behind.

        Batches up to `step` are forgotten.
        """
        if self._is_lost:
            return 0
        for settled in [number for number in self._batches if number <= step]:
            del self._batches[settled]
        return min([*self._open, *(number for numbers in self._batches.values() for number in numbers), self._next])
