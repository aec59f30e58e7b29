"""The hard failures on a real slurmctld: one after the other on one live run, which then completes; and short slices."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.faults.plan import load_plan
from cluster.faults.processes import role_processes
from cluster.faults.site import Site
from cluster.faults.watch import Watch
from cluster.job_spec import live_jobs
from cluster.profile import load_cluster
from cluster.scheduler import JobView, Phase
from cluster.slurm.command import query_env
from cluster.slurm.devslurm import DevSlurm
from cluster.supervisor import TOLD_TOO_EARLY_EXIT_CODE
from miles_core.paths import RunPaths
from miles_core.records import Incident, JobEnded, ShardSealed, WriterCut
from miles_core.run import read_run
from miles_core.runtime.context import DRAINED_EXIT_CODE
from miles_core.verify import verify_run
from miles_core.verify.joined import Joined
from miles_core.verify.streams import Files
from tests.e2e.runs import miles, start_miles, summary_of, wait_for
from tests.slurm.site import cluster_file, settings

pytestmark = [pytest.mark.timeout(900)]

STEPS = 40
UNSAVED_S = 1.5
"""Less than slurmctld takes to save a job that it has accepted."""


class Started:
    """`miles run` as the host of a run's supervisor."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self) -> None:
        raise AssertionError("nobody kills it here")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def has_ended(self) -> bool:
        return self.process.poll() is not None


@dataclass
class Live:
    """A run on the cluster, with what sees and breaks it."""

    root: Path
    folder: Path
    site: Site
    watch: Watch
    host: Started
    devslurm: DevSlurm

    def wait(self, what: str, condition: Any) -> Any:
        """As long as the run goes on."""
        output = self.folder / "output"

        def holds() -> Any:
            assert not self.host.has_ended(), output.read_text()
            return condition()

        return wait_for(what, holds, deadline_s=400.0)

    def steps_on(self) -> None:
        """Another step is trained."""
        step = self.watch.step()
        self.wait(f"a step after {step}", lambda: self.watch.step() > step)

    def records(self, kind: type) -> list[Any]:
        """Of the supervisor."""
        return [record for record in self.watch.supervisor_records() if isinstance(record, kind)]

    def incidents(self, what: str) -> list[Incident]:
        """Of one kind."""
        return [incident for incident in self.records(Incident) if incident.what == what]

    def wait_for_word_of(self, nodes: list[str]) -> None:
        """Until incidents name these nodes; then they are mended."""
        try:
            for node in nodes:
                self.wait(f"an incident of {node}", lambda node=node: self.names(node))  # type: ignore[misc]
        finally:
            for node in nodes:
                self.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    def names(self, node: str) -> bool:
        """An incident says that this node is down or drained."""
        return any(node in incident.detail for incident in self.incidents("node_down"))

    def jobs(self) -> tuple[JobView, ...]:
        """That have not ended."""
        return live_jobs(read_run(self.root)[0], self.site.scheduler)

    def slurm(self, *argv: str) -> None:
        """A command of the cluster's."""
        env = query_env(os.environ, self.devslurm.env())
        subprocess.run(argv, env=env, check=True, timeout=60, stdout=subprocess.DEVNULL)

    def is_one_of_each(self) -> bool:
        """Every role has one process, and it is of the newest attempt."""
        return self.processes() == Counter(self.watch.attempts().items())

    def joined(self) -> Joined:
        """Its accepted records."""
        run, paths = read_run(self.root)
        return Joined(Files(paths, run.run_id), run)

    def accepted_behind_the_cut(self, writer: str, attempt: int) -> int:
        """Records of an attempt that count although they lie behind its cut; fails where there is no cut."""
        joined = self.joined()
        [cut] = [
            record.cut for _, record in joined.orchestrator
            if isinstance(record, WriterCut) and (record.cut.writer, record.cut.attempt) == (writer, attempt)
        ]  # fmt: skip
        stream = joined.files.streams[writer][attempt]
        late = [record for end, record in stream.records if end > cut.bytes]
        shards = {record.path for record in late if isinstance(record, ShardSealed)}
        members = [m for batch in joined.batches.values() for group in batch.groups for m in group.members]
        return sum(record in late for record in stream.accepted) + sum(member.ref.shard in shards for member in members)

    def slices_that_worked(self, writer: str) -> list[JobEnded]:
        """Of a writer: those that made a shard and have ended."""
        worked = {attempt for attempt, record in self.joined().accepted(writer) if isinstance(record, ShardSealed)}
        return [record for record in self.records(JobEnded) if record.writer == writer and record.attempt in worked]

    def processes(self) -> Counter[tuple[str, int]]:
        """Living roles: how many processes of each (writer, attempt)."""
        found: Counter[tuple[str, int]] = Counter()
        for process in role_processes(RunPaths(self.root)):
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if "-m" not in words:
                continue
            role = words[words.index("-m") + 1].rpartition(".")[2]
            found[f"{role}-{words[words.index('--replica') + 1]}", int(words[words.index("--attempt") + 1])] += 1
        return found


