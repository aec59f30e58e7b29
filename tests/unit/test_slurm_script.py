"""The sbatch text: pinned line by line, run by a real shell, and refused where it cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from cluster.profile import Resources, SlurmSite
from cluster.scheduler import JobSpec
from cluster.slurm.script import NO_CODE_EXIT_CODE, sbatch_text
from miles_core.errors import RecipeError
from tests.unit.fake_slurm import parse_script

SPEC = JobSpec(
    run_id="night-1", run_dir=Path("/fs/runs/night-1"), writer="rollout-3", attempt=2, token="00ff",
    command=("/env/bin/python", "-u", "-m", "miles_core.roles.rollout", "--run-dir", "/fs/runs/night-1", "--replica", "3"),
    resources=Resources(cpus=4, time_min=90), log_dir=Path("/fs/runs/night-1/logs/rollout-3/attempt_2"),
    env={"PYTHONPATH": "/fs/runs/night-1/code", "NOTE": "it's a 'test' $HOME"}, exclude=("n7", "n2"),
)  # fmt: skip

PLAIN = """\
#!/bin/bash

# Parameters
#SBATCH --chdir=/fs/runs/night-1
#SBATCH --comment=miles:night-1:rollout-3:a2:00ff
#SBATCH --cpus-per-task=4
#SBATCH --exclude=n2,n7
#SBATCH --export=ALL
#SBATCH --job-name=miles-night-1-rollout-3
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/fs/runs/night-1/logs/rollout-3/attempt_2/%j_0.out
#SBATCH --signal=B:USR2@60
#SBATCH --time=90

# setup
export MKL_NUM_THREADS=4
export NOTE='it'"'"'s a '"'"'test'"'"' $HOME'
export OMP_NUM_THREADS=4
export PYTHONPATH=/fs/runs/night-1/code${PYTHONPATH:+:$PYTHONPATH}
cd /fs/runs/night-1/code || exit 66

