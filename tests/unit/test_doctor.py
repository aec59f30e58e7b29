"""What `miles doctor` makes of a site, of a filesystem and of two nodes; each bad finding says what to change."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.profile import ClusterProfile
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Snapshot
from cluster.slurm.site import Association, Partition, Shape, SiteFacts
from flows import doctor, doctor_nodes
from flows.doctor_files import Mount, examine_files, judge_mount, judge_writes, mount_of
from flows.doctor_slurm import judge
from flows.findings import Finding, findings_text
from miles_core.environments.sandbox_kind import SandboxKind
from miles_core.errors import RecipeError, SchedulerError
from tests.unit.fake_slurm import ManualClock


def profile(**changes: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "site", "kind": "slurm", "scheduler_poll_s": 30, **changes})


def partition(name: str = "main", **changes: Any) -> Partition:
    made = Partition(name, name == "main", "UP", math.inf, math.inf, None, None, (Shape(4, 8, 64000, 0, frozenset({"ib"})),))
    return replace(made, **changes)


def facts(*partitions: Partition, **changes: Any) -> SiteFacts:
    made = SiteFacts(
        version="slurm-wlm 22.05.8", ping="Slurmctld(primary) at x is UP",
        config={"AccountingStorageType": "accounting_storage/none", "MinJobAge": "300 sec", "TaskPlugin": "task/cgroup"},
        partitions={found.name: found for found in partitions or (partition(),)}, reservations=(),
    )  # fmt: skip
    return replace(made, **changes)


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in found}


GPU = partition("gpu", shapes=(Shape(2, 64, 512000, 4, frozenset()),))
LAB = Association("lab", frozenset({"normal"}), None, None)
DATABASE = {"AccountingStorageType": "accounting_storage/slurmdbd", "MinJobAge": "300 sec"}


def test_a_site_that_offers_everything_is_all_well() -> None:
    spot = partition("spot", preempts="REQUEUE", grace_s=60.0)
    found = list(judge(profile(resources={"learner": {"partition": "spot"}}), facts(partition(), spot)))
    assert set(verdicts(found).values()) == {"ok"}, found
    found = list(
        judge(profile(resources={"learner": {"partition": "gpu", "gpus": 4, "tasks": 4, "cpus": 4}}), facts(partition(), GPU))
    )
    assert set(verdicts(found).values()) == {"ok"}, found
    assert any("fits gpu: 1 x 16 CPUs, 4 GPUs" in finding.seen for finding in found)


@pytest.mark.parametrize(
    ("changes", "site", "name", "words"),
    [
        ({}, {"missing_commands": ("srun",)}, "slurm commands", "login node"),
        ({}, {"ping": "", "unknown": {"controller": "no answer in 20 s"}}, "slurmctld", "SLURM_CONF"),
        ({"resources": {"learner": {"partition": "gp"}}}, {}, "learner job", "one of main"),
        ({}, {"partitions": {"gpu": GPU}}, "learner job", "resources.learner.partition"),
        ({"pools": {"fast": {"partition": "no"}}}, {}, "rollout pool fast job", "pools.fast.partition"),
        ({}, {"partitions": {"main": partition(state="DOWN")}}, "grader job", "up"),
        ({}, {"partitions": {"main": partition(max_time_min=240.0)}}, "rollout job", "time_min"),
        ({"slurm": {"signal_lead_s": 60}, "resources": {"evaluator": {"time_min": 1}}}, {}, "evaluator job", "time_min"),
        ({"resources": {"learner": {"nodes": 3}}}, {"partitions": {"main": partition(max_nodes=2)}}, "learner job", "nodes"),
        ({"resources": {"learner": {"nodes": 9}}}, {}, "learner job", "lower resources.learner"),
        ({"resources": {"learner": {"gpus": 1}}}, {}, "learner job", "lower resources.learner"),
        ({"resources": {"learner": {"cpus": 4, "tasks": 4}}}, {}, "learner job", "lower resources.learner"),
        ({"resources": {"grader": {"mem_mb": 65000}}}, {}, "grader job", "lower resources.grader"),
        ({"slurm": {"constraint": "ib&fast"}}, {}, "learner job", "lower"),
        (
            {"slurm": {"account": "lab"}},
            {"partitions": {"main": partition(accounts=frozenset({"x"}))}},
            "learner job",
            "account",
        ),
        ({"slurm": {"qos": "hi"}}, {"partitions": {"main": partition(qos=frozenset({"lo"}))}}, "learner job", "slurm.qos"),
        ({"slurm": {"reservation": "r"}}, {"reservations": ("maint",)}, "reservation", "maint"),
        ({"slurm": {"account": "no"}}, {"config": DATABASE, "associations": (LAB,)}, "account", "one of: lab"),
        ({}, {"config": DATABASE, "associations": (replace(LAB, max_submit=3),)}, "account", "MaxSubmitJobs"),
        ({"slurm": {"qos": "no"}}, {"config": DATABASE, "qos": {"normal": math.inf}}, "QOS", "one of: normal"),
        ({"slurm": {"qos": "normal"}}, {"config": DATABASE, "qos": {"normal": 60.0}}, "QOS", "time_min"),
        (
            {"slurm": {"qos": "long", "account": "lab"}},
            {"config": DATABASE, "associations": (LAB,), "qos": {"long": math.inf}},
            "QOS",
            "one of: normal",
        ),
    ],
)
def test_what_cannot_work_is_bad_and_says_what_to_change(
    changes: dict[str, Any], site: dict[str, Any], name: str, words: str
) -> None:
    found = list(judge(profile(**changes), replace(facts(), **site)))
    wrong = [finding for finding in found if finding.verdict == "bad" and finding.name == name]
    assert wrong and words in wrong[0].fix, findings_text(found)


@pytest.mark.parametrize(
    ("changes", "site", "name", "verdict"),
    [
        ({"scheduler_poll_s": 1.0}, {}, "queries", "warn"),
        ({}, {"partitions": {"main": partition(preempts="CANCEL", grace_s=59.0)}}, "learner preemption", "warn"),
        ({"scheduler_poll_s": 120.0}, {}, "ended jobs", "warn"),
        ({}, {"config": {}}, "accounting", "unknown"),
        ({}, {"config": {}}, "ended jobs", "unknown"),
        ({}, {"config": {}}, "core binding", "unknown"),
        ({}, {"config": {"TaskPlugin": "task/none"}}, "core binding", "warn"),
        ({}, {"config": {"TaskPlugin": "task/affinity"}}, "core binding", "ok"),
        ({"slurm": {"devslurm": "/x"}}, {"config": {"TaskPlugin": "task/none"}}, "core binding", "ok"),
        ({}, {"version": ""}, "slurm version", "unknown"),
        ({}, {"partitions": None, "unknown": {"partitions": "denied"}}, "partitions", "unknown"),
        ({"slurm": {"account": "lab"}}, {}, "account and QOS", "unknown"),
        ({}, {"config": DATABASE}, "account", "unknown"),
        ({}, {"config": DATABASE}, "QOS", "unknown"),
        ({"slurm": {"constraint": "[a|b]"}}, {}, "learner job", "ok"),
        ({}, {"partitions": {"main": partition(shapes=())}}, "learner job", "ok"),
        ({"slurm": {"account": "lab"}}, {"config": DATABASE, "associations": (LAB,)}, "account", "ok"),
    ],
)
def test_what_is_worse_than_it_could_be_or_not_known(
    changes: dict[str, Any], site: dict[str, Any], name: str, verdict: str
) -> None:
    assert verdicts(list(judge(profile(**changes), replace(facts(), **site))))[name] == verdict


# --- the filesystem --------------------------------------------------------------------------------------------------

MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:40 / /shared rw,relatime - nfs4 server:/export rw,vers=4.2,hard,acregmax=60
31 22 0:41 / /shared/scratch\040disk rw - lustre mgs@tcp:/x rw,flock
32 22 0:42 / /dev/shm rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/shared/runs", "/shared", "nfs4"), ("/shared/scratch disk/runs", "/shared/scratch disk", "lustre"),
        ("/sharedness", "/", "ext4"), ("/dev/shm/x", "/dev/shm", "tmpfs"),
    ],
)  # fmt: skip
def test_the_mount_of_a_folder(path: str, point: str, kind: str) -> None:
    mount = mount_of(Path(path), MOUNTS)
    assert mount is not None and (mount.point, mount.kind) == (point, kind)


def test_no_mount_is_unknown() -> None:
    assert mount_of(Path("/x"), "rubbish\n") is None and judge_mount(profile(), None).verdict == "unknown"


NFS_TIMES = {"timing": {"visibility_s": 60, "lease_s": 300}}


@pytest.mark.parametrize(
    ("mount", "changes", "verdict", "words"),
    [
        (Mount("/", "ext4", frozenset()), {}, "warn", "nodes share"),
        (Mount("/", "ext4", frozenset()), {"kind": "local"}, "ok", ""),
        (Mount("/", "ext4", frozenset()), {"slurm": {"devslurm": "~/x"}}, "ok", ""),
        (Mount("/", "tmpfs", frozenset()), {"kind": "local"}, "warn", "disk"),
        (Mount("/s", "nfs4", frozenset({"soft"})), NFS_TIMES, "warn", "hard"),
        (Mount("/s", "nfs4", frozenset({"hard"})), {}, "warn", "visibility_s"),
        (Mount("/s", "nfs4", frozenset({"hard"})), NFS_TIMES, "ok", ""),
        (Mount("/s", "nfs", frozenset({"noac"})), {}, "ok", ""),
        (Mount("/s", "lustre", frozenset()), {}, "ok", ""),
    ],
)
def test_a_filesystem_and_the_times_of_the_profile(mount: Mount, changes: dict[str, Any], verdict: str, words: str) -> None:
    finding = judge_mount(profile(**changes), mount)
    assert finding.verdict == verdict and words in finding.fix


def test_this_filesystem_keeps_its_promises_and_nothing_stays(tmp_path: Path) -> None:
    found = list(examine_files(profile(kind="local"), tmp_path / "runs"))
    assert {"runs folder", "runs filesystem", "disk", "fsync", "write speed", "clock"} <= verdicts(found).keys()
    assert verdicts(found)["runs folder"] == "ok" and os.listdir(tmp_path / "runs") == []
    (tmp_path / "file").touch()
    (refused,) = examine_files(profile(kind="local"), tmp_path / "file" / "runs")
    assert refused.verdict == "bad" and "runs_root" in refused.fix


@pytest.mark.parametrize(
    ("changes", "measured", "verdict", "fix"),
    [
        ({}, 412.4, "ok", "set write_mib_s: 412 "),
        ({}, 3.14, "ok", "set write_mib_s: 3.1 "),
        ({"write_mib_s": 400}, 201.0, "ok", ""),
        ({"write_mib_s": 400}, 199.0, "warn", "set write_mib_s: 199,"),
        ({"kind": "local"}, 1.0, "ok", ""),
    ],
)
def test_a_measured_speed_says_what_the_profile_should_say(
    changes: dict[str, Any], measured: float, verdict: str, fix: str
) -> None:
    finding = judge_writes(profile(**changes), measured)
    assert finding.verdict == verdict and fix in finding.fix and bool(fix) == bool(finding.fix)


# --- two nodes -------------------------------------------------------------------------------------------------------


class TwoProcesses:
    """A scheduler whose job is two processes of this machine, each with the name of a node."""

    def __init__(self, clock: ManualClock, *, queued: bool = False, ranks: int = 2) -> None:
        self.clock, self.queued, self.ranks = clock, queued, ranks
        self.spec: JobSpec | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self.cancelled = False

    def submit(self, spec: JobSpec) -> str:
        self.spec = spec
        if not self.queued:
            self.processes = [
                subprocess.Popen(
                    spec.command, cwd=spec.run_dir / "code",
                    env={"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{rank}"},
                )
                for rank in range(self.ranks)
            ]  # fmt: skip
        return "7"

    def snapshot(self, run_id: str) -> Snapshot:
        if self.spec is None:
            return Snapshot(ok=True)
        made = JobView("7", run_id, "doctor-0", 1, "t", Phase.PENDING, state="PENDING", reason="Resources")
        if self.cancelled:
            return Snapshot(ok=True, jobs=(replace(made, phase=Phase.ENDED, cause=Cause.CANCELLED),))
        if self.queued:
            return Snapshot(ok=True, jobs=(made,))
        if any(process.poll() is None for process in self.processes):
            return Snapshot(ok=True, jobs=(replace(made, phase=Phase.RUNNING, state="RUNNING"),))
        return Snapshot(ok=True, jobs=(replace(made, phase=Phase.ENDED, state="COMPLETED", exit_code=0),))

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        self.cancelled = True
        for process in self.processes:
            process.kill()


def examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: object, clock: ManualClock, patience_s: float = 0.05
) -> list[Finding]:
    monkeypatch.setattr(doctor_nodes, "make_scheduler", lambda profile, run_dir: scheduler)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        for process in getattr(scheduler, "processes", ()):
            if process.poll() is None:
                try:
                    process.wait(patience_s)
                except subprocess.TimeoutExpired:
                    continue

    found = doctor_nodes.examine_nodes(profile(), tmp_path, clock=clock, sleep=sleep)
    assert os.listdir(tmp_path) == [], "its folder is gone"
    return found


def test_two_nodes_show_each_other_names_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    found = examined(tmp_path, monkeypatch, TwoProcesses(clock), clock)
    assert verdicts(found) == dict.fromkeys(("two nodes", "visibility of names", "visibility of lines", "node clocks"), "ok")
    assert "n0 and n1" in found[0].seen and "20 rounds" in found[1].seen


def test_a_job_that_stays_in_the_queue_is_cancelled_and_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    scheduler = TwoProcesses(clock, queued=True)
    (finding,) = examined(tmp_path, monkeypatch, scheduler, clock)
    assert finding.verdict == "unknown" and "(Resources)" in finding.seen and scheduler.cancelled


def test_nodes_that_do_not_see_the_folder_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    scheduler = TwoProcesses(clock, ranks=0)
    (finding,) = examined(tmp_path, monkeypatch, scheduler, clock)
    assert finding.verdict == "bad" and "COMPLETED 0" in finding.seen and str(tmp_path) in finding.fix


def test_a_job_that_slurm_refuses_is_unknown_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    scheduler = TwoProcesses(clock)

    def refuse(spec: JobSpec) -> str:
        raise SchedulerError("Slurm refused the job of doctor-0: More nodes than are there")

    monkeypatch.setattr(scheduler, "submit", refuse)
    (finding,) = examined(tmp_path, monkeypatch, scheduler, clock)
    assert finding.verdict == "unknown" and "More nodes" in finding.seen


@pytest.mark.parametrize(
    ("rounds", "error", "verdict"),
    [
        ([0.1, 0.4], "", "ok"), ([0.1, 1.5], "", "warn"), ([0.1, 3.0], "", "bad"),
        ([0.1], "line 2 was not seen in time", "bad"), ([], "the other rank was not seen in time", "bad"),
    ],
)  # fmt: skip
def test_rounds_against_the_profile(rounds: list[float], error: str, verdict: str) -> None:
    result = {"nodes": ["n1", "n2"], "names_s": rounds, "lines_s": [0.1], "clock_s": [5.0], "error": error}
    names, lines, clocks = doctor_nodes.judge_result(profile(timing={"visibility_s": 1, "lease_s": 9}), result)
    assert names.verdict == verdict and clocks.verdict == "warn" and "ahead" in clocks.seen
    assert lines.verdict == ("bad" if error else "ok")
    assert verdict == "ok" or not rounds or "visibility_s" in names.fix


def test_nodes_need_nodes() -> None:
    with pytest.raises(RecipeError, match="--nodes"):
        doctor.examine(profile(kind="local"), nodes=True)


# --- this machine ----------------------------------------------------------------------------------------------------


def test_a_weak_sandbox_is_said_with_what_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = SandboxKind("process group", (), missing=("the network can be reached",), reasons=("bwrap is not there",))
    monkeypatch.setattr(doctor, "sandbox_kind", lambda: weak)
    finding = doctor._sandbox()
    assert finding.verdict == "warn" and "network" in finding.seen and "bwrap is not there" in finding.fix


def test_limits_that_are_low_say_which_command_raises_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda number: (100, 100))
    files, processes = doctor._limits()
    assert (files.verdict, processes.verdict) == ("warn", "warn") and "ulimit -n" in files.fix and "ulimit -u" in processes.fix


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [({}, "ok"), ({"WANDB_MODE": "online"}, "warn"), ({"WANDB_MODE": "online", "WANDB_API_KEY": "x"}, "ok")],
)
def test_tracking_that_would_ask_for_a_key(tmp_path: Path, environ: dict[str, str], verdict: str) -> None:
    found: Iterator[Finding] = doctor._wandb({"NETRC": str(tmp_path / "none"), **environ})
    assert next(found).verdict == verdict


def test_pins_are_read_and_a_missing_file_pins_nothing(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# torch\ntorch==2.13.0\nReasoning-Gym==0.1.25  # x\nother>=1\n")
    assert doctor.read_pins(tmp_path / "requirements.txt") == {"torch": "2.13.0", "reasoning-gym": "0.1.25"}
    assert doctor.read_pins(tmp_path / "none") == {}


def test_the_text_counts_the_verdicts() -> None:
    text = findings_text([Finding("a", "ok", "fine"), Finding("b", "bad", "broken", "mend it")])
    assert text.splitlines()[-2:] == ["        -> mend it", "1 ok, 0 warn, 1 bad, 0 unknown"]
