"""The learner of several ranks: they meet, work as one, and none outlives another by more than seconds."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest

from miles_core.errors import DeadlineExceeded, LeaseLost, MilesError, RankLost
from miles_core.learner import ranks
from miles_core.learner.checkpoints import save_checkpoint, verify_checkpoint
from miles_core.learner.ranked import RankedTrainer, _Follower, device_of, interface_of
from miles_core.learner.ranks import Lead, Link, Meeting, Place, Sibling, ephemeral_ports, open_port
from miles_core.paths import RunPaths
from miles_core.recipe import LearnerSpec
from miles_core.records import Version
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes
from tests.protocol.learner_run import STEPS, FakeOrchestrator, learner_context, make_run, metric_points, read_lineage
from tests.unit.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0
SECONDS = 20.0
"""`within seconds`, on a machine that is busy."""


def wait_until(what: str, condition: Callable[[], object]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.02)


# ---- who is who, and where


def test_a_rank_is_what_slurm_says_and_one_rank_needs_no_slurm() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert Place.of({"MILES_RANKS": "8", **slurm}) == Place(5, 8, 1)
    assert Place.of({}) == Place.of(slurm) == Place(0, 1, 0)


@pytest.mark.parametrize("changes", [{"SLURM_NTASKS": "1"}, {"SLURM_PROCID": ""}, {"SLURM_LOCALID": "x"}])
def test_variables_that_do_not_agree_are_refused(changes: dict[str, str]) -> None:
    env = {"MILES_RANKS": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"} | changes
    with pytest.raises(MilesError, match=r"has 2 ranks \(MILES_RANKS\), but this process was started with .* one srun"):
        Place.of(env)


def test_ports_lie_outside_the_ephemeral_range_and_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = ephemeral_ports()
    assert 0 < low < high
    held = [open_port() for _ in range(20)]
    ports = [listener.getsockname()[1] for listener in held]
    assert len(set(ports)) == 20 and all(port >= ranks.FIRST_PORT and not low <= port <= high for port in ports)
    monkeypatch.setattr(ranks.random, "sample", lambda population, number: ports)
    with pytest.raises(MilesError, match="no free TCP port on"):
        open_port()
    for listener in held:
        listener.close()


def test_where_every_port_is_ephemeral_one_of_them_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ephemeral_ports", lambda: (1024, 65535))
    with open_port() as listener:
        assert listener.getsockname()[1] >= ranks.FIRST_PORT


def test_an_address_names_its_interface() -> None:
    assert interface_of("127.0.1.1") == interface_of("127.0.0.1") == "lo"
    with pytest.raises(
        MilesError, match=r"no interface of this node has the address 192\.0\.2\.1, .* export GLOO_SOCKET_IFNAME"
    ):
        interface_of("192.0.2.1")


# ---- meeting, watching and leaving, without a trainer


class Job:
    """One attempt's ranks as processes; rank 0 runs `lead`, the others do what it says."""

    def __init__(
        self, made: tuple[RunConfig, RunPaths], attempt: int = 1, num_ranks: int = 3, silent_s: float = ranks.SILENT_S
    ) -> None:
        (self.run, self.paths), self.attempt, self.num_ranks, self.silent_s = made, attempt, num_ranks, silent_s
        self.processes: list[BaseProcess] = []

    def start(self, lead: Callable[[Lead], None]) -> Job:
        self._start(lambda: self._lead(lead))
        for rank in range(1, self.num_ranks):
            self._start(lambda rank=rank: self._follow(rank))
        return self

    def _start(self, main: Callable[[], None]) -> None:
        rank = len(self.processes)

        def child() -> None:
            with open(self.log_file(rank), "w") as output:
                logging.basicConfig(stream=output, force=True, level=logging.INFO)
                main()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        self.processes.append(process)

    def _lead(self, work: Callable[[Lead], None]) -> None:
        context = learner_context(self.run, self.paths, self.attempt, job_id=f"job{self.attempt}")
        context.start()
        lead = Lead(Place(0, self.num_ranks, 0), silent_s=self.silent_s)
        try:
            assert lead.gather(context)
            work(lead)
        finally:
            lead.close()

    def sibling(self, rank: int) -> Sibling:
        token = f"token-l{self.attempt}"
        return Sibling(Place(rank, self.num_ranks, rank), self.run, self.paths, self.attempt, token, f"job{self.attempt}")

    def _follow(self, rank: int) -> None:
        link = self.sibling(rank).join()
        while (command := link.command())["do"] != "leave":
            if command["do"] == "hang":
                time.sleep(600)
            if command["do"] == "fail" and rank == command["rank"]:
                link.fail(ValueError("no such row"))
                raise SystemExit(1)
            link.answer(rank=rank)

    def log_file(self, rank: int) -> Path:
        return self.paths.root / f"a{self.attempt}-{rank}.log"

    def log(self, rank: int) -> str:
        return self.log_file(rank).read_text() if self.log_file(rank).exists() else ""

    def wait_until_joined(self) -> None:
        wait_until("all ranks to join", lambda: self.log(0).count("joined: rank") == self.num_ranks - 1)

    def codes(self, within_s: float = SECONDS) -> list[int | None]:
        for process in self.processes:
            process.join(within_s)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def idle(lead: Lead) -> None:
    """As rank 0 waits for a batch."""
    time.sleep(600)


