"""A long wait for another role's work, which may queue for hours: no deadline, but it says what it waits for (I15)."""

from __future__ import annotations

import logging

from miles_core.runtime.context import RoleContext
from miles_core.runtime.receiver import OrphanWatch

log = logging.getLogger("miles")

REPORT_S = 30.0
"""A wait says what it waits for at most this often."""


class Watch:
    """Paces one wait, reports it, and ends it (`leave`) when no supervisor is left."""

    def __init__(self, context: RoleContext, what: str, pause_s: float) -> None:
        self._context, self._what, self._pause_s = context, what, pause_s
        self._orphan_watch = OrphanWatch(context)
        self._started = self._told = context.clock()

    def pause(self) -> None:
        """Sleeps; the caller looks at `leave` afterwards."""
        now = self._context.clock()
        if now - self._told >= REPORT_S:
            self._told = now
            log.info("waiting for %s since %.0f s", self._what, now - self._started)
        try:
            self._orphan_watch.look()
        except OSError as error:
            log.warning("leases not read: %s", error)
        self._context.sleep(self._pause_s)


def gone_after_s(context: RoleContext) -> float:
    """Seconds after which something that was announced and cannot be seen counts as gone."""
    return 2 * context.timing.visibility_s + context.timing.lease_s
