"""Lineage: the accepted steps, versions and checkpoints of the learner (I7), as every role sees them.

Step = batch = version. A version (k, attempt) exists if an accepted step record of that attempt does; of several attempts
that recorded step k the highest counts. Of a branch that a rollback abandoned nothing counts: its versions are known, for
tokens that they sampled, and served to nobody (I8). Imports no torch: the orchestrator uses it.
"""

from __future__ import annotations

from miles_core.records import CheckpointSaved, Published, StepDone, Version
from miles_core.rollbacks import Rollbacks
from miles_core.store.follow import Delivered, Follower


class Lineage:
    """Folds accepted records of the learner's journal."""

    def __init__(self, rollbacks: Rollbacks | None = None) -> None:
        self.rollbacks = rollbacks or Rollbacks()
        self.steps: dict[int, StepDone] = {}
        """Accepted step record of the highest attempt, by step."""
        self.attempts: dict[int, int] = {}
        """Learner attempt of that record, by step."""
        self.published: dict[Version, Published] = {}
        self.checkpoints: dict[Version, CheckpointSaved] = {}
        self.abandoned: list[StepDone | Published | CheckpointSaved] = []
        """Accepted records of branches that a rollback ended, in order."""
        self._known: set[Version] = set()

    def fold(self, item: Delivered) -> None:
        """Takes one accepted record."""
        record = item.record
        if isinstance(record, StepDone):
            self._known.add(Version(record.step, item.attempt))
        if isinstance(record, StepDone | Published | CheckpointSaved) and self._is_abandoned(item):
            self.abandoned.append(record)
        elif isinstance(record, StepDone):
            if item.attempt >= self.attempts.get(record.step, 0):
                self.steps[record.step] = record
                self.attempts[record.step] = item.attempt
        elif isinstance(record, Published):
            self.published[record.version] = record
        elif isinstance(record, CheckpointSaved):
            self.checkpoints[Version(record.step, item.attempt)] = record

    def _is_abandoned(self, item: Delivered) -> bool:
        step = item.record.version.step if isinstance(item.record, Published) else item.record.step
        return self.rollbacks.abandons(Version(step, item.attempt))

    def knows(self, version: Version) -> bool:
        """True if an accepted step record made this version, also one of an abandoned branch."""
        return version in self._known

    def published_at(self, step: int) -> Published | None:
        """The published version of a step, of the highest attempt that published it."""
        found = [version for version in self.published if version.step == step]
        return self.published[max(found)] if found else None

    @property
    def newest_step(self) -> int:
        """Last accepted step; -1 before the base model was loaded."""
        return max(self.steps, default=-1)

    @property
    def newest_published(self) -> Published | None:
        """The published version of the highest attempt, and of that the highest step."""
        if not self.published:
            return None
        newest = max(self.published, key=lambda version: (version.attempt, version.step))
        return self.published[newest]


class StepLog(Lineage):
    """The lineage as a reader of the learner's journal follows it."""

    def __init__(self, follower: Follower, rollbacks: Rollbacks | None = None) -> None:
        super().__init__(rollbacks)
        self._follower = follower

    def poll(self) -> list[Delivered]:
        """Reads and folds what is new; returns it, too. OSError: poll again."""
        delivered = self._follower.poll()
        for item in delivered:
            self.fold(item)
        return delivered