def in_a_collective(lead: Lead) -> None:
    """Everybody hangs, as in a collective that a dead rank never enters."""
    lead.tell("hang")
    time.sleep(600)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(name: str = "run", attempt: int = 1, num_ranks: int = 3, silent_s: float = ranks.SILENT_S) -> Job:
        folder = tmp_path / name
        run = (made[0].run, made[0].paths) if folder.exists() else make_run(folder, run_id=name)
        made.append(Job(run, attempt, num_ranks, silent_s))
        return made[-1]

    yield make
    for job in made:
        job.kill()


def test_ranks_meet_do_what_rank_0_says_and_leave_with_it(jobs: Callable[..., Job]) -> None:
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def work(lead: Lead) -> None:
        lead.tell("something")
        answers.put((lead.answers(), lead.address))

    job = jobs().start(work)
    assert answers.get() == ([{"rank": 1}, {"rank": 2}], "127.0.0.1")
    assert job.codes() == [0, 0, 0]


def test_learners_of_two_runs_on_one_host_do_not_mix(jobs: Callable[..., Job]) -> None:
    first, second = jobs("first").start(idle), jobs("second").start(idle)
    for job in (first, second):
        job.wait_until_joined()
        pids = {process.pid for process in job.processes}
        assert all(f"(pid {pid} on" in job.log(0) for pid in pids - {job.processes[0].pid})


def test_a_successor_meets_anew_while_the_old_attempt_still_runs(jobs: Callable[..., Job]) -> None:
    old = jobs().start(idle)
    old.wait_until_joined()
    new = jobs(attempt=2).start(idle)
    new.wait_until_joined()
    assert [process.exitcode for process in old.processes] == [None] * 3


@pytest.mark.parametrize("work", [idle, in_a_collective])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_all_along_within_seconds_and_is_named(
    jobs: Callable[..., Job], victim: int, work: Callable[[Lead], None]
) -> None:
    job = jobs().start(work)
    job.wait_until_joined()
    time.sleep(0.2)
    os.kill(job.processes[victim].pid or 0, signal.SIGKILL)
    codes = job.codes()
    assert codes[victim] == -signal.SIGKILL
    survivors = [rank for rank in range(3) if rank != victim]
    assert [codes[rank] for rank in survivors] == [RankLost.exit_code] * 2
    name = f"rank {victim} (pid {job.processes[victim].pid} on {ranks.node_name()}) is gone: its connection closed"
    for rank in survivors:
        assert name in job.log(rank)


@pytest.mark.parametrize("work", [idle, in_a_collective])
def test_a_rank_that_stands_still_is_lost_though_its_connection_is_open(
    jobs: Callable[..., Job], work: Callable[[Lead], None]
) -> None:
    job = jobs(silent_s=2.0).start(work)
    job.wait_until_joined()
    os.kill(job.processes[1].pid or 0, signal.SIGSTOP)
    job.processes[0].join(SECONDS)
    job.processes[2].join(SECONDS)
    os.kill(job.processes[1].pid or 0, signal.SIGCONT)
    assert job.codes() == [RankLost.exit_code] * 3
    doing = ", in the middle of 'hang'" if work is in_a_collective else ""
    for rank in range(3):
        found = re.search(rf"rank 1 \(pid {job.processes[1].pid} on .*\) stands still: (.*); the ranks of", job.log(rank))
        assert found and re.fullmatch(rf"not heard for \d+ s though its connection is open{doing}", found[1])


