"""Which runs live, judged from their files alone: a heartbeat that moves while this process watches, by its own clock (I4).

Prefect's states say nothing here: a flow run may be Running without a process, and Crashed while its jobs train.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from miles_core.errors import MilesError
from miles_core.paths import RunPaths
from miles_core.run import RunConfig, read_run
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder, LivenessJudge

log = logging.getLogger("miles")

Verdict = Literal["moving", "silent", "unknown"]


def find_runs(runs_root: Path) -> list[tuple[RunConfig, RunPaths]]:
    """All runs below a folder; one that cannot be read is logged and left alone."""
    found = []
    for path in sorted(runs_root.glob("*/run.json")):
        try:
            found.append(read_run(path.parent))
        except (MilesError, OSError) as error:
            log.warning("left alone: %s", error)
    return found


class Pulse:
    """The heartbeats of some writers of one run: of each one's newest attempt."""

    def __init__(
        self, run: RunConfig, paths: RunPaths, writers: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.paths = run, paths
        fs = FileSystem()
        self._writers = tuple(writers)
        self._leases = LeaseFolder(fs, paths.leases, run.run_id, clock)
        self._judge = LivenessJudge(fs, paths.heartbeats, run.timing.lease_s, clock)
        self._first: dict[tuple[str, int], int] = {}
        self._kinds: dict[tuple[str, int], str] = {}
        self.verdict: Verdict = "unknown"
        self.moving = ""
        """The writer whose heartbeat moves."""

    def observe(self) -> Verdict:
        """One look; call it several times in lease_s / 3. silent: no change for lease_s, a tombstone, or no lease."""
        try:
            self._leases.refresh()
        except FileNotFoundError:
            log.debug("%s: no lease yet", self.paths.root)
        except OSError as error:
            log.warning("%s: leases not listed: %s", self.paths.root, error)
            return self.verdict
        verdicts = [self._look(writer) for writer in self._writers if self._leases.newest(writer)]
        if "moving" in verdicts:
            self.verdict = "moving"
        else:
            self.verdict = "unknown" if "unknown" in verdicts else "silent"
        return self.verdict

    def at(self, writer: str) -> tuple[int, int]:
        """Newest attempt and heartbeat counter of a writer; -1 without a heartbeat."""
        attempt = self._leases.newest(writer)
        heartbeat = self._judge.heartbeat(writer, attempt)
        return attempt, -1 if heartbeat is None else heartbeat.counter

    def _look(self, writer: str) -> Verdict:
        attempt = self._leases.newest(writer)
        if self._has_left(writer, attempt):
            return "silent"
        is_dead = self._judge.observe(writer, attempt) == "dead"
        heartbeat = self._judge.heartbeat(writer, attempt)
        if heartbeat is not None and heartbeat.counter > self._first.setdefault((writer, attempt), heartbeat.counter):
            self.moving = writer
            return "moving"
        return "silent" if is_dead else "unknown"

    def _has_left(self, writer: str, attempt: int) -> bool:
        """A tombstone: there is nobody to watch."""
        if (writer, attempt) not in self._kinds:
            try:
                self._kinds[writer, attempt] = self._leases.read(writer, attempt).kind
            except OSError:
                return False
        return self._kinds[writer, attempt] == "tombstone"


def watch(
    pulses: Sequence[Pulse],
    *,
    until_first: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Observes all pulses until each is judged, at most 3 x lease_s; `until_first`: or one moves. The rest stays unknown."""
    if not pulses:
        return
    lease_s = [pulse.run.timing.lease_s for pulse in pulses]
    until = clock() + 3 * max(lease_s)
    while True:
        waiting = [pulse for pulse in pulses if pulse.observe() == "unknown"]
        if not waiting or clock() > until or (until_first and any(pulse.verdict == "moving" for pulse in pulses)):
            return
        sleep(min(1.0, min(lease_s) / 10))