@contextmanager
def running(folder: Path, devslurm: DevSlurm, run_id: str, *changes: str, **profile: Any) -> Iterator[Live]:
    """A run that trains; at the end no job and no process of it is left."""
    cluster = cluster_file(folder, devslurm, **profile)
    argv = ["run", "chain_sum", "--cluster", str(cluster), "--run-id", run_id, *settings(*changes)]
    host = Started(start_miles(folder, *argv))
    root = folder / "runs" / run_id
    try:
        wait_for("run.json", (root / "run.json").exists)
        run, paths = read_run(root)
        site, watch = Site(run, paths, load_cluster(str(cluster)), load_plan("slow"), host), Watch(run, paths)
        live = Live(root, folder, site, watch, host, devslurm)
        live.wait("the first step", lambda: watch.step() >= 1)
        yield live
    finally:
        if not host.has_ended():
            miles(folder, "cancel", str(root))
        host.process.wait(timeout=60)


@pytest.fixture(scope="module")
def live(devslurm: DevSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One run for all of them."""
    with running(tmp_path_factory.mktemp("failures"), devslurm, "failures", f"steps={STEPS}") as run:
        yield run


def test_a_controller_that_dies_behind_a_submission_loses_no_role_and_doubles_none(live: Live, devslurm: DevSlurm) -> None:
    """Such a job runs and Slurm may not know it, may start it a second time, or give its id to another job."""
    before = live.watch.job_ids()
    live.site.injection("rollout", "kill", 0).fire()
    live.wait("the successor's submission", lambda: live.watch.job_ids()["rollout-0"] != before["rollout-0"])
    time.sleep(UNSAVED_S)
    devslurm.kill_controller()
    devslurm.start_controller()
    # Its id may be that of the job which slurmctld forgot.
    live.slurm("sbatch", "--output=/dev/null", "--wrap=sleep 1")
    attempt = live.watch.attempts()["rollout-0"]
    live.wait("the replica's work", lambda: live.watch.works("rollout-0", attempt))
    live.steps_on()
    live.wait("one process of each role", live.is_one_of_each)
    live.wait_for_word_of(set_aside(devslurm))
    after = live.watch.job_ids()
    del before["rollout-0"], after["rollout-0"]
    assert after == before and verify_run(live.root).faults == []


def set_aside(devslurm: DevSlurm) -> list[str]:
    """Nodes that Slurm takes nothing on: it drains one that was told of two jobs with one id."""
    return [node for node, state in devslurm.status()["nodes"].items() if state.startswith(("drain", "down"))]


def test_a_drained_node_is_noticed_and_reported(live: Live, devslurm: DevSlurm) -> None:
    busy = {node for job in live.jobs() for node in job.nodes}
    idle = next(node for node, state in devslurm.status()["nodes"].items() if node not in busy and state == "idle")
    live.slurm("scontrol", "update", f"nodename={idle}", "state=drain", "reason=test")
    live.wait_for_word_of([idle])


def test_nobody_is_replaced_and_nobody_leaves_when_all_stand_still_for_twice_the_lease(live: Live) -> None:
    before, processes = live.watch.job_ids(), live.processes()
    stall = live.site.injection("all", "stall", 0)
    try:
        stall.fire()
        live.wait("all to stand still", stall.took)
        time.sleep(stall.hold_s)
    finally:
        stall.heal()
    live.steps_on()
    time.sleep(stall.settle_s)
    assert live.watch.job_ids() == before and live.processes() == processes


def test_a_node_that_stood_still_past_its_lease_adds_nothing_when_it_comes_back(live: Live) -> None:
    """It stands still in the middle of its work: a shard may be half made, an order half read."""
    attempt = live.watch.attempts()["rollout-0"]
    zombie = live.site.injection("rollout", "node_zombie", 0)
    began = time.monotonic()
    try:
        zombie.fire()
        live.wait("the successor's work", lambda: live.watch.works("rollout-0", attempt + 1))
        time.sleep(max(0.0, began + zombie.hold_s - time.monotonic()))
        assert live.processes()["rollout-0", attempt] == 1, "it stands still, and is not gone"
    finally:
        zombie.heal()
    live.wait("the zombie to leave", live.is_one_of_each)
    live.steps_on()
    assert verify_run(live.root).faults == []
    assert live.accepted_behind_the_cut("rollout-0", attempt) == 0


def test_the_run_completes(live: Live) -> None:
    assert live.host.process.wait(timeout=400) == 0, (live.folder / "output").read_text()
    summary, verified = summary_of(live.root), verify_run(live.root)
    assert summary["state"] == "COMPLETED" and summary["steps"] == STEPS and summary["groups"]["open"] == 0
    assert verified.faults == [] and not live.processes() and not live.jobs()


def running_slice(run: Live) -> list[JobView]:
    """Of replica 1."""
    return [job for job in run.jobs() if job.writer == "rollout-1" and job.phase is Phase.RUNNING]


def test_slices_of_a_minute_hand_over_and_lose_nothing_and_a_preemption_costs_no_retry(
    devslurm: DevSlurm, tmp_path: Path
) -> None:
    """Slurm looks at limits twice a minute: with this lead it warns 20 to 50 s after the start, and ends no job before 60 s."""
    pools = "rollout.pools=[{name: steady, replicas: 1, slots: 16}, {name: slices, replicas: 1, slots: 16}]"
    profile = {
        "pools": {"slices": {"time_min": 1, "partition": "spot"}},
        "slurm": {"extra": {"exclusive": True}, "signal_lead_s": 10},
    }
    with running(tmp_path, devslurm, "slices", "steps=100000", pools, **profile) as run:
        worked = run.wait("a slice that worked and left", lambda: run.slices_that_worked("rollout-1"))
        assert {record.exit_code for record in worked} == {DRAINED_EXIT_CODE}, worked
        left = ("rollout-1", worked[0].attempt)
        run.wait("the cut of what it left", lambda: left in run.watch.lost_samples())
        assert run.watch.lost_samples()[left] == 0
        [victim] = run.wait("a slice that runs", lambda: running_slice(run))
        [node] = victim.nodes
        run.slurm("sbatch", "--output=/dev/null", "--partition=learner", "--exclusive", f"--nodelist={node}", "--wrap=sleep 1")
        ended = run.wait("its end", lambda: [end for end in run.records(JobEnded) if end.job_id == victim.job_id])
        assert ended[0].cause == "infrastructure" or ended[0].exit_code in (DRAINED_EXIT_CODE, TOLD_TOO_EARLY_EXIT_CODE), ended
        run.wait("its successor", lambda: run.watch.attempts()["rollout-1"] > victim.attempt)
        attempts = run.watch.attempts()
        del attempts["rollout-1"]
        assert set(attempts.values()) == {1}
        assert verify_run(run.root).faults == []
