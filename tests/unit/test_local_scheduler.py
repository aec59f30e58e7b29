"""LocalScheduler: the contract, and what is its own: processes that outlive their supervisor, reboots, escalation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local import shim
from cluster.local.scheduler import START_DEADLINE_S, LocalScheduler
from cluster.profile import ClusterProfile, Resources
from cluster.scheduler import Cause, JobSpec, JobView, Phase
from cluster.schedulers import make_scheduler
from miles_core.errors import SchedulerError
from tests.unit.scheduler_contract import CONTRACT, FOREVER_S, Harness


def pid_of(run_dir: Path, job_id: str) -> int:
    return int((run_dir / "local_jobs" / f"{job_id}.pid").read_text().split()[0])


def log_of(spec: JobSpec, job_id: str, rank: int = 0) -> str:
    path = spec.log_dir / f"{job_id}_{rank}.out"
    return path.read_text() if path.exists() else ""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    run_dir = tmp_path / "run"

    def unreachable() -> LocalScheduler:
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "local_jobs").write_text("not a folder")
        return LocalScheduler(broken)

    yield Harness(
        run_dir=run_dir,
        make=lambda: LocalScheduler(run_dir),
        unreachable=unreachable,
        lose=lambda job: os.kill(pid_of(run_dir, job.job_id), signal.SIGKILL),
        is_ready=lambda spec, job_id: "ready" in log_of(spec, job_id),
    )
    kill_all(run_dir)


def kill_all(run_dir: Path) -> None:
    """Leaves no process behind; a job that has not started yet sees its cancel mark and does not start."""
    scheduler = LocalScheduler(run_dir)
    scheduler.cancel(tuple(job.job_id for job in scheduler.snapshot("run").jobs))
    for job in scheduler.snapshot("run").jobs:
        if job.phase is Phase.RUNNING:
            with suppress(ProcessLookupError):
                os.killpg(pid_of(run_dir, job.job_id), signal.SIGKILL)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Harness], None], harness: Harness) -> None:
    check(harness)


def test_jobs_outlive_a_killed_supervisor(harness: Harness, tmp_path: Path) -> None:
    spec = harness.spec(seconds=1.0, code=7)
    program = f"""
import os, signal, sys
from pathlib import Path
from cluster.local.scheduler import LocalScheduler
from cluster.profile import Resources
from cluster.scheduler import JobSpec
spec = JobSpec(run_id="run", run_dir=Path({str(spec.run_dir)!r}), writer="rollout-0", attempt=1, token={spec.token!r},
    command={spec.command!r}, resources=Resources(), log_dir=Path({str(spec.log_dir)!r}))
