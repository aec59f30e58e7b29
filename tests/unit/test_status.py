"""What `miles status` says of a run: speed and end, roles, queue, requests; and what it does not know."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.drain import DrainRequest, request_drain
from cluster.scheduler import JobView, Phase, Snapshot
from cluster.slurm.client import SlurmScheduler
from flows import status as status_module
from flows.figures import newest_attempts, pace, read_tails, signs
from flows.status import Queue, Status, look, role_state
from flows.status_text import status_text, watch_status
from miles_core.errors import SchedulerError
from miles_core.records import Drained, Incident, LivenessEntry, LivenessTable
from miles_core.tracking.ledger import Ledger, read_ledger
from tests.unit.supervised_site import Site
from tests.unit.synthetic_run import SyntheticRun


@pytest.fixture
def made(tmp_path: Path) -> SyntheticRun:
    return SyntheticRun(tmp_path / "run", steps=40)


def train(made: SyntheticRun, steps: int) -> Ledger:
    for step in range(1, steps + 1):
        made.train(step)
    return read_ledger(made.run, made.paths)


def pace_of(made: SyntheticRun, ledger: Ledger, later_s: float = 1.0) -> status_module.Pace:
    return pace(ledger, read_tails(made.paths, newest_attempts(ledger)), made.now_s + later_s)


# --- speed -----------------------------------------------------------------------------------------------------------


def test_speed_and_end_follow_from_the_recent_steps(made: SyntheticRun) -> None:
    seen = pace_of(made, train(made, 10))
    assert (seen.median_step_s, seen.steps_per_h, seen.samples_per_h) == (5.0, 720.0, 2880.0)
    assert seen.tokens_per_s == pytest.approx(8.0), "40 tokens in 5 s"
    assert (
        seen.end_unix_s == pytest.approx(made.now_s + 30 * 5.0) and seen.last_step_age_s == pytest.approx(1.0) and not seen.why
    )


def test_one_slow_step_moves_neither_the_median_nor_the_end(made: SyntheticRun) -> None:
    train(made, 9)
    made.now_s += 50
    made.train(10)
    assert pace_of(made, read_ledger(made.run, made.paths)).median_step_s == 5.0


@pytest.mark.parametrize(
    ("steps", "later_s", "why"), [(0, 1.0, "0 intervals"), (3, 1.0, "2 intervals"), (10, 400.0, "no step for 400 s")]
)
def test_an_end_that_cannot_be_said_is_unknown_and_says_why(made: SyntheticRun, steps: int, later_s: float, why: str) -> None:
    seen = pace_of(made, train(made, steps), later_s)
    assert seen.end_unix_s is None and why in seen.why
    assert later_s < 120 or seen.tokens_per_s is None


def test_only_the_ends_of_the_shards_are_read(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = train(made, 10)
    monkeypatch.setattr("flows.figures._TAIL_BYTES", 400)
    tails = read_tails(made.paths, newest_attempts(ledger))
    assert 0 < len(tails["learner-0"]) < 5 and tails["learner-0"][-1]["step"] == 10
    with open(made.paths.metrics("learner-0", 1), "a") as file:
        file.write('{"event": "step", "un')
    assert read_tails(made.paths, newest_attempts(ledger))["learner-0"][-1]["step"] == 10


def test_the_table_gets_what_the_ledger_knows(made: SyntheticRun) -> None:
    ledger = train(made, 12)
    seen = signs(ledger, read_tails(made.paths, newest_attempts(ledger)))
    assert list(seen.rewards) == [0.5] * 12 and list(seen.entropies) == [0.5] * 12 and seen.losses[-1] == pytest.approx(-1.2)
    assert seen.spread_share == 1.0 and seen.lost_share == 0.0 and set(seen.backlog) == {3}
    assert seen.slots_busy == pytest.approx(1 / 64) and seen.learner_wait_share is not None and seen.batch_samples == 4


def test_a_backlog_that_fills_at_the_start_is_not_one_that_grows(made: SyntheticRun) -> None:
    for _ in range(20):
        made.point("orchestrator-0", "orchestrator", open=0, ready=0, in_flight=0, in_grading=0, ungraded=0)
    ledger = train(made, 12)
    assert set(signs(ledger, read_tails(made.paths, newest_attempts(ledger))).backlog) == {3.0}


# --- roles -----------------------------------------------------------------------------------------------------------


def job(phase: Phase, state: str = "", reason: str = "") -> JobView:
    return JobView(job_id="7", run_id="r", writer="rollout-0", attempt=1, token="t", phase=phase, state=state, reason=reason)


def entry(verdict: str, state: str = "") -> LivenessEntry:
    return LivenessEntry.model_validate(
        {"writer": "rollout-0", "attempt": 1, "verdict": verdict, "state": state, "silent_s": 12.0}
    )


ASKED = Queue({}, {}, asked=True)


@pytest.mark.parametrize(
    ("attempt", "listed", "said", "queue", "expected"),
    [
        (0, None, None, ASKED, "not started"),
        (1, job(Phase.PENDING, reason="Priority"), None, ASKED, "queued"),
        (1, job(Phase.RUNNING), None, ASKED, "starting"),
        (1, job(Phase.RUNNING), entry("alive", "serving"), ASKED, "serving"),
        (1, job(Phase.RUNNING), entry("dead"), ASKED, "silent for 12 s"),
        (1, job(Phase.ENDED, "NODE_FAIL"), entry("alive", "serving"), ASKED, "ended: NODE_FAIL"),
        (1, None, entry("alive", "serving"), Queue({}, {}, asked=False, why="away"), "serving"),
        (1, None, None, ASKED, "not listed by the scheduler"),
        (1, None, None, Queue({}, {}, asked=True, why="no answer in 5 s"), "UNKNOWN"),
        (1, None, None, Queue({}, {}, asked=False, why="no sbatch"), "UNKNOWN"),
    ],
)
def test_what_a_role_does(
    made: SyntheticRun, attempt: int, listed: JobView | None, said: LivenessEntry | None, queue: Queue, expected: str
) -> None:
    ledger = read_ledger(made.run, made.paths)
    assert role_state(ledger, "rollout-0", attempt, listed, said, queue) == expected
    ledger.done.add("rollout-0")
    assert role_state(ledger, "rollout-0", attempt, listed, said, queue) == "done"


class Elsewhere:
    """A scheduler that answers what it is told to."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self, run_id: str) -> Snapshot:
        return self._snapshot

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        return {}


