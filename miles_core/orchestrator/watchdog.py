"""Names what the orchestrator waits for when nothing happens (I15): the role, the order, the last sign of life.

Also names work in vain: groups that are sampled and dropped, one after the other, and no batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from miles_core.orchestrator.liveness import LivenessWatch
from miles_core.orchestrator.planner import Planner
from miles_core.orchestrator.state import Receiver, State
from miles_core.records import Batch, Drop
from miles_core.runtime.context import RoleContext

log = logging.getLogger("miles")

IN_VAIN_BATCHES = 3
"""As many groups as these batches take, dropped with no batch between them, are named."""


class Watchdog:
    """Once per stall, one line; the same text stands in the heartbeat until something happens again."""

    def __init__(self, context: RoleContext, liveness: LivenessWatch) -> None:
        self._context, self._liveness = context, liveness
        self._moved_at = context.clock()
        self._stalled = False
        self._dropped = 0
        """Groups since the last batch."""
        self._in_vain = ""

    def moved(self, record: object = None) -> None:
        """Something happened; `record`: what was decided."""
        if isinstance(record, Batch):
            self._dropped, self._in_vain = 0, ""
        elif isinstance(record, Drop) and record.reason not in ("run_ended", "rolled_back"):
            self._note_dropped(record)
        self._moved_at = self._context.clock()
        self._context.state = self._in_vain or "serving"
        self._stalled = False

    def _note_dropped(self, drop: Drop) -> None:
        """Once they are many: a broken environment or verifier would have them sampled and dropped for ever."""
        self._dropped += 1
        if self._dropped < IN_VAIN_BATCHES * self._context.recipe.orchestrator.prompts:
            return
        what = f"a group that can be trained; {self._dropped} in a row were dropped, the last as {drop.reason}: {drop.detail}"
        if not self._in_vain:
            log.warning("waiting for %s", what)
        self._in_vain = f"waiting: {what}"[:400]

    def look(self, state: State, planner: Planner, rollouts: Sequence[Receiver], graders: Sequence[Receiver]) -> None:
        """Speaks once when nothing happened for stall_s."""
        silent_s = self._context.clock() - self._moved_at
        if self._stalled or silent_s < self._context.timing.stall_s:
            return
        self._stalled = True
        what = self._waits_for(state, planner, bool(rollouts), bool(graders))
        self._context.state = f"waiting: {what}"[:400]
        log.warning("nothing happened for %.0f s: waiting for %s", silent_s, what)

    def _waits_for(self, state: State, planner: Planner, has_rollout: bool, has_grader: bool) -> str:
        """The oldest thing in the way, by name."""
        if state.untrained_batches:
            step = max(state.trained_step, 0) + 1
            return f"step {step} of {self._liveness.describe('learner-0')}, {state.untrained_batches} batches ready for it"
        if planner.waiting:
            return f"the step record of a version that group {planner.waiting[0]} names"
        if state.lost and not has_rollout:
            return f"a serving rollout replica, for sample {next(iter(state.lost))}; {self._nearest('rollout')}"
        if state.ungraded and not has_grader:
            return f"a serving grader, for sample {next(iter(state.ungraded))}; {self._nearest('grader')}"
        order = min(state.open_orders(), key=lambda order: order.order_id, default=None)
        if order is not None:
            return f"order {order.order_id} at {self._liveness.describe(order.receiver)}"
        return f"a serving rollout replica, for new groups; {self._nearest('rollout')}"

    def _nearest(self, role: str) -> str:
        return "there is " + self._liveness.describe(f"{role}-0")
