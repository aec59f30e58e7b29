"""The `miles` command at its border: exit codes and words, without a run. Whole runs are in tests/e2e."""

from __future__ import annotations

import errno
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.profile import ClusterProfile
from cluster.slurm.client import SlurmScheduler
from cluster.supervise import Supervisor
from flows import cli, launch
from flows.ending import wait_for_outcome
from flows.logs import print_logs
from miles_core.errors import DeadlineExceeded, MilesError, RecipeError, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import RunClosed
from miles_core.run import RunConfig
from tasks.prepare import ensure_run
from tests.protocol.simulation import TIMING, finished_run, simulated_recipe
from tests.unit.supervised_site import Site


@dataclass
class Outcome:
    """What a person sees."""

    code: int
    out: str
    err: str


Miles = Callable[..., Outcome]


@pytest.fixture
def miles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Miles]:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILES_RUNS", raising=False)

    def run(*argv: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["miles", *argv])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    yield run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


SLURM_SITE = """
name: mysite
kind: slurm
runs_root: {root}
resources: {{learner: {{partition: gpu, gpus: 1}}}}
slurm: {{account: lab, setup: ["module load cuda"], extra: {{licenses: "x:1"}}}}
"""


def site_file(tmp_path: Path, text: str = SLURM_SITE) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(text.format(root=tmp_path / "runs"))
    return str(path)


# --- without a cluster -----------------------------------------------------------------------------------------------


def test_jobs_prints_every_script_where_there_is_no_slurm(
    tmp_path: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = miles("jobs", "chain_sum", "--cluster", site_file(tmp_path))
    assert shown.code == 0, shown.err
    assert shown.out.count("#!/bin/bash") == shown.out.count("# ---- ") == 5
    assert "#SBATCH --account=lab" in shown.out and "module load cuda" in shown.out and "#SBATCH --licenses=x:1" in shown.out


def test_jobs_of_the_local_default(miles: Miles) -> None:
    assert "miles_core.roles.learner" in miles("jobs", "chain_sum").out


def test_run_without_slurm_is_one_sentence_before_anything_is_made(
    tmp_path: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = miles("run", "chain_sum", "--cluster", site_file(tmp_path))
    assert refused.code == 7 and refused.err.startswith("miles: cluster mysite needs Slurm")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "status", "logs", "cancel", "verify", "jobs", "runs", "doctor"])
def test_every_command_has_help(miles: Miles, command: str) -> None:
    shown = miles(command, "--help")
    assert shown.code == 0 and "Usage: miles" in shown.out and len(shown.out.splitlines()) > 4


def test_doctor_on_a_site_that_is_not_there_says_what_to_change(
    tmp_path: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MILES_CACHE", str(closed))
    shown = miles("doctor", "--json", "--cluster", site_file(tmp_path, SLURM_SITE.replace("{root}", "{root}/../closed/runs")))
    found = {finding["name"]: finding for finding in json.loads(shown.out)}
    assert shown.code == 1
    bad = {name for name, finding in found.items() if finding["verdict"] == "bad"}
    assert {"runs folder", "base model cache", "slurm commands", "slurmctld"} <= bad
    assert all(found[name]["fix"] for name in bad)


# --- runs and their state --------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return finished_run(tmp_path / "runs" / "one")


def test_runs_lists_what_it_can_and_names_what_it_cannot(tmp_path: Path, finished: Path, miles: Miles) -> None:
    for name, text in (("torn", "{"), ("open", "{}")):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "runs" / "open").chmod(0o777)
    shown = miles("runs")
    assert shown.code == 0
    lines = {line.split()[0]: line for line in shown.out.splitlines()}
    assert "COMPLETED" in lines["simulated-1"] and "UNREADABLE" in lines["torn"] and "chmod go-w" in lines["open"]


def test_status_shows_the_steps_while_a_learner_starts_again(finished: Path, miles: Miles) -> None:
    """Its lease is there, its first record is not yet: for people, what was trained was trained."""
    (finished / "leases" / "learner-0.a9").write_bytes((finished / "leases" / "learner-0.a1").read_bytes())
    assert json.loads(miles("status", "one", "--json").out)["steps"] == 4


