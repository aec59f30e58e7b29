"""What a rollback means, for whoever folds records (I8). Pure but for `read_rollbacks`.

A rollback to step c abandons the branch of all attempts before it: their steps, versions and checkpoints behind c, the
batches behind c, and every word on an end. Its file is published before any job starts again and never changes, and a job
reads all of them after it took its lease: so the rollbacks that a process knows are all there will be while it lives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from miles_core.errors import JournalCorrupt
from miles_core.paths import RunPaths
from miles_core.records import Batch, Rollback, RunEnded, Version
from miles_core.store.fs import FileSystem

_NAME = re.compile(r"rollback-(\d+)\.json")


class Rollbacks:
    """The rollbacks of a run, in order."""

    def __init__(self, records: Sequence[Rollback] = ()) -> None:
        self.records = tuple(records)

    @property
    def lost_shards(self) -> frozenset[str]:
        """Shards that were gone or damaged at some rollback."""
        return frozenset(shard for rollback in self.records for shard in rollback.lost)

    def abandons(self, version: Version) -> bool:
        """True for a version (also: the step record or checkpoint) of an abandoned branch."""
        return version.step > self._fork(version)

    def counted_step(self, version: Version) -> int:
        """The step that a version counts as when the age of its tokens is asked for; below 0 it goes on counting.

        Of an abandoned version forked at c: as far before c as it was behind c, so that (k-1) - this is the way through the
        fork, (k-1-c) + (step-c).
        """
        return 2 * self._fork(version) - version.step

    def voids(self, attempt: int, record: object) -> bool:
        """True for a record of the orchestrator that no longer counts: a batch behind a rollback, an end before one."""
        later = [rollback for rollback in self.records if attempt <= rollback.attempts["orchestrator-0"]]
        if isinstance(record, Batch):
            return any(record.step > rollback.step for rollback in later)
        return isinstance(record, RunEnded) and bool(later)

    def precede(self, writer: str, attempt: int) -> bool:
        """True if that attempt came after all rollbacks; the word of one before that it was done does not count."""
        return not self.records or attempt > self.records[-1].attempts[writer]

    def _fork(self, version: Version) -> int:
        """The last step that a version's branch shares with the one that counts, or its own step if that is shared."""
        steps = [rollback.step for rollback in self.records if version.attempt <= rollback.attempts["learner-0"]]
        return min([*steps, version.step])


def read_rollbacks(fs: FileSystem, paths: RunPaths) -> Rollbacks:
    """All rollbacks of a run. Raises OSError, JournalCorrupt (one is missing), ValueError (one is damaged)."""
    folder = paths.rollback(1).parent
    try:
        numbers = sorted(int(match[1]) for match in map(_NAME.fullmatch, fs.listdir(folder)) if match)
    except FileNotFoundError:
        return Rollbacks()
    if numbers != list(range(1, len(numbers) + 1)):
        raise JournalCorrupt(f"{folder} holds the rollbacks {numbers}: one is missing; run `miles verify`")
    return Rollbacks([Rollback.model_validate_json(fs.read(paths.rollback(number))) for number in numbers])
