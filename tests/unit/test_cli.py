"""The `miles` command at its border: exit codes and words, without a run. Whole runs are in tests/e2e."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.drain import DrainRequest, request_drain
from cluster.profile import ClusterProfile
from cluster.slurm.client import SlurmScheduler
from cluster.supervise import Progress, Supervisor
from flows import cli, launch
from flows.ending import wait_for_outcome
from flows.logs import print_logs
from miles_core.errors import DeadlineExceeded, MilesError, NeedsRollback, RecipeError, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import Rollback, RunClosed
from miles_core.run import RunConfig
from tasks.prepare import ensure_run
from tests.e2e.runs import REPOSITORY
from tests.protocol.simulation import TIMING, simulated_recipe
from tests.unit.conftest import Miles, Outcome
from tests.unit.sleeping_run import ROLES, SleepingRun
from tests.unit.supervised_site import Site


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
    tmp_path: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = miles("jobs", "chain_sum", "--cluster", site_file(tmp_path), "--set", "environment.episode_deadline_s=120")
    assert shown.code == 0, shown.err
    assert shown.out.count("#!/bin/bash") == shown.out.count("# ---- ") == 5
    assert "#SBATCH --account=lab" in shown.out and "module load cuda" in shown.out and "#SBATCH --licenses=x:1" in shown.out
    assert "signal_lead_s=60 " in caplog.text and "episode_deadline_s=120:" in caplog.text


def test_jobs_of_the_local_default(miles: Miles) -> None:
    assert "miles_core.roles.learner" in miles("jobs", "chain_sum").out


def test_run_without_slurm_is_one_sentence_before_anything_is_made(
    tmp_path: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = miles("run", "chain_sum", "--cluster", site_file(tmp_path))
    assert refused.code == 7 and refused.err.startswith("miles: cluster mysite needs Slurm")
    assert not (tmp_path / "runs").exists()


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of every command there is."""
    for name, command in (group or typer.main.get_command(cli.app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


@pytest.mark.parametrize(("words", "command"), list(commands()), ids=["-".join(words) for words, _ in commands()])
def test_every_command_says_what_it_and_each_of_its_options_does(miles: Miles, words: tuple[str, ...], command: Any) -> None:
    shown = miles(*words, "--help")
    assert shown.code == 0 and f"Usage: miles {' '.join(words)}" in shown.out and command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []


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


def test_runs_lists_what_it_can_and_names_what_it_cannot(tmp_path: Path, finished: Path, miles: Miles) -> None:
    for name, text in (("torn", "{"), ("open", "{}")):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "runs" / "open").chmod(0o777)
    shown = miles("runs")
    assert shown.code == 0
    lines = {line.split()[0]: line for line in shown.out.splitlines()}
    assert "COMPLETED" in lines["one"] and "UNREADABLE" in lines["torn"] and "chmod go-w" in lines["open"]


def test_a_copied_run_is_listed_by_the_name_that_commands_take(tmp_path: Path, finished: Path, miles: Miles) -> None:
    shutil.copytree(finished, tmp_path / "runs" / "kept")
    assert [line.split()[0] for line in miles("runs").out.splitlines()] == ["kept", "one"]


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


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        "status one", "runs", "recipes", "recipes chain_sum", "jobs chain_sum", "verify one", "report one", "cancel one",
        "drain one", "doctor", "devslurm status --folder none",
    ],
)  # fmt: skip
def test_json_is_all_that_stdout_holds(finished: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, argv: str) -> None:
    monkeypatch.setattr("cluster.slurm.devslurm.slurm_available", lambda: None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    seen = miles(*argv.split(), "--json")
    assert json.loads(seen.out) and seen.out.startswith(("{", "[")) and "\x1b" not in seen.out + seen.err, seen.err


def test_a_run_left_in_json_prints_its_figures_alone_and_the_rest_on_stderr(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    left = miles(*run_arguments(model, "--json"))
    told = json.loads(left.out)
    assert left.code == 130 and (told["run_id"], told["state"], told["steps"]) == ("x", "RUNNING", 0)
    assert "Continue: " in left.err and told["root"] in left.err and told["verify"] == f"miles verify {told['root']}"
    again = miles("resume", "x", "--json")
    assert again.code == 130 and json.loads(again.out) == told


# --- pipes, terminals, Ctrl-C ----------------------------------------------------------------------------------------


def python(code: str, *argv: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
    )  # fmt: skip


RUN_CLI = "import sys; from flows.cli import main; main()"


@pytest.mark.parametrize("argv", [("jobs", "chain_sum"), ("recipes",), ("--help",)])
def test_a_reader_that_left_is_no_error_of_ours(argv: tuple[str, ...]) -> None:
    process = python(RUN_CLI, *argv)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 141


@pytest.mark.parametrize(
    "argv", ["status one", "status one -w", "logs one -f", "verify one", "report one", "runs", "drain one"]
)
def test_ctrl_c_is_130_and_no_words(finished: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, argv: str) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    for where in ("miles_core.run.check_trusted", "miles_core.paths.check_trusted"):
        monkeypatch.setattr(where, interrupt)
    seen = miles(*argv.split())
    assert seen.code == 130 and seen.out == "" and seen.err.strip() == ""


def test_no_colour_where_there_is_no_terminal(model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    left = miles(*run_arguments(model))
    assert left.code == 130 and "\x1b" not in left.out + left.err


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("miles status o", ["one"]), ("miles verify ", ["one"]), ("miles run chain_sum --cluster dev", ["devslurm"]),
        ("miles jobs chain_sum_m", ["chain_sum_moe"]),
        ("miles recipes shell_p", ["shell_puzzle"]), ("miles dra", ["drain"]),
        ("miles run ./mi", ["./mine.yaml"]), ("miles compare one o", ["one"]),
    ],
)  # fmt: skip
def test_the_shell_offers_runs_recipes_and_clusters(
    tmp_path: Path, finished: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setenv("_MILES_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    seen = miles()
    assert seen.code == 0 and seen.out.split() == offered


def test_completion_imports_nothing_large(tmp_path: Path) -> None:
    code = "import sys, atexit; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); " + RUN_CLI
    process = python(
        code, _MILES_COMPLETE="complete_bash", COMP_WORDS="miles status ", COMP_CWORD="2", MILES_RUNS=str(tmp_path)
    )
    modules = process.communicate(timeout=60)[1].split()
    assert process.returncode == 0 and "flows.completion" in modules
    assert {"torch", "prefect", "transformers", "pyarrow", "submitit", "rich.live"}.isdisjoint(modules)


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


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 2), ("CANCELLED", 10), ("NEEDS_ROLLBACK", 6)])
def test_resume_refuses_what_is_over_with_a_sentence(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    miles(*run_arguments(model))
    closed = RunClosed.model_validate({"state": state, "detail": "because"})
    monkeypatch.setattr("flows.session.read_closed", lambda run, paths: closed)
    refused = miles("resume", "x")
    assert refused.code == code and refused.err.startswith("miles: run x ") and refused.out == ""


def test_resume_with_rollback_says_what_is_dropped_then_goes_on(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    miles(*run_arguments(model))
    rollback = Rollback(number=1, step=4, last_step=6, attempts={}, groups=8, missing="shard x", unix_s=1.0)
    asked: list[bool] = []
    monkeypatch.setattr("flows.session.request_rollback", lambda paths, *, takeover: asked.append(takeover) or rollback)  # type: ignore[func-returns-value]
    gone_on = miles("resume", "x", "--rollback")
    assert gone_on.code == 130 and asked == [False]
    assert "steps 5 to 6 are abandoned, 8 groups are dropped; missing was shard x" in gone_on.out
    told = miles("resume", "x", "--rollback", "--takeover", "--json")
    assert asked[1:] == [True] and "8 groups" in told.err and json.loads(told.out)["run_id"] == "x"


def test_a_run_that_needs_a_rollback_says_how(model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(self: Supervisor) -> None:
        leave_at_once(self)
        raise NeedsRollback("run x needs a rollback: shard y is gone")

    monkeypatch.setattr(Supervisor, "run", give_up)
    told = miles(*run_arguments(model))
    assert (
        told.code == 6 and "shard y is gone" in told.err and f"miles resume {Path('runs/x').resolve()} --rollback" in told.err
    )


def test_resume_takes_a_corrected_profile_of_the_same_cluster_only(
    tmp_path: Path, model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ClusterProfile] = []
    monkeypatch.setattr(Supervisor, "run", lambda self: seen.append(self.profile) or leave_at_once(self))  # type: ignore[func-returns-value]
    miles(*run_arguments(model))
    corrected = tmp_path / "corrected.yaml"
    corrected.write_text("{name: local, kind: local, drain_s: 77}")
    assert miles("resume", "x").code == miles("resume", "x", "--cluster", str(corrected)).code == 130
    assert [profile.drain_s for profile in seen] == [30, 30, 77]
    corrected.write_text("{name: elsewhere, kind: local}")
    refused = miles("resume", "x", "--cluster", str(corrected))
    assert refused.code == 2 and "was started on cluster local" in refused.err


def test_a_drain_that_reaches_nobody_leaves_its_request_and_resume_lifts_it(
    model: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    miles(*run_arguments(model))

    def refuse(self: Supervisor) -> None:
        leave_at_once(self)
        raise SchedulerError("the cluster does not answer")

    monkeypatch.setattr(Supervisor, "run", refuse)
    refused = miles("drain", "x", "--within", "30")
    request = Path("runs/x/supervisor/drain_requested")
    assert refused.code == 7 and "The request stays" in refused.err and json.loads(request.read_text())["leave_s"] == 30
    monkeypatch.setattr(Supervisor, "run", leave_at_once)
    assert miles("resume", "x").code == 130 and not request.exists()
    take = launch.take_epoch

    def drained_meanwhile(*arguments: Any, **options: Any) -> Any:
        request_drain(RunPaths(Path("runs/x")), DrainRequest(leave_s=40))
        return take(*arguments, **options)

    monkeypatch.setattr(launch, "take_epoch", drained_meanwhile)
    assert miles("resume", "x").code == 130 and json.loads(request.read_text())["leave_s"] == 40


def test_draining_a_real_run_ends_its_jobs_and_says_how_to_go_on(tmp_path: Path, miles: Miles) -> None:
    """By a supervisor that lives, and by the command itself where there is none."""
    with SleepingRun(tmp_path / "runs", "sleepy") as sleeping:
        for by_whom in ("the live one", "the command"):
            leaving: list[Supervisor] = []
            thread = threading.Thread(target=supervise_until_told, args=(sleeping, leaving), daemon=True)
            thread.start()
            wait_until("all roles to run", lambda: len(sleeping.running_jobs()) == len(ROLES))
            if by_whom == "the command":
                leaving[0].context.leave.set()
                thread.join(30)
            drained = miles("drain", "sleepy", "--json")
            thread.join(30)
            assert drained.code == 0 and sleeping.live_jobs() == set(), drained.err
            told = json.loads(drained.out)
            assert (told["state"], told["cancelled"]) == ("DRAINED", [])
            assert shlex.split(told["resume"]) == ["miles", "resume", str(sleeping.paths.root)]
            again = miles("drain", "sleepy")
            assert again.code == 0 and "already drained" in again.out and "Continue: " in again.out
            assert "DRAINED" in miles("runs").out


def supervise_until_told(sleeping: SleepingRun, leaving: list[Supervisor]) -> None:
    """As `miles resume` does, in a thread."""

    def remember(progress: Progress) -> None:
        return None

    class Remembered(Supervisor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            leaving.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "Supervisor", Remembered)
        launch.supervise(sleeping.paths, sleeping.profile, launch.Hooks(remember), go_on=True)


def wait_until(what: str, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.05)


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


@pytest.mark.parametrize("lead_s", [119, 120])
def test_a_run_whose_rollout_is_warned_too_late_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lead_s: int
) -> None:
    site = Site(tmp_path / "run", slurm={"signal_lead_s": lead_s})
    launch.check_scripts(site.run, site.paths, site.profile, SlurmScheduler(site.profile.slurm, run=site.fake.run))
    assert caplog.text.count("signal_lead_s=119 ") == (lead_s == 119)


def test_flags_that_cannot_be_are_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    site = Site(tmp_path / "run", resources={"evaluator": {"time_min": 1}}, slurm={"signal_lead_s": 60})
    scheduler = SlurmScheduler(site.profile.slurm, run=site.fake.run)
    with pytest.raises(RecipeError, match="walltime of evaluator-0"):
        launch.check_scripts(site.run, site.paths, site.profile, scheduler)
    assert site.fake.commands == [] and site.run.timing == TIMING
