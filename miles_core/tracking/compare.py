"""What differs between two runs: what they were made from, where they ran, and what came of it.

Built from the files of both run directories. What a run directory does not say (it was made before there was a record, or the
file is gone) is UNKNOWN, a value of its own: neither equal nor different.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from miles_core.masking import MASK, is_secret_name, looks_secret
from miles_core.paths import RunPaths
from miles_core.provenance import Data, Provenance, read_provenance
from miles_core.records import FileDigest, split_writer
from miles_core.run import RunConfig, read_run, rollout_writers
from miles_core.store.lease import UNKNOWN, Lease
from miles_core.store.publish import digest_bytes
from miles_core.tracking.ledger import Ledger, read_ledger
from miles_core.tracking.machines import kind_text, read_leases
from miles_core.tracking.report_data import Lane, collect
from miles_core.tracking.summary import summarize

Verdict = Literal["equal", "differs", "UNKNOWN"]
ABSENT = "(none)"
"""What stands for a field, file or package that only the other run has."""
_MOST_HOSTS = 4

INPUTS = ("recipe", "code", "packages", "base model", "data")
"""Groups that decide what a run trains; the cluster and the hosts decide when."""


@dataclass(frozen=True)
class Difference:
    """One thing with its two values, as text without secrets."""

    field: str
    first: str
    second: str


@dataclass(frozen=True)
class Group:
    """One kind of thing in both runs."""

    name: str
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    note: str = ""
    """What is equal, in a few words, or why it is UNKNOWN."""


@dataclass(frozen=True)
class Weights:
    """The weights after each step, by their digests."""

    common_steps: int
    """Steps after 0 that both runs have."""
    differ_from: int | None
    """First step (0 = the base model as loaded) with different digests; None: all common ones are equal."""


@dataclass(frozen=True)
class Side:
    """One of the two runs, read."""

    run: RunConfig
    paths: RunPaths
    provenance: Provenance | None
    ledger: Ledger
    summary: dict[str, Any]
    lanes: list[Lane]
    leases: dict[str, list[Lease]] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """Who made it, where and how."""
        if self.provenance is None:
            return UNKNOWN
        submitted = self.provenance.submitted
        return f"{submitted.user}@{submitted.host}: {' '.join(submitted.command)}"


@dataclass(frozen=True)
class Comparison:
    """Everything that `miles compare` shows."""

    sides: tuple[Side, Side]
    groups: tuple[Group, ...]
    weights: Weights
    results: dict[str, tuple[Any, Any]]
    """Figures by name; None where unknown."""

    @property
    def inputs(self) -> Verdict:
        """Whether both runs trained the same thing."""
        verdicts = {group.verdict for group in self.groups if group.name in INPUTS}
        return "differs" if "differs" in verdicts else UNKNOWN if UNKNOWN in verdicts else "equal"

    def as_json(self) -> dict[str, Any]:
        """The comparison for machines."""
        return {
            "runs": [str(side.paths.root) for side in self.sides],
            "submitted": [side.command for side in self.sides],
            "inputs": self.inputs,
            "groups": {
                group.name: {
                    "verdict": group.verdict, "note": group.note,
                    "differences": {item.field: [item.first, item.second] for item in group.differences},
                }
                for group in self.groups
            },
            "weights": {"common_steps": self.weights.common_steps, "differ_from_step": self.weights.differ_from},
            "results": {name: list(values) for name, values in self.results.items()},
        }  # fmt: skip


def compare(first: Path, second: Path) -> Comparison:
    """Compares two run directories, live or finished. Raises RunDirectoryError, JournalCorrupt, OSError."""
    sides = read_side(first), read_side(second)
    one, two = sides
    groups = (
        _fields("recipe", _flat(one.run.recipe.model_dump(mode="json")), _flat(two.run.recipe.model_dump(mode="json"))),
        _code(one, two),
        _packages(one, two),
        _base_model(one, two),
        _data(one, two),
        _fields("cluster", _flat(one.run.cluster), _flat(two.run.cluster)),
        _hosts(one, two),
    )
    figures = _figures(one), _figures(two)
    results = {name: (value, figures[1][name]) for name, value in figures[0].items()}
    return Comparison(sides, groups, _weights(one.ledger, two.ledger), results)


def read_side(root: Path) -> Side:
    """Everything of one run directory. Raises RunDirectoryError, JournalCorrupt, OSError."""
    run, paths = read_run(root)
    ledger = read_ledger(run, paths)
    summary = summarize(ledger, paths)
    lanes = collect(ledger, paths, summary).lanes
    return Side(run, paths, read_provenance(paths), ledger, summary, lanes, read_leases(run, paths))


# --- what they were made from ----------------------------------------------------------------------------------------


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists, by dotted path."""
    if isinstance(value, Mapping) and value:
        parts = value.items()
    elif isinstance(value, list | tuple) and value:
        parts = enumerate(value)  # type: ignore[assignment]
    else:
        return {name: value}
    return {path: leaf for key, part in parts for path, leaf in _flat(part, f"{name}.{key}" if name else str(key)).items()}


