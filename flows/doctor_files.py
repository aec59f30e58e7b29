"""The filesystem that runs live on, looked at from this machine: what it is, how much is left, how it keeps its promises.

How late one node sees what another wrote, a single machine cannot tell: that is flows/doctor_nodes.py.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.profile import ClusterProfile
from flows.findings import Finding, bad, ok, unknown, warn
from miles_core.store.fs import FileSystem
from miles_core.store.publish import publish_exclusive

MIN_FREE_BYTES = 2 << 30
MIN_FREE_FILES = 100_000
NETWORK_TYPES = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs", "panfs", "wekafs", "cifs",
    "9p", "virtiofs", "orangefs", "afs", "vast", "daos",
})  # fmt: skip
VOLATILE_TYPES = frozenset({"tmpfs", "ramfs"})
_SYNCS = 10
_SLOW_SYNC_S = 0.2
_CLOCK_S = 2.0
_WRITE_BYTES = 64 << 20
_SLOWER = 0.5
"""A speed under this part of what the profile says is told."""


@dataclass(frozen=True)
class Mount:
    """Where a folder lies."""

    point: str
    kind: str
    options: frozenset[str]


def examine_files(profile: ClusterProfile, root: Path) -> Iterator[Finding]:
    """All checks of the runs folder; it is made if it is missing, and nothing else stays."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".doctor.") as name:
            folder = Path(name)
            yield _promises(root, folder)
            yield judge_mount(profile, mount_of(root.resolve(), Path("/proc/self/mountinfo").read_text()))
            yield from _space(root)
            yield _syncs(folder)
            yield judge_writes(profile, _write_mib_s(folder))
            yield _clock(folder)
    except OSError as error:
        yield bad("runs folder", f"{root}: {error}", "set runs_root to a shared folder that you may write to")


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount that holds a path, from /proc/self/mountinfo; of mounts over each other the last."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        head, dash, tail = line.partition(" - ")
        cells, rest = head.split(), tail.split()
        if not dash or len(cells) < 6 or len(rest) < 1:
            continue
        # Blanks in a name are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), cells[4])
        if path.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, rest[0], frozenset([*cells[5].split(","), *(rest[2].split(",") if len(rest) > 2 else [])]))
    return best


def judge_mount(profile: ClusterProfile, mount: Mount | None) -> Finding:
    """Whether all nodes can see it, and whether its times go with the profile's."""
    name = "runs filesystem"
    if mount is None:
        return unknown(name, "no mount of it is known")
    seen, timing = f"{mount.kind} at {mount.point}", profile.timing
    if mount.kind in VOLATILE_TYPES:
        return warn(name, f"{seen}: memory, gone with this machine", "set runs_root to a disk")
    is_local = mount.kind not in NETWORK_TYPES and not mount.kind.startswith("fuse.")
    if is_local and profile.kind == "slurm" and profile.slurm.devslurm is None:
        return warn(
            name, f"{seen}: a local disk, other nodes do not see it", "set runs_root to the filesystem that all nodes share; "
            "if they do see it, `miles doctor --nodes` proves it",
        )  # fmt: skip
    if mount.kind.startswith("nfs") and "soft" in mount.options:
        return warn(name, f"{seen}, mounted soft: a slow server makes writes fail", "ask for a hard mount")
    if mount.kind.startswith("nfs") and "noac" not in mount.options and timing.visibility_s < 3:
        return warn(
            name, f"{seen} shows changes up to its acregmax or acdirmax late; timing.visibility_s is {timing.visibility_s:g}",
            "set timing.visibility_s to 60 and lease_s to 300, or to what `miles doctor --nodes` measures",
        )  # fmt: skip
    return ok(name, seen)


