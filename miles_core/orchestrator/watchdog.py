"""Names what the orchestrator waits for when nothing happens (I15): the role, the order, the last sign of life."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from miles_core.orchestrator.liveness import LivenessWatch
from miles_core.orchestrator.planner import Planner
from miles_core.orchestrator.state import Receiver, State
from miles_core.runtime.context import RoleContext

log = logging.getLogger("miles")


class Watchdog:
    """Once per stall, one line; the same text stands in the heartbeat until something happens again."""

    def __init__(self, context: RoleContext, liveness: LivenessWatch) -> None:
        self._context, self._liveness = context, liveness
        self._moved_at = context.clock()
        self._stalled = False

    def moved(self) -> None:
        """Something happened."""
        self._moved_at = self._context.clock()
        self._context.state = "serving"
        self._stalled = False

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
