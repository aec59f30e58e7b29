"""FakeSlurm: a small slurmctld behind `run_slurm`, with time, faults and the real commands' words.

It interprets the argument lists of sbatch, squeue, scancel, sinfo and scontrol ping, keeps jobs and nodes, and answers text
as Slurm 22.05 does; an option it does not know fails the test. Time is the injected clock's; what a job does is `program`.

    fake = FakeSlurm(clock)
    scheduler = SlurmScheduler(SlurmSite(), run=fake.run, sleep=clock.sleep)
"""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.slurm.command import Answer

SubmitFault = Literal["timeout_accepted", "timeout_lost", "socket_accepted", "socket_lost"]
"""What happens to one sbatch: no answer in time, or `Socket timed out`; with the job accepted all the same, or not."""

SOCKET_TIMED_OUT = "Socket timed out on send/recv operation"
NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"
LIVE = ("PENDING", "RUNNING", "SUSPENDED")


class ManualClock:
    """A clock that moves when it is told to; sleeping moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeJob:
    """One job in the fake's memory."""

    job_id: str
    flags: dict[str, str]
    command: tuple[str, ...]
    """argv behind `exec`."""
    submitted_s: float
    state: str = "PENDING"
    reason: str = "Priority"
    nodes: tuple[str, ...] = ()
    started_s: float = 0.0
    ended_s: float = 0.0
    wait_status: int = 0
    restarts: int = 0
    signals: list[str] = field(default_factory=list)

    @property
    def comment(self) -> str:
        return self.flags.get("comment", "(null)")

    def show(self, letter: str) -> str:
        """One field of squeue's --format."""
        values = {"i": self.job_id, "T": self.state, "r": self.reason, "N": ",".join(self.nodes), "k": self.comment}
        return values[letter]


Program = Callable[[FakeJob], tuple[float, int] | None]
"""Runtime in seconds and exit code of a job; None: it runs until something ends it."""


def run_forever(job: FakeJob) -> None:
    """The default program."""
    return None


