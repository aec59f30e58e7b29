"""Prefect's global concurrency limits around a scheduler, for a service node that hosts many supervisors.

`slurm-submit` (slots) is held during a submission; `slurm-query` (slots with decay) spaces queries. Both are courtesy: where
a limit does not exist, is not granted in time, or the API is away, the call is made all the same; a run does not depend on
Prefect. A limit that does not exist, or whose API is in trouble, is left alone for a while, so that no tick waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency, rate_limit

from cluster.scheduler import JobSpec, Scheduler, Snapshot
from flows.prefect_report import API_ERRORS

log = logging.getLogger("miles")

SUBMIT, QUERY = "slurm-submit", "slurm-query"
_ERRORS = (*API_ERRORS, ConcurrencySlotAcquisitionError)
_GRANT_DEADLINE_S = 10.0
_LEAVE_ALONE_S = 300.0
Slot = Callable[[str], AbstractContextManager[None]]


def hold(name: str) -> AbstractContextManager[None]:
    """A slot of a limit while the call lasts."""
    return concurrency(name, timeout_seconds=_GRANT_DEADLINE_S, strict=True, raise_on_lease_renewal_failure=False)


@contextmanager
def pace(name: str) -> Iterator[None]:
    """A slot of a limit with decay: given back by time alone."""
    rate_limit(name, timeout_seconds=_GRANT_DEADLINE_S, strict=True)
    yield


class LimitedScheduler:
    """A scheduler behind the limits; cancelling is never limited."""

    def __init__(
        self, inner: Scheduler, *, hold: Slot = hold, pace: Slot = pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner, self._hold, self._pace, self._clock = inner, hold, pace, clock
        self._alone_until_s = {SUBMIT: 0.0, QUERY: 0.0}

    def submit(self, spec: JobSpec) -> str:
        """As the inner one."""
        with self._slot(self._hold, SUBMIT):
            return self._inner.submit(spec)

    def snapshot(self, run_id: str) -> Snapshot:
        """As the inner one."""
        with self._slot(self._pace, QUERY):
            return self._inner.snapshot(run_id)

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        """As the inner one."""
        self._inner.cancel(job_ids, signal=signal)

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        """As the inner one."""
        with self._slot(self._pace, QUERY):
            return self._inner.expected_starts(job_ids)

    def script(self, spec: JobSpec) -> str:
        """As the inner one."""
        return self._inner.script(spec)

    def _slot(self, slot: Slot, name: str) -> ExitStack:
        """Entered already; what fails on leaving it is logged, too."""
        stack = ExitStack()
        if self._clock() >= self._alone_until_s[name]:
            try:
                context = slot(name)
                context.__enter__()
            except _ERRORS as error:
                self._leave_alone(name, error)
            else:
                stack.callback(self._give_back, context, name)
        return stack

    def _give_back(self, context: AbstractContextManager[None], name: str) -> None:
        try:
            context.__exit__(None, None, None)
        except _ERRORS as error:
            self._leave_alone(name, error)

    def _leave_alone(self, name: str, error: Exception) -> None:
        self._alone_until_s[name] = self._clock() + _LEAVE_ALONE_S
        log.info("limit %s is not asked for during the next %g s: %s", name, _LEAVE_ALONE_S, error or type(error).__name__)
