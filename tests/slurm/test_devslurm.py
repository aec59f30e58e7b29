"""The throw-away cluster against the real slurmctld: it works, dies in parts, comes back, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.slurm.devslurm import DevSlurm, slurm_available
from cluster.slurm.devslurm_config import Layout
from cluster.slurm.devslurm_processes import wait_until
from miles_core.errors import SchedulerError

DEADLINE_S = 60.0


@pytest.fixture
def own() -> Iterator[Callable[[DevSlurm], DevSlurm]]:
    """Takes the test's own cluster in charge: it is stopped at the end, also of a failed test."""
    clusters: list[DevSlurm] = []

    def take(cluster: DevSlurm) -> DevSlurm:
        clusters.append(cluster)
        return cluster

    yield take
    for cluster in clusters:
        cluster.down()


@pytest.fixture
def small(tmp_path: Path, own: Callable[[DevSlurm], DevSlurm]) -> DevSlurm:
    """A cluster of two nodes that the test may break."""
    cluster = own(DevSlurm(tmp_path / "c", num_nodes=2))
    cluster.up()
    return cluster


def client(cluster: DevSlurm, *argv: str) -> str:
    env = {**os.environ, **cluster.env()}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


def submit(cluster: DevSlurm, script: str, *options: str) -> str:
    out = cluster.status()["folder"] + "/job-%j.out"
    return client(cluster, "sbatch", "--parsable", f"--output={out}", *options, "--wrap", script).strip()


def state(cluster: DevSlurm, job_id: str) -> str:
    return client(cluster, "squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T").strip()


def wait_for_state(cluster: DevSlurm, job_id: str, wanted: str) -> None:
    wait_until(f"job {job_id} to be {wanted}", DEADLINE_S, lambda: state(cluster, job_id) == wanted)


def wait_for_file(path: Path) -> None:
    wait_until(f"{path}", DEADLINE_S, path.exists)


