"""A role that lives but does not get on: named with its last progress, then replaced; never one that says why it waits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.stalls import STALL_LIMIT, Sign, StallWatch
from cluster.supervisor import Lost, Retire, Start, decide
from miles_core.errors import NodesLost
from tests.protocol.simulation import TIMING
from tests.unit.supervised_site import Site
from tests.unit.test_supervisor import job, role, world

STALL_S = 30.0
TRAINING = Sign(1, "training: batch 4", 3, 0)
SAMPLING = Sign(1, "serving", 40, 6, (3, 1))


def watched(writer: str, signs: list[Sign | None], *, every_s: float = 5.0) -> float:
    """Seconds of a stall after these looks."""
    watch = StallWatch(STALL_S, {"rollout": 12.0})
    for number, sign in enumerate(signs):
        watch.observe(writer, sign, number * every_s)
    return watch.seconds(writer)


@pytest.mark.parametrize(
    ("writer", "sign", "stalled"),
    [
        ("learner-0", TRAINING, True),
        ("learner-0", TRAINING._replace(state="loading"), True),
        ("learner-0", TRAINING._replace(state="starting"), True),
        ("learner-0", TRAINING._replace(state="waiting: batch 4"), False),
        ("learner-0", TRAINING._replace(state="waiting: disk full (...)"), False),
        ("orchestrator-0", TRAINING._replace(state="serving"), True),
        ("evaluator-0", TRAINING._replace(state="waiting: version 9"), False),
        ("rollout-0", SAMPLING, True),
        ("rollout-0", SAMPLING._replace(load=0), False),
        ("rollout-0", SAMPLING._replace(state="serving, waiting: version 5"), False),
        ("rollout-0", SAMPLING._replace(state="starting", load=0), True),
        ("grader-0", SAMPLING, True),
        ("grader-0", SAMPLING._replace(load=0), False),
    ],
)
def test_who_is_stalled(writer: str, sign: Sign, stalled: bool) -> None:
    allowance_s = 12.0 if writer == "rollout-0" else 0.0
    assert watched(writer, [sign] * 9) == (40.0 - allowance_s if stalled else 0.0)


@pytest.mark.parametrize(
    "change", [{"progress": 4}, {"state": "saving: step 3"}, {"load": 1}, {"version": (4, 1)}, {"attempt": 2}]
)
def test_any_change_of_what_it_says_is_progress(change: dict[str, object]) -> None:
    assert watched("learner-0", [*[TRAINING] * 7, TRAINING._replace(**change), *[TRAINING._replace(**change)] * 2]) == 10.0


def test_what_nobody_saw_is_no_stall() -> None:
    """The heartbeat stopped for a while, or the observer did."""
    assert watched("learner-0", [*[TRAINING] * 7, None, TRAINING, TRAINING]) == 5.0
    assert watched("learner-0", [TRAINING] * 9, every_s=11.0) == 0.0
    assert watched("learner-0", [None]) == 0.0


def test_a_stalled_role_is_lost_with_its_last_progress_and_costs_a_retry() -> None:
    stalled = role("rollout-0", stalled_for_s=90.0, last_sign=SAMPLING.describe())
    assert decide(world(stalled)) == [] and decide(world(stalled, stall_limit_s=90.1)) == []
    (lost,) = decide(world(stalled, stall_limit_s=90.0))
    assert isinstance(lost, Lost) and lost.costs_retry
    assert lost.detail.endswith("no progress for 90 s: it says 'serving', progress 40, 6 samples in work")
    longer = replace(stalled, stalled_for_s=120.0, last_end=lost.detail)
    retire, start = decide(world(longer, stall_limit_s=90.0))
    assert isinstance(retire, Retire) and isinstance(start, Start) and start.attempt == 3


def test_what_the_newest_lease_does_not_say_is_no_stall_of_the_newest_job() -> None:
    older = role("rollout-0", attempt=2, jobs=(job("rollout-0", 2),), newest_lease=1, stalled_for_s=math.inf)
    assert decide(world(older, stall_limit_s=90.0)) == []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path / "run")
    site.run = site.run.model_copy(update={"timing": TIMING.model_copy(update={"stall_s": STALL_S})})
    site.states = {writer: "waiting: nothing in particular" for writer in site.writers}
    return site


def test_it_is_named_once_then_replaced_and_the_others_stay(site: Site) -> None:
    site.start_all()
    others = site.running() - {("learner-0", 1)}
    site.states["learner-0"] = "training: batch 4"
    supervisor = site.supervisor()
    site.run_for(supervisor, 2 * STALL_S)
    (named,) = site.incidents("role_stalled")
    assert named == (
        "attempt 1 lives but made no progress for 30 s, replaced after 90 s of that: it says 'training: batch 4', progress 0"
    )
    assert site.incidents("role_lost") == []
    site.run_until(site.supervisor(), lambda: site.running() == others | {("learner-0", 2)})
    (lost,) = site.incidents("role_lost")
    assert (
        lost == f"attempt 1 lives but made no progress for {STALL_LIMIT * STALL_S:g} s: it says 'training: batch 4', progress 0"
    )


def test_a_role_that_stalls_again_and_again_ends_the_run_with_what_it_said(site: Site) -> None:
    site.start_all()
    site.states["learner-0"] = "loading"
    with pytest.raises(
        NodesLost, match=r"learner-0 cannot be replaced: .* no progress for 90 s: it says 'loading', progress 0"
    ):
        site.supervisor().run()


def test_roles_that_say_why_they_wait_stay_for_ever(site: Site) -> None:
    site.start_all()
    site.run_for(site.supervisor(), 2 * STALL_LIMIT * STALL_S)
    assert site.incidents("role_stalled") == site.incidents("role_lost") == []
    assert site.running() == {(writer, 1) for writer in site.writers}