def _promises(root: Path, folder: Path) -> Finding:
    """Hard links that fail where the name exists, and renames over a name: publish and lease are made of these."""
    fs = FileSystem()
    first = publish_exclusive(fs, folder / "lease", b"1")
    second = publish_exclusive(fs, folder / "lease", b"2")
    fs.append(folder / "new", b"new")
    fs.rename(folder / "new", folder / "lease")
    replaced = fs.read(folder / "lease") == b"new" and "new" not in fs.listdir(folder)
    if first and not second and replaced:
        return ok("runs folder", f"{root}: exclusive link and rename work")
    what = "link(2) is not exclusive" if not (first and not second) else "rename(2) does not replace"
    return bad("runs folder", f"{root}: {what} here", "use another filesystem for runs_root")


def _space(root: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(root).free
    shown = f"{free / 2**30:.1f} GiB free"
    if free >= MIN_FREE_BYTES:
        yield ok("disk", shown)
    else:
        yield bad("disk", shown, f"free at least {MIN_FREE_BYTES >> 30} GiB there; a quota may allow even less than that")
    info = os.statvfs(root)
    # Filesystems that make inodes as they need them report none at all.
    if info.f_files and info.f_favail < MIN_FREE_FILES:
        yield warn("inodes", f"{info.f_favail} files can still be made", "a run makes a few files a step: make room there")


def _syncs(folder: Path) -> Finding:
    """Control records are synced, at most once in timing.sync_s by each role."""
    fs, seconds = FileSystem(), []
    for number in range(_SYNCS):
        path = folder / f"sync-{number}"
        fs.append(path, b"x" * 4096)
        start = time.perf_counter()
        fs.sync(path)
        seconds.append(time.perf_counter() - start)
    median, most = statistics.median(seconds), max(seconds)
    seen = f"median {median * 1000:.1f} ms, largest {most * 1000:.1f} ms of {_SYNCS}"
    if median < _SLOW_SYNC_S:
        return ok("fsync", seen)
    return warn("fsync", seen, f"set timing.sync_s to {max(1.0, 2 * median):.1g} or more, or use a quicker filesystem")


def _write_mib_s(folder: Path) -> float:
    """MiB a second of one large file, written and synced as a checkpoint is."""
    fs, path, data = FileSystem(), folder / "large", os.urandom(_WRITE_BYTES)
    start = time.perf_counter()
    fs.append(path, data)
    fs.sync(path)
    return _WRITE_BYTES / 2**20 / (time.perf_counter() - start)


def judge_writes(profile: ClusterProfile, measured: float) -> Finding:
    """What the profile should say of the speed; on Slurm it decides whether a checkpoint fits the warning ahead of a limit."""
    name, said = "write speed", profile.write_mib_s
    speed = f"{measured:.0f}" if measured >= 10 else f"{measured:.1f}"
    seen = f"{speed} MiB/s, {_WRITE_BYTES >> 20} MiB written and synced"
    if profile.kind != "slurm":
        return ok(name, seen)
    if said is None:
        return Finding(
            name, "ok", f"{seen}; the profile does not say", f"set write_mib_s: {speed} (or what a compute node reaches): then "
            "a checkpoint that cannot fit slurm.signal_lead_s is refused at submit",
        )  # fmt: skip
    if measured < _SLOWER * said:
        return warn(name, f"{seen}; the profile says {said:g}", f"set write_mib_s: {speed}, if it is so often")
    return ok(name, f"{seen}; the profile says {said:g}")


def _clock(folder: Path) -> Finding:
    """The filesystem's clock against this machine's. Nothing decides by clocks; ages in `status` do."""
    path = folder / "clock"
    before = time.time()
    path.write_bytes(b"x")
    after, there = time.time(), path.stat().st_mtime
    ahead = there - after if there > after else min(0.0, there - before)
    seen = f"this machine and the runs filesystem differ by {abs(ahead):.1f} s"
    if abs(ahead) < _CLOCK_S:
        return ok("clock", seen)
    return warn("clock", seen, "start chrony or ntpd; no role decides by clocks, but ages and times shown are off by that much")
