"""`miles doctor`: can this machine run the system on this cluster? Each finding says what was seen and what to change."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.profile import ClusterProfile
from cluster.schedulers import make_scheduler
from miles_core.errors import MilesError
from miles_core.store.fs import FileSystem
from miles_core.store.publish import publish_exclusive
from tasks.prepare import cache_folder, run_root

PINNED = ("torch", "transformers", "deepspeed", "prefect", "submitit", "pyarrow", "reasoning-gym")
_MIN_FREE_GIB = 2.0


@dataclass(frozen=True)
class Finding:
    """One check."""

    name: str
    verdict: Literal["good", "note", "bad"]
    seen: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def examine(profile: ClusterProfile) -> list[Finding]:
    """All checks; nothing stays of them but the runs folder."""
    root = run_root(profile, "doctor").parent
    findings = [_python(), *_packages(), _compiler(), _filesystem(root), _space(root), _cache(), _cpus()]
    if profile.kind == "slurm":
        findings.append(_slurm(profile, root))
    return findings


def print_findings(findings: list[Finding]) -> None:
    """A line each, the fix below what is wrong."""
    for finding in findings:
        print(f"{finding.verdict:5} {finding.name}: {finding.seen}")
        if finding.fix:
            print(f"      -> {finding.fix}")


def _python() -> Finding:
    version = sys.version.split()[0]
    good = sys.version_info[:2] == (3, 11)
    return Finding("python", "good" if good else "bad", version, "" if good else "use Python 3.11: the pinned set is for it")


def _packages() -> list[Finding]:
    found = []
    for name in PINNED:
        try:
            found.append(Finding(name, "good", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, "bad", "not installed", "run `make install`"))
    return found


def _compiler() -> Finding:
    path = shutil.which("c++") or shutil.which("g++")
    if path:
        return Finding("compiler", "good", path)
    return Finding("compiler", "note", "no C++ compiler", "DeepSpeed's CPU offload builds a kernel with one; nothing else does")


def _filesystem(root: Path) -> Finding:
    """Hard links and renames are what publish and lease are made of."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".doctor.") as folder:
            first = publish_exclusive(FileSystem(), Path(folder) / "lease", b"1")
            second = publish_exclusive(FileSystem(), Path(folder) / "lease", b"2")
    except OSError as error:
        return Finding("runs folder", "bad", f"{root}: {error}", "set runs_root to a shared folder that you may write to")
    if first and not second:
        return Finding("runs folder", "good", f"{root}: exclusive link and rename work")
    return Finding("runs folder", "bad", f"{root}: link(2) is not exclusive here", "use another filesystem for runs_root")


def _cache() -> Finding:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor."):
            return Finding("base model cache", "good", str(folder))
    except (OSError, MilesError) as error:
        return Finding("base model cache", "bad", str(error), "set MILES_CACHE to a folder that you may write to")


def _space(root: Path) -> Finding:
    there = next(folder for folder in (root, *root.parents) if os.access(folder, os.R_OK) and folder.is_dir())
    free = shutil.disk_usage(there).free / 2**30
    good = free >= _MIN_FREE_GIB
    return Finding("disk", "good" if good else "bad", f"{free:.1f} GiB free", "" if good else f"free {_MIN_FREE_GIB} GiB")


def _cpus() -> Finding:
    width = len(os.sched_getaffinity(0))
    if width >= 2:
        return Finding("cpus", "good", f"{width} usable")
    return Finding("cpus", "note", f"{width} usable", "learner and rollout share one core; a run takes about twice as long")


def _slurm(profile: ClusterProfile, root: Path) -> Finding:
    try:
        snapshot = make_scheduler(profile, root / "doctor").snapshot("doctor")
    except MilesError as error:
        return Finding("slurm", "bad", str(error))
    if not snapshot.ok:
        return Finding("slurm", "bad", snapshot.error, "is slurmctld up, and SLURM_CONF right? try `sinfo`")
    version = _slurm_version(profile)
    nodes = "" if snapshot.usable_nodes is None else f", {snapshot.usable_nodes} usable nodes"
    return Finding("slurm", "good", f"{version}{nodes}")


def _slurm_version(profile: ClusterProfile) -> str:
    """As sbatch says it; it reads the cluster's configuration even for that."""
    env = dict(os.environ)
    if profile.slurm.devslurm is not None:
        env["SLURM_CONF"] = str(Path(profile.slurm.devslurm).expanduser() / "slurm.conf")
    command = ["sbatch", "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"version not known ({error})"
    return done.stdout.strip() or "version not known"
