"""The supervisor's loop over a fake Slurm: what it starts, replaces, adopts and survives; who wins; how it ends."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from cluster.drain import DrainRequest, drain_mark, lift_drain, request_drain
from cluster.epoch import read_closed, read_outcome, take_epoch
from cluster.evidence import RoleRecord
from cluster.rollback import roll_back
from cluster.scheduler import JobSpec
from cluster.slurm.client import SlurmScheduler
from miles_core.errors import DeadlineExceeded, HeldElsewhere, LeaseLost, NeedsRollback, NodesLost, SchedulerError
from miles_core.records import Drained, Intent
from miles_core.store.lease import LeaseFolder
from miles_core.tracking.ledger import read_ledger
from tests.unit.fake_slurm import LIVE
from tests.unit.supervised_site import FlakyFS, Killed, Site, attempt_of


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "run")


def all_first_attempts(site: Site) -> set[tuple[str, int]]:
    return {(writer, 1) for writer in site.writers}


# --- starting --------------------------------------------------------------------------------------------------------


def test_first_start_submits_every_role_once_the_learner_first(site: Site) -> None:
    site.run_for(site.supervisor(), 5)
    assert [attempt_of(job)[0] for job in site.jobs()] == site.writers
    assert site.running() == all_first_attempts(site)
    assert len(site.records("intent")) == len(site.records("submitted")) == site.submissions() == len(site.writers)


class DyingScheduler(SlurmScheduler):
    """The supervisor is killed in its `number`-th sbatch, before or after Slurm took the job."""

    def __init__(self, site: Site, number: int, *, accepted: bool) -> None:
        super().__init__(site.profile.slurm, run=site.fake.run, sleep=site.clock.sleep)
        self._dying, self._left, self._accepted = site, number, accepted

    def submit(self, spec: JobSpec) -> str:
        self._left -= 1
        if self._left == 0 and not self._accepted:
            self._dying.fs.dead = True
            raise Killed
        job_id = super().submit(spec)
        if self._left == 0:
            self._dying.fs.dead = True
            raise Killed
        return job_id


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_killed_between_intent_and_submission_record(site: Site, number: int, accepted: bool) -> None:
    with pytest.raises(Killed):
        site.supervisor(scheduler=DyingScheduler(site, number, accepted=accepted)).run()
    site.run_for(site.supervisor(), 5)
    assert site.running() == all_first_attempts(site)
    assert site.submissions() == len(site.writers)
    assert [record.adopted for record in site.records("submitted")].count(True) == accepted  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["timeout_accepted", "timeout_lost", "socket_accepted", "socket_lost"])
def test_an_ambiguous_submission_gives_one_job(site: Site, fault: str) -> None:
    site.fake.submit_faults.append(fault)  # type: ignore[arg-type]
    site.run_until(site.supervisor(), lambda: site.running() == all_first_attempts(site))
    assert len(site.jobs("learner-0")) == 1
    assert len(site.incidents("submit_failed")) == 1


def test_a_job_that_was_taken_in_silence_and_is_listed_late_gets_no_twin(site: Site) -> None:
    site.fake.submit_faults.append("timeout_accepted")
    site.fake.visible_after_s = 10.0
    site.run_for(site.supervisor(), 40)
    assert len(site.jobs("learner-0")) == 1 and site.running() == all_first_attempts(site)


def test_a_controller_that_is_away_is_one_incident_and_not_asked_for_every_role_at_every_tick(site: Site) -> None:
    site.fake.controller_up = False
    supervisor = site.supervisor()
    site.run_for(supervisor, 300)
    assert len(site.incidents("submit_failed")) == len({job.writer for job in site.records("intent")})  # type: ignore[attr-defined]
    assert site.submissions() < 2 * len(site.writers)
    site.fake.controller_up = True
    site.run_until(site.supervisor(), lambda: site.running() == all_first_attempts(site))
    assert all(len(site.jobs(writer)) == 1 for writer in site.writers)


def test_a_role_that_is_refused_for_good_ends_a_run_that_has_not_trained_and_leaves_no_job(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", pools={"main": {"partition": "nowhere"}})
    with pytest.raises(SchedulerError, match="'nowhere', the cluster has: main, spot") as caught:
        site.supervisor().run()
    assert "4 jobs of this run" in str(caught.value) and "--run-id supervised" in str(caught.value)
    assert {job.state for job in site.jobs()} == {"CANCELLED"}
    corrected = Site(tmp_path / "other").profile
    site.profile = corrected
    site.run_until(site.supervisor(), lambda: len(site.running()) == len(site.writers))


def test_a_replacement_that_is_refused_costs_its_budget_and_touches_nobody_else(site: Site) -> None:
    site.start_all()
    site.train(1)
    others = site.running() - {("rollout-0", 1)}
    site.fake.partitions = ("other",)
    site.profile = site.profile.model_copy(update={"pools": {"main": site.profile.resources_for("rollout").model_copy(
        update={"partition": "gone"})}})  # fmt: skip
    site.fake.finish(site.jobs("rollout-0")[0].job_id, 1)
    with pytest.raises(NodesLost, match="gone"):
        site.supervisor().run()
    assert site.running() == others
    assert len(site.incidents("submit_failed")) == 1


# --- following -------------------------------------------------------------------------------------------------------


def test_a_supervisor_after_kill_9_adopts_everything(site: Site) -> None:
    supervisor = site.supervisor()

    def kill() -> None:
        if len(site.running()) == len(site.writers):
            site.fs.dead = True

    site.on_sleep = kill
    with pytest.raises(Killed):
        supervisor.run()
    site.on_sleep = lambda: None
    before = site.submissions()
    site.run_for(site.supervisor(), 30)
    assert site.submissions() == before and site.running() == all_first_attempts(site)


def test_jobs_of_an_older_run_with_the_same_id_are_neither_adopted_nor_touched(site: Site, tmp_path: Path) -> None:
    site.start_all()
    again = Site(tmp_path / "again")
    again.fake, again.clock = site.fake, site.clock
    again.run = again.run.model_copy(update={"created_s": 2.0})
    again.fake.nodes |= dict.fromkeys((f"m{number}" for number in range(10)), "idle")
    again.run_for(again.supervisor(), 10)
    assert len(again.records("submitted")) == len(again.writers)
    assert len([job for job in again.jobs() if job.state == "RUNNING"]) == 2 * len(site.writers)


def test_the_newer_epoch_wins_and_the_older_one_stops_at_its_next_action(site: Site) -> None:
    old = site.supervisor()

    def take_over() -> None:
        if len(site.running()) == len(site.writers):
            site.on_sleep = lambda: None
            new = site.supervisor(takeover=True)
            site.fake.finish(site.jobs("rollout-1")[0].job_id, 1)
            old.context.leases.refresh()
            with pytest.raises(LeaseLost):
                old.tick()
            new.context.leave.set()
            new.run()
            raise LeaseLost("the old one noticed", why="superseded")

    site.on_sleep = take_over
    with pytest.raises(LeaseLost):
        old.run()
    assert {attempt for _, attempt in site.running()} == {1}


def test_a_supervisor_that_is_taken_over_while_idle_says_so(site: Site) -> None:
    """Its heartbeat notices; that is not a request to leave."""
    old = site.supervisor()
    site.on_sleep = lambda: None
    taken = site.supervisor(takeover=True)
    old.context.leases_check_in_background()
    with pytest.raises(LeaseLost, match="superseded"):
        old.run()
    taken.context.leave.set()
    taken.run()


def test_a_living_holder_is_named_and_a_dead_one_is_followed(site: Site) -> None:
    holder = site.supervisor()
    site.on_sleep = holder.context.beat
    with pytest.raises(HeldElsewhere, match="--takeover"):
        site.supervisor()
    holder.context.stop()
    site.on_sleep = lambda: None
    site.run_for(site.supervisor(), 3)
    assert len(site.records("intent")) == len(site.writers)


def test_a_clean_end_lets_the_next_one_in_at_once(site: Site) -> None:
    site.start_all()
    before = site.clock()
    site.supervisor().context.stop()
    assert site.clock() - before < site.run.timing.lease_s / 10


@pytest.mark.parametrize("failing", ["supervisor/journal", "leases"])
def test_whatever_ends_an_epoch_ends_its_heartbeat(site: Site, failing: str) -> None:
    """A flow enters again in the same process: a heartbeat left behind would hold the run against itself."""
    supervisor = site.supervisor()
    site.fs.failing.add(failing)
    site.on_sleep = supervisor.context.leave.set
    if failing == "supervisor/journal":
        with pytest.raises(OSError, match="Stale"):
            supervisor.run()
    else:
        supervisor.run()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


# --- losing ----------------------------------------------------------------------------------------------------------


def test_a_lost_worker_is_buried_before_its_successor_and_its_node_is_avoided(site: Site) -> None:
    site.start_all()
    node = site.jobs("rollout-0")[0].nodes[0]
    site.fake.fail_node(node)
    site.run_until(site.supervisor(), lambda: ("rollout-0", 3) in site.running())
    leases = LeaseFolder(site.fs, site.paths.leases, site.run.run_id)
    assert leases.read("rollout-0", 2).kind == "tombstone"
    assert site.jobs("rollout-0")[-1].flags["exclude"] == node
    assert {attempt for writer, attempt in site.running() if writer != "rollout-0"} == {1}
    assert len(site.records("job_ended")) == 1 and len(site.incidents("node_down")) == 1


def test_a_lost_role_is_replaced_in_the_tick_that_notices_it(tmp_path: Path) -> None:
    """The next query of a real cluster is half a minute away."""
    site = Site(tmp_path / "run", scheduler_poll_s=60.0)
    site.start_all()
    site.fake.finish(site.jobs("rollout-0")[0].job_id, 137)
    noticed: list[int] = []

    def has_started() -> bool:
        if site.incidents("role_lost"):
            noticed.append(len(site.ticks))
        return ("rollout-0", 3) in site.running()

    site.run_until(site.supervisor(), has_started)
    assert noticed[0] == len(site.ticks)


def test_of_a_job_on_two_nodes_only_the_one_that_died_is_avoided(tmp_path: Path) -> None:
    nodes = tuple(f"n{number}" for number in range(1, 10))
    site = Site(tmp_path, nodes=nodes, resources={"learner": {"nodes": 2}})
    site.start_all()
    _, dead = site.jobs("learner-0")[0].nodes
    site.fake.fail_node(dead)
    site.run_until(site.supervisor(), lambda: ("learner-0", 2) in site.running())
    assert site.jobs("learner-0")[-1].flags["exclude"] == dead


def test_the_exclusion_of_an_intent_survives_a_failed_submission(site: Site) -> None:
    site.start_all()
    node = site.jobs("rollout-0")[0].nodes[0]
    site.fake.fail_node(node)
    site.fake.submit_faults.append("socket_lost")
    site.run_until(site.supervisor(), lambda: ("rollout-0", 3) in site.running())
    assert site.jobs("rollout-0")[-1].flags["exclude"] == node


def test_a_job_that_slurm_holds_after_a_failed_launch_is_replaced_and_does_not_stay_in_the_queue(site: Site) -> None:
    site.start_all()
    (held,) = site.jobs("grader-0")
    held.state, held.nodes, held.reason = "PENDING", (), "launch failed requeued held"
    start = site.fake._try_to_start
    site.fake._try_to_start = lambda job: None if job is held else start(job)  # type: ignore[method-assign]
    site.run_until(site.supervisor(), lambda: ("grader-0", 3) in site.running())
    assert held.state == "CANCELLED"


def test_preemption_costs_neither_a_retry_nor_the_node(site: Site) -> None:
    site.start_all()
    site.fake.preempt(site.jobs("learner-0")[0].job_id)
    site.run_until(site.supervisor(), lambda: ("learner-0", 2) in site.running())
    assert "exclude" not in site.jobs("learner-0")[-1].flags


def test_a_vanished_job_is_replaced_once_its_heartbeat_is_gone(site: Site) -> None:
    site.start_all()
    site.fake.forget(site.jobs("grader-1")[0].job_id)
    site.run_until(site.supervisor(), lambda: ("grader-1", 3) in site.running())
    assert "vanished" in site.incidents("role_lost")[0]


def test_a_hung_job_is_replaced_and_cancelled(site: Site) -> None:
    site.start_all()
    hung = site.jobs("rollout-1")[0]
    site.silent.add(("rollout-1", 1))
    site.run_until(site.supervisor(), lambda: ("rollout-1", 3) in site.running() and hung.state == "CANCELLED")
    assert site.jobs("rollout-1")[-1].flags["exclude"] == hung.nodes[0]


def test_a_suspended_job_is_replaced_and_its_node_is_not_avoided(site: Site) -> None:
    site.start_all()
    site.jobs("rollout-1")[0].state = "SUSPENDED"
    site.silent.add(("rollout-1", 1))
    site.run_until(site.supervisor(), lambda: ("rollout-1", 3) in site.running())
    assert "suspended" in site.incidents("role_lost")[0] and "exclude" not in site.jobs("rollout-1")[-1].flags


@pytest.mark.parametrize("writer", ["learner-0", "evaluator-0"])
def test_a_role_that_hangs_after_the_orchestrator_is_done_is_replaced_all_the_same(site: Site, writer: str) -> None:
    """Nobody publishes a liveness table any more, and the run does not end without that role."""
    site.start_all()
    site.finish("orchestrator-0")
    site.silent |= {("orchestrator-0", 1), (writer, 1)}
    site.run_until(site.supervisor(), lambda: (writer, 2) in site.running())
    assert "heartbeat" in site.incidents("role_lost")[0]


def test_an_old_liveness_table_kills_nobody(site: Site) -> None:
    """It says `dead`, but its orchestrator is as silent as its supervisor was."""
    site.start_all()
    site.silent.add(("rollout-0", 1))
    site.move()
    site.silent = {("orchestrator-0", 1)}
    site.run_for(site.supervisor(), site.run.timing.lease_s - 2)
    assert site.running() == all_first_attempts(site)


def test_a_spent_budget_ends_with_the_log_and_the_next_one_starts_afresh(site: Site) -> None:
    site.start_all()
    site.fake.program = lambda job: (1.0, 9) if attempt_of(job)[0] == "learner-0" else None
    log = site.paths.logs("learner-0", 1 + site.profile.role_failures)
    log.mkdir(parents=True)
    (log / "7_0.out").write_text("CUDA error: device-side assert\n")
    with pytest.raises(NodesLost, match=r"exit code 9(.|\n)*device-side assert(.|\n)*miles cancel"):
        site.run_until(site.supervisor(), lambda: False)
    spent = len(site.records("intent", "learner-0"))
    assert spent == 1 + site.profile.role_failures
    site.fake.program = lambda job: None
    site.run_until(site.supervisor(), lambda: "learner-0" in {writer for writer, _ in site.running()})
    assert len(site.records("intent", "learner-0")) == spent + 1
    assert {attempt for writer, attempt in site.running() if writer != "learner-0"} == {1}


def test_what_costs_no_retry_is_still_backed_off(site: Site) -> None:
    """A machine that kills everything at once is not fed at each tick."""
    site.start_all()
    until = site.clock() + 300
    supervisor = site.supervisor()

    def preempt() -> None:
        for job in site.jobs("learner-0"):
            if job.state == "RUNNING":
                site.fake.preempt(job.job_id)
        if site.clock() >= until:
            supervisor.context.leave.set()

    site.on_sleep = preempt
    supervisor.run()
    assert len(site.records("intent", "learner-0")) < 15


@pytest.mark.parametrize(("state", "trained", "survives"), [
    ("waiting: version {steps}", False, True),
    ("evaluating: version {steps}", False, False),
    ("waiting: version {steps}", True, False),
])  # fmt: skip
def test_an_evaluator_may_die_often_while_it_only_waits(site: Site, state: str, trained: bool, survives: bool) -> None:
    """It has no progress then, and is not at fault; once its version is there it has no excuse."""
    steps = site.run.recipe.steps
    site.states["evaluator-0"] = state.format(steps=steps)
    site.start_all()
    for step in range(steps + 1 if trained else 1):
        site.train(step)
    site.fake.program = lambda job: (20.0, 9) if attempt_of(job)[0] == "evaluator-0" else None
    supervisor = site.supervisor()
    try:
        site.run_for(supervisor, 400)
    except NodesLost as lost:
        assert not survives and "evaluator-0" in str(lost)
    else:
        assert survives
    assert (len(site.records("intent", "evaluator-0")) > 2 + site.profile.role_failures) == survives


# --- ending ----------------------------------------------------------------------------------------------------------


def test_completed_means_that_no_job_is_left(site: Site) -> None:
    site.start_all()
    supervisor = site.supervisor()
    site.finish("learner-0", "orchestrator-0", "evaluator-0")
    closed = site.run_until(supervisor, lambda: False)
    assert closed is not None and closed.state == "COMPLETED"
    assert site.running() == set() and site.records("run_closed")[0].state == "COMPLETED"  # type: ignore[attr-defined]
    assert site.clock() >= 1000 + site.profile.drain_s


def test_a_superseded_job_that_ignores_its_cancel_delays_the_close(site: Site) -> None:
    site.start_all()
    hung = site.jobs("rollout-1")[0]
    site.silent.add(("rollout-1", 1))
    stubborn_until = site.clock() + 120
    cancel = site.fake._cancel_or_signal
    site.fake._cancel_or_signal = lambda job_id, signal: (  # type: ignore[method-assign]
        "" if job_id == hung.job_id and site.clock() < stubborn_until else cancel(job_id, signal)
    )
    site.run_until(site.supervisor(), lambda: ("rollout-1", 3) in site.running())
    site.paths.cancel_request.touch()
    closed = site.run_until(site.supervisor(), lambda: False)
    assert closed is not None and closed.state == "CANCELLED" and hung.state == "CANCELLED"


def test_a_request_to_cancel_is_noticed_within_a_second_and_ends_everything(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", scheduler_poll_s=60.0)
    supervisor = site.supervisor()
    asked_at: list[float] = []

    def ask() -> None:
        if len(site.running()) == len(site.writers) and not asked_at:
            site.paths.cancel_request.touch()
            asked_at.append(site.clock())
        if site.running() == set() and len(asked_at) == 1:
            asked_at.append(site.clock())

    site.on_sleep = ask
    closed = supervisor.run()
    assert closed is not None and closed.state == "CANCELLED"
    assert asked_at[1] - asked_at[0] <= 3
    assert len(site.fake.commands) < 60


def test_roles_that_slurm_forgot_are_retired_by_a_cancel(site: Site) -> None:
    site.start_all()
    site.fake.forget(site.jobs("learner-0")[0].job_id)
    site.paths.cancel_request.touch()
    closed = site.run_until(site.supervisor(), lambda: False)
    assert closed is not None and closed.state == "CANCELLED"
    leases = LeaseFolder(site.fs, site.paths.leases, site.run.run_id)
    leases.refresh()
    assert leases.newest("learner-0") == 2 and leases.read("learner-0", 2).kind == "tombstone"


def test_a_cancel_on_a_cluster_that_is_down_says_so_in_time(site: Site) -> None:
    site.start_all()
    site.paths.cancel_request.touch()
    site.fake.controller_up = False
    with pytest.raises(DeadlineExceeded, match="Unable to contact slurm controller"):
        site.supervisor(unreachable_s=60.0).run()


# --- draining --------------------------------------------------------------------------------------------------------


def drain(site: Site, leave_s: float = 30.0) -> Drained:
    """By a supervisor that finds the request; every job has left then."""
    request_drain(site.paths, DrainRequest(leave_s=leave_s))
    drained = site.run_until(site.supervisor(), lambda: False)
    assert isinstance(drained, Drained) and not [job for job in site.jobs() if job.state in LIVE]
    return drained


def test_a_drained_run_has_no_job_is_open_and_goes_on_at_once_and_without_an_incident(site: Site) -> None:
    site.start_all()
    assert drain(site).cancelled == ()
    assert {tuple(job.signals) for job in site.jobs()} == {("USR2",)} and site.records("run_closed") == []
    assert isinstance(read_outcome(site.run, site.paths), Drained) and read_ledger(site.run, site.paths).state == "DRAINED"
    mark = drain_mark(site.paths)
    assert lift_drain(site.paths, mark) and not lift_drain(site.paths, mark)
    began = site.clock()
    site.run_until(site.supervisor(), lambda: len(site.running()) == len(site.writers))
    assert site.clock() - began < 5 and all(attempt > 1 for _, attempt in site.running())
    assert site.records("incident") == [] and read_outcome(site.run, site.paths) is None
    assert read_ledger(site.run, site.paths).state == "RUNNING"


def test_a_request_to_drain_is_noticed_within_a_second_by_the_supervisor_that_lives(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", scheduler_poll_s=60.0)
    supervisor = site.supervisor()
    asked_at: list[float] = []

    def ask() -> None:
        if len(site.running()) == len(site.writers) and not asked_at:
            request_drain(site.paths, DrainRequest())
            asked_at.append(site.clock())
        if site.running() == set() and len(asked_at) == 1:
            asked_at.append(site.clock())

    site.on_sleep = ask
    assert isinstance(supervisor.run(), Drained)
    assert asked_at[1] - asked_at[0] <= 3


def test_a_request_outlives_its_supervisor_and_is_obeyed_again_until_it_is_lifted(site: Site) -> None:
    site.start_all()
    request_drain(site.paths, DrainRequest())
    dying = site.supervisor()
    site.fs.dead = True
    with pytest.raises(Killed):
        dying.run()
    assert site.running() == all_first_attempts(site)
    drain(site)
    before = site.submissions()
    assert isinstance(site.run_until(site.supervisor(), lambda: False), Drained)
    assert site.submissions() == before


def test_who_does_not_hear_is_named_then_cancelled(site: Site) -> None:
    site.start_all()
    (deaf,) = site.jobs("rollout-1")
    site.fake.deaf.add(deaf.job_id)
    began = site.clock()
    assert drain(site, leave_s=30.0).cancelled == ("rollout-1",)
    assert deaf.state == "CANCELLED" and 30 + site.profile.drain_s <= site.clock() - began < 60
    assert len(deaf.signals) > 1, "one signal may come before its role can hear it"
    (late,), (cancelled,) = site.incidents("drain_late"), site.incidents("drain_cancelled")
    assert late == "still there 30 s after they were asked to leave: rollout-1" and "40 s" in cancelled


def test_a_drain_waits_while_the_controller_is_away_and_cancels_what_is_queued(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", nodes=("n1", "n2"))
    site.run_for(site.supervisor(), 10)
    assert len(site.running()) == 2
    site.fake.controller_up = False
    request_drain(site.paths, DrainRequest())
    site.run_for(site.supervisor(), 20)
    assert read_outcome(site.run, site.paths) is None
    site.fake.controller_up = True
    drain(site)
    assert sorted(job.state for job in site.jobs()).count("CANCELLED") == len(site.writers) - 2


def test_a_job_that_was_taken_in_silence_is_not_left_behind_by_a_drain(site: Site) -> None:
    site.fake.submit_faults.append("timeout_accepted")
    site.fake.visible_after_s = 10.0
    site.run_for(site.supervisor(), 3)
    request_drain(site.paths, DrainRequest())
    assert isinstance(site.run_until(site.supervisor(), lambda: False), Drained)
    leases = LeaseFolder(site.fs, site.paths.leases, site.run.run_id)
    leases.refresh()
    for job in site.jobs():
        writer, attempt = attempt_of(job)
        assert job.state not in LIVE or leases.newest(writer) > attempt, "its job leaves as soon as it looks at its lease"


def test_a_learner_that_cannot_replay_ends_the_run(site: Site) -> None:
    site.start_all()
    site.finish("learner-0", outcome="needs_rollback", detail="shard x is gone")
    with pytest.raises(NeedsRollback, match="shard x is gone"):
        site.supervisor().run()
    assert site.running() == set()


def test_after_a_rollback_everybody_starts_again_and_old_words_on_ends_do_not_count(site: Site) -> None:
    site.start_all()
    site.train(0)
    site.train(1)
    site.finish("orchestrator-0", "evaluator-0")
    site.finish("learner-0", outcome="needs_rollback", detail="shard x is gone")
    with pytest.raises(NeedsRollback):
        site.supervisor().run()
    assert read_closed(site.run, site.paths) is not None
    site.fs = FlakyFS()
    context = take_epoch(site.context, takeover=False)
    rollback = roll_back(context)
    context.stop()
    assert (rollback.step, rollback.last_step, rollback.missing) == (0, 1, "shard x is gone")
    assert read_closed(site.run, site.paths) is None
    site.run_until(site.supervisor(takeover=True), lambda: len(site.running()) == len(site.writers))
    assert site.running() == {(writer, rollback.attempts[writer] + 1) for writer in site.writers}
    assert site.incidents("role_lost") == site.incidents("role_replaced") == []
    assert len(site.incidents("rolled_back")) == 1


def test_a_completion_record_that_is_seen_late_starts_nobody(site: Site) -> None:
    site.start_all()
    for job in site.jobs("learner-0"):
        site.fake.finish(job.job_id, 0)
    supervisor = site.supervisor()
    began = site.clock()

    def show_late() -> None:
        if site.clock() > began + 2 * site.run.timing.visibility_s - 0.5:
            site.finish("learner-0")
        if site.clock() > began + 20:
            supervisor.context.leave.set()

    site.on_sleep = show_late
    supervisor.run()
    assert len(site.jobs("learner-0")) == 1 and site.incidents("role_lost") == []


def test_a_tick_costs_replicas_not_their_square(tmp_path: Path) -> None:
    """Not replicas squared (I16)."""
    nodes = tuple(f"n{number}" for number in range(310))
    site = Site(tmp_path / "run", nodes=nodes, replicas=300)
    supervisor = site.supervisor()
    site.run_until(supervisor, lambda: len(site.running()) == len(site.writers))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    evidence = supervisor.evidence
    sys.setprofile(count)
    try:
        evidence.world(drain_s=1.0, max_failures=1)
    finally:
        sys.setprofile(None)
    assert calls < 60 * len(site.writers)


# --- surviving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/done", "leases", "liveness.json", "learner/steps", "heartbeats", "supervisor/journal", "/"])
def test_a_filesystem_that_fails_for_a_minute_ends_nothing(site: Site, path: str) -> None:
    site.start_all()
    site.train(1)
    supervisor = site.supervisor()
    began = site.clock()

    def fail_then_heal() -> None:
        elapsed = site.clock() - began
        site.fs.failing = {path} if 5 < elapsed < 65 else set()
        if elapsed > 80:
            supervisor.context.leave.set()

    site.on_sleep = fail_then_heal
    assert supervisor.run() is None
    assert site.running() == all_first_attempts(site)


def test_a_full_disk_starts_nothing_but_still_cancels(site: Site) -> None:
    site.start_all()
    supervisor = site.supervisor()
    until = site.clock() + 60
    hung = site.jobs("rollout-1")[0]
    site.silent.add(("rollout-1", 1))

    def fill() -> None:
        if site.ticks:
            site.fs.full = {"supervisor/journal"}
        if site.running() and not site.paths.cancel_request.exists() and site.clock() >= until:
            assert hung.state == "RUNNING" and len(site.jobs("rollout-1")) == 1, "a job without a durable intent"
            site.paths.cancel_request.touch()
        if site.clock() >= until + 20:
            supervisor.context.leave.set()

    site.on_sleep = fill
    assert supervisor.run() is None, "closed without a record"
    assert site.running() == set()
    site.on_sleep = lambda: None
    closed = site.run_until(site.supervisor(), lambda: False)
    assert closed is not None and closed.state == "CANCELLED"


def test_a_disk_that_runs_full_is_told_once(site: Site) -> None:
    supervisor = site.supervisor()
    free = [1 << 40]
    supervisor.evidence.free_bytes = lambda root: free[0]
    began = site.clock()

    def fill_and_empty() -> None:
        free[0] = 1 << 20 if site.clock() - began > 5 else 1 << 40
        if site.clock() - began > 30:
            supervisor.context.leave.set()

    site.on_sleep = fill_and_empty
    supervisor.run()
    assert site.incidents("disk_low") == [f"1 MiB are left for {site.paths.root}: make room, the roles wait for it and go on"]


def test_a_save_that_does_not_fit_the_warning_is_told_once(tmp_path: Path) -> None:
    site = Site(tmp_path, slurm={"signal_lead_s": 20})
    shard = site.paths.metrics("learner-0", 1)
    shard.parent.mkdir(parents=True)
    shard.write_text('{"event": "step", "checkpoint_s": 20.0}\n')
    site.run_for(site.supervisor(), 10)
    assert site.incidents("save_slower_than_grace") == []
    with shard.open("a") as file:
        file.write('{"event": "step", "checkpoint_s": 20.5}\n{"event": "step", "checkpoint_s": 31.0}\n')
    site.run_for(site.supervisor(), 30)
    (told,) = site.incidents("save_slower_than_grace")
    assert "took 31.0 s" in told and "signal_lead_s=20 s" in told


def test_a_damaged_learner_journal_does_not_keep_a_run_from_being_cancelled(site: Site) -> None:
    site.start_all()
    site.train(1)
    site.train(2)
    site.train(3)
    (segment,) = site.paths.journal("learner-0").glob("*.journal")
    data = bytearray(segment.read_bytes())
    data[data.index(b'"step":2')] ^= 1
    segment.write_bytes(bytes(data))
    site.run_for(site.supervisor(), 30)
    site.paths.cancel_request.touch()
    closed = site.run_until(site.supervisor(), lambda: False)
    assert closed is not None and closed.state == "CANCELLED"


def test_a_listener_that_is_gone_is_not_taken_for_a_filesystem(site: Site) -> None:
    """`miles run | head`: the pipe breaks while an incident is printed."""
    site.start_all()

    def broken(incident: object) -> None:
        raise BrokenPipeError

    supervisor = site.supervisor()
    supervisor._on_incident = broken
    site.fake.fail_node(site.jobs("rollout-0")[0].nodes[0])
    with pytest.raises(BrokenPipeError):
        site.run_for(supervisor, 30)


def test_a_worker_that_always_gets_further_keeps_its_retries() -> None:
    worker, learner = RoleRecord("rollout-0"), RoleRecord("learner-0")
    for role in (worker, learner):
        role.note_progress(500)
        role.failures = 2
        role.fold(Intent(writer=role.writer, attempt=2, token="", reason=""))
        role.note_progress(300)
    assert worker.failures == 0, "trajectories are counted anew by each attempt"
    assert learner.failures == 2, "steps are not"
