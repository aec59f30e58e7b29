"""What a rollout replica and a grader share: orders come in, a refusing filesystem is waited for, orphans leave.

Failure: an OSError of the run directory pauses the work and is tried again with back-off; nothing is lost meanwhile. The
bound of that wait is orphan_s, as for any role that nobody looks after; until then the heartbeat says what is waited for.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection

from miles_core.errors import DeadlineExceeded
from miles_core.records import GradeOrder, Order, Stop
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import CopyReader

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
_STATE_CHARS = 200
_FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("miles")


class Inbox:
    """The orders for one attempt: those that name another attempt or are known already are skipped (I6)."""

    def __init__(self, context: RoleContext) -> None:
        self._attempt = context.attempt
        self._copies = CopyReader(context.reading, context.paths.orders(context.writer), "orchestrator-0")
        self._known: set[str] = set()
        self.stop: Stop | None = None
        """The orchestrator's word that the run is over, once it was read."""

    def poll(self) -> list[Order | GradeOrder]:
        """New orders, in order. OSError: nothing is lost, poll again."""
        new: list[Order | GradeOrder] = []
        for _, _, record in self._copies.poll():
            if isinstance(record, Stop):
                self.stop = record
            elif is_mine(record, self._attempt, self._known):
                self._known.add(record.order_id)
                new.append(record)
        return new


def is_mine(order: Order | GradeOrder, attempt: int, known: Collection[str]) -> bool:
    """Whether `attempt` does an order: it names this attempt, and is none of those that it knows by their ids."""
    return order.receiver_attempt == attempt and order.order_id not in known


class Patience:
    """Tries an action again, with back-off, as long as the filesystem refuses it."""

    def __init__(self, context: RoleContext, doing: str) -> None:
        self._clock, self._deadline_s, self._doing = context.clock, context.timing.orphan_s, doing
        self._since = self._retry_at = 0.0
        self._delay_s = FIRST_RETRY_S
        self.blocked = ""
        """What is waited for, as a heartbeat says it; empty while all goes well."""

    def attempt(self, action: Callable[[], object]) -> bool:
        """True if `action` was run and succeeded; False while it waits. Raises DeadlineExceeded, and what `action` raises."""
        now = self._clock()
        if self.blocked and now < self._retry_at:
            return False
        try:
            action()
        except OSError as error:
            self._refused(error, now)
            return False
        if self.blocked:
            log.info("%s: goes on after %.1f s", self._doing, now - self._since)
        self.blocked, self._delay_s = "", FIRST_RETRY_S
        return True

    def _refused(self, error: OSError, now: float) -> None:
        if not self.blocked:
            self._since = now
        what = "disk full" if error.errno in _FULL else "filesystem"
        self.blocked = f"waiting: {what} ({error})"[:_STATE_CHARS]
        log.warning("%s: %s; tried again in %.1f s", self._doing, error, self._delay_s)
        if now - self._since > self._deadline_s:
            raise DeadlineExceeded(f"{self._doing}: refused for {now - self._since:.0f} s, last: {error}") from error
        self._retry_at = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_RETRY_S)


class OrphanWatch:
    """Asks, rarely, whether a supervisor is alive; sets `leave` when none was for orphan_s."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        # The judge starts its count again after a pause of a third of orphan_s, so it must be asked more often.
        self._interval_s = min(context.timing.lease_s, context.timing.orphan_s / 6)
        self._next = context.clock()

    def look(self) -> None:
        """One look, when due. OSError: ask again."""
        if self._context.clock() < self._next:
            return
        self._next = self._context.clock() + self._interval_s
        if self._context.check_orphaned() and not self._context.leave.is_set():
            log.warning("no supervisor was seen for %.0f s: leaving", self._context.timing.orphan_s)
            self._context.leave.set()
