"""Table tests of the supervisor's decision: evidence in, actions out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler import Cause, JobView, Phase
from cluster.supervisor import (
    MISSING_QUERIES,
    Adopt,
    AskToLeave,
    CancelJobs,
    Close,
    EndDrain,
    Exclusions,
    GiveUp,
    Lost,
    Overdue,
    Resubmit,
    Retire,
    RoleView,
    Start,
    World,
    costs_retry,
    decide,
)
from miles_core.runtime.context import DRAINED_EXIT_CODE


def job(writer: str, attempt: int = 1, phase: Phase = Phase.RUNNING, **changes: Any) -> JobView:
    made = JobView(job_id=f"{writer}/{attempt}", run_id="r", writer=writer, attempt=attempt, token="t", phase=phase)
    return replace(made, **changes)


def ended(writer: str, cause: Cause = Cause.FAILED, attempt: int = 1, **changes: Any) -> JobView:
    return job(writer, attempt, Phase.ENDED, cause=cause, state=cause.value.upper(), **changes)


def role(writer: str, **changes: Any) -> RoleView:
    made = RoleView(writer=writer, attempt=1, submitted=True, jobs=(job(writer),), liveness="alive", newest_lease=1)
    return replace(made, **changes)


def world(*views: RoleView, **changes: Any) -> World:
    made = World(roles={view.writer: view for view in views}, now_s=100.0, query_ok=True)
    return replace(made, **changes)


def known_loss(view: RoleView) -> RoleView:
    """The same view after its loss was recorded."""
    (lost,) = decide(world(view))
    assert isinstance(lost, Lost)
    return replace(view, last_end=lost.detail)


def test_a_healthy_world_needs_nothing() -> None:
    assert decide(world(role("learner-0"), role("rollout-0"))) == []


def test_roles_start_in_submission_order() -> None:
    views = [RoleView(writer) for writer in ("learner-0", "orchestrator-0", "rollout-0")]
    assert [action.writer for action in decide(world(*views)) if isinstance(action, Start)] == [
        "learner-0", "orchestrator-0", "rollout-0",
    ]  # fmt: skip


def test_a_first_start_needs_no_query() -> None:
    assert decide(world(RoleView("learner-0"), query_ok=False)) == [Start("learner-0", 1, "first start")]


def test_a_failed_query_decides_nothing_about_started_roles() -> None:
    assert decide(world(role("learner-0", jobs=(), missing_queries=99, liveness="dead"), query_ok=False)) == []


def test_a_loss_is_recorded_once_then_replaced() -> None:
    view = role("learner-0", jobs=(ended("learner-0", exit_code=1),), liveness="dead")
    (lost,) = decide(world(view))
    assert isinstance(lost, Lost) and lost.costs_retry
    assert "exit code 1" in lost.detail and "without a completion record" in lost.detail
    assert decide(world(replace(view, last_end=lost.detail))) == [Start("learner-0", 2, lost.detail)]


@pytest.mark.parametrize("writer", ["rollout-0", "grader-0"])
def test_a_lost_worker_is_retired_by_a_tombstone_so_that_its_samples_move_at_once(writer: str) -> None:
    view = known_loss(role(writer, jobs=(ended(writer, Cause.INFRASTRUCTURE),)))
    retire, start = decide(world(view))
    assert retire == Retire(writer, 2)
    assert isinstance(start, Start) and start.attempt == 3


def test_a_worker_that_never_took_its_lease_needs_no_tombstone() -> None:
    view = known_loss(role("rollout-0", jobs=(ended("rollout-0"),), newest_lease=0))
    (start,) = decide(world(view))
    assert isinstance(start, Start) and start.attempt == 2


def test_attempts_rise_above_every_lease() -> None:
    view = known_loss(role("learner-0", jobs=(ended("learner-0"),), newest_lease=7))
    (start,) = decide(world(view))
    assert isinstance(start, Start) and start.attempt == 8


@pytest.mark.parametrize(
    ("cause", "exit_code", "costs"),
    [
        (Cause.FAILED, 1, True),
        (Cause.COMPLETED, 0, True),
        (Cause.LIMIT, None, True),
        (Cause.INFRASTRUCTURE, None, False),
        (Cause.CANCELLED, None, False),
        (Cause.FAILED, DRAINED_EXIT_CODE, False),
        (Cause.FAILED, 140, False),
    ],
)
def test_what_costs_a_retry(cause: Cause, exit_code: int | None, costs: bool) -> None:
    assert costs_retry(ended("learner-0", cause, exit_code=exit_code)) is costs


def test_the_budget_is_bounded_and_names_the_last_end() -> None:
    view = replace(known_loss(role("learner-0", jobs=(ended("learner-0", exit_code=9),))), failures=4)
    (give_up,) = decide(world(view, max_failures=3))
    assert isinstance(give_up, GiveUp) and "exit code 9" in give_up.detail
    assert isinstance(decide(world(replace(view, failures=3), max_failures=3))[0], Start)


def test_the_completion_record_of_a_job_that_ended_well_may_be_seen_late() -> None:
    """On NFS a new name takes its time to another node; a second learner must not start over a first that is done."""
    ended_well = role("learner-0", jobs=(ended("learner-0", Cause.COMPLETED, exit_code=0),), ended_for_s=119.0)
    assert decide(world(ended_well, visibility_s=60.0)) == []
    (lost,) = decide(world(replace(ended_well, ended_for_s=120.0), visibility_s=60.0))
    assert isinstance(lost, Lost)
    failed = replace(ended_well, jobs=(ended("learner-0", exit_code=1),), ended_for_s=0.0)
    assert isinstance(decide(world(failed, visibility_s=60.0))[0], Lost)


def test_back_off_delays_a_replacement() -> None:
    view = replace(known_loss(role("learner-0", jobs=(ended("learner-0"),))), waits_until_s=101.0)
    assert decide(world(view)) == []
    assert isinstance(decide(world(view, now_s=101.0))[0], Start)


def test_an_intent_without_a_job_is_submitted_again_and_one_with_a_job_is_adopted() -> None:
    assert decide(world(role("learner-0", submitted=False, jobs=()))) == [Resubmit("learner-0", 1)]
    assert decide(world(role("learner-0", submitted=False))) == [Adopt("learner-0", 1, "learner-0/1")]


def test_a_submission_that_was_not_taken_waits_and_then_costs_the_budget() -> None:
    refused = role("learner-0", submitted=False, jobs=(), waits_until_s=101.0, last_refusal="no such partition")
    assert decide(world(refused)) == []
    assert decide(world(refused, now_s=101.0)) == [Resubmit("learner-0", 1)]
    (give_up,) = decide(world(replace(refused, failures=4), max_failures=3))
    assert isinstance(give_up, GiveUp) and "no such partition" in give_up.detail


def test_a_live_job_under_a_tombstone_is_replaced() -> None:
    """The supervisor died between a hung worker's tombstone and its successor's intent."""
    retired = role("rollout-0", newest_lease=2, liveness="unknown")
    (lost,) = decide(world(retired))
    assert isinstance(lost, Lost) and not lost.costs_retry
    (start,) = decide(world(replace(retired, last_end=lost.detail)))
    assert isinstance(start, Start) and start.attempt == 3


def test_unknown_is_no_information() -> None:
    unknown = role("learner-0", jobs=(job("learner-0", phase=Phase.UNKNOWN),), liveness="unknown")
    assert decide(world(unknown)) == []


def test_a_vanished_job_is_lost_only_after_several_queries_and_without_a_heartbeat() -> None:
    gone = role("learner-0", jobs=(), missing_queries=MISSING_QUERIES)
    assert decide(world(gone)) == []
    assert decide(world(replace(gone, liveness="dead", missing_queries=MISSING_QUERIES - 1))) == []
    (lost,) = decide(world(replace(gone, liveness="dead")))
    assert isinstance(lost, Lost) and not lost.costs_retry and "vanished" in lost.detail


def test_a_stopped_heartbeat_of_a_running_job_is_a_hang() -> None:
    hung = role("rollout-0", liveness="dead")
    (lost,) = decide(world(hung))
    assert isinstance(lost, Lost) and lost.costs_retry and "heartbeat" in lost.detail
    retire, start = decide(world(replace(hung, last_end=lost.detail)))
    assert isinstance(retire, Retire) and isinstance(start, Start)


def test_a_role_whose_job_was_suspended_is_replaced_without_a_retry() -> None:
    hung = role("learner-0", liveness="dead", jobs=(job("learner-0", state="SUSPENDED"),))
    (lost,) = decide(world(hung))
    assert isinstance(lost, Lost) and not lost.costs_retry and "suspended" in lost.detail
    assert decide(world(replace(hung, liveness="alive"))) == []


def test_a_dead_heartbeat_of_an_older_lease_says_nothing_about_a_starting_job() -> None:
    assert decide(world(role("rollout-0", attempt=2, jobs=(job("rollout-0", 2),), liveness="dead", newest_lease=1))) == []


def test_a_pending_job_may_wait_for_ever() -> None:
    assert decide(world(role("rollout-0", jobs=(job("rollout-0", phase=Phase.PENDING),), liveness="dead"))) == []


def test_jobs_of_superseded_attempts_are_cancelled() -> None:
    assert decide(world(role("learner-0"), stale_jobs=("7",))) == [CancelJobs(("7",), "superseded by a newer attempt")]


def test_twins_are_left_alone() -> None:
    twins = role("learner-0", jobs=(ended("learner-0", Cause.COMPLETED, exit_code=0), job("learner-0")))
    assert decide(world(twins)) == []


def test_done_roles_are_not_replaced_and_workers_end_with_the_orchestrator() -> None:
    done = role("learner-0", done=True, jobs=(ended("learner-0", Cause.COMPLETED),))
    orchestrator = role("orchestrator-0", done=True, jobs=())
    worker = role("rollout-0", jobs=(ended("rollout-0"),))
    assert decide(world(done, orchestrator, worker)) == []


def test_the_end_waits_for_leavers_then_cancels_then_closes() -> None:
    left, there = role("learner-0", done=True, jobs=()), role("rollout-0")
    assert decide(world(left, there, ended_for_s=1.0, drain_s=5.0)) == []
    (cancel,) = decide(world(left, there, ended_for_s=5.0, drain_s=5.0))
    assert isinstance(cancel, CancelJobs) and cancel.job_ids == ("rollout-0/1",)
    assert decide(world(left, replace(there, jobs=()), ended_for_s=1.0)) == [Close("COMPLETED")]


def test_cancel_and_rollback_wind_everything_down() -> None:
    (cancel,) = decide(world(role("learner-0"), stale_jobs=("9",), cancel_requested=True))
    assert isinstance(cancel, CancelJobs) and cancel.job_ids == ("learner-0/1", "9")
    empty = role("learner-0", jobs=())
    retire = Retire("learner-0", 2)
    assert decide(world(empty, cancel_requested=True)) == [retire, Close("CANCELLED", "cancelled on request")]
    assert decide(world(empty, needs_rollback="shard x is gone")) == [retire, Close("NEEDS_ROLLBACK", "shard x is gone")]
    not_heard_of = replace(empty, newest_lease=0, submitted=False)  # Its submission may still come.
    assert decide(world(not_heard_of, cancel_requested=True)) == [retire, Close("CANCELLED", "cancelled on request")]
    for nobody in (replace(empty, attempt=0, newest_lease=0), replace(empty, newest_lease=2)):
        assert decide(world(nobody, cancel_requested=True)) == [Close("CANCELLED", "cancelled on request")]
    assert decide(world(empty, cancel_requested=True, query_ok=False)) == []


def pending(writer: str) -> RoleView:
    return role(writer, jobs=(job(writer, phase=Phase.PENDING),), newest_lease=0)


@pytest.mark.parametrize(
    ("views", "for_s", "expected"),
    [
        ((role("learner-0"), pending("rollout-0")), 0.0, [CancelJobs(("rollout-0/1", "9"), ""), AskToLeave(("learner-0/1",))]),
        ((role("learner-0"),), 19.9, [CancelJobs(("9",), ""), AskToLeave(("learner-0/1",))]),
        ((role("learner-0"),), 20.0, [CancelJobs(("9",), ""), Overdue(("learner-0",), False), AskToLeave(("learner-0/1",))]),
        (
            (role("learner-0"),), 25.0,
            [CancelJobs(("9",), ""), Overdue(("learner-0",), True), CancelJobs(("learner-0/1",), "")],
        ),
    ],
)  # fmt: skip
def test_a_drain_asks_then_names_then_cancels_and_starts_nobody(
    views: tuple[RoleView, ...], for_s: float, expected: list[object]
) -> None:
    lost = role("grader-0", jobs=(ended("grader-0"),))
    seen = decide(world(*views, lost, RoleView("evaluator-0"), stale_jobs=("9",), draining_for_s=for_s, leave_s=20, drain_s=5))
    assert [replace(action, reason="") if isinstance(action, CancelJobs) else action for action in seen] == expected


def test_a_drain_ends_when_no_job_is_left_and_retires_what_the_scheduler_does_not_list() -> None:
    left, vanished = role("learner-0", jobs=(ended("learner-0"),)), role("rollout-0", jobs=())
    never, done = RoleView("evaluator-0"), role("orchestrator-0", done=True, jobs=())
    draining = {"draining_for_s": 1.0}
    assert decide(world(left, never, done, **draining)) == [EndDrain()]
    assert decide(world(left, vanished, **draining)) == [], "squeue may list it in a moment"
    gone = replace(vanished, missing_queries=MISSING_QUERIES)
    assert decide(world(left, gone, **draining)) == [Retire("rollout-0", 2), EndDrain()]
    unclear = replace(vanished, submitted=False, newest_lease=0)
    assert decide(world(unclear, **draining)) == [Retire("rollout-0", 2), EndDrain()]
    assert decide(world(role("learner-0"), query_ok=False, **draining)) == []


def test_what_ends_a_run_goes_before_a_drain() -> None:
    gone = role("learner-0", jobs=(), done=True)
    assert decide(world(gone, draining_for_s=1.0, ended_for_s=1.0)) == [Close("COMPLETED")]
    assert decide(world(gone, draining_for_s=1.0, cancel_requested=True)) == [Close("CANCELLED", "cancelled on request")]


def test_a_drained_role_is_followed_at_once_and_a_live_one_adopted() -> None:
    drained = role("learner-0", jobs=(ended("learner-0", exit_code=75),), submitted=False, drained=True)
    (start,) = decide(world(drained))
    assert isinstance(start, Start) and start.attempt == 2 and "drain" in start.reason
    assert decide(world(drained, query_ok=False)) == []
    assert [type(action) for action in decide(world(replace(drained, writer="rollout-0")))] == [Retire, Start]
    assert decide(world(replace(drained, jobs=(job("learner-0"),)))) == [Adopt("learner-0", 1, "learner-0/1")]


def test_exclusions_expire_and_never_empty_the_partition() -> None:
    exclusions = Exclusions(exclude_s=10.0, most=2)
    for now_s, node in enumerate(["n1", "n2", "n3"]):
        exclusions.add((node,), float(now_s))
    assert exclusions.current(3.0, usable_nodes=None) == ("n3", "n2")
    assert exclusions.current(3.0, usable_nodes=2) == ("n3",)
    assert exclusions.current(3.0, usable_nodes=1) == ()
    assert exclusions.current(11.5, usable_nodes=9) == ("n3",)