def _fields(name: str, first: Mapping[str, Any], second: Mapping[str, Any], note: str = "") -> Group:
    """A group of fields by name, with `note` if all are equal; a field that one side lacks is a difference."""
    differences = tuple(
        Difference(key, shown(key, first.get(key, ABSENT)), shown(key, second.get(key, ABSENT)))
        for key in dict.fromkeys([*first, *second])
        if first.get(key, ABSENT) != second.get(key, ABSENT)
    )
    return Group(name, "differs", differences) if differences else Group(name, "equal", note=note)


def shown(name: str, value: Any) -> str:
    """A value as text on one line, without a secret in it."""
    text = value if isinstance(value, str) else json.dumps(value)
    if is_secret_name(name.rpartition(".")[2]) or looks_secret(text):
        return MASK
    return "".join(character if character.isprintable() else "?" for character in text)


def _code(one: Side, two: Side) -> Group:
    """By the snapshots' files; by their digests alone where a snapshot is gone."""
    digests_equal = one.run.code_digest == two.run.code_digest
    files = code_files(one.paths), code_files(two.paths)
    if not all(files):
        note = "a code snapshot is gone, so which files differ is UNKNOWN"
        digests = Difference("digest", one.run.code_digest, two.run.code_digest)
        return Group("code", "equal") if digests_equal else Group("code", "differs", (digests,), note)
    return replace(_fields("code", files[0], files[1]), note=" | ".join(map(_commit, (one, two))))


def _commit(side: Side) -> str:
    """`commit 1a2b3c4d+dirty`."""
    git = None if side.provenance is None else side.provenance.git
    if git is None or git.commit == UNKNOWN:
        return f"commit {UNKNOWN}"
    return f"commit {git.commit[:12]}{'+dirty' if git.dirty is True else ''}"


def code_files(paths: RunPaths) -> dict[str, str]:
    """Short digest of each file of a code snapshot, by name; empty if it is gone."""
    return {name: digest_bytes(path.read_bytes())[:12] for name, path in _snapshot(paths).items()}


def _snapshot(paths: RunPaths) -> dict[str, Path]:
    files = (path for path in paths.code.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(paths.code)): path for path in sorted(files)}


def code_diff(first: RunPaths, second: RunPaths) -> Iterator[str]:
    """Unified diff of the two code snapshots, line by line."""
    one, two = _snapshot(first), _snapshot(second)
    for name in sorted({*one, *two}):
        labels = [f"{side}/{name}" if name in files else "/dev/null" for side, files in (("a", one), ("b", two))]
        yield from difflib.unified_diff(_lines(one.get(name)), _lines(two.get(name)), labels[0], labels[1], lineterm="")


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else path.read_text(errors="replace").splitlines()


def _packages(one: Side, two: Side) -> Group:
    if one.provenance is None or two.provenance is None:
        return Group("packages", UNKNOWN, note=_unrecorded(one, two))
    return _fields("packages", one.provenance.packages, two.provenance.packages, f"{len(one.provenance.packages)} versions")


def _unrecorded(one: Side, two: Side) -> str:
    names = [name for name, side in (("a", one), ("b", two)) if side.provenance is None]
    return f"no readable record in {' and '.join(names)}"


def _base_model(one: Side, two: Side) -> Group:
    digests = {"weights": one.run.base_model_digest}, {"weights": two.run.base_model_digest}
    weights = _fields("base model", *digests)
    if one.provenance is None or two.provenance is None:
        if weights.verdict == "differs":
            return weights
        return Group("base model", UNKNOWN, note=f"weights equal, tokenizer and configuration not: {_unrecorded(one, two)}")
    files = _by_name(one.provenance.base_model), _by_name(two.provenance.base_model)
    return _fields("base model", {**digests[0], **files[0]}, {**digests[1], **files[1]}, note=f"{len(files[0])} files")


def _by_name(files: tuple[FileDigest, ...]) -> dict[str, str]:
    return {file.name: file.digest[:12] for file in files}


def _data(one: Side, two: Side) -> Group:
    if one.provenance is None or two.provenance is None:
        return Group("data", UNKNOWN, note=_unrecorded(one, two))
    data = one.provenance.data
    group = _fields("data", _data_fields(data), _data_fields(two.provenance.data), note=data.library)
    if group.verdict == "equal" and data.source_digest == UNKNOWN:
        return Group("data", UNKNOWN, note=f"the source of {data.family} was not found when the runs were made")
    return group


