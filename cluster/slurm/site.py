"""What a Slurm site offers and allows, asked once, for `miles doctor`: partitions, accounts, QOS, limits, versions.

Best effort: each part is None where the site did not say, and `unknown` holds why. Accounts and QOS are known only where there
is an accounting database (slurmdbd); nothing of a run needs one.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.slurm.command import Answer, Run, query_env, run_slurm
from miles_core.errors import SchedulerError

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
SHAPE_FORMAT = "%P|%D|%c|%m|%G|%f"
"""Partition, nodes, CPUs, memory in MiB, GRES and features: one line for each kind of node."""
_TIMEOUT_S = 20.0
_GPU = re.compile(r"gpu(?::[^:,()]+)*?:(\d+)")


@dataclass(frozen=True)
class Shape:
    """So many equal nodes of a partition."""

    nodes: int
    cpus: int
    mem_mb: int
    gpus: int
    features: frozenset[str]


@dataclass(frozen=True)
class Partition:
    """One partition. `accounts`, `qos` None: all may use it."""

    name: str
    is_default: bool
    state: str
    max_time_min: float
    max_nodes: float
    accounts: frozenset[str] | None
    qos: frozenset[str] | None
    shapes: tuple[Shape, ...] = ()
    preempts: str = "OFF"
    """What becomes of a job that a better one displaces: OFF (nothing displaces it), REQUEUE, CANCEL, SUSPEND ..."""
    grace_s: float = 0.0
    """Between the warning of a preemption and its end."""


@dataclass(frozen=True)
class Association:
    """An account that this user may charge. None: no limit, or not said."""

    account: str
    qos: frozenset[str]
    max_jobs: int | None
    max_submit: int | None


@dataclass(frozen=True)
class SiteFacts:
    """Everything that was asked for."""

    missing_commands: tuple[str, ...] = ()
    version: str = ""
    ping: str = ""
    """What a controller that answers says; empty if none does."""
    config: Mapping[str, str] = field(default_factory=dict)
    """`scontrol show config`."""
    partitions: Mapping[str, Partition] | None = None
    associations: tuple[Association, ...] | None = None
    qos: Mapping[str, float] | None = None
    """MaxWall in minutes by name; inf without one."""
    reservations: tuple[str, ...] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Why a part is not known, by its name."""

    @property
    def has_accounting(self) -> bool:
        return self.config.get("AccountingStorageType", "").endswith("slurmdbd")


def ask_site(env: Mapping[str, str], *, run: Run = run_slurm, user: str | None = None) -> SiteFacts:
    """Asks the site that `env` (SLURM_CONF) leads to. Raises nothing: what cannot be asked is unknown."""
    return _Asker(env, run, user or getpass.getuser()).facts()


class _Asker:
    def __init__(self, env: Mapping[str, str], run: Run, user: str) -> None:
        self._env, self._run, self._user = query_env(os.environ, env), run, user
        self._unknown: dict[str, str] = {}

    def facts(self) -> SiteFacts:
        missing = tuple(command for command in COMMANDS if shutil.which(command) is None)
        version = self._ask("version", "sbatch", "--version") or ""
        ping = self._ask("controller", "scontrol", "ping") or ""
        config = parse_config(self._ask("configuration", "scontrol", "show", "config") or "") if ping else {}
        partitions = self._partitions() if ping else None
        reservations = self._ask("reservations", "scontrol", "--oneliner", "show", "reservation") if ping else None
        known = SiteFacts(
            missing, version.strip(), ping.strip(), config, partitions,
            reservations=None if reservations is None else parse_reservations(reservations),
        )  # fmt: skip
        associations, qos = self._accounting() if known.has_accounting else (None, None)
        return SiteFacts(
            missing, known.version, known.ping, config, partitions, associations, qos, known.reservations, dict(self._unknown)
        )

    def _partitions(self) -> dict[str, Partition] | None:
        text = self._ask("partitions", "scontrol", "--oneliner", "show", "partition")
        shapes = self._ask("nodes", "sinfo", "--noheader", f"--format={SHAPE_FORMAT}")
        return None if text is None else parse_partitions(text, parse_shapes(shapes or ""))

    def _accounting(self) -> tuple[tuple[Association, ...] | None, dict[str, float] | None]:
        fields = "format=Account,QOS,MaxJobs,MaxSubmitJobs"
        accounts = self._ask("accounts", "sacctmgr", "-nP", "show", "associations", f"user={self._user}", fields)
        qos = self._ask("qos", "sacctmgr", "-nP", "show", "qos", "format=Name,MaxWall")
        return (None if accounts is None else parse_associations(accounts)), (None if qos is None else parse_qos(qos))

    def _ask(self, part: str, *argv: str) -> str | None:
        try:
            answer = self._run(argv, env=self._env, timeout_s=_TIMEOUT_S)
        except SchedulerError as error:
            answer = Answer(1, "", str(error))
        if answer.returncode == 0:
            return answer.stdout
        self._unknown[part] = answer.words or f"`{' '.join(argv)}` ended with {answer.returncode}"
        return None


