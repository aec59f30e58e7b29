"""The grader: takes grade orders, reads the facts of each trajectory, asks the verifier, answers with a grade or a reason.

Invariants: whatever keeps a trajectory from being judged (an unreadable shard, a verifier that raises or hangs, a score
that is no reward, an episode that failed) is "no grade" with the reason, never a zero (G9); facts are believed only from
bytes with the digest that the order names. Failure: a shard that is missing or torn may not be visible yet, so it is tried
again for a while; a verifier call that hangs is left behind in its thread, and too many of those end the grader, so that
its successor starts clean. A ranking grader that fails or hangs costs the quality alone, never the grade, and is not asked
again once too many of its calls hang.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from miles_core.errors import DeadlineExceeded, DigestMismatch, MilesError
from miles_core.grading.base import Estimate, Grade, Verifier, judged
from miles_core.grading.ranking import Ranker
from miles_core.records import Graded, GradeEntry, GradeOrder, Leaving, TrajectoryRef
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import crash_point
from miles_core.runtime.receiver import Inbox, OrphanWatch, Patience
from miles_core.store.journal import JournalWriter
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import read_rows

MOST_STUCK = 4
"""Verifier calls that may hang in threads left behind."""

log = logging.getLogger("miles")
T = TypeVar("T")


class DeadlineCalls:
    """Runs foreign code in daemon threads, one at a time, each with a deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._left_behind: list[threading.Thread] = []

    @property
    def num_stuck(self) -> int:
        """Calls that missed their deadline and still run."""
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        return len(self._left_behind)

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`. Raises what it raises, and DeadlineExceeded."""
        answers: SimpleQueue[tuple[list[T], Exception | None]] = SimpleQueue()

        def run() -> None:
            try:
                answers.put(([function()], None))
            except Exception as error:  # noqa: BLE001 - foreign code may raise anything; the caller gets it
                answers.put(([], error))

        thread = threading.Thread(target=run, name="verifier", daemon=True)
        thread.start()
        try:
            results, error = answers.get(timeout=self._deadline_s)
        except Empty:
            self._left_behind.append(thread)
            raise DeadlineExceeded(f"it did not answer within {self._deadline_s:g} s") from None
        if error is not None:
            raise error
        return results[0]


@dataclass(eq=False)
class _Part:
    """The trajectories of one order that are in one shard."""

    order_id: str
    items: list[TrajectoryRef]
    since: float
    """Monotonic seconds at which it was first due."""
    retry_at: float = 0.0


class GraderWorker:
    """See module. `run` ends without an error after a drain or a stop."""

    def __init__(
        self,
        context: RoleContext,
        journal: JournalWriter,
        verifier: Verifier,
        ranker: Ranker | None = None,
        *,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._context, self._journal, self._verifier, self._ranker = context, journal, verifier, ranker
        self._clock, self._unix_time = context.clock, unix_time
        self._inbox = Inbox(context)
        self._orphans = OrphanWatch(context)
        self._reads, self._writes = Patience(context, "reading grade orders"), Patience(context, "writing grades")
        self._calls = DeadlineCalls(context.recipe.grader.deadline_s)
        self._ranker_calls = DeadlineCalls(context.recipe.grader.deadline_s)
        self._shard_wait_s = max(1.0, 3 * context.timing.visibility_s)
        self._parts: deque[_Part] = deque()
        self._drain_until: float | None = None
        self._next_poll = context.clock()
        self._records = self._announced = 0

    def run(self) -> None:
        """Works until a stop, a drain or an error. Raises LeaseLost, DeadlineExceeded, JournalCorrupt."""
        while not self._is_over():
            if not self.step():
                self._context.pause()
        self._close()

    def step(self) -> bool:
        """One round; True if it answered something."""
        if self._clock() >= self._next_poll:
            self._next_poll = self._clock() + self._context.timing.poll_s
            self._reads.attempt(self._poll)
        answered = not self._writes.blocked and self._grade_next()
        self._writes.attempt(self._publish)
        self._report()
        if self._calls.num_stuck >= MOST_STUCK:
            self._writes.attempt(self._journal.flush)
            raise DeadlineExceeded(
                f"{self._calls.num_stuck} calls of {self._verifier.source} never returned (grader.deadline_s="
                f"{self._context.recipe.grader.deadline_s:g}): leaving, so that a fresh process goes on"
            )
        return answered

    def _is_over(self) -> bool:
        if self._inbox.stop is not None:
            return True
        if not self._context.leave.is_set():
            return False
        if self._drain_until is None:
            self._drain_until = self._clock() + self._context.recipe.grader.deadline_s + self._shard_wait_s
            self._journal.append(Leaving())
            self._writes.attempt(self._journal.flush)
        return not self._parts or self._clock() >= self._drain_until

    def _poll(self) -> None:
        for order in self._inbox.poll():
            # Work that comes after the signal is left to the successor; the orchestrator gives it out at the cut.
            if isinstance(order, GradeOrder) and self._drain_until is None:
                self._take(order)
        self._orphans.look()

    def _take(self, order: GradeOrder) -> None:
        by_shard: dict[tuple[str, str], list[TrajectoryRef]] = {}
        for item in order.items:
            by_shard.setdefault((item.shard, item.shard_digest), []).append(item)
        self._parts.extend(_Part(order.order_id, items, self._clock()) for items in by_shard.values())

    def _grade_next(self) -> bool:
        """Answers the first part that is due; False if none was, or its shard is not readable yet."""
        now = self._clock()
        part = next((part for part in self._parts if part.retry_at <= now), None)
        if part is None:
            return False
        self._parts.remove(part)
        entries = self._answers(part)
        if entries is None:
            part.retry_at = now + max(self._context.timing.poll_s, self._context.timing.visibility_s / 4)
            self._parts.append(part)
            return False
        self._journal.append(Graded(order_id=part.order_id, entries=entries))
        self._records += 1
        return True

    def _answers(self, part: _Part) -> tuple[GradeEntry, ...] | None:
        """One entry per item; None while the shard may still become readable."""
        first = part.items[0]
        try:
            path = self._context.paths.resolve(first.shard)
            rows = read_rows(path, [item.row for item in part.items], digest=first.shard_digest)
        except (OSError, DigestMismatch) as error:
            waited_s = self._clock() - part.since
            if waited_s < self._shard_wait_s:
                return None
            return self._no_grades(part, f"shard not readable for {waited_s:.1f} s: {error}")
        except MilesError as error:
            return self._no_grades(part, str(error))
        entries: list[GradeEntry] = []
        for item, row in zip(part.items, rows, strict=True):
            entries.append(self._grade(item, row))
            self._context.progress += 1
        return tuple(entries)

    def _no_grades(self, part: _Part, reason: str) -> tuple[GradeEntry, ...]:
        log.warning("order=%s: no grade for %d trajectories: %s", part.order_id, len(part.items), reason)
        self._context.progress += len(part.items)
        return tuple(GradeEntry(trajectory_id=item.trajectory_id, grade=None, error=reason) for item in part.items)

    def _grade(self, item: TrajectoryRef, row: Trajectory) -> GradeEntry:
        try:
            found = self._judge(item, row)
        except Exception as error:  # noqa: BLE001 - a verifier is foreign code; any failure of it is "no grade"
            reason = f"{type(error).__name__}: {error}"
            log.warning("trajectory=%s: no grade: %s", item.trajectory_id, reason)
            return GradeEntry(trajectory_id=item.trajectory_id, grade=None, error=reason)
        grade = Grade(
            value=found.value, std=found.std, source=self._verifier.source, timestamp=self._unix_time(),
            quality=self._quality(row),
        )  # fmt: skip
        return GradeEntry(trajectory_id=item.trajectory_id, grade=grade)

    def _judge(self, item: TrajectoryRef, row: Trajectory) -> Estimate:
        """The reward. Raises whatever keeps the trajectory from being judged."""
        if row.trajectory_id != item.trajectory_id:
            raise DigestMismatch(f"{item.shard} row {item.row} is {row.trajectory_id}, the order names {item.trajectory_id}")
        if row.status == "failed":
            raise ValueError(f"the episode failed ({row.failure_kind}): there is nothing to judge")
        return self._calls.call(partial(judged, self._verifier, row.task_seed, row.facts))

    def _quality(self, row: Trajectory) -> float | None:
        """The ranking grader's word; None without one, and where it is down: a reward never waits for a rank twice."""
        if self._ranker is None or self._ranker_calls.num_stuck >= MOST_STUCK:
            return None
        try:
            quality = float(self._ranker_calls.call(partial(self._ranker, row)))
        except Exception as error:  # noqa: BLE001 - foreign code; without a quality the group keeps its plain advantage
            log.warning("trajectory=%s: no quality: %s: %s", row.trajectory_id, type(error).__name__, error)
            return None
        return quality if math.isfinite(quality) else None

    def _publish(self) -> None:
        self._journal.flush_when_due()
        self._note_announced()

    def _note_announced(self) -> None:
        while self._announced < self._records and self._journal.synced_bytes == self._journal.bytes:
            self._announced += 1
            crash_point("grader", "after_grade", self._announced, self._context.attempt)

    def _close(self) -> None:
        """Writes every answer, and the completion record after a stop."""
        self._context.state, self._context.load = "leaving", 0
        deadline = self._clock() + self._context.timing.stall_s
        while not self._writes.attempt(self._leave_behind):
            if self._clock() > deadline:
                raise DeadlineExceeded(
                    f"grades could not be written to {self._context.paths.root} before leaving: {self._writes.blocked}"
                )
            self._context.pause()

    def _leave_behind(self) -> None:
        self._journal.flush()
        self._note_announced()
        if self._inbox.stop is not None:
            self._context.finish(self._journal, "completed", self._inbox.stop.reason)

    def _report(self) -> None:
        serving = "serving" if self._drain_until is None else "leaving"
        self._context.say(self._writes.blocked or self._reads.blocked or serving)
        self._context.load = sum(len(part.items) for part in self._parts)
