"""`miles drain` on a real slurmctld: the signal reaches every role; who is deaf is named, then cancelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.epoch import supervisor_context, take_epoch
from cluster.profile import ClusterProfile
from cluster.scheduler import Phase
from cluster.schedulers import make_scheduler
from cluster.slurm.devslurm import DevSlurm
from cluster.supervise import Progress, Supervisor
from flows.ending import drain_run
from miles_core.run import all_writers
from miles_core.tracking.ledger import read_ledger
from tests.unit.sleeping_run import ROLES, SleepingRun

ROLE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR2, {handler})
pathlib.Path(sys.argv[2], "hears-" + pathlib.Path(sys.argv[0]).stem).touch()
time.sleep(600)
"""
LEAVES, DEAF = ROLE.format(handler="lambda *_: sys.exit(75)"), ROLE.format(handler="signal.SIG_IGN")


@pytest.fixture
def run(devslurm: DevSlurm, tmp_path: Path) -> SleepingRun:
    """Its learner does not hear the signal."""
    made = SleepingRun(tmp_path / "runs", tmp_path.name, lease_s=2.0)
    made.profile = ClusterProfile.model_validate({
        "name": "dev", "kind": "slurm", "runs_root": str(tmp_path / "runs"), "scheduler_poll_s": 0.5, "drain_s": 3,
        "timing": made.run.timing, "slurm": {"devslurm": str(Path(devslurm.env()["SLURM_CONF"]).parent)},
    })  # fmt: skip
    made.run = made.run.model_copy(update={"cluster": json.loads(made.profile.model_dump_json())})
    made.paths.run_file.write_text(made.run.model_dump_json())
    for role in ROLES:
        (made.paths.code / "miles_core" / "roles" / f"{role}.py").write_text(DEAF if role == "learner" else LEAVES)
    return made


def start_all(run: SleepingRun) -> None:
    """A supervisor that leaves once every role is ready for a signal."""
    context = take_epoch(lambda epoch: supervisor_context(run.run, run.paths, epoch), takeover=False)

    def look(progress: Progress) -> None:
        if len(list(run.paths.root.glob("hears-*"))) == len(progress.roles):
            context.leave.set()

    Supervisor(context, run.profile, make_scheduler(run.profile, run.paths.root), on_progress=look).run()


def test_roles_leave_by_themselves_and_a_deaf_one_is_named_then_cancelled(
    run: SleepingRun, devslurm: DevSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    start_all(run)
    assert drain_run(run.paths.root, 5.0, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["cancelled"]) == ("DRAINED", ["learner-0"])
    jobs = {job.writer: job for job in make_scheduler(run.profile, run.paths.root).snapshot(run.run.run_id).jobs}
    assert {job.phase for job in jobs.values()} == {Phase.ENDED} and jobs.keys() == set(all_writers(run.run.recipe))
    assert {job.exit_code for writer, job in jobs.items() if writer != "learner-0"} == {75}
    assert [incident.what for incident in read_ledger(run.run, run.paths).incidents] == ["drain_late", "drain_cancelled"]