def test_logs_end_with_a_broken_line_and_count_attempts_as_numbers(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(finished)
    run = RunConfig.model_validate_json(paths.run_file.read_bytes())
    for attempt in (2, 10):
        paths.logs("learner-0", attempt).mkdir(parents=True)
        (paths.logs("learner-0", attempt) / "1_0.out").write_text(f"whole {attempt}\nKilled")
    print_logs(run, paths, follow=True, role="learner")
    assert capsys.readouterr().out.splitlines() == [
        "learner-0 2| whole 2", "learner-0 2| Killed", "learner-0 10| whole 10", "learner-0 10| Killed",
    ]  # fmt: skip


def test_status_and_logs_of_a_run_that_has_only_begun(tmp_path: Path, model: Path, miles: Miles) -> None:
    ensure_run(simulated_recipe(), ClusterProfile(name="local", kind="local"), "new", model)
    assert "RUNNING: 0 steps" in miles("status", "new").out
    assert miles("logs", "new") == Outcome(0, "", "")


# --- leaving and cancelling ------------------------------------------------------------------------------------------


RUN = Supervisor.run


def leave_at_once(supervisor: Supervisor) -> RunClosed | None:
    """A supervisor whose person pressed Ctrl-C before it did anything."""
    supervisor.context.leave.set()
    return RUN(supervisor)


def run_arguments(model: Path, *more: str) -> list[str]:
    return ["run", "chain_sum", "--run-id", "x", "--set", "model.bootstrap=null", "--set", f"model.path={model}", *more]


def test_what_a_person_reads_after_ctrl_c_can_be_typed(
    tmp_path: Path, model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    left = miles(*run_arguments(model, "--set", "rollout.pools=[{name: main, replicas: 2}]"))
    assert left.code == 130
    again, end = [line.partition(mark)[2] for mark in ("Continue: ", "End: ") for line in left.out.splitlines() if mark in line]
    assert miles(*shlex.split(again)[1:]).code == 130, "the same recipe, settings and all"
    monkeypatch.setattr(Supervisor, "run", lambda self: leave_at_once(self) or RunClosed(state="CANCELLED"))
    monkeypatch.chdir(tmp_path.parent)
    assert miles(*shlex.split(end)[1:]).code == 0


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("CANCELLED", 10), ("NEEDS_ROLLBACK", 6)])
def test_the_exit_code_says_how_a_run_ended_also_when_it_is_only_read(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    closed = RunClosed.model_validate({"state": state, "detail": "because"})
    monkeypatch.setattr(launch, "read_closed", lambda run, paths: closed)
    assert miles(*run_arguments(model)).code == code


@pytest.mark.parametrize("error", [SchedulerError("the devslurm is not up"), DeadlineExceeded("no answer for 120 s")])
def test_a_cancel_that_reaches_nobody_says_that_the_request_stays(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, error: MilesError
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    miles(*run_arguments(model))

    def refuse(self: Supervisor) -> None:
        leave_at_once(self)
        raise error

    monkeypatch.setattr(Supervisor, "run", refuse)
    refused = miles("cancel", "x")
    assert refused.code == error.exit_code
    assert str(error) in refused.err and "The request stays" in refused.err
    assert Path("runs/x/supervisor/cancel_requested").exists()


def test_a_live_supervisor_that_does_not_end_the_run_is_waited_for_with_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="--takeover"):
        wait_for_outcome(lambda: None, "cancel", tmp_path, deadline_s=0.01)


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "make room"), (errno.EROFS, "read-only"), (errno.EIO, "healthy")])
def test_a_filesystem_that_refuses_is_one_message(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(self: Supervisor) -> None:
        raise OSError(number, "refused", "/runs/x/supervisor/journal")

    monkeypatch.setattr(Supervisor, "run", refuse)
    seen = miles(*run_arguments(model))
    assert seen.code == 1 and words in seen.err and "/runs/x/supervisor/journal" in seen.err
    assert "Traceback" not in seen.err and len(seen.err.strip().splitlines()) == 1


def test_flags_that_cannot_be_are_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", resources={"evaluator": {"time_min": 1}}, slurm={"signal_lead_s": 60})
    scheduler = SlurmScheduler(site.profile.slurm, run=site.fake.run)
    with pytest.raises(RecipeError, match="walltime of evaluator-0"):
        launch.check_scripts(site.run, site.paths, site.profile, scheduler)
    assert site.fake.commands == [] and site.run.timing == TIMING