# command
export SUBMITIT_EXECUTOR=slurm
exec /env/bin/python -u -m miles_core.roles.rollout --run-dir /fs/runs/night-1 --replica 3
"""


def test_the_text_is_pinned() -> None:
    assert version("submitit") == "1.5.4", "its sbatch writer is private: look at the text again, then pin the new version"
    assert sbatch_text(SPEC, SlurmSite()) == PLAIN


def test_every_site_fact_and_resource_becomes_a_flag() -> None:
    site = SlurmSite(
        account="lab", qos="low", reservation="r1", constraint="a100&ib", exclude=("n9", "n2"), signal_lead_s=120,
        setup=("module load cuda", "ulimit -n 4096"), extra={"licenses": "matlab:1", "exclusive": True, "mail_type": "END",
                                                             "contiguous": False, "nice": 100},
    )  # fmt: skip
    spec = replace(SPEC, resources=Resources(partition="gpu", nodes=2, tasks=4, cpus=8, gpus=4, mem_mb=64000, time_min=600))
    text = sbatch_text(spec, site)
    flags, command = parse_script(text)
    assert flags | {} == {
        "account": "lab", "qos": "low", "reservation": "r1", "constraint": "a100&ib", "exclude": "n2,n7,n9",
        "signal": "B:USR2@120", "licenses": "matlab:1", "exclusive": "", "mail-type": "END", "nice": "100",
        "partition": "gpu", "nodes": "2", "ntasks-per-node": "4", "cpus-per-task": "8", "gpus-per-node": "4", "mem": "64000M",
        "time": "600", "no-requeue": "", "open-mode": "append", "export": "ALL", "chdir": "/fs/runs/night-1",
        "comment": SPEC.comment, "job-name": SPEC.name, "output": f"{SPEC.log_dir}/%j_0.out",
    }  # fmt: skip
    assert command == SPEC.command
    assert text.index("module load cuda\nulimit -n 4096\n") < text.index("export OMP_NUM_THREADS=8")
    assert "export MILES_RANKS=8\n" in text
    [line] = [line for line in text.splitlines() if line.startswith("exec ")]
    assert line.startswith(
        f"exec srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --output={SPEC.log_dir}/%j_%t.out --open-mode=append --unbuffered "
        "--cpus-per-task=8 --kill-on-bad-exit=0 --wait=120 /env/bin/python -u -m"
    )


def test_the_role_may_set_its_threads() -> None:
    text = sbatch_text(replace(SPEC, env={"OMP_NUM_THREADS": "1"}), SlurmSite())
    assert "export OMP_NUM_THREADS=1\n" in text and "export MKL_NUM_THREADS=4\n" in text


def test_a_percent_sign_in_the_path_is_not_a_pattern() -> None:
    flags, _ = parse_script(sbatch_text(replace(SPEC, log_dir=Path("/fs/100%j done/logs")), SlurmSite()))
    assert flags["output"] == "/fs/100%%j done/logs/%j_0.out"


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("comment", "token"), ("account", "slurm.account"), ("cpus_per_task", "resources.<role>.cpus"), ("--time", "time_min"),
        ("signal", "signal_lead_s"), ("requeue", "supervisor"), ("output", "fixed place"),
    ],
)  # fmt: skip
def test_a_flag_that_is_ours_is_refused(key: str, fix: str) -> None:
    with pytest.raises(RecipeError, match=f"slurm.extra: {key} .*{fix}"):
        sbatch_text(SPEC, SlurmSite(extra={key: "x"}))


def test_every_flag_we_write_is_refused_from_the_site() -> None:
    site = SlurmSite(account="a", qos="b", reservation="c", constraint="d")
    spec = replace(SPEC, resources=Resources(partition="p", gpus=1, mem_mb=1, time_min=5))
    for name in parse_script(sbatch_text(spec, site))[0]:
        with pytest.raises(RecipeError, match=f"--{name} is set by us"):
            sbatch_text(spec, SlurmSite(extra={name: "x"}))


def test_a_lead_as_long_as_the_walltime_is_refused() -> None:
    spec = replace(SPEC, resources=Resources(time_min=1))
    with pytest.raises(RecipeError, match=r"signal_lead_s: 60 s .* rollout-3 \(1 min\)"):
        sbatch_text(spec, SlurmSite(signal_lead_s=60))
    assert "--signal=B:USR2@59" in sbatch_text(spec, SlurmSite(signal_lead_s=59))


# ---- by a real shell


def script_file(tmp_path: Path, *command: str, code: bool = True) -> Path:
    run_dir = tmp_path / "a run"
    (run_dir / "code" if code else run_dir).mkdir(parents=True)
    path = tmp_path / "job.sh"
    path.write_text(sbatch_text(replace(SPEC, run_dir=run_dir, log_dir=run_dir / "logs", command=command), SlurmSite()))
    return path


def test_the_exit_code_is_the_roles_own(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.environ['NOTE']); sys.exit(7)"
    done = subprocess.run(
        ["bash", script_file(tmp_path, sys.executable, "-c", program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"{tmp_path / 'a run' / 'code'} it's a 'test' $HOME\n"


def test_without_a_code_snapshot_nothing_runs(tmp_path: Path) -> None:
    path = script_file(tmp_path, "echo", "ran", code=False)
    done = subprocess.run(["bash", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (NO_CODE_EXIT_CODE, "")


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_script_is_one_to_the_role(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        "leave = lambda number, frame: sys.exit(number)\n"
        "signal.signal(signal.SIGUSR2, leave); signal.signal(signal.SIGTERM, leave)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    path = script_file(tmp_path, sys.executable, "-c", program)
    job = subprocess.Popen(["bash", path], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    os.kill(job.pid, number)
    started = time.monotonic()
    assert job.wait(timeout=60) == number and time.monotonic() - started < 60
    job.stdout.close()