def _data_fields(data: Data) -> dict[str, Any]:
    return {**_flat(data.model_dump(mode="json", exclude={"files"})), **_by_name(data.files)}


# --- where they ran --------------------------------------------------------------------------------------------------


def _hosts(one: Side, two: Side) -> Group:
    """By role: kinds of machine with the hosts."""
    places = _fields("hosts", _places(one), _places(two))
    leases = [lease for side in (one, two) for of_writer in side.leases.values() for lease in of_writer]
    if not one.leases or not two.leases:
        return Group("hosts", UNKNOWN, places.differences, "a run has no lease: no job has started, or they are gone")
    if any(lease.machine is None for lease in leases):
        return Group("hosts", UNKNOWN, places.differences, "a run is from before machines were recorded")
    return places


def _places(side: Side) -> dict[str, str]:
    """`n1, n2: AMD EPYC, 8 CPUs` by role, one such part for each kind of machine; attempts on one host count once."""
    found: dict[str, dict[str, set[str]]] = {}
    for writer, leases in side.leases.items():
        kinds = found.setdefault(split_writer(writer)[0], {})
        for lease in leases:
            nodes = "" if lease.machine is None else lease.machine.nodes
            kinds.setdefault(kind_text(lease), set()).add(nodes or lease.host or f"{UNKNOWN} host")
    return {
        role: "; ".join(f"{_some(hosts)}: {kind}" for kind, hosts in sorted(kinds.items()))
        for role, kinds in sorted(found.items())
    }


def _some(names: set[str]) -> str:
    shown_names = sorted(names)[:_MOST_HOSTS]
    return ", ".join(shown_names) + (f" and {len(names) - len(shown_names)} more" if len(names) > len(shown_names) else "")


# --- what came of them -----------------------------------------------------------------------------------------------


def _weights(one: Ledger, two: Ledger) -> Weights:
    steps = sorted(set(one.steps.steps) & set(two.steps.steps))
    differ = (step for step in steps if one.steps.steps[step].weights_digest != two.steps.steps[step].weights_digest)
    return Weights(sum(step > 0 for step in steps), next(differ, None))


def _figures(side: Side) -> dict[str, Any]:
    summary, seconds = side.summary, side.summary["seconds"]
    incidents = Counter(str(incident["what"]) for incident in summary["incidents"])
    hours = _hours(side)
    return {
        "state": summary["state"],
        "steps": summary["steps"],
        "reward, first 5 steps": summary["reward"]["first5"],
        "reward, last 5 steps": summary["reward"]["last5"],
        "greedy before": summary["eval"]["greedy_before"],
        "greedy after": summary["eval"]["greedy_after"],
        "staleness mean": summary["staleness"]["mean"],
        "staleness max": summary["staleness"]["max"],
        "steps per hour": round(summary["steps"] * 3600 / seconds["total"], 1) if seconds["total"] > 0 else None,
        "sampled tokens/s": summary["tokens_per_s"],
        "seconds in all": seconds["total"],
        "groups trained": summary["groups"]["trained"],
        "groups dropped": _counts(summary["groups"]["dropped"]),
        "incidents": _counts(incidents),
        "bytes published": summary["policy"]["bytes_published"],
        "CPU-hours, requested": None if hours is None else hours[0],
        "GPU-hours, requested": None if hours is None else hours[1],
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _hours(side: Side) -> tuple[float, float] | None:
    """CPU- and GPU-hours that jobs of a batch system held, by what they asked for; None where roles share a machine."""
    if side.run.cluster.get("kind") != "slurm":
        return None
    pools = dict(rollout_writers(side.run.recipe))
    cpus = gpus = 0.0
    for lane in side.lanes:
        hours = sum(attempt.end_s - attempt.start_s for attempt in lane.attempts) / 3600
        asked = _asked(side.run.cluster, split_writer(lane.writer)[0], pools.get(lane.writer))
        nodes = asked.get("nodes", 1)
        cpus += hours * nodes * asked.get("tasks", 1) * asked.get("cpus", 1)
        gpus += hours * nodes * asked.get("gpus", 0)
    return round(cpus, 3), round(gpus, 3)


def _asked(cluster: Mapping[str, Any], role: str, pool: str | None) -> dict[str, Any]:
    """Resources of a role, as its profile's JSON has them; of whatever version that profile is."""
    for section, name in (("pools", pool), ("resources", role)):
        entries = cluster.get(section)
        found = entries.get(name) if isinstance(entries, dict) else None
        if isinstance(found, dict):
            return found
    return {}