# --- parsers ---------------------------------------------------------------------------------------------------------


def parse_config(text: str) -> dict[str, str]:
    """`Key   = value` lines."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_minutes(text: str) -> float:
    """`1-02:00:00`, `08:00:00`, `30:00`, `45` in minutes; inf for UNLIMITED, infinite, NONE or what is no time."""
    match = re.fullmatch(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})", text.strip())
    if match is None:
        return math.inf
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(match["days"]) * 1440 + hours * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)


def parse_shapes(text: str) -> dict[str, tuple[Shape, ...]]:
    """Kinds of nodes by partition, from sinfo in SHAPE_FORMAT."""
    found: dict[str, tuple[Shape, ...]] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) != 6:
            continue
        nodes, cpus, mem_mb = (int(digits[0]) if (digits := re.match(r"\d+", cell)) else 0 for cell in cells[1:4])
        gpus = sum(int(count) for count in _GPU.findall(cells[4]))
        features = frozenset(cells[5].split(",")) - {"(null)", ""}
        name = cells[0].rstrip("*")
        found[name] = (*found.get(name, ()), Shape(nodes, cpus, mem_mb, gpus, features))
    return found


def parse_partitions(text: str, shapes: Mapping[str, tuple[Shape, ...]]) -> dict[str, Partition]:
    """Partitions by name, from `scontrol --oneliner show partition`."""
    found = {}
    for line in text.splitlines():
        values = dict(pair for word in line.split() if len(pair := word.split("=", 1)) == 2)
        if name := values.get("PartitionName"):
            found[name] = Partition(
                name=name, is_default=values.get("Default") == "YES", state=values.get("State", ""),
                max_time_min=parse_minutes(values.get("MaxTime", "")), max_nodes=_count(values.get("MaxNodes", "")),
                accounts=_names(values.get("AllowAccounts", "ALL")), qos=_names(values.get("AllowQos", "ALL")),
                shapes=shapes.get(name, ()), preempts=values.get("PreemptMode", "OFF"),
                grace_s=float(values["GraceTime"]) if values.get("GraceTime", "").isdigit() else 0.0,
            )  # fmt: skip
    return found


def parse_reservations(text: str) -> tuple[str, ...]:
    """Names, from `scontrol --oneliner show reservation`."""
    return tuple(re.findall(r"ReservationName=(\S+)", text))


def parse_associations(text: str) -> tuple[Association, ...]:
    """From `sacctmgr -nP show associations format=Account,QOS,MaxJobs,MaxSubmitJobs`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    return tuple(
        Association(account, frozenset(qos.split(",")) - {""}, _limit(jobs), _limit(submit))
        for account, qos, jobs, submit in rows
    )


def parse_qos(text: str) -> dict[str, float]:
    """MaxWall in minutes by name, from `sacctmgr -nP show qos format=Name,MaxWall`."""
    rows = (line.partition("|") for line in text.splitlines() if "|" in line)
    return {name: parse_minutes(wall) for name, _, wall in rows if name}


def _names(text: str) -> frozenset[str] | None:
    return None if text in ("ALL", "(null)", "") else frozenset(text.split(","))


def _count(text: str) -> float:
    return int(text) if text.isdigit() else math.inf


def _limit(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None