def looked(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch, scheduler: object) -> Status:
    def make(*arguments: object, **options: object) -> object:
        if isinstance(scheduler, Exception):
            raise scheduler
        return scheduler

    monkeypatch.setattr(status_module, "make_scheduler", make)
    monkeypatch.setattr(status_module, "read_cluster", lambda run: None)
    return look(made.run, made.paths, now_s=made.now_s + 1)


@pytest.mark.parametrize(
    "scheduler",
    [SchedulerError("cluster x needs Slurm, but there is no `sbatch` in PATH"), Elsewhere(Snapshot(ok=False, error="away"))],
)
def test_a_scheduler_that_does_not_answer_is_unknown_and_nothing_else_is_lost(
    made: SyntheticRun, monkeypatch: pytest.MonkeyPatch, scheduler: object
) -> None:
    train(made, 10)
    seen = looked(made, monkeypatch, scheduler)
    text = status_text(seen)
    assert "scheduler: UNKNOWN (" in text and "10 steps of 40" in text and "healthy" not in text.splitlines()[0]
    assert {role.state for role in seen.roles} == {"UNKNOWN"}
    told = json.loads(json.dumps(seen.as_json()))
    assert told["scheduler"]["why_unknown"] and told["progress"]["step"] == 10 and told["symptom"]["row"]


STABLE = {
    "run_id", "state", "root", "recipe", "cluster", "steps", "progress", "roles", "scheduler", "supervisor", "requests",
    "symptom", "also", "incidents", "staleness", "groups", "reward", "eval", "seconds", "tokens_per_s", "jobs", "policy",
}  # fmt: skip


