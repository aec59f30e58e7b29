"""Work in vain is named: groups that are sampled and dropped for ever look like work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from miles_core.orchestrator.watchdog import IN_VAIN_BATCHES, Watchdog
from miles_core.recipe import OrchestratorSpec
from miles_core.records import Batch, Drop

PROMPTS = 2
NAN = Drop(group_id="g1.o1", reason="ungraded", detail="g1.o1/0: the verifier gave nan")


def watchdog() -> tuple[Watchdog, Any]:
    """One, and what stands for its role's context."""
    recipe = SimpleNamespace(orchestrator=OrchestratorSpec(prompts=PROMPTS))
    context: Any = SimpleNamespace(clock=lambda: 0.0, state="", recipe=recipe)
    return Watchdog(context, liveness=None), context  # type: ignore[arg-type]


def test_groups_dropped_one_after_the_other_are_named_until_a_batch_comes() -> None:
    dog, context = watchdog()
    for _ in range(IN_VAIN_BATCHES * PROMPTS - 1):
        dog.moved(NAN)
    assert context.state == "serving"
    dog.moved(NAN)
    dog.moved()
    assert context.state == (
        "waiting: a group that can be trained; 6 in a row were dropped, the last as ungraded: g1.o1/0: the verifier gave nan"
    )
    dog.moved(Batch(step=1, batch_id="b1.o1", groups=(), staleness=0))
    assert context.state == "serving"
    dog.moved(NAN)
    assert context.state == "serving"


def test_groups_that_leave_at_the_end_or_by_a_rollback_were_not_in_vain() -> None:
    dog, context = watchdog()
    for _ in range(20):
        dog.moved(NAN.model_copy(update={"reason": "run_ended"}))
        dog.moved(NAN.model_copy(update={"reason": "rolled_back"}))
    assert context.state == "serving"