def processes_naming(text: Path | str) -> list[str]:
    """Command lines of all living processes that have the text in their arguments or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes()
                known = words + (folder / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if str(text).encode() in known:
                found.append(words.decode(errors="replace").replace("\0", " "))
    return found


def test_a_job_completes_and_sees_the_same_files_and_home(devslurm: DevSlurm, tmp_path: Path) -> None:
    job_id = submit(devslurm, f'echo "$HOME" > {tmp_path}/home')
    wait_for_state(devslurm, job_id, "COMPLETED")
    assert (tmp_path / "home").read_text().strip() == os.environ["HOME"]


def test_a_step_runs_on_every_node_at_once(devslurm: DevSlurm) -> None:
    names = client(devslurm, "srun", "--nodes=7", "--partition=learner", "sh", "-c", "echo $SLURMD_NODENAME").split()
    assert sorted(names) == [f"n{i}" for i in range(1, 8)]


def test_jobs_of_one_node_get_different_gpus(devslurm: DevSlurm) -> None:
    argv = ("srun", "--exact", "--ntasks=2", "--gpus-per-task=2", "--nodelist=n2", "sh", "-c", "echo $SLURM_STEP_GPUS")
    one, other = client(devslurm, *argv).split()[:2]
    assert {"0", "1", "2", "3"} == set(one.split(",")) | set(other.split(","))


def test_status_is_json_and_up_on_a_healthy_cluster_changes_nothing(devslurm: DevSlurm) -> None:
    before = devslurm.status()
    job_id = submit(devslurm, "sleep 300")
    wait_for_state(devslurm, job_id, "RUNNING")
    DevSlurm(Path(before["folder"])).up()
    after = devslurm.status()
    assert state(devslurm, job_id) == "RUNNING"
    client(devslurm, "scancel", job_id)
    assert json.loads(json.dumps(after))["slurmctld"] == before["slurmctld"]
    assert after["up"] and after["jobs"] >= 1


def test_two_clusters_live_side_by_side(devslurm: DevSlurm, small: DevSlurm) -> None:
    assert client(small, "srun", "--nodes=2", "echo", "second").split() == ["second"] * 2
    assert client(devslurm, "srun", "--nodes=3", "echo", "first").split() == ["first"] * 3
    small.down()
    assert processes_naming(small.status()["folder"]) == []
    assert devslurm.status()["up"]


def test_a_killed_node_takes_its_processes_along_and_comes_back(small: DevSlurm, tmp_path: Path) -> None:
    # The namespace is also the node's hostname; without one a process that drops its environment may escape.
    clean = "env -i" if client(small, "srun", "--nodelist=n2", "hostname").strip() == "n2" else ""
    marker = f"77{os.getpid()}"
    script = f"setsid nohup {clean} sleep {marker} & touch {tmp_path}/begun; exec sleep 300"
    job_id = submit(small, script, "--no-requeue", "--nodelist=n2")
    wait_for_file(tmp_path / "begun")
    wait_until("the detached process", DEADLINE_S, lambda: f"sleep {marker} " in processes_naming(marker))
    small.kill_node("n2")
    assert f"sleep {marker} " not in processes_naming(marker)
    wait_for_state(small, job_id, "NODE_FAIL")
    small.start_node("n2")
    assert client(small, "srun", "--nodelist=n2", "echo", "back").strip() == "back"


def test_a_stopped_node_stands_still_until_it_is_continued(small: DevSlurm, tmp_path: Path) -> None:
    ticks = tmp_path / "ticks"
    submit(small, f"while sleep 0.05; do echo >> {ticks}; done", "--nodelist=n1")
    wait_for_file(ticks)
    small.stop_node("n1")
    size_bytes = ticks.stat().st_size
    assert client(small, "srun", "--nodelist=n2", "echo", "other").strip() == "other"
    assert ticks.stat().st_size == size_bytes
    small.continue_node("n1")
    wait_until("the job to go on", DEADLINE_S, lambda: ticks.stat().st_size > size_bytes)


def test_jobs_outlive_the_controller(small: DevSlurm, tmp_path: Path) -> None:
    end = tmp_path / "end"
    job_id = submit(small, f"while [ ! -e {end} ]; do sleep 0.1; done")
    wait_for_state(small, job_id, "RUNNING")
    (tmp_path / "running").touch()
    # What slurmctld did not save is lost with it, and it saves some time after a change: make one and wait for the file.
    client(small, "scontrol", "update", f"jobid={job_id}", "comment=running")
    saved, running_ns = tmp_path / "c" / "state" / "job_state", (tmp_path / "running").stat().st_mtime_ns
    wait_until("slurmctld to save the job", DEADLINE_S, lambda: saved.exists() and saved.stat().st_mtime_ns > running_ns)
    small.kill_controller()
    assert not [line for line in processes_naming(tmp_path / "c") if "slurmctld" in line]
    assert not small.status()["up"] and small.status()["slurmctld"] is None
    small.start_controller()
    assert state(small, job_id) == "RUNNING"
    end.touch()
    wait_for_state(small, job_id, "COMPLETED")


def test_down_leaves_no_process_and_up_continues_with_the_state(small: DevSlurm, tmp_path: Path) -> None:
    marker = f"78{os.getpid()}"
    job_id = submit(small, f"setsid nohup sleep {marker} & touch {tmp_path}/begun; exec sleep 300")
    wait_for_file(tmp_path / "begun")
    small.down()
    small.down()
    assert processes_naming(small.status()["folder"]) == [] and processes_naming(marker) == []
    assert not small.status()["up"]
    small.up()
    assert state(small, job_id) == "CANCELLED"
    assert int(submit(small, "true")) == int(job_id) + 1


def test_up_mends_what_a_crash_left(small: DevSlurm) -> None:
    for name in ("n1", "n2"):
        small.kill_node(name)
    small.kill_controller()
    small.up()
    assert small.status()["nodes"] == {"n1": "idle", "n2": "idle"}
    assert client(small, "srun", "--nodes=2", "echo", "again").split() == ["again"] * 2


def test_down_never_hits_a_process_that_got_a_recorded_id(small: DevSlurm, tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "300"])
    record = tmp_path / "c" / "processes" / "slurmctld.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"pid": stranger.pid}))
    small.down()
    survived = stranger.poll() is None
    stranger.kill()
    stranger.wait()
    assert survived
    assert processes_naming(tmp_path / "c") == []


def test_down_spares_a_shell_that_only_points_at_the_cluster(small: DevSlurm) -> None:
    shell = subprocess.Popen(["sleep", "300"], env={**os.environ, **small.env()})
    small.down()
    survived = shell.poll() is None
    shell.kill()
    shell.wait()
    assert survived


def test_a_folder_too_deep_for_sockets_works_and_is_cleaned(tmp_path: Path, own: Callable[[DevSlurm], DevSlurm]) -> None:
    folder = tmp_path / ("deep" * 25)
    outside = Layout(folder, os.getuid()).socket_dir
    cluster = own(DevSlurm(folder, num_nodes=1))
    cluster.up()
    assert client(cluster, "srun", "echo", "deep").strip() == "deep"
    assert outside.parent == Path("/tmp") and outside.is_dir()
    cluster.down()
    assert not outside.exists()


def test_without_namespaces_nodes_still_die_whole(
    tmp_path: Path, own: Callable[[DevSlurm], DevSlurm], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = own(DevSlurm(tmp_path / "c", num_nodes=2, unshare="false"))
    with caplog.at_level(logging.WARNING):
        cluster.up()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    marker = f"79{os.getpid()}"
    script = f"setsid nohup sleep {marker} & touch {tmp_path}/begun; exec sleep 300"
    job_id = submit(cluster, script, "--no-requeue", "--nodelist=n2")
    wait_for_file(tmp_path / "begun")
    other = submit(cluster, "sleep 300", "--nodelist=n1")
    wait_for_state(cluster, other, "RUNNING")
    cluster.kill_node("n2")
    assert processes_naming(marker) == []
    wait_for_state(cluster, job_id, "NODE_FAIL")
    assert state(cluster, other) == "RUNNING"
    cluster.down()
    assert processes_naming(tmp_path / "c") == []


def test_a_failed_start_tells_the_log_and_leaves_nothing(tmp_path: Path) -> None:
    key = tmp_path / "c" / "munge" / "key"
    key.parent.mkdir(parents=True)
    key.write_bytes(b"short")
    with pytest.raises(SchedulerError, match=r"munged .*ended(.|\n)*Keyfile"):
        DevSlurm(tmp_path / "c", num_nodes=1).up()
    assert processes_naming(tmp_path / "c") == []


def test_sockets_never_go_to_a_folder_that_others_can_write(tmp_path: Path) -> None:
    cluster = DevSlurm(tmp_path / ("deep" * 25), num_nodes=1)
    outside = Layout(tmp_path / ("deep" * 25), os.getuid()).socket_dir
    outside.mkdir()
    outside.chmod(0o777)
    with pytest.raises(SchedulerError, match="too deep for Unix sockets"):
        cluster.up()
    outside.rmdir()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: DevSlurm(folder, num_nodes=2).kill_node("n9"), "no node 'n9', only n1, n2"),
        (lambda folder: DevSlurm(folder, num_nodes=3).up(), "runs with 2 nodes of 4 CPUs, not 3 of 4"),
        (lambda folder: DevSlurm(folder / "none").start_controller(), "miles devslurm up"),
        (lambda folder: DevSlurm(folder / "a b"), "choose another folder"),
    ],
)
def test_wrong_calls_are_refused_with_the_way_out(small: DevSlurm, call: Callable[[Path], None], words: str) -> None:
    with pytest.raises(SchedulerError, match=words):
        call(Path(small.status()["folder"]))


def test_a_call_from_another_machine_is_refused(small: DevSlurm, tmp_path: Path) -> None:
    shape = tmp_path / "c" / "cluster.json"
    here = shape.read_text()
    shape.write_text(json.dumps(json.loads(here) | {"host": "elsewhere"}))
    try:
        with pytest.raises(SchedulerError, match="was started on 'elsewhere'"):
            small.down()
    finally:
        shape.write_text(here)


def test_slurm_available_looks_in_sbin_and_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_available() is None
    sbin = shutil.which("slurmctld", path="/usr/sbin")
    monkeypatch.setenv("PATH", str(tmp_path))
    sentence = slurm_available()
    assert sentence is not None and "squeue" in sentence and "apt-get install" in sentence
    assert ("slurmctld" in sentence) == (sbin is None)


def become(account: pwd.struct_passwd, folder: Path, work: Callable[[Path], None]) -> None:
    """Turns this (forked) process into the user for good and does the work."""
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
    os.environ.update(HOME=str(folder), USER=account.pw_name, LOGNAME=account.pw_name)
    os.chdir(folder)
    work(folder)


def as_plain_user(folder: Path, work: Callable[[Path], None]) -> int:
    """Does the work as a user without privileges and returns his id; for root that is `daemon`, in a forked child.

    A fork and not a new interpreter: that user may be unable to read root's.
    """
    if os.getuid() != 0:
        work(folder)
        return os.getuid()
    account = pwd.getpwnam("daemon")
    os.chown(folder, account.pw_uid, account.pw_gid)
    child = multiprocessing.get_context("fork").Process(target=become, args=(account, folder, work))
    child.start()
    child.join()
    assert child.exitcode == 0, "the plain user's part failed, its traceback is in the captured stderr"
    return account.pw_uid


def life_of_a_cluster(folder: Path) -> None:
    """Writes what was seen to FOLDER/seen."""
    cluster = DevSlurm(folder / "c", num_nodes=2)
    cluster.up()
    try:
        uids = client(cluster, "srun", "--nodes=2", "id", "-u").split()
        job_id = submit(cluster, "exec sleep 300", "--no-requeue", "--nodelist=n1")
        wait_for_state(cluster, job_id, "RUNNING")
        cluster.kill_node("n1")
        wait_for_state(cluster, job_id, "NODE_FAIL")
        cluster.start_node("n1")
        capabilities = client(cluster, "srun", "--nodes=1", "grep", "CapEff", "/proc/self/status").split()[1]
    finally:
        cluster.down()
    (folder / "seen").write_text(json.dumps({"uids": uids, "capabilities": int(capabilities, 16)}))


def test_a_plain_user_has_a_whole_cluster_of_his_own() -> None:
    folder = Path(tempfile.mkdtemp(prefix="devslurm-", dir="/tmp"))
    try:
        uid = as_plain_user(folder, life_of_a_cluster)
        seen = json.loads((folder / "seen").read_text())
        assert processes_naming(folder) == []
    finally:
        shutil.rmtree(folder)
    assert seen == {"uids": [str(uid)] * 2, "capabilities": 0}