def test_json_has_all_of_it_under_stable_keys(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    train(made, 10)
    made.lose("rollout-0", "its node died")
    request_drain(made.paths, DrainRequest())
    table = LivenessTable(attempt=1, counter=1, entries=(entry("alive", "serving"),))
    made.paths.liveness_table.write_text(table.model_dump_json())
    told = json.loads(json.dumps(looked(made, monkeypatch, Elsewhere(Snapshot(ok=True))).as_json()))
    assert told.keys() >= STABLE
    assert told["requests"] == ["drain"] and told["incidents"][0]["age_s"] == 1.0
    roles = {role["writer"]: role for role in told["roles"]}
    assert roles["learner-0"]["progress"] == 10 and roles["learner-0"]["seen_s"] == 1.0
    assert (roles["rollout-0"]["attempt"], roles["rollout-0"]["job_id"], roles["rollout-0"]["node"]) == (2, "200", None)


def test_a_drained_run_says_how_to_go_on_and_asks_nobody(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    train(made, 10)
    made.write("supervisor-0", Drained(), Incident(what="late", detail="x", unix_s=made.now_s - 3600))
    seen = looked(made, monkeypatch, SchedulerError("not asked"))
    text = status_text(seen)
    assert text.splitlines()[1].startswith("DRAINED: 10 steps") and f"miles resume {made.paths.root}" in text
    assert "end       UNKNOWN (the run is drained)" in text and "! 60 min ago late x" in text and "scheduler:" not in text
    made.close()
    assert "resume" not in status_text(looked(made, monkeypatch, SchedulerError("not asked"))), "a closed run does not go on"


def test_what_others_wrote_does_not_steer_the_terminal(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made.write("supervisor-0", Incident(what="late", detail="\x1b[2Jgone\x07 \u202elive\nnext", unix_s=made.now_s))
    text = status_text(looked(made, monkeypatch, SchedulerError("no answer")))
    assert "late ?[2Jgone? ?live\nnext" in text


def test_a_queue_says_its_reasons_and_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path / "run", nodes=("n1", "n2"))
    site.run_for(site.supervisor(), 10)
    monkeypatch.setattr(status_module, "make_scheduler", lambda *a, **o: SlurmScheduler(site.profile.slurm, run=site.fake.run))
    monkeypatch.setattr(status_module, "read_cluster", lambda run: site.profile)
    waiting = [found for found in site.jobs() if found.state == "PENDING"]
    site.fake.expected[waiting[0].job_id] = "2036-11-30T16:08:38"
    seen = look(site.run, site.paths)
    queued = [role for role in seen.roles if role.state == "queued"]
    assert len(queued) == len(waiting) and {role.queue_reason for role in queued} == {"Resources"}
    assert [role.expected_start_unix_s is None for role in queued] == [False] + [True] * (len(waiting) - 1)
    text = status_text(seen)
    assert "queued (Resources), expected to start: 2036-11-30 16:08 (in" in text and "expected to start: UNKNOWN" in text
    assert not seen.queue.why and {role.node for role in seen.roles if role.state != "queued"} <= {None, ""}


def test_an_old_table_is_said_to_be_old(made: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    train(made, 10)
    made.paths.liveness_table.write_text(LivenessTable(attempt=1, counter=1, entries=()).model_dump_json())
    os.utime(made.paths.liveness_table, (made.now_s - 600, made.now_s - 600))
    assert "states are 10 min old" in status_text(looked(made, monkeypatch, Elsewhere(Snapshot(ok=True))))


# --- watching --------------------------------------------------------------------------------------------------------


def test_watching_prints_again_without_control_codes_and_ends_with_the_run(
    made: SyntheticRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(made, 10)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            made.close()

    read: Callable[[], Status] = lambda: looked(made, monkeypatch, Elsewhere(Snapshot(ok=True)))  # noqa: E731
    watch_status(read, 7.0, sleep)
    out = capsys.readouterr().out
    assert pauses == [7.0, 7.0] and out.count("run synthetic-1") == 3 and "\x1b" not in out and "COMPLETED" in out


def test_a_pace_is_what_its_points_say(made: SyntheticRun) -> None:
    """A closed run has a speed and no end."""
    ledger = train(made, 10)
    made.close()
    closed = pace_of(made, read_ledger(made.run, made.paths))
    assert (
        replace(closed, why="") == replace(pace_of(made, ledger), end_unix_s=None, why="") and closed.why == "the run is over"
    )
