"""Flows without a server: who lives, what is reaped, what Prefect is told, and that prefect.yaml fits the flows."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.drain import DrainRequest, request_drain
from cluster.epoch import read_closed, read_outcome
from cluster.job_spec import make_job_spec
from cluster.local.scheduler import LocalScheduler
from cluster.supervise import Progress
from flows import train
from flows.automations import continued
from flows.limits import LimitedScheduler
from flows.nightly import live_run, slot_is_old, slot_run_id
from flows.prefect_report import PrefectReporter, Teller, artifact_key, flow_run_name, jobs_table
from flows.pulse import Pulse, watch
from flows.reap import MEMORY_FILE, Finding, Reaper
from flows.resume import resume
from miles_core.errors import SchedulerError
from miles_core.records import Drained, Incident
from miles_core.run import all_writers
from miles_core.store.journal import encode_frame
from tests.unit.fake_slurm import ManualClock
from tests.unit.sleeping_run import SleepingRun
from tests.unit.synthetic_run import SyntheticRun

REPOSITORY = Path(__file__).resolve().parents[2]

# --- who lives -----------------------------------------------------------------------------------------------------------


def verdict_of(sleeping: SleepingRun, writer: str = "supervisor-0", *, moving: bool = False) -> str:
    """What a watch says, with time made by hand."""
    clock, counter = ManualClock(), 1

    def sleep(seconds: float) -> None:
        nonlocal counter
        clock.sleep(seconds)
        counter += 1
        if moving:
            sleeping.beat(counter, writer)

    pulse = Pulse(sleeping.run, sleeping.paths, [writer], clock=clock)
    watch([pulse], clock=clock, sleep=sleep)
    return pulse.verdict


def test_a_heartbeat_lives_only_while_it_moves(tmp_path: Path) -> None:
    sleeping = SleepingRun(tmp_path, "one")
    assert verdict_of(sleeping) == "silent"
    sleeping.take()
    assert verdict_of(sleeping) == "silent"
    sleeping.beat(1)
    assert verdict_of(sleeping) == "silent"
    assert verdict_of(sleeping, moving=True) == "moving"


def test_a_watch_without_readings_judges_nobody(tmp_path: Path) -> None:
    sleeping = SleepingRun(tmp_path, "one")
    sleeping.take()
    sleeping.paths.heartbeats.rmdir()
    sleeping.paths.heartbeats.write_text("a file where the folder should be")
    assert verdict_of(sleeping) == "unknown"
    assert "could not be judged" in live_run("sleepy", tmp_path)


def test_a_nightly_sees_roles_that_live_without_a_supervisor(tmp_path: Path) -> None:
    sleeping = SleepingRun(tmp_path, "sleepy-1", lease_s=30)
    with sleeping.beating("rollout-0"):
        assert "rollout-0" in live_run("sleepy", tmp_path)
        assert live_run("another recipe", tmp_path) == ""
        assert live_run("sleepy", tmp_path, but_not=["sleepy-1"]) == ""


def test_a_nightly_does_not_wait_for_closed_or_dead_runs(tmp_path: Path) -> None:
    closed, dead = SleepingRun(tmp_path, "closed", lease_s=30), SleepingRun(tmp_path, "dead")
    closed.close()
    dead.take()
    with closed.beating("rollout-0"):
        assert live_run("sleepy", tmp_path) == ""


def add_unknown_record(made: SleepingRun) -> None:
    """A journal of another version, or a damaged one: reading it raises."""
    (segment,) = made.paths.journal("supervisor-0").iterdir()
    with segment.open("ab") as file:
        file.write(encode_frame(b'{"kind": "unknown"}'))
    with pytest.raises(ValueError):
        read_closed(made.run, made.paths)


def test_an_unreadable_journal_of_an_old_run_stops_no_night(tmp_path: Path) -> None:
    old = SleepingRun(tmp_path, "old")
    old.close()
    add_unknown_record(old)
    assert live_run("sleepy", tmp_path) == ""


def test_a_slot_is_old_after_its_age_and_names_its_run() -> None:
    slot = datetime(2026, 3, 1, 22, 0, tzinfo=UTC)
    assert slot_is_old(slot, slot + timedelta(hours=6), 6.0) == ""
    assert "6.1 h old" in slot_is_old(slot, slot + timedelta(hours=6, minutes=6), 6.0)
    assert slot_run_id("chain_sum", slot) == "chain_sum-20260301-2200"


# --- what is reaped --------------------------------------------------------------------------------------------------------


def reap(root: Path, clock: ManualClock, *, orphan_s: float = 100.0, dry_run: bool = False) -> list[Finding]:
    return Reaper(root, orphan_s=orphan_s, dry_run=dry_run, clock=clock, sleep=Patience(clock).sleep).run()


class Patience:
    """Sleeps by hand while heartbeats are watched; processes need real time to die."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._wait = clock, threading.Event().wait

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)
        self._wait(0.05)


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[SleepingRun]:
    with SleepingRun(tmp_path / "runs", "sleepy-1") as made:
        yield made


