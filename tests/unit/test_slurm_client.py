"""SlurmScheduler over FakeSlurm: the contract, submission faults, failing queries, nodes; and the border to real processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from cluster.profile import ClusterProfile, Resources, SlurmSite
from cluster.scheduler import Cause, JobSpec, Phase
from cluster.schedulers import make_scheduler
from cluster.slurm.client import SlurmScheduler, slurm_for
from cluster.slurm.command import Answer, client_env, query_env, refusal, run_slurm
from miles_core.errors import SchedulerError
from tests.unit.fake_slurm import FakeJob, FakeSlurm, ManualClock
from tests.unit.scheduler_contract import CONTRACT, FOREVER_S, Harness


def sleep_and_exit(job: FakeJob) -> tuple[float, int]:
    """The contract's role: its last two arguments are seconds and exit code."""
    return float(job.command[-2]), int(job.command[-1])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def fake(clock: ManualClock) -> FakeSlurm:
    return FakeSlurm(clock, program=sleep_and_exit)


def scheduler_on(fake: FakeSlurm, clock: ManualClock, site: SlurmSite | None = None) -> SlurmScheduler:
    return SlurmScheduler(site or SlurmSite(), run=fake.run, sleep=clock.sleep, jitter=lambda: 0.5)


@pytest.fixture
def harness(tmp_path: Path, fake: FakeSlurm, clock: ManualClock) -> Harness:
    dead = FakeSlurm(clock)
    dead.controller_up = False
    return Harness(
        run_dir=tmp_path / "run",
        make=lambda: scheduler_on(fake, clock),
        unreachable=lambda: scheduler_on(dead, clock),
        lose=lambda job: fake.fail_node(job.nodes[0]),
        is_ready=lambda spec, job_id: True,
        clock=clock,
        sleep=clock.sleep,
    )


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Harness], None], harness: Harness) -> None:
    check(harness)


# ---- submission


@pytest.mark.parametrize("fault", ["timeout_accepted", "socket_accepted"])
def test_an_accepted_job_is_found_by_its_token_after_an_unclear_answer(harness: Harness, fake: FakeSlurm, fault: str) -> None:
    scheduler, spec = harness.make(), harness.spec(seconds=FOREVER_S)
    fake.submit_faults.append(fault)  # type: ignore[arg-type]
    fake.visible_after_s = 5.0
    with pytest.raises(SchedulerError, match="search for its token") as unclear:
        scheduler.submit(spec)
    assert unclear.value.ambiguous and unclear.value.transient
    assert harness.jobs(scheduler) == (), "it appears late"
    found = harness.until("the job", lambda: harness.jobs(scheduler))
    assert [job.token for job in found] == [spec.token]


@pytest.mark.parametrize("fault", ["timeout_lost", "socket_lost"])
def test_a_lost_submission_is_as_unclear_and_is_never_repeated_here(harness: Harness, fake: FakeSlurm, fault: str) -> None:
    fake.submit_faults.append(fault)  # type: ignore[arg-type]
    with pytest.raises(SchedulerError) as unclear:
        harness.make().submit(harness.spec())
    assert unclear.value.ambiguous
    assert [command[0] for command in fake.commands] == ["sbatch"] and fake.jobs == []


def test_a_controller_that_is_away_makes_an_unclear_answer(harness: Harness, fake: FakeSlurm) -> None:
    fake.controller_up = False
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller") as unclear:
        harness.make().submit(harness.spec())
    assert unclear.value.ambiguous


def test_an_answer_without_an_id_is_unclear(harness: Harness, clock: ManualClock) -> None:
    def silent(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        return Answer(0, "Submitted\n")

    with pytest.raises(SchedulerError, match="printed no id") as unclear:
        SlurmScheduler(SlurmSite(), run=silent).submit(harness.spec())
    assert unclear.value.ambiguous


def test_an_unknown_partition_is_refused_with_the_known_ones(harness: Harness) -> None:
    spec = replace(harness.spec("learner-0"), resources=Resources(partition="gpu", time_min=5))
    with pytest.raises(SchedulerError, match=r"invalid partition specified: gpu.*learner.partition.*main, spot") as refused:
        harness.make().submit(spec)
    assert not refused.value.ambiguous and not refused.value.transient


def test_a_job_refused_late_is_listed_as_failed_but_has_no_exit_code(harness: Harness) -> None:
    scheduler = harness.make()
    with pytest.raises(SchedulerError, match=r"not available.*nodes=9"):
        scheduler.submit(replace(harness.spec(), resources=Resources(nodes=9, time_min=5)))
    [job] = harness.jobs(scheduler)
    assert (job.phase, job.cause, job.reason) == (Phase.ENDED, Cause.FAILED, "BadConstraints")
    assert (job.nodes, job.exit_code) == ((), None)


REFUSALS = [
    ("Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
    ("Batch job submission failed: Invalid qos specification", "slurm.qos"),
    ("Batch job submission failed: Requested reservation is invalid", "slurm.reservation"),
    ("Batch job submission failed: Invalid feature specification", "slurm.constraint"),
    ("Batch job submission failed: Requested node configuration is not available", "gpus=0"),
    ("Memory specification can not be satisfied", "mem_mb=None"),
    ("Invalid generic resource (gres) specification", "resources.rollout"),
    ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "time_min is 5"),
    ("Batch job submission failed: Invalid node name specified", "slurm.exclude"),
    ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, size and/or time)", "over a limit"),
    ("sbatch: unrecognized option '--bogus=1'", "miles jobs"),
]