print(LocalScheduler(spec.run_dir).submit(spec), flush=True)
os.killpg(0, signal.SIGKILL)
"""
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, start_new_session=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    ended = harness.until_phase(harness.make(), done.stdout.strip(), Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, 7)
    assert log_of(spec, ended.job_id) == "ready\n"


def test_the_role_runs_from_the_code_snapshot_with_its_own_environment(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("PYTHONPATH", "/my/environments")
    (harness.run_dir / "code").mkdir(parents=True)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MILES_JOB_ID", "SLURM_JOB_ID", "EXTRA", "PYTHONPATH")
    code = f"import os; print(os.getcwd(), [os.environ.get(name) for name in {names!r}])"
    spec = replace(harness.spec(), command=(sys.executable, "-c", code), env={"EXTRA": "a b", "MKL_NUM_THREADS": "3"})
    spec = replace(spec, env={**spec.env, "PYTHONPATH": "/code"})
    spec = replace(spec, resources=spec.resources.model_copy(update={"cpus": 2}))
    scheduler = harness.make()
    job_id = scheduler.submit(spec)
    harness.until_phase(scheduler, job_id, Phase.ENDED)
    assert log_of(spec, job_id) == f"{harness.run_dir / 'code'} ['2', '3', '{job_id}', None, 'a b', '/code:/my/environments']\n"


def test_the_role_dies_with_its_keeper(harness: Harness) -> None:
    scheduler = harness.make()
    child = replace(harness.spec(), command=("sh", "-c", "echo $$; echo ready; exec sleep 600"))
    job = harness.start(scheduler, child)
    role = int(log_of(child, job.job_id).split()[0])
    assert shim.start_ticks(role) is not None
    os.kill(pid_of(harness.run_dir, job.job_id), signal.SIGKILL)
    harness.until("the role to die", lambda: shim.start_ticks(role) is None)
    assert harness.until_phase(scheduler, job.job_id, Phase.ENDED).cause is Cause.INFRASTRUCTURE


def test_a_killed_role_is_a_failure_with_the_signal_in_its_code(harness: Harness) -> None:
    scheduler = harness.make()
    job_id = scheduler.submit(replace(harness.spec(), command=("sh", "-c", "kill -9 $$")))
    ended = harness.until_phase(scheduler, job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, 128 + signal.SIGKILL)


def test_what_a_role_leaves_behind_is_killed(harness: Harness) -> None:
    scheduler = harness.make()
    spec = replace(harness.spec(), command=("sh", "-c", "sleep 600 & echo $!"))
    job_id = scheduler.submit(spec)
    assert harness.until_phase(scheduler, job_id, Phase.ENDED).cause is Cause.COMPLETED
    orphan = int(log_of(spec, job_id))
    harness.until("the orphan to die", lambda: shim.start_ticks(orphan) is None)


def test_a_command_that_is_not_there_is_a_failure_with_words_in_the_log(harness: Harness) -> None:
    scheduler = harness.make()
    spec = replace(harness.spec(), command=("/no/such/python", "-m", "x"))
    job_id = scheduler.submit(spec)
    ended = harness.until_phase(scheduler, job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, shim.NOT_STARTED_EXIT_CODE)
    assert "/no/such/python cannot be started" in log_of(spec, job_id)


def test_no_code_snapshot_is_refused_and_leaves_nothing(harness: Harness) -> None:
    spec = harness.spec()
    (harness.run_dir / "code").rmdir()
    scheduler = harness.make()
    with pytest.raises(SchedulerError, match="code snapshot") as refused:
        scheduler.submit(spec)
    assert not refused.value.ambiguous and not refused.value.transient
    assert harness.jobs(scheduler) == ()


def test_cancel_kills_after_five_seconds_and_not_before(harness: Harness) -> None:
    now = [time.monotonic()]
    scheduler = LocalScheduler(harness.run_dir, clock=lambda: now[0])
    stubborn = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    spec = replace(harness.spec(), command=("sh", "-c", stubborn))
    job = harness.start(scheduler, spec)
    scheduler.cancel((job.job_id,))
    now[0] += 4.9
    scheduler.cancel((job.job_id,))
    # Not a matter of time: whoever got KILL is dead before the call returns to a reader of /proc; a second look is enough.
    harness.sleep(0.2)
    still = harness.view(scheduler, job.job_id)
    assert still is not None and still.phase is Phase.RUNNING
    now[0] += 0.2
    LocalScheduler(harness.run_dir, clock=lambda: now[0]).cancel((job.job_id,))
    ended = harness.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.CANCELLED, None)


def test_a_cancel_before_the_start_is_obeyed(harness: Harness, tmp_path: Path) -> None:
    spec = harness.spec(seconds=FOREVER_S)
    scheduler = harness.make()
    record = scheduler._claim(spec)  # type: ignore[attr-defined]
    scheduler.cancel((record.job_id,))
    prefix = str(harness.run_dir / "local_jobs" / record.job_id)
    subprocess.run([sys.executable, shim.__file__, prefix, "1", prefix, *spec.command], start_new_session=True, timeout=60)
    ended = harness.view(scheduler, record.job_id)
    assert ended is not None and (ended.phase, ended.cause) == (Phase.ENDED, Cause.CANCELLED)


RANK = """
import os, signal, sys, time
rank = int(os.environ["SLURM_PROCID"])
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75 if rank == 0 else 3))
print("ready", rank, os.environ["SLURM_LOCALID"], os.environ["SLURM_NTASKS"], os.environ["MILES_RANKS"], flush=True)
time.sleep(float(sys.argv[1]) if rank == 0 else 600)
"""


def ranks_spec(harness: Harness, seconds: float) -> JobSpec:
    command = (sys.executable, "-S", "-c", RANK, str(seconds))
    return replace(harness.spec(), command=command, resources=Resources(tasks=3, time_min=5))


def test_ranks_have_slurms_variables_a_log_each_the_signal_and_one_exit_code(harness: Harness) -> None:
    scheduler, spec = harness.make(), ranks_spec(harness, FOREVER_S)
    job = harness.start(scheduler, spec)
    for rank in range(3):
        harness.until("a rank to start", lambda rank=rank: log_of(spec, job.job_id, rank) == f"ready {rank} {rank} 3 3\n")
    scheduler.cancel((job.job_id,), signal="USR2")
    ended = harness.until_phase(scheduler, job.job_id, Phase.ENDED)
    assert (ended.cause, ended.exit_code) == (Cause.FAILED, 75), "the highest code of all ranks"


def test_ranks_that_stay_behind_the_first_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "WAIT_S", 0.5)
    monkeypatch.setattr(os, "environ", os.environ | {"MILES_RANKS": "3"})
    keeper = shim.Shim(str(tmp_path / "1"), 3, str(tmp_path / "1"), [sys.executable, "-S", "-c", RANK, "0"])
    assert keeper._role() == 128 + signal.SIGKILL
    assert (tmp_path / "1_2.out").read_text() == "ready 2 2 3 3\n"


def test_a_signal_before_all_ranks_have_started_reaches_them_all(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"""
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
number = signal.sigwait([signal.SIGUSR1])
open({str(seen)!r} + os.environ["SLURM_PROCID"], "w").write(str(number))
"""
    keeper = shim.Shim(str(tmp_path / "1"), 2, str(tmp_path / "1"), [sys.executable, "-S", "-c", code])
    # Blocked signals stay blocked in children, so that it waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        keeper._on_signal(signal.SIGUSR1, None)
        assert keeper._role() == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    assert [seen.with_name(f"seen{rank}").read_text() for rank in (0, 1)] == [str(int(signal.SIGUSR1))] * 2


def test_the_script_of_several_ranks_starts_each(harness: Harness) -> None:
    text = harness.make().script(ranks_spec(harness, 0))
    assert "for rank in $(seq 0 2); do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=3 " in text


def test_a_claim_without_a_process_is_pending_then_lost(harness: Harness) -> None:
    now = [time.monotonic()]
    scheduler = LocalScheduler(harness.run_dir, clock=lambda: now[0])
    job_id = scheduler._claim(harness.spec()).job_id
    pending = harness.view(scheduler, job_id)
    assert pending is not None and pending.phase is Phase.PENDING
    now[0] += START_DEADLINE_S + 1
    lost = harness.view(scheduler, job_id)
    assert lost is not None and (lost.phase, lost.cause) == (Phase.ENDED, Cause.INFRASTRUCTURE)
    assert "never started" in lost.reason


def test_another_boot_is_a_lost_machine(harness: Harness) -> None:
    job = harness.start(harness.make(), harness.spec(seconds=FOREVER_S))
    edited = falsify(harness, job, "boot_id")
    successor = harness.make()
    lost = harness.view(successor, job.job_id)
    assert lost is not None and (lost.phase, lost.cause) == (Phase.ENDED, Cause.INFRASTRUCTURE)
    assert "started again" in lost.reason
    successor.cancel((job.job_id,))
    assert shim.start_ticks(pid_of(harness.run_dir, job.job_id)) is not None, "a stranger with that pid is left alone"
    edited()


def test_nothing_is_said_of_a_job_on_another_host_before_its_end(harness: Harness) -> None:
    """It may well live there: called lost, it would be given up while it works."""
    job = harness.start(harness.make(), harness.spec(seconds=FOREVER_S))
    edited = falsify(harness, job, "host")
    successor = harness.make()
    assert harness.view(successor, job.job_id) is None
    successor.cancel((job.job_id,))
    assert shim.start_ticks(pid_of(harness.run_dir, job.job_id)) is not None
    (harness.run_dir / "local_jobs" / f"{job.job_id}.exit").write_text("3")
    ended = harness.view(harness.make(), job.job_id)
    assert ended is not None and (ended.phase, ended.exit_code) == (Phase.ENDED, 3)
    (harness.run_dir / "local_jobs" / f"{job.job_id}.exit").unlink()
    edited()


def falsify(harness: Harness, job: JobView, key: str) -> Callable[[], object]:
    """Changes one field of a job's record; the result undoes it."""
    path = harness.run_dir / "local_jobs" / f"{job.job_id}.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {key: "elsewhere"}))
    return lambda: path.write_text(before)


