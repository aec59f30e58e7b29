"""verify's own arithmetic of rollbacks (I8): which branch a record belongs to, and what was abandoned.

Branch i is what attempts wrote that began behind the i-th rollback and before the next; branch 0 is that of a run without one.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from miles_core.records import Batch, Rollback, Version
from miles_core.verify.streams import Files

_NAME = re.compile(r"rollback-(\d+)\.json")


class Branches:
    """The rollbacks of a run, as its files say them."""

    def __init__(self, files: Files) -> None:
        self.rollbacks = _read(files)
        self.batches: dict[tuple[int, int], Batch] = {}
        """Every accepted batch, by the branch that made it and its step."""
        self.lost_shards = {shard for rollback in self.rollbacks for shard in rollback.lost}
        """Shards that a rollback found gone or damaged."""

    def of(self, writer: str, attempt: int) -> int:
        """The branch that an attempt wrote in."""
        return sum(rollback.attempts.get(writer, 0) < attempt for rollback in self.rollbacks)

    def lives(self, branch: int, step: int) -> bool:
        """Whether step `step` of a branch is part of the newest branch."""
        return all(step <= rollback.step for rollback in self.rollbacks[branch:])

    def voided_groups(self) -> set[str]:
        """Groups of batches that were taken back; the next orchestrator drops them."""
        voided = [batch for (branch, step), batch in self.batches.items() if not self.lives(branch, step)]
        return {group.group_id for batch in voided for group in batch.groups}

    def has_abandoned(self, version: Version) -> bool:
        """Whether a version (a step record, a checkpoint) is of an abandoned part."""
        return not self.lives(self.of("learner-0", version.attempt), version.step)

    def lived_on(self, version: Version, branch: int) -> bool:
        """Whether a version is part of a branch: of its own, or of one that took it over."""
        return all(version.step <= rollback.step for rollback in self.rollbacks[self.of("learner-0", version.attempt) : branch])

    def counted_step(self, version: Version, branch: int) -> int:
        """The step that a version counts as for a batch of `branch`: behind a fork it counts back from there."""
        passed = self.rollbacks[self.of("learner-0", version.attempt) : branch]
        fork = min((rollback.step for rollback in passed), default=version.step)
        return version.step if version.step <= fork else fork - (version.step - fork)

    def batch_of(self, branch: int, step: int) -> Batch | None:
        """The batch that step `step` of a branch trains: its own, or one that it took over from a branch before."""
        for made_in in range(branch, -1, -1):
            if all(step <= rollback.step for rollback in self.rollbacks[made_in:branch]):
                batch = self.batches.get((made_in, step))
                if batch is not None:
                    return batch
        return None


def _read(files: Files) -> list[Rollback]:
    folder = files.paths.rollback(1).parent
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found: list[Rollback] = []
    for name in filter(_NAME.fullmatch, names):
        try:
            found.append(Rollback.model_validate_json((folder / name).read_bytes()))
        except ValidationError as error:
            files.fault("rollback", folder / name, f"not readable: {error.errors()[0]['msg']}")
    if [rollback.number for rollback in found] != list(range(1, len(found) + 1)):
        files.fault("rollback", folder, f"numbers {[rollback.number for rollback in found]}: one is missing")
    return found
