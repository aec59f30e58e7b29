"""The orchestrator's loop: read, fold, decide, journal, copy. All decisions are in planner.py, all knowledge in state.py.

Invariants (I5, I6): everything this role does is a record of its own journal first; a copy follows its original's sync. A
decision that rests on a cut stands behind the cut in that journal, so the cut is durable before anything outside shows the
decision. Failure: an OSError costs a round of the file it hit and nothing else; a lost lease ends the process; a successor
cuts the journal, folds it, re-reads the manifests and writes the open orders again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from miles_core.orchestrator.copies import Outbox
from miles_core.orchestrator.intake import Intake
from miles_core.orchestrator.liveness import LivenessWatch
from miles_core.orchestrator.planner import Emitted, Planner
from miles_core.orchestrator.report import Reporter
from miles_core.orchestrator.state import State
from miles_core.orchestrator.watchdog import Watchdog
from miles_core.policy.lineage import StepLog
from miles_core.records import Batch, Cut, GradeOrder, Order, StepDone, Stop, WriterCut, number_of
from miles_core.run import all_writers, grader_writers, rollout_writers
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import crash_point
from miles_core.runtime.succession import open_journal

log = logging.getLogger("miles")
Result = TypeVar("Result")


class Orchestrator:
    """One attempt. `start`, then `tick` until it says False."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._rollouts = [writer for writer, _ in rollout_writers(context.recipe)]
        self._graders = grader_writers(context.recipe)
        self.state = State(context.rollbacks)
        self._steps = StepLog(context.follow("learner-0"), context.rollbacks)
        self.planner = Planner(
            context.recipe, context.attempt, self.state, knows=self._steps.knows, emit=self._emit, rollbacks=context.rollbacks
        )
        self._outbox = Outbox(context)
        self._liveness = LivenessWatch(context, all_writers(context.recipe))
        self._watchdog = Watchdog(context, self._liveness)
        self._reporter = Reporter(context, self.state, self.planner)
        self._border = _Border()
        self._unsynced: list[Emitted | WriterCut] = []
        self._stop_is_sent = False
        self._looked_for_supervisor_at = context.clock()

    def run(self) -> None:
        """Until the run is over or this attempt shall leave. Raises LeaseLost, JournalCorrupt."""
        self.start()
        while self.tick():
            self._context.pause()

    def start(self) -> None:
        """Cuts and folds the predecessors' journals and queues what is open to be copied again."""
        self._journal, accepted = open_journal(self._context)
        self.state.take_over(accepted, self._context.rollbacks)
        everyone = [*self._rollouts, *self._graders]
        self._intake = Intake(self._context, everyone, cuts=self.state.cuts, on_cut=self._on_cut)
        self._context.leases.refresh()
        for order in self.state.orders_to_repeat(self._context.leases.newest):
            self._outbox.add(0, order.receiver, order)
        self._context.state = "serving"
        log.info("open_groups=%d last_batch=%d records=%d", len(self.state.groups), self.state.last_batch, len(accepted))

    def tick(self) -> bool:
        """One round; False when it was the last."""
        self._border.attempt("the learner's journal", self._read_steps)
        self._border.attempt("the leases", self._read_manifests)
        self._liveness.observe()
        self._look_for_supervisor()
        if self._context.leave.is_set():
            # What cannot be written now was seen by nobody: a successor decides it again.
            self._border.attempt("the own journal", self._journal.flush)
            return False
        if self.state.trained_step >= self._context.recipe.steps:
            return not self._end()
        self._decide()
        self._publish()
        self._reporter.tick()
        return True

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_steps(self) -> None:
        if any(isinstance(item.record, StepDone) for item in self._steps.poll()):
            self.state.trained_step = self._steps.newest_step
            self._moved()

    def _read_manifests(self) -> None:
        for receiver, record in self._intake.poll():
            if record is None:
                self.state.end(receiver)
            else:
                self.state.fold(receiver, record)
            self._moved()

    def _on_cut(self, cut: Cut) -> None:
        log.info("cut writer=%s attempt=%d bytes=%d", cut.writer, cut.attempt, cut.bytes)
        self._append(WriterCut(cut=cut))

    def _look_for_supervisor(self) -> None:
        now = self._context.clock()
        if now - self._looked_for_supervisor_at < min(60.0, self._context.timing.orphan_s / 10):
            return
        self._looked_for_supervisor_at = now
        if self._border.attempt("the supervisor's heartbeat", self._context.check_orphaned):
            log.warning("no supervisor was seen for %g s: leaving", self._context.timing.orphan_s)
            self._context.leave.set()

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        rollouts = self._liveness.serving(self._rollouts, self.state.leaving)
        graders = self._liveness.serving(self._graders, self.state.leaving)
        self.planner.decide(self._context.clock(), rollouts, graders)
        self._context.load = len(self.state.groups)
        self._watchdog.look(self.state, self.planner, rollouts, graders)

    def _emit(self, record: Emitted) -> None:
        self._reporter.before(record)
        position = self._append(record)
        if isinstance(record, (Order, GradeOrder)):
            self._outbox.add(position, record.receiver, record)
        self._moved(record)

    def _moved(self, record: Emitted | None = None) -> None:
        """Something happened: for the own watchdog, and for the supervisor's, which reads the heartbeat."""
        self._context.progress += 1
        self._watchdog.moved(record)

    def _append(self, record: Emitted | WriterCut) -> int:
        position = self._journal.append(record)
        self.state.apply(record)
        self._unsynced.append(record)
        return position

    # --- writing -----------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        self._border.attempt("the own journal", self._journal.flush_when_due)
        self._send()
        self._border.attempt("the liveness table", self._liveness.publish)

    def _send(self) -> None:
        if self._journal.synced_bytes == self._journal.bytes:
            for record in self._unsynced:
                self._note_synced(record)
            self._unsynced.clear()
        for copy in self._outbox.send(self._journal.synced_bytes):
            if isinstance(copy, (Order, GradeOrder)):
                self._crash("after_copy_order", number_of(copy.order_id))

    def _note_synced(self, record: Emitted | WriterCut) -> None:
        if isinstance(record, (Order, GradeOrder)):
            self._crash("after_journal_order", number_of(record.order_id))
        elif isinstance(record, WriterCut):
            self._crash("after_cut", record.cut.attempt)
        elif isinstance(record, Batch):
            self._crash("after_batch_journal", record.step)

    def _end(self) -> bool:
        """Closes every group, says so, sends everybody home; True once all is on disk. It may begin again at any point."""
        self._crash("before_run_ended", self._context.recipe.steps)
        self.planner.end_run()
        if not self._stop_is_sent:
            self._stop_is_sent = True
            for receiver in [*self._rollouts, *self._graders]:
                self._outbox.add(self._journal.bytes, receiver, Stop(reason="the run is over"))
        self._border.attempt("the own journal", self._journal.flush_when_due)
        self._send()
        if self._journal.synced_bytes < self._journal.bytes or not self._outbox.is_empty:
            return False
        self._reporter.close()
        return self._border.attempt("the completion record", self._finish) is True

    def _finish(self) -> bool:
        self._context.finish(self._journal, "completed")
        return True

    def _crash(self, name: str, number: int) -> None:
        crash_point("orchestrator", name, number, self._context.attempt)


class _Border:
    """The border to the filesystem: an OSError costs a round. It is logged when it begins and when it is over."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def attempt(self, what: str, call: Callable[[], Result]) -> Result | None:
        """The result of `call`; None after an OSError."""
        try:
            result = call()
        except OSError as error:
            if what not in self._failing:
                log.warning("%s: %s; tried again in each round", what, error)
            self._failing.add(what)
            return None
        if what in self._failing:
            log.info("%s: goes on", what)
            self._failing.discard(what)
        return result