@pytest.mark.parametrize(("words", "fix"), REFUSALS)
def test_a_refusal_names_the_fix(harness: Harness, words: str, fix: str) -> None:
    error = refusal(harness.spec(), Answer(1, "", f"sbatch: error: {words}\n"), lambda: "a, b")
    assert words in str(error) and fix in str(error)
    assert not error.ambiguous and not error.transient


def test_a_limit_on_jobs_passes_with_time(harness: Harness) -> None:
    words = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting"
    error = refusal(harness.spec(), Answer(1, "", words), lambda: "")
    assert error.transient and not error.ambiguous


def test_a_log_folder_that_cannot_be_made_is_an_error_before_sbatch(harness: Harness, fake: FakeSlurm) -> None:
    spec = harness.spec()
    (harness.run_dir / "logs").write_text("")
    with pytest.raises(SchedulerError, match="log folder"):
        harness.make().submit(spec)
    assert fake.commands == []


# ---- queries


def test_one_query_lists_everything_and_codes_are_asked_once(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    ids = [scheduler.submit(harness.spec(f"rollout-{n}", code=n)) for n in range(4)]
    harness.until("all to end", lambda: all(job.phase is Phase.ENDED for job in harness.jobs(scheduler)))
    assert {job.job_id: job.exit_code for job in harness.jobs(scheduler)} == dict(zip(ids, range(4), strict=True))
    fake.commands.clear()
    for _ in range(8):
        assert scheduler.snapshot("run").ok
    names = [(command[0], "--jobs" in " ".join(command)) for command in fake.commands]
    assert names.count(("squeue", False)) == 8 and names.count(("squeue", True)) == 0 and names.count(("sinfo", False)) == 2


def test_a_busy_controller_is_asked_again(harness: Harness, fake: FakeSlurm, clock: ManualClock) -> None:
    scheduler = harness.make()
    scheduler.submit(harness.spec(seconds=FOREVER_S))
    fake.busy_queries = 2
    before = clock()
    assert len(scheduler.snapshot("run").jobs) == 1
    assert clock() - before == 4.0, "pauses of 1 and 3 s"


def test_a_query_that_fails_says_nothing_about_jobs(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    scheduler.submit(harness.spec(seconds=FOREVER_S))
    fake.busy_queries = 3
    failed = scheduler.snapshot("run")
    assert not failed.ok and failed.jobs == () and "Socket timed out" in failed.error
    assert len(harness.jobs(scheduler)) == 1


def test_a_failed_query_for_exit_codes_fails_the_snapshot(harness: Harness, fake: FakeSlurm, clock: ManualClock) -> None:
    """Else a role that drained would look as if it had failed for a reason of its own."""
    refused = False

    def no_codes(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        if refused and any(word.startswith("--jobs=") for word in argv):
            return Answer(1, "", "slurm_load_jobs error: Socket timed out on send/recv operation\n")
        return fake.run(argv, env=env, timeout_s=timeout_s, stdin=stdin)

    scheduler = SlurmScheduler(SlurmSite(), run=no_codes, sleep=clock.sleep)
    job_id = scheduler.submit(harness.spec(code=75))
    clock.sleep(2)
    refused = True
    assert not scheduler.snapshot("run").ok
    refused = False
    assert harness.until_phase(scheduler, job_id, Phase.ENDED).exit_code == 75


def test_a_job_forgotten_between_two_queries_has_no_code(harness: Harness, fake: FakeSlurm, clock: ManualClock) -> None:
    def forgetful(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        if any(word.startswith("--jobs=") for word in argv):
            fake.forget("1")
        return fake.run(argv, env=env, timeout_s=timeout_s, stdin=stdin)

    scheduler = SlurmScheduler(SlurmSite(), run=forgetful, sleep=clock.sleep)
    scheduler.submit(harness.spec(code=7))
    clock.sleep(2)
    [job] = harness.jobs(scheduler)
    assert (job.cause, job.exit_code) == (Cause.FAILED, None)


def test_a_vanished_job_is_not_listed(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    job_id = scheduler.submit(harness.spec(seconds=FOREVER_S))
    fake.forget(job_id)
    assert harness.jobs(scheduler) == ()


def test_a_reused_id_is_told_by_its_token(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    first = scheduler.submit(harness.spec("rollout-0", code=7))
    assert harness.until_phase(scheduler, first, Phase.ENDED).exit_code == 7
    fake.forget(first)
    fake.next_id = int(first)
    second = scheduler.submit(harness.spec("grader-0", code=9))
    assert second == first
    ended = harness.until_phase(scheduler, second, Phase.ENDED)
    assert (ended.writer, ended.exit_code) == ("grader-0", 9)


def test_preemption_is_infrastructure_and_a_requeued_job_waits(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    job_id = harness.start(scheduler, harness.spec(seconds=FOREVER_S)).job_id
    fake.requeue(job_id)
    waiting = harness.view(scheduler, job_id)
    assert waiting is not None and (waiting.phase, waiting.reason) == (Phase.PENDING, "BeginTime")
    harness.until_phase(scheduler, job_id, Phase.RUNNING)
    fake.preempt(job_id)
    lost = harness.view(scheduler, job_id)
    assert lost is not None and (lost.phase, lost.cause, lost.state) == (Phase.ENDED, Cause.INFRASTRUCTURE, "PREEMPTED")


def test_a_lost_node_is_seen_at_once_and_is_avoided_on_request(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    job = harness.start(scheduler, harness.spec(seconds=FOREVER_S))
    scheduler = harness.make()
    assert scheduler.snapshot("run").usable_nodes == 4, "asked at the first snapshot, not due again before the fifth"
    fake.fail_node(job.nodes[0])
    lost = scheduler.snapshot("run")
    assert (lost.down_nodes, lost.usable_nodes) == (job.nodes, 3)
    fake.restore_node(job.nodes[0])
    spec = replace(harness.spec(seconds=FOREVER_S), exclude=job.nodes)
    again = harness.until_phase(scheduler, scheduler.submit(spec), Phase.RUNNING)
    assert again.nodes != job.nodes


def test_nodes_are_asked_for_rarely_and_a_failure_leaves_them_unknown(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    for _ in range(9):
        scheduler.snapshot("run")
    assert [command[0] for command in fake.commands].count("sinfo") == 3
    scheduler = harness.make()
    fake.commands.clear()
    answers = iter([Answer(0, ""), *[Answer(1, "", "slurm_load_partitions: Socket timed out")] * 3])
    blind = SlurmScheduler(SlurmSite(), run=lambda argv, **rest: next(answers), sleep=lambda seconds: None)
    snapshot = blind.snapshot("run")
    assert snapshot.ok and snapshot.usable_nodes is None and snapshot.down_nodes == ()


def test_cancel_is_one_call_and_reports_a_controller_that_is_away(harness: Harness, fake: FakeSlurm) -> None:
    scheduler = harness.make()
    ids = tuple(scheduler.submit(harness.spec(f"rollout-{n}", seconds=FOREVER_S)) for n in range(3))
    fake.commands.clear()
    scheduler.cancel(ids)
    assert fake.commands == [("scancel", *ids)]
    fake.controller_up = False
    with pytest.raises(SchedulerError, match="scancel 1 2 3") as failed:
        scheduler.cancel(ids)
    assert failed.value.transient


# ---- the border


def command_file(folder: Path, name: str, text: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_run_slurm_gives_words_codes_and_input(tmp_path: Path) -> None:
    env = command_file(tmp_path, "sbatch", 'cat; echo "no $1" >&2; exit 3')
    answer = run_slurm(("sbatch", "a b"), env=env, timeout_s=30, stdin="text")
    assert answer == Answer(3, "text", "no a b\n") and answer.words == "no a b" and not answer.transient


def test_run_slurm_ends_at_its_timeout(tmp_path: Path) -> None:
    env = command_file(tmp_path, "squeue", "exec sleep 600")
    answer = run_slurm(("squeue",), env=env, timeout_s=0.3)
    assert answer.returncode is None and answer.transient


def test_run_slurm_without_the_command_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match=r"sbatch cannot be started.*login node"):
        run_slurm(("sbatch",), env={"PATH": str(tmp_path)}, timeout_s=30)
    snapshot = SlurmScheduler(SlurmSite(), env={"PATH": str(tmp_path)}).snapshot("run")
    assert not snapshot.ok and "squeue cannot be started" in snapshot.error


def test_a_job_around_us_does_not_leak_into_commands_or_jobs() -> None:
    base = {
        "SLURM_JOB_ID": "1", "SLURM_CPU_BIND": "x", "SBATCH_PARTITION": "x", "SRUN_DEBUG": "x", "PMIX_RANK": "0",
        "PMI_RANK": "0", "SQUEUE_FORMAT": "x", "SLURMD_NODENAME": "n1", "SINFO_FORMAT": "x", "SCANCEL_STATE": "x",
        "SLURM_CONF": "/etc/c", "SLURM_JWT": "t", "PATH": "/bin", "LC_ALL": "de_DE.UTF-8", "SLURMY": "mine",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/etc/c", "SLURM_JWT": "t", "PATH": "/bin", "LC_ALL": "de_DE.UTF-8", "SLURMY": "mine"}
    assert client_env(base, {}) == kept
    assert query_env(base, {"SLURM_CONF": "/dev/c"}) == {
        **kept, "SLURM_CONF": "/dev/c", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"
    }  # fmt: skip


def test_what_is_only_for_our_parsers_is_not_passed_on_to_jobs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    locales: dict[str, str] = {}

    def record(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        locales[argv[0]] = env["LC_ALL"]
        return Answer(0, "1\n")

    scheduler = SlurmScheduler(SlurmSite(), run=record)
    scheduler.submit(harness.spec())
    scheduler.snapshot("run")
    scheduler.cancel(("1",))
    assert locales == {"sbatch": "de_DE.UTF-8", "squeue": "C", "sinfo": "C", "scancel": "C"}


# ---- by profile


def slurm_profile(tmp_path: Path) -> ClusterProfile:
    return ClusterProfile(name="dev", kind="slurm", slurm=SlurmSite(devslurm=str(tmp_path / "dev")))


def test_no_sbatch_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match="cluster dev needs Slurm, but there is no `sbatch` in PATH"):
        make_scheduler(slurm_profile(tmp_path), tmp_path / "run")


def test_a_devslurm_that_is_not_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", command_file(tmp_path / "bin", "sbatch", "exit 1")["PATH"])
    assert shutil.which("sbatch") == str(tmp_path / "bin" / "sbatch")
    with pytest.raises(SchedulerError, match=r"is not up: there is no .*slurm.conf; start it with `miles devslurm up`"):
        make_scheduler(slurm_profile(tmp_path), tmp_path / "run")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "slurm.conf").write_text("")

    def down(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        assert list(argv) == ["scontrol", "ping"] and env["SLURM_CONF"] == str(tmp_path / "dev" / "slurm.conf")
        return Answer(1, "Slurmctld(primary) at head is DOWN\n*****\n** RESTORE SLURMCTLD DAEMON TO SERVICE **\n")

    with pytest.raises(SchedulerError, match=r"is not up: Slurmctld\(primary\) at head is DOWN; start it"):
        slurm_for(slurm_profile(tmp_path), run=down)


def test_a_devslurm_that_is_up_is_where_jobs_go(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", command_file(tmp_path / "bin", "sbatch", "exit 1")["PATH"])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "slurm.conf").write_text("")
    seen: list[str] = []
    fake = FakeSlurm(ManualClock())

    def record(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        seen.append(env["SLURM_CONF"])
        return fake.run(argv, env=env, timeout_s=timeout_s, stdin=stdin)

    profile = ClusterProfile(name="dev", kind="slurm", slurm=SlurmSite(devslurm="~/dev"))
    scheduler = slurm_for(profile, run=record)
    spec: JobSpec = harness.spec()
    assert scheduler.submit(spec) == "1" and scheduler.snapshot("run").ok
    assert set(seen) == {str(tmp_path / "dev" / "slurm.conf")} and len(seen) == 4


# --- for a person who waits ------------------------------------------------------------------------------------------


def test_expected_starts_of_what_the_scheduler_planned_and_none_where_it_does_not_answer(
    harness: Harness, fake: FakeSlurm, clock: ManualClock
) -> None:
    fake.queue_s = 1e9
    scheduler = scheduler_on(fake, clock)
    planned, unplanned = (scheduler.submit(harness.spec(writer)) for writer in ("rollout-0", "rollout-1"))
    fake.expected[planned] = "2026-11-30T16:08:38"
    starts = scheduler.expected_starts((planned, unplanned))
    assert list(starts) == [planned]
    assert datetime.fromtimestamp(starts[planned]).isoformat() == "2026-11-30T16:08:38", (
        "in this machine's zone, as squeue says"
    )
    queries = len(fake.commands)
    assert scheduler.expected_starts(()) == {} and len(fake.commands) == queries
    fake.controller_up = False
    assert scheduler.expected_starts((planned,)) == {}


def test_a_person_waits_for_one_short_query(fake: FakeSlurm, clock: ManualClock) -> None:
    timeouts: list[float] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        timeouts.append(timeout_s)
        return Answer(None, "", f"no answer in {timeout_s:.0f} s")

    hasty = SlurmScheduler(SlurmSite(), run=run, sleep=clock.sleep, patient=False)
    assert not hasty.snapshot("run").ok and timeouts == [5.0]