def test_ranks_that_all_stood_still_for_longer_than_that_lose_nobody(jobs: Callable[..., Job]) -> None:
    """The job was suspended, or its node; rank 0 wakes up first."""
    job = jobs(silent_s=2.0).start(idle)
    job.wait_until_joined()
    for process in reversed(job.processes):
        os.kill(process.pid or 0, signal.SIGSTOP)
    time.sleep(3.0)
    for process in job.processes:
        os.kill(process.pid or 0, signal.SIGCONT)
    time.sleep(3.0)
    assert [process.exitcode for process in job.processes] == [None] * 3


def test_a_rank_that_fails_is_named_with_its_error(jobs: Callable[..., Job]) -> None:
    def work(lead: Lead) -> None:
        lead.tell("fail", rank=2)
        lead.answers()

    job = jobs().start(work)
    assert job.codes() == [RankLost.exit_code, RankLost.exit_code, 1]
    for rank in (0, 1):
        assert f"rank 2 (pid {job.processes[2].pid} on {ranks.node_name()}) failed: ValueError: no such row" in job.log(rank)


def test_rank_0_that_breaks_off_in_the_middle_of_a_command_leaves_nobody_behind(jobs: Callable[..., Job]) -> None:
    def work(lead: Lead) -> None:
        lead.tell("hang")
        raise ValueError("a fault of rank 0")

    job = jobs().start(work)
    assert job.codes() == [1, RankLost.exit_code, RankLost.exit_code]
    assert "rank 0 left in the middle of 'hang'" in job.log(1)


