"""One drill: injects a plan's faults into a live run, one after the other, and records what each one cost.

A fault is injected when the run is productive: every role's newest attempt has done work, and a step was trained since the
last fault was over. Losses are what the supervisor's own journal says, progress is what the roles' journals say. A fault is
good if it fired, the run went on, nobody but its victims was replaced, and `verify` of the live run finds nothing.
Failure: DrillFailed when the run is stuck or its supervisor gave up; what the fault stopped is let go in any case.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.epoch import WRITER
from cluster.faults.host import HostedSupervisor
from cluster.faults.leftovers import leftovers
from cluster.faults.plan import Kind, Plan, Round, Target
from cluster.faults.record import FaultRecord, left_of, read_drill, write_drill
from cluster.faults.site import Injection, Site
from cluster.faults.watch import Attempt, Watch
from cluster.profile import ClusterProfile
from miles_core.errors import DeadlineExceeded, DrillFailed, SchedulerError
from miles_core.run import read_run
from miles_core.verify import verify_run

log = logging.getLogger("miles")

_POLL_S = 0.25
_TOOK_DEADLINE_S = 30.0


class RunIsOver(Exception):
    """The run ended before the plan did."""


@dataclass
class _Course:
    """What became of one fault, as far as it went."""

    notes: list[str]
    fired_s: float = field(default_factory=time.time)
    fired: bool = False
    noticed_s: float | None = None
    productive_s: float | None = None

    def seconds(self) -> float:
        """Since it was fired."""
        return round(time.time() - self.fired_s, 2)


class Drill:
    """One plan on one run."""

    def __init__(
        self, root: Path, profile: ClusterProfile, plan: Plan, host: HostedSupervisor, say: Callable[[str], None]
    ) -> None:
        self._run, self._paths = read_run(root)
        self._plan, self._host, self._say = plan, host, say
        self._watch = Watch(self._run, self._paths)
        self._site = Site(self._run, self._paths, profile, plan, host)
        self._records = list(read_drill(self._paths).faults)
        self._step = 0
        """Trained when the last fault was over; the next one waits for another."""
        self._known: set[Attempt] = set()
        """Attempts known to work."""

    # --- the whole ---------------------------------------------------------------------------------------------------

    def run(self, *, left_deadline_s: float = 60.0) -> dict[str, Any]:
        """Carries out what is left of the plan, lets the run end, and says how it went. Raises DrillFailed when stuck.

        `left_deadline_s`: within this time the last processes end and the scheduler knows of it.
        """
        self._paths.drill_filler.unlink(missing_ok=True)
        self._host.start()
        try:
            self._carry_out(self._left())
            self._say("the plan is carried out; waiting for the run to end")
        except RunIsOver as over:
            self._say(f"{over}: the rest of the plan is not carried out")
        with contextlib.suppress(RunIsOver):
            self._until(lambda: False, math.inf)
        return self._outcome(self._leftovers(left_deadline_s))

    def _carry_out(self, left: list[Round]) -> None:
        for number, (role, kind, turn) in enumerate(left, start=1):
            record = self._inject(role, kind, turn)
            self._records.append(record)
            write_drill(self._paths, self._records)
            self._say(f"fault {number}/{len(left)}: {record.as_line()}")

    def _left(self) -> list[Round]:
        return left_of(self._plan.rounds(), self._records)

    def _outcome(self, left: list[str]) -> dict[str, Any]:
        verified = verify_run(self._paths.root)
        missing = Counter(f"{role} {kind}" for role, kind, _ in self._left())
        problems = [f"{name}: {count} did not fire or did not go well" for name, count in missing.items()]
        problems += [f"left behind: {line}" for line in left]
        problems += [f"verify: {fault.kind} {fault.where}: {fault.detail}" for fault in verified.faults]
        return {
            "run_id": self._run.run_id, "directory": str(self._paths.root), "state": verified.state,
            "groups_open": verified.facts["groups_open"], "ok": not problems, "problems": problems,
            "faults": [record.model_dump() for record in self._records],
        }  # fmt: skip

    def _leftovers(self, deadline_s: float) -> list[str]:
        until = time.monotonic() + deadline_s
        while (found := leftovers(self._run, self._paths, self._site.scheduler)) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return found

    # --- one fault ---------------------------------------------------------------------------------------------------

    def _inject(self, role: Target, kind: Kind, turn: int) -> FaultRecord:
        if not self._until(self._is_productive):
            raise DrillFailed(
                f"the run was not productive within {self._plan.deadline_s:g} s (deadline_s of the plan): step "
                f"{self._watch.step()}, no work yet of {', '.join(self._idle()) or 'nobody'}; look at `miles status "
                f"{self._paths.root}`. The same command continues"
            )
        try:
            injection = self._site.injection(role, kind, turn)
        except SchedulerError as error:
            return FaultRecord(role=role, kind=kind, fired=False, detail=str(error))
        jobs, lost = self._watch.job_ids(), self._watch.lost_samples()
        self._say(f"{role} {kind}: {injection.what}")
        course = _Course([injection.what])
        try:
            self._fire(injection, course)
            self._until(self._has_moved_since(self._watch.step()))
        except (RunIsOver, SchedulerError, DeadlineExceeded, OSError) as error:
            course.notes.append(str(error))
        time.sleep(injection.settle_s)
        changed = [w for w, job in self._watch.job_ids().items() if w not in injection.victims and job != jobs.get(w)]
        faults = verify_run(self._paths.root).faults
        cut, self._step = self._watch.lost_samples(), self._watch.step()
        course.notes += [f"{writer} was replaced, too" for writer in changed]
        course.notes += [f"verify: {fault.kind} {fault.where}: {fault.detail}" for fault in faults[:3]]
        return FaultRecord(
            role=role, kind=kind, fired=course.fired, noticed_s=course.noticed_s, productive_s=course.productive_s,
            lost_samples=sum(cut[attempt] for attempt in cut.keys() - lost.keys()), verify=not faults,
            others_unchanged=not changed, detail="; ".join(course.notes),
        )  # fmt: skip

    def _fire(self, injection: Injection, course: _Course) -> None:
        attempts = self._watch.attempts() | {WRITER: self._watch.newest_attempt(WRITER)}
        try:
            injection.fire()
            if injection.victims:
                self._follow_loss(injection, course, attempts)
            else:
                self._follow_hold(injection, course, attempts)
        finally:
            injection.heal()

    def _follow_loss(self, injection: Injection, course: _Course, attempts: dict[str, int]) -> None:
        """Until every victim's successor has worked."""
        if not self._until(lambda: self._losses(injection, course) is not None):
            course.notes.append(f"no loss was recorded within {self._plan.deadline_s:g} s")
            return
        course.fired, course.noticed_s = True, self._losses(injection, course)
        if injection.heals_at_loss:
            injection.heal()
        if self._until(lambda: all(self._works(writer, attempts[writer] + 1) for writer in injection.victims)):
            course.productive_s = course.seconds()
        else:
            course.notes.append(f"no successor had worked after {self._plan.deadline_s:g} s")
        self._hold(injection, course)

    def _losses(self, injection: Injection, course: _Course) -> float | None:
        """Seconds until the loss of the last victim was recorded; None before."""
        found = [self._since("role_lost", writer, course) for writer in injection.victims]
        known = [seconds for seconds in found if seconds is not None]
        return max(known) if len(known) == len(found) else None

    def _since(self, what: str, writer: str, course: _Course) -> float | None:
        """Seconds until the supervisor recorded such an incident; None before."""
        when = self._watch.incident_s(what, writer, course.fired_s)
        return None if when is None else round(when - course.fired_s, 2)

    def _follow_hold(self, injection: Injection, course: _Course, attempts: dict[str, int]) -> None:
        """Until the run goes on behind something that ends nobody but, perhaps, the supervisor."""
        until = time.monotonic() + _TOOK_DEADLINE_S
        while not (took := injection.took()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        course.fired = took
        if not took:
            course.notes.append(f"it did not take effect within {_TOOK_DEADLINE_S:g} s")
        self._hold(injection, course)
        injection.heal()
        if injection.ends_supervisor and self._until(lambda: self._works(WRITER, attempts[WRITER] + 1)):
            course.noticed_s = course.seconds()
        if self._until(self._has_moved_since(self._watch.step())):
            course.productive_s = course.seconds()
        if injection.incident:
            course.noticed_s = self._since(injection.incident, "", course)

    def _hold(self, injection: Injection, course: _Course) -> None:
        time.sleep(max(injection.hold_s - course.seconds(), 0.0))

    # --- conditions --------------------------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], deadline_s: float | None = None) -> bool:
        """False after the plan's deadline. Raises RunIsOver, and DrillFailed when the supervisor gave up."""
        until = time.monotonic() + (self._plan.deadline_s if deadline_s is None else deadline_s)
        while True:
            for line in self._host.new_lines():
                self._say(f"  | {line}")
            try:
                if condition():
                    return True
            except OSError as error:
                log.debug("looked in vain: %s", error)
            if self._host.has_ended():
                self._ended()
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)

    def _ended(self) -> None:
        if self._host.exit_code() == 0:
            raise RunIsOver("the run is over")
        raise DrillFailed(
            f"the supervisor ended with exit code {self._host.exit_code()} (see above). The same command continues, or "
            f"`miles cancel {self._paths.root}` ends the run"
        )

    def _is_productive(self) -> bool:
        """Not behind the last step, where everybody leaves."""
        return self._step < self._watch.step() < self._run.recipe.steps and not self._idle()

    def _idle(self) -> list[str]:
        """Roles whose newest attempt has done no work yet."""
        attempts = self._watch.attempts()
        return [w for w in self._watch.writers if not self._watch.is_done(w) and not self._works(w, attempts.get(w, 1))]

    def _works(self, writer: str, attempt: int) -> bool:
        """Remembered, for a journal that says so is long."""
        if (writer, attempt) not in self._known and self._watch.works(writer, attempt):
            self._known.add((writer, attempt))
        return (writer, attempt) in self._known

    def _has_moved_since(self, step: int) -> Callable[[], bool]:
        return lambda: self._watch.step() > step
