"""SlurmScheduler against a real slurmctld: the contract that FakeSlurm and the local scheduler keep, and what only it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.profile import ClusterProfile, Resources, SlurmSite
from cluster.scheduler import Cause, JobSpec, Phase
from cluster.schedulers import make_scheduler
from cluster.slurm.client import SlurmScheduler
from cluster.slurm.command import query_env
from cluster.slurm.devslurm import DevSlurm
from miles_core.errors import SchedulerError
from tests.unit.scheduler_contract import CONTRACT, DRAINED, FOREVER_S, ROLE, Harness


def log_of(spec: JobSpec, job_id: str, task: int = 0) -> str:
    path = spec.log_dir / f"{job_id}_{task}.out"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def harness(devslurm: DevSlurm, tmp_path: Path) -> Iterator[Harness]:
    lost: list[str] = []
    # A run id of its own: the cluster remembers the jobs of the tests before.
    run_dir = tmp_path / "a folder 100%j" / tmp_path.name

    def lose(node: str) -> None:
        lost.append(node)
        devslurm.kill_node(node)

    def make() -> SlurmScheduler:
        return SlurmScheduler(SlurmSite(), env=devslurm.env())

    yield Harness(
        run_dir=run_dir,
        make=make,
        unreachable=lambda: SlurmScheduler(SlurmSite(), env=dead_cluster(devslurm, tmp_path), sleep=lambda seconds: None),
        lose=lambda job: lose(job.nodes[0]),
        is_ready=lambda spec, job_id: "ready" in log_of(spec, job_id),
    )
    for node in lost:
        devslurm.start_node(node)
    scheduler = make()
    live = tuple(job.job_id for job in scheduler.snapshot(run_dir.name).jobs if job.phase is not Phase.ENDED)
    scheduler.cancel(live)


def dead_cluster(devslurm: DevSlurm, tmp_path: Path) -> dict[str, str]:
    """The same configuration with a port that nobody listens on."""
    lines = Path(devslurm.env()["SLURM_CONF"]).read_text().splitlines()
    changed = ["SlurmctldPort=1" if line.startswith("SlurmctldPort=") else line for line in lines]
    assert changed != lines
    path = tmp_path / "slurm.conf"
    path.write_text("\n".join(changed) + "\n")
    return {"SLURM_CONF": str(path)}


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Harness], None], harness: Harness) -> None:
    check(harness)


def test_the_warning_ahead_of_the_walltime_reaches_the_role(harness: Harness, devslurm: DevSlurm) -> None:
    """Slurm looks at limits twice a minute, so a lead of 55 s of one minute comes within half a minute."""
    scheduler = SlurmScheduler(SlurmSite(signal_lead_s=55), env=devslurm.env())
    job = harness.start(scheduler, replace(harness.spec(seconds=FOREVER_S), resources=Resources(time_min=1)))
    ended = harness.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, DRAINED)


def test_ranks_on_two_nodes_have_a_log_each_slurms_variables_one_exit_code_and_one_signal(harness: Harness) -> None:
    scheduler = harness.make()
    spec = replace(harness.spec(seconds=FOREVER_S), resources=Resources(nodes=2, tasks=2, time_min=5))
    place = "import os; print(*(os.environ[name] for name in ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'MILES_RANKS')))"
    spec = replace(spec, command=(*spec.command[:3], f"{place}\n{ROLE}", *spec.command[4:]))
    job = harness.start(scheduler, spec)
    assert len(job.nodes) == 2
    harness.until("all ranks", lambda: all("ready" in log_of(spec, job.job_id, rank) for rank in range(4)))
    assert [log_of(spec, job.job_id, rank).splitlines()[0] for rank in range(4)] == ["0 4 0 4", "1 4 1 4", "2 4 0 4", "3 4 1 4"]
    scheduler.cancel((job.job_id,), signal="USR2")
    ended = harness.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, DRAINED)
    job_id = scheduler.submit(replace(spec, command=(sys.executable, "-S", "-c", ROLE, "0", "7")))
    assert harness.until_phase(scheduler, job_id, Phase.ENDED).exit_code == 7


def test_the_job_sees_its_snapshot_and_its_environment_but_not_ours(
    harness: Harness, devslurm: DevSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_JOB_NAME", "not-this")
    monkeypatch.setenv("SLURM_CPU_BIND", "not-this")
    monkeypatch.setenv("FROM_THE_SHELL", "kept")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    names = ("SLURM_JOB_NAME", "SLURM_CPU_BIND", "FROM_THE_SHELL", "LC_ALL", "OMP_NUM_THREADS", "EXTRA", "SUBMITIT_EXECUTOR")
    code = f"import os; print(os.getcwd(), *(os.environ.get(name) for name in {names!r}), sep='|')"
    spec = replace(
        harness.spec(), command=(sys.executable, "-c", code), env={"EXTRA": "a 'b' $c"}, resources=Resources(cpus=3, time_min=5)
    )
    scheduler = SlurmScheduler(SlurmSite(setup=("export EXTRA=setup",), extra={"nice": 5}), env=devslurm.env())
    job_id = scheduler.submit(spec)
    assert harness.until_phase(scheduler, job_id, Phase.ENDED).cause is Cause.COMPLETED
    expected = (spec.run_dir / "code", spec.name, None, "kept", "C.UTF-8", 3, "a 'b' $c", "slurm")
    assert log_of(spec, job_id) == "|".join(map(str, expected)) + "\n"


@pytest.mark.parametrize(
    ("resources", "site", "words"),
    [
        ({"partition": "nope"}, {}, r"invalid partition specified: nope.*rollout, learner, grader, orchestrator, spot"),
        ({"mem_mb": 9_000_000}, {}, r"Requested node configuration is not available.*mem_mb=9000000"),
        ({}, {"constraint": "none"}, r"Invalid feature specification.*slurm.constraint"),
        ({}, {"reservation": "none"}, r"reservation is invalid.*slurm.reservation"),
        ({}, {"exclude": ("elsewhere",)}, r"Invalid node name specified.*slurm.exclude"),
        ({}, {"extra": {"no-such-flag": 1}}, r"unrecognized option '--no-such-flag=1'"),
    ],
)
def test_a_refusal_is_in_slurms_words_with_the_fix(
    harness: Harness, devslurm: DevSlurm, resources: dict[str, object], site: dict[str, object], words: str
) -> None:
    scheduler = SlurmScheduler(SlurmSite.model_validate(site), env=devslurm.env())
    spec = replace(harness.spec(), resources=Resources.model_validate({"time_min": 5, **resources}))
    with pytest.raises(SchedulerError, match=words) as refused:
        scheduler.submit(spec)
    assert not refused.value.ambiguous and not refused.value.transient
    # Slurm keeps a record of a job that it refused late; it never ran.
    assert all(job.phase is Phase.ENDED and job.nodes == () and job.exit_code is None for job in harness.jobs(scheduler))


def test_a_controller_that_is_away_is_unclear_for_submission_and_no_answer_for_queries(
    harness: Harness, devslurm: DevSlurm, tmp_path: Path
) -> None:
    scheduler = harness.unreachable()
    with pytest.raises(SchedulerError) as unclear:
        scheduler.submit(harness.spec())
    assert unclear.value.ambiguous
    with pytest.raises(SchedulerError) as failed:
        scheduler.cancel(("1",))
    assert failed.value.transient


def test_down_nodes_are_listed_and_the_others_counted(harness: Harness, devslurm: DevSlurm) -> None:
    scontrol(devslurm, "update", "nodename=n2", "state=drain", "reason=test")
    scheduler = harness.make()
    snapshot = scheduler.snapshot(harness.run_id)
    scontrol(devslurm, "update", "nodename=n2", "state=resume")
    assert snapshot.ok and snapshot.down_nodes == ("n2",) and snapshot.usable_nodes == len(devslurm.status()["nodes"]) - 1


def scontrol(devslurm: DevSlurm, *argv: str) -> None:
    subprocess.run(["scontrol", *argv], env=query_env(os.environ, devslurm.env()), check=True, timeout=60)


def test_the_profile_leads_to_this_cluster(devslurm: DevSlurm, tmp_path: Path) -> None:
    folder = str(Path(devslurm.env()["SLURM_CONF"]).parent)
    profile = ClusterProfile(name="dev", kind="slurm", slurm=SlurmSite(devslurm=folder))
    snapshot = make_scheduler(profile, tmp_path / "run").snapshot("run")
    assert snapshot.ok and snapshot.usable_nodes == len(devslurm.status()["nodes"])
