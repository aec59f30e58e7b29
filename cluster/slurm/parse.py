"""Parsers of what Slurm's commands print. Pure; a line that does not fit is skipped, never guessed at.

Why text and not JSON: the JSON of squeue changed with each openapi plugin between Slurm 21 and 25, the format letters did
not. The exit code has no letter, so it comes from the long format with explicit widths, asked only for ended jobs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

SQUEUE_FORMAT = "%i|%T|%N|%r|%k"
"""Id, state, nodes, reason, comment. The comment is last: those of other people's jobs may hold anything."""
EXIT_CODE_FORMAT = "JobID:24|,exit_code:12|"
START_FORMAT = "%i|%S"
"""Id and, with --start, the expected time of start: `2026-11-30T16:08:38` in the client's zone, or `N/A`."""
SINFO_NODES_FORMAT = "%N|%T"
"""%N is the node's name; %n would be its hostname, the same for all nodes of one machine."""

_JOB = re.compile(
    r"(?P<id>[^|]+)\|(?P<state>[^|]*)\|(?P<nodes>[^|]*)\|(?P<reason>.*)\|"
    r"miles:(?P<run>[^:|]+):(?P<writer>[^:|]+):a(?P<attempt>\d+):(?P<token>[^:|\s]+)\s*"
)
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_DOWN = frozenset({"down", "drain", "drained", "draining", "fail", "failing", "error", "inval"})
_OUT_OF_USE = _DOWN | {"maint", "future"}
_STATE_FLAGS = "*~#!%$@^-+"


@dataclass(frozen=True)
class JobLine:
    """One of our jobs as squeue lists it."""

    job_id: str
    state: str
    nodes: tuple[str, ...]
    reason: str
    run_id: str
    writer: str
    attempt: int
    token: str


def parse_squeue(text: str) -> list[JobLine]:
    """Our jobs among the lines of squeue in SQUEUE_FORMAT, oldest first; other jobs have no comment of ours."""
    found = [match for line in text.splitlines() if (match := _JOB.fullmatch(line.strip()))]
    jobs = [
        JobLine(
            job_id=match["id"], state=match["state"], nodes=expand_hostlist(match["nodes"]), reason=match["reason"],
            run_id=match["run"], writer=match["writer"], attempt=int(match["attempt"]), token=match["token"],
        )
        for match in found
    ]  # fmt: skip
    return sorted(jobs, key=lambda job: _number(job.job_id))


def _number(job_id: str) -> int:
    digits = re.match(r"\d+", job_id)
    return int(digits.group()) if digits else 0


def parse_exit_codes(text: str) -> dict[str, int]:
    """Exit codes by job id, as a shell gives them (128 + signal), from squeue in EXIT_CODE_FORMAT."""
    codes = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 2 and (code := _exit_code(fields[1])) is not None:
            codes[fields[0]] = code
    return codes


def _exit_code(text: str) -> int | None:
    """`7:0` (code and signal) or the raw wait status 1792."""
    if pair := re.fullmatch(r"(\d+):(\d+)", text):
        code, signal = int(pair[1]), int(pair[2])
    elif text.isdigit():
        code, signal = int(text) >> 8, int(text) & 0x7F
    else:
        return None
    return 128 + signal if signal else code


def parse_starts(text: str) -> dict[str, float]:
    """Expected starts in Unix seconds by job id, from squeue in START_FORMAT; `N/A` gives none."""
    starts = {}
    for line in text.splitlines():
        job_id, _, when = line.strip().partition("|")
        try:
            starts[job_id] = datetime.strptime(when, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
        except (ValueError, OSError):
            continue
    return starts


def parse_job_id(text: str) -> str | None:
    """The id that `sbatch --parsable` printed (`123` or `123;cluster`); None if there is none."""
    lines = text.split()
    job_id = lines[-1].partition(";")[0] if lines else ""
    return job_id if job_id.isdigit() else None


def parse_nodes(text: str) -> tuple[tuple[str, ...], int]:
    """Nodes that are down or drained, and the number of nodes that could run something, from sinfo in SINFO_NODES_FORMAT.

    A node that does not answer or whose state is unknown (as all are after a restart of slurmctld) counts as usable: that
    is no information.
    """
    states: dict[str, str] = {}
    for line in text.splitlines():
        name, _, state = line.strip().partition("|")
        if state:
            states[name] = state.lower()
    plain = {name: state.rstrip(_STATE_FLAGS) for name, state in states.items()}
    down = tuple(name for name, state in plain.items() if state in _DOWN)
    return down, sum(1 for state in plain.values() if state not in _OUT_OF_USE)


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Names of `n[1-3,07],gpu-a` in order. Anything that is no host list (`(null)`, `None assigned`) gives none."""
    text = text.strip()
    if not text or text.startswith("(") or " " in text:
        return ()
    return tuple(chain.from_iterable(_expand(part) for part in re.split(r",(?![^\[]*\])", text) if part))


def _expand(part: str) -> list[str]:
    match = _BRACKETS.search(part)
    if match is None:
        return [part]
    head, tail = part[: match.start()], part[match.end() :]
    return [head + middle + rest for middle in _range_list(match[1]) for rest in _expand(tail)]


def _range_list(text: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        first, dash, last = piece.partition("-")
        if dash and first.isdigit() and last.isdigit():
            names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            names.append(piece)
    return names