class FakeSlurm:
    """A cluster of named nodes, one job per node; pass `run` where run_slurm goes."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        nodes: Iterable[str] = ("n1", "n2", "n3", "n4"),
        partitions: Sequence[str] = ("main", "spot"),
        program: Program = run_forever,
        queue_s: float = 1.0,
        min_job_age_s: float = 300.0,
    ) -> None:
        self.clock, self.program, self.partitions = clock, program, partitions
        self.queue_s, self.min_job_age_s = queue_s, min_job_age_s
        self.nodes = dict.fromkeys(nodes, "idle")
        self.jobs: list[FakeJob] = []
        self.next_id = 1
        self.commands: list[tuple[str, ...]] = []
        """Every command, for counting queries."""
        self.controller_up = True
        self.busy_queries = 0
        """So many of the next commands but sbatch end with `Socket timed out`."""
        self.submit_faults: deque[SubmitFault] = deque()
        self.visible_after_s = 0.0
        """squeue lists a new job only after this long."""
        self.signal_exit_code = 75
        """A role that gets USR2 leaves with this."""
        self.expected: dict[str, str] = {}
        """Planned starts by job id, as squeue prints them."""
        self.deaf: set[str] = set()
        """Ids of jobs whose roles do not hear it."""

    # ---- faults

    def preempt(self, job_id: str) -> None:
        """The job loses its nodes to a better one; it was submitted with --no-requeue."""
        self._end(self.job(job_id), "PREEMPTED", "None", 15)

    def fail_node(self, node: str) -> None:
        """A node dies: its jobs are NODE_FAIL, or go back to the queue if they may."""
        self.nodes[node] = "down*"
        for job in self.jobs:
            if job.state == "RUNNING" and node in job.nodes:
                if "no-requeue" in job.flags:
                    self._end(job, "NODE_FAIL", "NodeDown", 0)
                else:
                    self.requeue(job.job_id)

    def restore_node(self, node: str) -> None:
        """The node is back."""
        self.nodes[node] = "idle"

    def requeue(self, job_id: str) -> None:
        """Slurm starts the job again, under the same id."""
        job = self.job(job_id)
        job.state, job.reason, job.nodes, job.submitted_s = "PENDING", "BeginTime", (), self.clock()
        job.restarts += 1

    def forget(self, job_id: str) -> None:
        """The controller loses the job, as after kill -9 before its state was saved."""
        self.jobs.remove(self.job(job_id))

    def finish(self, job_id: str, exit_code: int) -> None:
        """The job's program ends now."""
        self._finish(self.job(job_id), exit_code)

    def job(self, job_id: str) -> FakeJob:
        """The newest job with this id (ids can be reused)."""
        return next(job for job in reversed(self.jobs) if job.job_id == job_id)

    # ---- the border

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        """Stands in for run_slurm."""
        self.commands.append(tuple(argv))
        self.advance()
        if argv[0] == "sbatch":
            return self._sbatch(argv, stdin, timeout_s)
        if not self.controller_up:
            return Answer(1, "", f"{argv[0]}: error: {NO_CONTROLLER}\n")
        if self.busy_queries > 0:
            self.busy_queries -= 1
            return Answer(1, "", f"slurm_load_jobs error: {SOCKET_TIMED_OUT}\n")
        return {"squeue": self._squeue, "scancel": self._scancel, "sinfo": self._sinfo, "scontrol": self._ping}[argv[0]](argv)

    def advance(self) -> None:
        """Brings all jobs to the clock's time."""
        now = self.clock()
        for job in self.jobs:
            if job.state == "PENDING" and now >= job.submitted_s + self.queue_s:
                self._try_to_start(job)
            if job.state == "RUNNING" and (plan := self.program(job)) is not None and now >= job.started_s + plan[0]:
                self._finish(job, plan[1])
        self.jobs = [job for job in self.jobs if job.state in LIVE or now < job.ended_s + self.min_job_age_s]

    # ---- state

    def _try_to_start(self, job: FakeJob) -> None:
        excluded = set(job.flags.get("exclude", "").split(","))
        busy = {node for other in self.jobs if other.state == "RUNNING" for node in other.nodes}
        free = [name for name, state in self.nodes.items() if state == "idle" and name not in busy | excluded]
        wanted = int(job.flags["nodes"])
        if len(free) < wanted:
            job.reason = "Resources"
            return
        job.state, job.reason, job.nodes, job.started_s = "RUNNING", "None", tuple(free[:wanted]), self.clock()

    def _finish(self, job: FakeJob, exit_code: int) -> None:
        state, reason = ("COMPLETED", "None") if exit_code == 0 else ("FAILED", "NonZeroExitCode")
        self._end(job, state, reason, exit_code << 8)

    def _end(self, job: FakeJob, state: str, reason: str, wait_status: int) -> None:
        job.state, job.reason, job.wait_status, job.ended_s = state, reason, wait_status, self.clock()

    # ---- commands

    def _sbatch(self, argv: Sequence[str], script: str, timeout_s: float) -> Answer:
        assert list(argv) == ["sbatch", "--parsable"], argv
        if not self.controller_up:
            return Answer(1, "", f"sbatch: error: Batch job submission failed: {NO_CONTROLLER}\n")
        flags, command = parse_script(script)
        if flags.get("partition", self.partitions[0]) not in self.partitions:
            refused = f"sbatch: error: invalid partition specified: {flags['partition']}\n"
            return Answer(1, "", refused + "sbatch: error: Batch job submission failed: Invalid partition name specified\n")
        fault = self.submit_faults.popleft() if self.submit_faults else None
        if fault in ("timeout_lost", "socket_lost"):
            return _submit_fault(fault, timeout_s)
        job = FakeJob(str(self.next_id), flags, command, self.clock())
        self.next_id += 1
        self.jobs.append(job)
        if int(flags["nodes"]) > len(self.nodes):
            # The real one keeps the record of a job that it refuses so late.
            self._end(job, "FAILED", "BadConstraints", 1)
            return Answer(1, "", "sbatch: error: Batch job submission failed: Requested node configuration is not available\n")
        return Answer(0, f"{job.job_id}\n") if fault is None else _submit_fault(fault, timeout_s)

    def _squeue(self, argv: Sequence[str]) -> Answer:
        options = _options(argv, {"noheader", "states", "user", "format", "jobs", "Format", "start"})
        assert options["noheader"] == ""
        if "start" in options:
            return self._starts(options)
        assert options["states"] == "all"
        if "jobs" in options:
            return self._exit_codes(options)
        assert options["user"] == str(os.getuid())
        visible = [job for job in self.jobs if self.clock() >= job.submitted_s + self.visible_after_s]
        lines = [_fill(options["format"], job) for job in visible]
        return Answer(0, "".join(f"{line}\n" for line in lines))

    def _starts(self, options: dict[str, str]) -> Answer:
        """As for pending jobs only; the backfill scheduler has planned those of `expected`."""
        assert options["format"] == "%i|%S"
        wanted = [job for job in self.jobs if job.job_id in options["jobs"].split(",") and job.state == "PENDING"]
        return Answer(0, "".join(f"{job.job_id}|{self.expected.get(job.job_id, 'N/A')}\n" for job in wanted))

    def _exit_codes(self, options: dict[str, str]) -> Answer:
        assert options["Format"] == "JobID:24|,exit_code:12|"
        wanted = options["jobs"].split(",")
        found = [job for job in self.jobs if job.job_id in wanted]
        if not found and len(wanted) == 1:
            return Answer(1, "", "slurm_load_jobs error: Invalid job id specified\n")
        return Answer(0, "".join(f"{job.job_id:24}|{job.wait_status:<12}|\n" for job in found))

    def _scancel(self, argv: Sequence[str]) -> Answer:
        options = _options([word for word in argv if word.startswith("--")], {"signal", "batch"}, skip=0)
        ids = [word for word in argv[1:] if not word.startswith("--")]
        complaints = [self._cancel_or_signal(job_id, options.get("signal")) for job_id in ids]
        text = "".join(complaint for complaint in complaints if complaint)
        return Answer(1 if text else 0, "", text)

    def _cancel_or_signal(self, job_id: str, signal: str | None) -> str:
        """The complaint, if any: scancel is silent about unknown and ended jobs, but not when it sends a signal."""
        job = next((job for job in self.jobs if job.job_id == job_id and job.state in LIVE), None)
        if signal is None:
            if job is not None:
                self._end(job, "CANCELLED", "None", 0)
            return ""
        if job is None:
            return f"scancel: error: Kill job error on job id {job_id}: Invalid job id specified\n"
        if job.state == "PENDING":
            return f"scancel: error: Kill job error on job id {job_id}: Job can not be altered now, try again later\n"
        job.signals.append(signal)
        if signal == "USR2" and job_id not in self.deaf:
            self._finish(job, self.signal_exit_code)
        return ""

    def _sinfo(self, argv: Sequence[str]) -> Answer:
        options = _options(argv, {"noheader", "Node", "format"})
        assert options["noheader"] == ""
        if options["format"] == "%R":
            return Answer(0, "".join(f"{name}\n" for name in self.partitions))
        assert options["format"] == "%N|%T" and options["Node"] == ""
        lines = [f"{name}|{state}\n" for name, state in self.nodes.items() for _ in self.partitions]
        return Answer(0, "".join(lines))

    def _ping(self, argv: Sequence[str]) -> Answer:
        assert list(argv) == ["scontrol", "ping"], argv
        return Answer(0, "Slurmctld(primary) at fake is UP\n")