def test_jobs_of_a_closed_run_are_ended_and_then_not_asked_for_again(sleeping: SleepingRun) -> None:
    root, clock = sleeping.paths.root.parent, ManualClock()
    sleeping.start_job()
    sleeping.close()
    (finding,) = reap(root, clock)
    assert finding.why == "closed as COMPLETED" and finding.done == "cancelled" and not finding.is_failure
    assert not sleeping.live_jobs()
    assert reap(root, clock) == []
    assert len(json.loads((root / MEMORY_FILE).read_text())["clean"]) == 1


def test_orphans_are_ended_after_orphan_s_counted_over_calls_and_the_run_stays_open(sleeping: SleepingRun) -> None:
    root, clock = sleeping.paths.root.parent, ManualClock()
    sleeping.start_job()
    sleeping.take()
    assert reap(root, clock) == [] and sleeping.live_jobs()
    clock.sleep(50.0)
    assert reap(root, clock) == [] and sleeping.live_jobs()
    clock.sleep(60.0)
    (found,) = reap(root, clock, dry_run=True)
    assert "dry run" in found.done and sleeping.live_jobs()
    (finding,) = reap(root, clock)
    assert "resume" in finding.done and not sleeping.live_jobs()
    assert read_closed(sleeping.run, sleeping.paths) is None


def test_silence_begins_anew_when_the_heartbeat_moved_or_the_host_was_started_again(sleeping: SleepingRun) -> None:
    root, clock = sleeping.paths.root.parent, ManualClock()
    sleeping.start_job()
    sleeping.take()
    reap(root, clock)
    clock.sleep(110.0)
    sleeping.beat(7)
    assert reap(root, clock) == []
    clock.sleep(110.0)
    memory = json.loads((root / MEMORY_FILE).read_text())
    (root / MEMORY_FILE).write_text(json.dumps(memory | {"boot_id": "another"}))
    assert reap(root, clock) == [] and sleeping.live_jobs()
    clock.sleep(110.0)
    assert len(reap(root, clock)) == 1


def test_a_live_supervisor_is_never_touched(sleeping: SleepingRun) -> None:
    root, clock = sleeping.paths.root.parent, ManualClock()
    sleeping.start_job()
    sleeping.take()
    sleeping.paths.cancel_request.parent.mkdir()
    sleeping.paths.cancel_request.touch()
    counter = 0

    def beat(seconds: float) -> None:
        nonlocal counter
        counter += 1
        clock.sleep(seconds)
        sleeping.beat(counter)

    assert Reaper(root, orphan_s=0.0, clock=clock, sleep=beat).run() == []
    assert sleeping.live_jobs()
    assert len(reap(root, clock, orphan_s=0.0)) == 1


def test_a_run_that_cannot_be_read_is_named_and_keeps_no_other_from_its_end(sleeping: SleepingRun) -> None:
    root = sleeping.paths.root.parent
    old = SleepingRun(root, "another")
    old.close()
    add_unknown_record(old)
    sleeping.start_job()
    sleeping.close()
    unreadable, ended = reap(root, ManualClock())
    assert unreadable.run_id == "another" and unreadable.is_failure
    assert ended.done == "cancelled" and not sleeping.live_jobs()


def test_a_cancel_that_nobody_obeyed_is_obeyed(sleeping: SleepingRun) -> None:
    sleeping.start_job()
    sleeping.take()
    sleeping.paths.cancel_request.parent.mkdir()
    sleeping.paths.cancel_request.touch()
    (finding,) = reap(sleeping.paths.root.parent, ManualClock())
    assert finding.done == "ended and closed as CANCELLED" and not sleeping.live_jobs()
    closed = read_closed(sleeping.run, sleeping.paths)
    assert closed is not None and closed.state == "CANCELLED"


def test_a_drain_that_nobody_obeyed_is_obeyed_and_the_run_stays_open(sleeping: SleepingRun) -> None:
    sleeping.start_job()
    sleeping.take()
    request_drain(sleeping.paths, DrainRequest())
    (finding,) = reap(sleeping.paths.root.parent, ManualClock())
    assert finding.done == "drained; `resume` continues the run" and not sleeping.live_jobs()
    assert isinstance(read_outcome(sleeping.run, sleeping.paths), Drained)
    assert reap(sleeping.paths.root.parent, ManualClock()) == []


