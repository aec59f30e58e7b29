"""Copies of the orchestrator's orders, one journal per receiver (I6).

A copy is written only once its original is synced in the orchestrator's own journal: `send` is told how far that is. What
a full disk or a stalled filesystem refuses stays here and goes out with a later `send`.
"""

from __future__ import annotations

import logging
from collections import deque

from miles_core.records import GradeOrder, Order, Stop
from miles_core.runtime.context import RoleContext
from miles_core.store.journal import JournalWriter

log = logging.getLogger("miles")

Copied = Order | GradeOrder | Stop


class Outbox:
    """Waiting copies, in journal order."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._waiting: deque[tuple[int, str, Copied]] = deque()
        self._writers: dict[str, JournalWriter] = {}
        self._unflushed: dict[str, None] = {}
        self._refused: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Everything was written."""
        return not self._waiting and not self._unflushed

    def add(self, position: int, receiver: str, record: Copied) -> None:
        """A copy of the record that ends at stream position `position` of the own journal."""
        self._waiting.append((position, receiver, record))

    def send(self, synced_bytes: int) -> list[Copied]:
        """Writes the copies whose originals end at or before `synced_bytes`; returns those handed over. Raises LeaseLost."""
        handed_over: list[Copied] = []
        while self._waiting and self._waiting[0][0] <= synced_bytes:
            _, receiver, record = self._waiting.popleft()
            self._writer(receiver).append(record)
            self._unflushed[receiver] = None
            handed_over.append(record)
        for receiver in list(self._unflushed):
            self._flush(receiver)
        return handed_over

    def _writer(self, receiver: str) -> JournalWriter:
        if receiver not in self._writers:
            context = self._context
            self._writers[receiver] = JournalWriter(
                context.fs, context.paths.orders(receiver), run_id=context.run.run_id, writer=context.writer,
                attempt=context.attempt, token=context.token, clock=context.clock, before_write=context.before_write,
            )  # fmt: skip
        return self._writers[receiver]

    def _flush(self, receiver: str) -> None:
        try:
            self._writers[receiver].flush_when_due()
        except OSError as error:
            if receiver not in self._refused:
                log.warning("copies to %s wait for the filesystem: %s", receiver, error)
            self._refused.add(receiver)
        else:
            self._refused.discard(receiver)
            del self._unflushed[receiver]