def _fill(template: str, job: FakeJob) -> str:
    return re.sub(r"%(\w)", lambda letter: job.show(letter[1]), template)


def parse_script(text: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Flags of the #SBATCH lines, and the argv behind `exec` (behind srun's own options, if there is one)."""
    assert text.startswith("#!"), text
    flags = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH --"):
            [word] = shlex.split(line.removeprefix("#SBATCH --"))
            name, _, value = word.partition("=")
            flags[name] = value
    before, _, after = text.partition("\nexec ")
    assert after, f"no exec in {before}"
    command = shlex.split(after)
    if command[0] == "srun":
        command = command[next(n for n, word in enumerate(command) if n and not word.startswith("--")) :]
    return flags, tuple(command)


def _submit_fault(fault: SubmitFault, timeout_s: float) -> Answer:
    if fault.startswith("timeout"):
        return Answer(None, "", f"no answer in {timeout_s:.0f} s")
    return Answer(1, "", f"sbatch: error: Batch job submission failed: {SOCKET_TIMED_OUT}\n")


def _options(argv: Sequence[str], known: set[str], skip: int = 1) -> dict[str, str]:
    found = {}
    for word in argv[skip:]:
        assert word.startswith("--"), f"unexpected argument {word!r} in {argv}"
        name, _, value = word.removeprefix("--").partition("=")
        assert name in known, f"{argv[0]} option --{name} is not known to FakeSlurm"
        found[name] = value
    return found
