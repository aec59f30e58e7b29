"""What the orchestrator tells people: metric points and log lines. Nothing decides by them.

Lengths of trained and of dropped samples stand side by side, so that a bias towards short answers is seen (I10).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from miles_core.orchestrator.planner import Emitted, Planner
from miles_core.orchestrator.state import State
from miles_core.records import Batch, Drop
from miles_core.runtime.context import RoleContext

log = logging.getLogger("miles")

REPORT_S = 1.0


class Reporter:
    """Writes one `orchestrator` point about once a second, one `batch` point per batch, one `drop` point per drop."""

    def __init__(self, context: RoleContext, state: State, planner: Planner) -> None:
        self._context, self._state, self._planner = context, state, planner
        self._reported_at: float | None = None

    def before(self, record: Emitted) -> None:
        """Called before a record is applied, while its groups are still open."""
        if isinstance(record, Batch):
            rewards = [reward for group in record.groups for reward in group.rewards]
            mean = sum(rewards) / len(rewards)
            lengths = self._lengths(group.group_id for group in record.groups)
            self._context.metrics.log(
                "batch", step=record.step, staleness=record.staleness, mean_reward=mean, num_groups=len(record.groups),
                num_samples=len(rewards), num_replaced=len(self._state.replaced), sampled_tokens=quantiles(lengths),
            )  # fmt: skip
            log.info("batch=%s staleness=%d mean_reward=%.4f", record.batch_id, record.staleness, mean)
        elif isinstance(record, Drop):
            lengths = self._lengths([record.group_id])
            self._context.metrics.log(
                "drop", group=record.group_id, reason=record.reason, detail=record.detail, sampled_tokens=quantiles(lengths)
            )
            log.info("dropped=%s reason=%s detail=%s", record.group_id, record.reason, record.detail)

    def tick(self) -> None:
        """Writes the point, if it is due."""
        now, state = self._context.clock(), self._state
        if self._reported_at is not None and now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        self._context.metrics.log(
            "orchestrator", open=len(state.groups), ready=self._planner.num_ready, in_flight=state.in_flight,
            in_grading=state.in_grading, ungraded=len(state.ungraded), lost=len(state.lost),
            waiting_for_versions=len(self._planner.waiting), untrained_batches=state.untrained_batches,
            last_batch=state.last_batch, trained_step=state.trained_step, drops=dict(state.drops), ignored=state.ignored,
        )  # fmt: skip

    def close(self) -> None:
        """Writes a last point."""
        self._reported_at = None
        self.tick()

    def _lengths(self, group_ids: Iterable[str]) -> list[int]:
        """Sampled tokens of each trajectory that the groups have so far."""
        groups = (self._state.groups[group_id] for group_id in group_ids if group_id in self._state.groups)
        samples = (sample for group in groups for sample in group.samples)
        return [sample.listed.entry.num_sampled_tokens for sample in samples if sample.listed is not None]


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """Count, mean, and smallest, median and largest value; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return {"n": len(ordered), "mean": sum(ordered) / len(ordered), "min": ordered[0], "p50": middle, "max": ordered[-1]}
