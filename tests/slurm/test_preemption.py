"""Every way in which a real slurmctld preempts, on one live run: REQUEUE, CANCEL with a grace, SUSPEND."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.scheduler import JobView
from cluster.slurm.command import query_env
from cluster.slurm.devslurm import DevSlurm
from cluster.supervisor import TOLD_TOO_EARLY_EXIT_CODE
from miles_core.records import Intent, JobEnded
from miles_core.runtime.context import DRAINED_EXIT_CODE
from miles_core.verify import verify_run
from tests.slurm.test_failures import Live, running

pytestmark = [pytest.mark.timeout(900)]

VICTIMS = {"rollout-0": "requeue", "rollout-1": "cancel", "rollout-2": "suspend"}
"""Replica and its pool; the pool's partition has the same name."""
PARTITIONS = """\
PartitionName=requeue PriorityTier=1 PreemptMode=REQUEUE
PartitionName=cancel PriorityTier=1 PreemptMode=CANCEL GraceTime=10
PartitionName=suspend PriorityTier=1 PreemptMode=SUSPEND OverSubscribe=FORCE:1
PartitionName=urgent PriorityTier=20 PreemptMode=OFF OverSubscribe=FORCE:1
"""
ROLE_MB = 200_000
"""Of the 256,000 MB of a node, so that each has its own: an exclusive job cannot be suspended for another."""


@pytest.fixture(scope="module")
def preempting(slurm_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevSlurm]:
    """A node for each of the 7 roles and one to spare. GANG resumes suspended jobs; only the whole cluster can have it."""
    cluster = DevSlurm(tmp_path_factory.mktemp("preempting"), num_nodes=8)
    cluster.up()
    try:
        conf = Path(cluster.env()["SLURM_CONF"])
        plain = conf.read_text()
        assert plain.count("\nPreemptMode=REQUEUE\n") == 1
        conf.write_text(plain.replace("\nPreemptMode=REQUEUE\n", "\nPreemptMode=SUSPEND,GANG\n") + PARTITIONS)
        cluster.kill_controller()
        cluster.start_controller()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def live(preempting: DevSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One run for all of them. Its long poll leaves a resumed job some seconds of life before it is cancelled."""
    pools = ", ".join(f"{{name: {pool}, replicas: 1, slots: 16}}" for pool in VICTIMS.values())
    profile = {
        "scheduler_poll_s": 5.0,
        "resources": {role: {"mem_mb": ROLE_MB} for role in ("orchestrator", "grader", "learner", "evaluator")},
        "pools": {pool: {"mem_mb": ROLE_MB, "partition": pool} for pool in VICTIMS.values()},
        "slurm": {},
    }
    folder = tmp_path_factory.mktemp("preemption")
    with running(folder, preempting, "preemption", "steps=100000", f"rollout.pools=[{pools}]", **profile) as run:
        yield run


@pytest.mark.parametrize("writer", ["rollout-0", "rollout-1"])
def test_a_preempted_replica_is_replaced_and_costs_no_retry(live: Live, writer: str) -> None:
    """Without a grace Slurm ends it as PREEMPTED; with one it is warned, and leaves by itself."""
    victim, others = running_job(live, writer), other_jobs(live, writer)
    preempt(live, victim, "sleep 1")
    [ended] = live.wait("its end", lambda: [end for end in live.records(JobEnded) if end.job_id == victim.job_id])
    assert ended.cause == "infrastructure" or ended.exit_code in (DRAINED_EXIT_CODE, TOLD_TOO_EARLY_EXIT_CODE), ended
    check_replaced(live, victim, others)


def test_a_suspended_replica_is_replaced_costs_no_retry_and_adds_nothing_when_it_goes_on(live: Live) -> None:
    """Nobody tells it anything: its heartbeat stops. It goes on when its successor's number is taken."""
    victim, others = running_job(live, "rollout-2"), other_jobs(live, "rollout-2")
    better = preempt(live, victim, "sleep 600")
    live.wait("the successor", lambda: live.watch.attempts()["rollout-2"] > victim.attempt)
    live.slurm("scancel", better)
    lost = [incident for incident in live.incidents("role_lost") if incident.writer == "rollout-2"]
    assert [incident for incident in lost if "suspended" in incident.detail] == lost != []
    check_replaced(live, victim, others)
    assert live.accepted_behind_the_cut("rollout-2", victim.attempt) == 0


def running_job(live: Live, writer: str) -> JobView:
    """Its newest job, once it has worked and is nowhere else."""
    attempt = live.watch.attempts()[writer]
    live.wait(f"work of {writer}", lambda: live.watch.works(writer, attempt))
    [job] = [job for job in live.jobs() if job.writer == writer]
    return job


def other_jobs(live: Live, writer: str) -> dict[str, str]:
    """Jobs of all roles but this one."""
    return {name: job_id for name, job_id in live.watch.job_ids().items() if name != writer}


def preempt(live: Live, victim: JobView, command: str) -> str:
    """A better job takes all cores of the victim's node; returns its id."""
    [node] = victim.nodes
    argv = ["sbatch", "--parsable", "--partition=urgent", "--cpus-per-task=4", "--mem=1000M", f"--nodelist={node}"]
    env = query_env(os.environ, live.devslurm.env())
    done = subprocess.run(
        [*argv, "--output=/dev/null", f"--wrap={command}"], env=env, check=True, timeout=60, capture_output=True, text=True
    )
    return done.stdout.strip()


def check_replaced(live: Live, victim: JobView, others: dict[str, str]) -> None:
    """Its successor works and has no twin, its node is not avoided, and no other role lost its job."""
    writer = victim.writer
    live.wait("the successor's work", lambda: live.watch.works(writer, victim.attempt + 1))
    live.wait("one process of each role", live.is_one_of_each)
    live.steps_on()
    assert [intent for intent in live.records(Intent) if intent.writer == writer and intent.exclude] == []
    assert other_jobs(live, writer) == others
    assert verify_run(live.root).faults == []
