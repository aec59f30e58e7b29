"""The one place where a Slurm command is started: list arguments, a timeout, a scrubbed environment.

What comes back is words and an exit code; what they mean is decided by `is_transient` and `refusal`.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.role_env import without_slurm
from cluster.scheduler import JobSpec
from miles_core.errors import SchedulerError

log = logging.getLogger(__name__)

NO_SLURM_HINT = "run on a login node or load the site's Slurm module, or use `--cluster local`"

TRANSIENT = (
    "Socket timed out",
    "Unable to contact slurm controller",
    "Zero Bytes were transmitted or received",
    "Unexpected message received",
    "Communication connection failure",
    "Message receive failure",
    "Message send failure",
    "Connection refused",
    "Connection timed out",
    "Connection reset by peer",
    "Transport endpoint is not connected",
    "Slurm backup controller in standby mode",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
    "Protocol authentication error",
)
"""Words of a controller that is away, busy or starting. A request that ended so may have been accepted."""

SUBMIT_LIMIT = "SubmitJob"
"""In the names of the limits on a user's jobs, as QOSMaxSubmitJobPerUserLimit: such a refusal ends when other jobs end."""


@dataclass(frozen=True)
class Answer:
    """What one command gave."""

    returncode: int | None
    """None: no answer within the timeout."""
    stdout: str = ""
    stderr: str = ""

    @property
    def words(self) -> str:
        """What it complained about, in one line."""
        return "; ".join(line.strip() for line in (self.stderr or self.stdout).splitlines() if line.strip())

    @property
    def transient(self) -> bool:
        """The controller did not answer this time; the request may have been accepted all the same."""
        died = self.returncode is None or self.returncode < 0
        return died or any(words.lower() in self.words.lower() for words in TRANSIENT)


class Run(Protocol):
    """Starts one Slurm command; run_slurm, or a fake."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer: ...


def run_slurm(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
    """Runs a Slurm command to its end or timeout. SchedulerError if it cannot be started."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            list(argv), input=stdin, env=dict(env), capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False,
        )  # fmt: skip
        answer = Answer(done.returncode, done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        answer = Answer(None, "", f"no answer in {timeout_s:.0f} s")
    except OSError as error:
        raise SchedulerError(f"{argv[0]} cannot be started: {error}; {NO_SLURM_HINT}") from error
    log.debug("command=%s rc=%s duration_s=%.3f", shlex.join(argv)[:200], answer.returncode, time.monotonic() - started)
    return answer


def client_env(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Environment for sbatch; jobs inherit it, so it holds nothing that is only for our parsers."""
    return {**without_slurm(base), **extra}


def query_env(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Environment for commands whose output we parse."""
    return {**client_env(base, extra), "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def refusal(spec: JobSpec, answer: Answer, partitions: Callable[[], str]) -> SchedulerError:
    """Why sbatch did not take the job, in Slurm's words, and what to change. `partitions` lists the cluster's."""
    what = f"job of {spec.writer} attempt {spec.attempt}"
    if answer.transient:
        return SchedulerError(
            f"sbatch did not answer for the {what}: {answer.words}; it may have been accepted, search for its token first",
            ambiguous=True, transient=True,
        )  # fmt: skip
    if SUBMIT_LIMIT in answer.words:
        return SchedulerError(
            f"Slurm has no room for the {what} now: {answer.words}; it is tried again, or ask for fewer replicas",
            transient=True,
        )  # fmt: skip
    return SchedulerError(f"Slurm refused the {what}: {answer.words}; {_fix(spec, answer.words.lower(), partitions)}")


def _fix(spec: JobSpec, words: str, partitions: Callable[[], str]) -> str:
    wanted = spec.resources
    role = spec.writer.rpartition("-")[0]
    if "partition" in words and "account/partition" not in words:
        return f"resources.{role}.partition is {wanted.partition!r}, the cluster has: {partitions()}"
    if "node configuration" in words or "memory" in words or "cpu count" in words or "gres" in words:
        return (
            f"no node offers what it asks for (nodes={wanted.nodes} tasks={wanted.tasks} cpus={wanted.cpus} gpus={wanted.gpus} "
            f"mem_mb={wanted.mem_mb}); lower resources.{role} in the cluster profile"
        )
    for word, fix in (
        ("qos policy", f"it is over a limit of your account or QOS; lower resources.{role} or set another slurm.qos"),
        ("account", "set slurm.account in the cluster profile to one of `sacctmgr show associations user=$USER`"),
        ("qos", "set slurm.qos in the cluster profile to one of `sacctmgr show qos`"),
        ("reservation", "set slurm.reservation in the cluster profile to one of `scontrol show reservation`"),
        ("feature", "set slurm.constraint in the cluster profile to features that `sinfo --format=%f` lists"),
        ("time limit", f"resources.{role}.time_min is {wanted.time_min}; the partition's limit is in `sinfo --format=%R,%l`"),
        ("node name", "a node in slurm.exclude of the cluster profile is not known to the cluster"),
    ):
        if word in words:
            return fix
    return "correct the cluster profile (`miles jobs` prints the script) and try again"