def test_a_reused_pid_is_not_the_job(harness: Harness) -> None:
    job = harness.start(harness.make(), harness.spec(seconds=FOREVER_S))
    shim_pid = pid_of(harness.run_dir, job.job_id)
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (harness.run_dir / "local_jobs" / f"{job.job_id}.pid").write_text(f"{stranger.pid} 1")
    successor = harness.make()
    lost = harness.view(successor, job.job_id)
    assert lost is not None and lost.cause is Cause.INFRASTRUCTURE
    successor.cancel((job.job_id,))
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    os.killpg(shim_pid, signal.SIGKILL)


def test_ids_are_never_used_twice(harness: Harness) -> None:
    ids = [harness.make().submit(harness.spec()) for _ in range(3)]
    two = [harness.make(), harness.make()]
    ids += [scheduler.submit(harness.spec()) for scheduler in two for _ in range(2)]
    assert len(set(ids)) == len(ids)
    harness.until("all to end", lambda: all(job.phase is Phase.ENDED for job in harness.jobs(two[0])))
    assert [job.job_id for job in harness.jobs(two[0])] == ids


def test_two_supervisors_at_once_never_share_an_id(harness: Harness) -> None:
    class Blind(LocalScheduler):
        """Its listing is older than the other one's claim."""

        def _ids(self) -> list[str]:
            return []

    ids = [Blind(harness.run_dir).submit(harness.spec(writer)) for writer in ("rollout-0", "rollout-1")]
    assert len(set(ids)) == 2
    assert [job.writer for job in harness.jobs(harness.make())] == ["rollout-0", "rollout-1"]


def test_a_snapshot_makes_no_folder_and_an_unknown_signal_is_refused(tmp_path: Path) -> None:
    scheduler = make_scheduler(ClusterProfile(name="here", kind="local"), tmp_path / "run")
    assert scheduler.snapshot("run").ok and scheduler.snapshot("run").jobs == ()
    assert not (tmp_path / "run").exists()
    with pytest.raises(SchedulerError, match="USR9"):
        scheduler.cancel(("1",), signal="USR9")
