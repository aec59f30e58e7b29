"""The one reading of heartbeats: who may get work, and the liveness table for everybody else (I4).

Heartbeats are read every lease_s / 8, those of a few newcomers every NEWCOMERS_S, so that one who begins to serve gets work
at once; the table is replaced by rename about once a second and at once when a
verdict changes. Only the newest attempt of a writer is judged; a tombstone has no heartbeat and so is never alive. A table
that cannot be written is tried again at the next round: its readers see by its counter that it is old.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from itertools import islice

from miles_core.orchestrator.state import Receiver
from miles_core.records import LivenessEntry, LivenessTable, Version
from miles_core.runtime.context import RoleContext
from miles_core.store.lease import Heartbeat, Liveness, LivenessJudge
from miles_core.store.publish import Durability, publish_bytes

log = logging.getLogger("miles")

PUBLISH_S = 1.0
NEWCOMERS_S = 0.5
NEWCOMERS = 16
"""At most so many that have not served yet are read more often; of a whole site that starts, the others can wait."""


class LivenessWatch:
    """Judges the newest attempt of each writer."""

    def __init__(self, context: RoleContext, writers: Iterable[str]) -> None:
        self._context, self._writers = context, list(writers)
        self._judge = LivenessJudge(context.fs, context.paths.heartbeats, context.timing.lease_s, context.clock)
        self._verdicts: dict[Receiver, Liveness] = {}
        self._observed_at: float | None = None
        self._newcomers_at = 0.0
        self._published_at: float | None = None
        self._changed = False
        self._counter = 0

    def observe(self) -> None:
        """Reads all heartbeats, if that is due. The leases are those of the last refresh."""
        now = self._context.clock()
        if self._observed_at is not None and now - self._observed_at < self._context.timing.lease_s / 8:
            self._look_for_newcomers(now)
            return
        self._observed_at = now
        newest = [Receiver(writer, self._context.leases.newest(writer)) for writer in self._writers]
        verdicts = {who: self._judge.observe(*who) for who in newest if who.attempt > 0}
        for who in self._verdicts.keys() - verdicts.keys():
            self._judge.forget(*who)
        self._changed = self._changed or verdicts != self._verdicts
        for who, verdict in verdicts.items():
            if verdict == "dead" and self._verdicts.get(who) != "dead":
                log.warning("%s attempt %d: heartbeat silent for %.1f s", *who, self._judge.silent_s(*who))
        self._verdicts = verdicts

    def _look_for_newcomers(self, now: float) -> None:
        if now - self._newcomers_at < NEWCOMERS_S:
            return
        self._newcomers_at = now
        everyone = (Receiver(writer, self._context.leases.newest(writer)) for writer in self._writers)
        new = (who for who in everyone if who.attempt > 0 and self.state_of(who) in ("", "starting"))
        for who in islice(new, NEWCOMERS):
            verdict = self._judge.observe(*who)
            self._changed = self._changed or verdict != self._verdicts.get(who)
            self._verdicts[who] = verdict

    def serving(self, writers: Iterable[str], leaving: Collection[Receiver]) -> list[Receiver]:
        """Attempts that may get work: of the newest lease, alive, saying that they serve, not handing work back."""
        found = []
        for writer in writers:
            who = Receiver(writer, self._context.leases.newest(writer))
            if self._verdicts.get(who) == "alive" and who not in leaving and self.state_of(who).startswith("serving"):
                found.append(who)
        return found

    def state_of(self, who: Receiver) -> str:
        """What an attempt last said of itself."""
        heartbeat = self._judge.heartbeat(*who)
        return "" if heartbeat is None else heartbeat.state

    def describe(self, writer: str) -> str:
        """One writer, for people."""
        who = Receiver(writer, self._context.leases.newest(writer))
        if who.attempt == 0:
            return f"{writer} (never started)"
        return (
            f"{writer} attempt {who.attempt} ({self._verdicts.get(who, 'unknown')}, says {self.state_of(who) or 'nothing'!r})"
        )

    def publish(self) -> None:
        """Replaces the table, if that is due. OSError: call again."""
        now = self._context.clock()
        due = self._published_at is None or now - self._published_at >= PUBLISH_S
        if not due and not self._changed:
            return
        self._context.before_write()
        table = LivenessTable(
            attempt=self._context.attempt,
            counter=self._counter + 1,
            entries=tuple(self._entry(who, verdict) for who, verdict in self._verdicts.items()),
        )
        self._context.crash_point("before_table")
        publish_bytes(
            self._context.fs, self._context.paths.liveness_table, table.model_dump_json().encode(), Durability.RENAMED
        )
        self._context.crash_point("after_table")
        self._counter, self._published_at, self._changed = table.counter, now, False

    def _entry(self, who: Receiver, verdict: Liveness) -> LivenessEntry:
        beat = self._judge.heartbeat(*who) or Heartbeat(writer=who.writer, attempt=who.attempt, counter=0)
        return LivenessEntry(
            writer=who.writer,
            attempt=who.attempt,
            verdict=verdict,
            state=beat.state,
            progress=beat.progress,
            load=beat.load,
            version=None if beat.version is None else Version(*beat.version),
            reading=None if beat.reading is None else Version(*beat.reading),
            silent_s=round(self._judge.silent_s(*who), 3),
        )