@pytest.mark.parametrize("go_on", [True, False])
def test_a_flow_of_a_drained_run_is_completed_and_named_so(
    sleeping: SleepingRun, monkeypatch: pytest.MonkeyPatch, go_on: bool
) -> None:
    """Failed or Crashed, a retry or the automation would start it again before the maintenance."""
    seen: list[bool] = []
    monkeypatch.setattr(train, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(train, "supervise", lambda *arguments, **options: seen.append(options["go_on"]) or Drained())
    state = train.host(sleeping.run, sleeping.paths, sleeping.profile, go_on=go_on)
    assert not isinstance(state, str) and state.is_completed() and state.name == "Drained" and seen == [go_on]
    assert "miles resume" in str(state.message)


def test_the_automation_behind_a_crash_obeys_a_drain() -> None:
    (action,) = continued("00000000-0000-0000-0000-000000000000").model_dump(mode="json")["actions"]
    assert action["parameters"]["go_on"] is False and inspect.signature(resume.fn).parameters["go_on"].default is True


# --- what Prefect is told ----------------------------------------------------------------------------------------------


def test_the_loop_neither_fails_with_the_api_nor_waits_for_it(tmp_path: Path) -> None:
    made = SyntheticRun(tmp_path / "run")
    teller, told = Teller(), threading.Event()

    def refuse() -> None:
        raise httpx.ConnectError("nobody there")

    teller.tell(refuse)
    teller.tell(told.set)
    assert told.wait(30), "an error ended the teller"
    teller.tell(threading.Event().wait)  # a server that never answers
    reporter = PrefectReporter(made.run, made.paths, teller=teller)
    for step in range(500):
        reporter.progress(Progress(step % 8, 8, 0.5, 0, (), 0, 31.0 * step))
        reporter.incident(Incident(what="role_lost", writer="rollout-0"))
    teller.close(deadline_s=0.01)


def test_jobs_are_told_with_attempts_and_ids(tmp_path: Path) -> None:
    made = SyntheticRun(tmp_path / "run")
    rows = jobs_table(made.run, made.paths, {"learner-0": "training"})
    assert len(rows) == len(all_writers(made.run.recipe))
    assert rows[0] == {"role": "learner", "replica": 0, "attempt": 1, "job ids": "100", "state": "training"}


def test_names_can_be_searched_and_keys_are_taken(tmp_path: Path) -> None:
    assert flow_run_name(SleepingRun(tmp_path, "night-1").run) == "sleepy-night-1"
    assert flow_run_name(SleepingRun(tmp_path, "sleepy-20260301").run) == "sleepy-20260301"
    assert artifact_key("run", "Chain_Sum.1", "jobs") == "run-chain-sum-1-jobs"


# --- limits --------------------------------------------------------------------------------------------------------------


def test_a_limit_paces_and_never_stops_the_scheduler(tmp_path: Path) -> None:
    made, clock, asked = SleepingRun(tmp_path, "limited"), ManualClock(), []
    fails = False

    @contextmanager
    def slot(name: str) -> Iterator[None]:
        if fails:
            raise TimeoutError
        asked.append(name)
        yield
        asked.append(f"{name} given back")

    limited = LimitedScheduler(LocalScheduler(made.paths.root), hold=slot, pace=slot, clock=clock)
    assert limited.snapshot("limited").ok
    assert asked == ["slurm-query", "slurm-query given back"]
    fails = True
    assert limited.snapshot("limited").ok
    fails = False
    assert limited.snapshot("limited").ok and len(asked) == 2, "asked again at once after trouble"
    clock.sleep(301.0)
    assert limited.snapshot("limited").ok and len(asked) == 4


def test_an_error_of_the_scheduler_passes_and_gives_the_slot_back(tmp_path: Path) -> None:
    made, held = SleepingRun(tmp_path, "limited"), []

    @contextmanager
    def slot(name: str) -> Iterator[None]:
        held.append(name)
        yield
        held.remove(name)

    shutil.rmtree(made.paths.code)
    limited = LimitedScheduler(LocalScheduler(made.paths.root), hold=slot, pace=slot)
    with pytest.raises(SchedulerError):
        limited.submit(make_job_spec(made.run, made.paths, made.profile, "learner-0", 1))
    assert held == []


# --- prefect.yaml --------------------------------------------------------------------------------------------------------


def test_deployments_fit_their_flows_and_no_schedule_is_active() -> None:
    deployments = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    assert [deployment["name"] for deployment in deployments] == ["manual", "nightly", "resume", "evaluate", "reap"]
    for deployment in deployments:
        path, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert deployment.get("parameters", {}).keys() <= inspect.signature(flow.fn).parameters.keys()
        assert not any(schedule["active"] for schedule in deployment.get("schedules", []))
