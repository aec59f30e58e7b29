"""What a role does against its neighbours on a node: cores of its own, memory that stays, tools that die before it.

- *cores*: numerical threads are never more than the cores that affinity and cgroup leave. Tasks that share the CPUs of one
  Slurm allocation take equal parts of all of them, by SLURM_LOCALID; hyperthreads of a core stay together. Where Slurm binds a
  job to no cores there is nothing to part.
- *memory*: what the process holds at its start (interpreter, heartbeat, protocol) is not paged out: under memory pressure a
  role that waits for its own code looks dead. Memory that it takes later, models above all, stays as it is.
- *kill order*: when memory runs out the kernel ends commands of a sandbox first (environments/sandbox.py sets 1000 on them); a
  role lowers its own score where this user may.

    python -m miles_core.runtime.hardening     # what holds here, as JSON; `miles doctor` asks it

Each part that a site forbids is left out; all of them together are one warning, and no error. A limit on locked memory, which
only an admin can raise, is information.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import platform
import re
import resource
import sys
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.runtime.machine import usable_cpus

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OOM_SCORE = -250
"""Of a role, in thousandths of the node's memory that it may use more than others before it is ended."""
MCL_CURRENT, MCL_ONFAULT = 1, 4
"""Of mlockall(2): all that is mapped now, each page when it is first touched."""
KNOWN_MACHINES = ("x86_64", "aarch64")
"""Where these are the numbers."""
MEMLOCK_FIX = (
    "an admin's to allow: LimitMEMLOCK=infinity for slurmd, and memlock unlimited in limits.conf where runs are submitted"
)
_OOM_FILE = Path("/proc/self/oom_score_adj")
_CPUS = Path("/sys/devices/system/cpu")

log = logging.getLogger("miles")


@dataclass(frozen=True)
class Hold:
    """One part."""

    name: str
    seen: str
    fix: str = ""
    """What would make it hold; empty where it does."""


def harden(environ: MutableMapping[str, str] = os.environ) -> tuple[Hold, ...]:
    """Takes what can be had, before torch is imported, and says once what not."""
    holds = (hold_cores(environ), hold_memory(), hold_kill_order())
    for level in (logging.WARNING, logging.INFO):
        missing = [hold for hold in holds if hold.fix and (hold.fix == MEMLOCK_FIX) == (level == logging.INFO)]
        if missing:
            told = "; ".join(f"{hold.name}: {hold.seen} ({hold.fix})" for hold in missing)
            log.log(level, "not held on this node, which only matters where neighbours are greedy: %s", told)
    return holds


def hold_cores(environ: MutableMapping[str, str]) -> Hold:
    """Bounds the threads in `environ`, and pins a task to its part of an allocation."""
    cores, given = sorted(os.sched_getaffinity(0)), _number(environ, "SLURM_CPUS_ON_NODE")
    width, tasks, place = (_number(environ, f"SLURM_{name}") for name in ("CPUS_PER_TASK", "NTASKS_PER_NODE", "LOCALID"))
    is_shared = bool(given) and len(cores) <= given and tasks > 1 and len(cores) >= tasks * width > 0
    if is_shared and place < tasks:
        part = len(cores) // tasks
        cores = by_physical_core(cores, _CPUS)[place * part : (place + 1) * part]
        os.sched_setaffinity(0, cores)
    threads = max(1, int(usable_cpus()))
    for name in THREADS:
        environ[name] = str(min(threads, _number(environ, name) or threads))
    seen = f"{len(cores)} cores, {environ[THREADS[0]]} threads"
    if given and len(cores) > given:
        return Hold(
            "cores", f"this job has {given} CPUs of the node and may run on all {len(cores)}",
            "Slurm binds no job to its cores: ask for TaskPlugin=task/cgroup,task/affinity",
        )  # fmt: skip
    return Hold("cores", f"{seen}, the allocation's" if given else f"{seen}, shared with what else runs here")


def by_physical_core(cores: list[int], cpus: Path) -> list[int]:
    """Hyperthreads of a core behind one another, cores of a socket too; as they are where the kernel does not say."""

    def place(core: int) -> tuple[int, int, int]:
        topology = cpus / f"cpu{core}" / "topology"
        siblings = re.findall(r"\d+", (topology / "thread_siblings_list").read_text())
        return int((topology / "physical_package_id").read_text()), int(siblings[0]), core

    try:
        return sorted(cores, key=place)
    except (OSError, ValueError, IndexError):
        return cores


def hold_memory() -> Hold:
    """Locks what is mapped now."""
    name, soft, hard = "memory", *resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if platform.machine() not in KNOWN_MACHINES:
        return Hold(name, f"not locked: {platform.machine()} is not known", f"it is for {' and '.join(KNOWN_MACHINES)}")
    if soft != resource.RLIM_INFINITY and hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_ONFAULT) == 0:
        return Hold(name, "what a role has at its start is locked")
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"`ulimit -l` is {soft >> 10} KiB"
    return Hold(name, f"not locked: {os.strerror(ctypes.get_errno())}, {limit}", MEMLOCK_FIX)


def hold_kill_order(path: Path = _OOM_FILE) -> Hold:
    """Lowers the role's score; without the right to, the raised scores of commands are order enough."""
    name = "kill order"
    try:
        score = int(path.read_text())
    except (OSError, ValueError) as error:
        return Hold(name, f"oom_score_adj is not known: {error}", "is /proc mounted?")
    try:
        path.write_text(str(min(score, OOM_SCORE)))
    except OSError:
        return Hold(name, f"oom_score_adj {score}, which this user may not lower; commands of a sandbox 1000")
    return Hold(name, f"oom_score_adj {min(score, OOM_SCORE)}; commands of a sandbox 1000")


def _number(environ: MutableMapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


if __name__ == "__main__":
    json.dump([asdict(hold) for hold in harden()], sys.stdout)