def test_one_that_does_not_answer_is_named(jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_S", 0.3)

    def work(lead: Lead) -> None:
        lead.tell("hang")
        with pytest.raises(RankLost, match=r"rank 1 \(pid .*\) has not answered 'hang' within 0 s"):
            lead.answers()

    assert jobs().start(work).codes() == [0, RankLost.exit_code, RankLost.exit_code]


def test_without_all_ranks_the_wait_ends_and_names_the_missing(
    jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "JOIN_S", 0.5)
    job = jobs()
    context = learner_context(job.run, job.paths, job_id="job1")
    lead = Lead(Place(0, 3, 0))
    try:
        with pytest.raises(DeadlineExceeded, match=r"ranks \[1, 2\] of 3 have not joined .* port \d+ within"):
            lead.gather(context)
    finally:
        lead.close()
    with pytest.raises(DeadlineExceeded, match=r"rank 1 has not reached rank 0 within .*: 127\.0\.0\.1 port \d+"):
        job.sibling(1).join()


def test_asked_to_leave_before_all_have_joined_it_leaves(jobs: Callable[..., Job]) -> None:
    job = jobs()
    context = learner_context(job.run, job.paths, job_id="job1")
    context.leave.set()
    lead = Lead(Place(0, 2, 0))
    assert lead.gather(context) is False
    assert context.state == "waiting: ranks [1] to join"
    lead.close()


def test_strangers_are_not_taken_for_siblings(jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "HELLO_S", 0.5)
    job = jobs(num_ranks=2)
    context = learner_context(job.run, job.paths, job_id="job1")
    ended: list[int] = []
    lead = Lead(Place(0, 2, 0), end=ended.append)
    gathering = threading.Thread(target=lead.gather, args=(context,))
    gathering.start()
    wait_until("the meeting", job.paths.ranks(1).exists)
    meeting = Meeting.model_validate_json(job.paths.ranks(1).read_bytes())
    hello = {"token": "token-l1", "job_id": "job1", "rank": 1, "where": "here"}
    wrong = ({"token": "other"}, {"job_id": "twin"}, {"rank": 0}, {"rank": 2}, {"rank": "1"}, {"rank": None})
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", *(json.dumps(hello | change).encode() + b"\n" for change in wrong)):
        with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
            stranger.sendall(data)
            stranger.settimeout(DEADLINE_S)
            assert stranger.recv(1) == b""
    with socket.create_connection(("127.0.0.1", meeting.port)) as stranger, pytest.raises(OSError):
        for _ in range(200):  # Byte by byte, never silent for HELLO_S.
            stranger.sendall(b"x")
            time.sleep(0.05)
    assert gathering.is_alive()
    link = job.sibling(1).join(end=ended.append)
    gathering.join(DEADLINE_S)
    lead.close()
    assert link.command() == {"do": "leave"}
    link.close()
    assert ended == []


def test_a_rank_of_a_twin_or_of_a_superseded_attempt_leaves_without_failure(jobs: Callable[..., Job]) -> None:
    job = jobs().start(idle)
    job.wait_until_joined()
    with pytest.raises(LeaseLost, match="is held by another job") as twin:
        replace(job.sibling(1), job_id="job1b").join()
    assert twin.value.why == "twin"
    successor = learner_context(job.run, job.paths, attempt=2)
    successor.start()
    successor.stop()
    with pytest.raises(LeaseLost, match="superseded by attempt 2"):
        replace(job.sibling(1), job_id="job1b").join()


def test_names_that_lead_nowhere_are_passed_over(jobs: Callable[..., Job]) -> None:
    """A node is reached by any of its names; of another machine the loopback is not tried."""
    job = jobs(num_ranks=2)
    with open_port() as listener:
        meeting = Meeting(
            token="t", job_id="j", pid=1, hosts=("no-such-host.invalid", "localhost"), machine="another",
            port=listener.getsockname()[1], store_port=1,
        )  # fmt: skip

        open_lines: list[ranks.Line] = []

        def welcome() -> None:
            connection, _ = listener.accept()
            line = ranks.Line(connection)
            open_lines.append(line)
            line.receive()
            line.send(do="welcome", pulse_s=1.0)
            line.send(do="leave")

        threading.Thread(target=welcome, daemon=True).start()
        link: Link = job.sibling(1)._connect(meeting, os._exit)
    assert link.command() == {"do": "leave"} and link.own_address == link.peer_address == "127.0.0.1"
    link.close()


# ---- checkpoints of several ranks, and which GPU


class HalfTrainer:
    """One rank's trainer, as far as a checkpoint goes: one file, or a disk that is full."""

    def __init__(self, rank: int, *, is_full: bool = False) -> None:
        self.name, self.is_full = f"engine/rank{rank}.pt", is_full

    def save(self, folder: Path) -> tuple[str, ...]:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        (folder / self.name).parent.mkdir(exist_ok=True)
        (folder / self.name).write_bytes(self.name.encode())
        return (self.name,)


class LeadOf(Lead):
    """A lead whose one sibling is in this process."""

    def __init__(self, trainer: HalfTrainer) -> None:
        super().__init__(Place(0, 2, 0))
        self._sibling = _Follower(cast(Link, None), Place(1, 2, 1), cast(Any, None))
        self._sibling._trainer = cast(Any, trainer)
        self._answers: list[dict[str, Any]] = []

    def tell(self, do: str, **what: Any) -> None:
        self._answers = [self._sibling.do(json.loads(json.dumps({"do": do, **what})))]

    def answers(self) -> list[dict[str, Any]]:
        answers, self._answers = json.loads(json.dumps(self._answers)), []
        return cast(list[dict[str, Any]], answers)


def ranked(own: HalfTrainer, other: HalfTrainer) -> RankedTrainer:
    return RankedTrainer(cast(Any, own), LeadOf(other))


def test_each_rank_seals_its_own_files_and_rank_0_announces_all(tmp_path: Path) -> None:
    trainer = ranked(HalfTrainer(0), HalfTrainer(1))
    record = save_checkpoint(FileSystem(), RunPaths(tmp_path), Version(3, 1), "w", trainer.save)
    assert [(file.name, file.digest) for file in record.files] == [
        (f"engine/rank{rank}.pt", digest_bytes(f"engine/rank{rank}.pt".encode())) for rank in (0, 1)
    ]
    assert verify_checkpoint(RunPaths(tmp_path), record)


@pytest.mark.parametrize(("full", "says"), [(0, "No space left"), (1, "rank 1: No space left")])
def test_a_full_disk_on_any_rank_is_an_oserror_that_leaves_the_ranks_in_step(tmp_path: Path, full: int, says: str) -> None:
    halves = [HalfTrainer(rank, is_full=rank == full) for rank in (0, 1)]
    trainer = ranked(*halves)
    with pytest.raises(OSError, match=says) as refused:
        save_checkpoint(FileSystem(), RunPaths(tmp_path), Version(3, 1), "w", trainer.save)
    assert refused.value.errno == errno.ENOSPC and refused.value.filename == f"engine/rank{full}.pt"
    assert trainer._lead.answers() == [], "the other rank's answer was taken all the same"
    halves[full].is_full = False
    assert len(save_checkpoint(FileSystem(), RunPaths(tmp_path), Version(3, 1), "w", trainer.save).files) == 2


@pytest.mark.parametrize(("visible", "local_rank", "device"), [(0, 3, "cpu"), (4, 3, "cuda:3"), (1, 3, "cuda:0")])
def test_a_rank_takes_the_gpu_of_its_number_or_the_one_it_is_shown(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, device: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: visible > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    assert device_of(Place(5, 8, local_rank)) == device
    if visible == 4:
        with pytest.raises(MilesError, match="local rank 4 finds 4 GPUs on its node"):
            device_of(Place(5, 8, 4))


# ---- the role itself, with DeepSpeed and gloo


class Processes:
    """One learner attempt, as srun starts it."""

    def __init__(self, paths: RunPaths, attempt: int, **env: str) -> None:
        self.folder = paths.logs("learner-0", attempt)
        self.folder.mkdir(parents=True)
        job = {
            "MILES_TOKEN": f"token-l{attempt}", "MILES_JOB_ID": f"job{attempt}", "MILES_RANKS": "2", "SLURM_NTASKS": "2",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = (sys.executable, "-m", "miles_core.roles.learner", "--run-dir", str(paths.root), "--attempt", str(attempt))
        self.processes = []
        for rank in ("0", "1"):
            place = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            with open(self.folder / f"{rank}.out", "w") as output:
                process = subprocess.Popen(command, env=os.environ | job | place | env, stdout=output, stderr=output)
            self.processes.append(process)

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def codes(self) -> list[int]:
        try:
            return [process.wait(DEADLINE_S) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


@pytest.mark.timeout(900)
def test_two_ranks_are_one_learner_over_a_drain_and_a_death(tmp_path: Path) -> None:
    run, paths = make_run(tmp_path / "run", learner=LearnerSpec(checkpoint_every=2, zero_stage=3))
    save_tiny_model(paths.base_model)
    orchestrator = FakeOrchestrator(run, paths)
    orchestrator.write_all(steps=3)

    drained = Processes(paths, 1)
    wait_until("step 3", lambda: "step 3 reward" in drained.log(0) or drained.processes[0].poll() is not None)
    for process in drained.processes:
        process.send_signal(signal.SIGUSR2)
    assert drained.codes() == [75, 0], drained.log(0)
    assert "signal=SIGUSR2: rank 0 decides" in drained.log(1)
    lineage = read_lineage(run, paths)
    assert lineage.newest_step == 3
    names = [file.name.partition("_mp_")[0] for file in lineage.checkpoints[Version(3, 1)].files]
    assert names == ["engine/zero_pp_rank_0"] * 2 + ["engine/zero_pp_rank_1"] * 2

    for step in range(4, STEPS + 1):
        orchestrator.write(orchestrator.batch(step))
    killed = Processes(paths, 2, MILES_CRASH_AT="rank1:before_train:6:2")
    assert killed.codes() == [RankLost.exit_code, 9], killed.log(0)
    pid = killed.processes[1].pid
    assert f"rank 1 (pid {pid} on {ranks.node_name()}) is gone: its connection closed" in killed.log(0)
    assert read_lineage(run, paths).newest_step == 5

    last = Processes(paths, 3)
    assert last.codes() == [0, 0], last.log(0)
    assert "loaded the checkpoint of step 4" in last.log(0)
    assert [(point["step"], point["bit_exact"]) for point in metric_points(paths, 3, "replay")] == [(5, True)]
    assert read_lineage(run, paths).newest_step == STEPS
