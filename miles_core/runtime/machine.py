"""What kind of machine this process runs on. A fact that cannot be read is UNKNOWN, never an error."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_core.store.lease import UNKNOWN, Machine

_ROOT = Path("/")


def read_machine(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine below `root` (another one in tests), with what Slurm says of the job in `environ`."""
    libc, version = platform.libc_ver()
    return Machine(
        kernel=platform.release() or UNKNOWN, libc=f"{libc} {version}".strip() or UNKNOWN, cpu=_cpu_model(root),
        cpus=usable_cpus(root), gpus=_gpu_models(root),
        gpus_visible=environ.get("CUDA_VISIBLE_DEVICES", ""), nodes=environ.get("SLURM_JOB_NODELIST", ""),
    )  # fmt: skip


def usable_cpus(root: Path = _ROOT) -> float:
    """CPUs that affinity and cgroup leave to this process."""
    return min(len(os.sched_getaffinity(0)), _cgroup_cpus(root))


def _cpu_model(root: Path) -> str:
    return next(_values(root / "proc/cpuinfo", "model name"), platform.machine() or UNKNOWN)


def _gpu_models(root: Path) -> tuple[str, ...]:
    """Of every GPU that the NVIDIA driver lists: no library is loaded for it, and no GPU is touched."""
    files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    return tuple(next(_values(file, "Model"), UNKNOWN) for file in files)


def _values(path: Path, key: str) -> Iterator[str]:
    """Values of `key : value` lines; none if the file cannot be read."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip():
            yield value.strip()


def _cgroup_cpus(root: Path) -> float:
    """CPUs that the quotas of this process's cgroup and of those above it leave; inf without a quota."""
    least = math.inf
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            quotas = [_read(folder / "cpu.max").split() for folder in _upwards(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quotas = [[_read(folder / name) for name in names] for folder in _upwards(root / "sys/fs/cgroup/cpu", path)]
        else:
            continue
        least = min([least, *(share for quota in quotas if (share := _share(quota)) is not None)])
    return least


def _upwards(top: Path, path: str) -> list[Path]:
    """The folder of a cgroup and those above it, down from the top."""
    folders = [top]
    for part in Path(path.lstrip("/")).parts:
        folders.append(folders[-1] / part)
    return folders


def _share(quota: list[str]) -> float | None:
    try:
        microseconds, period = map(int, quota)
    except ValueError:  # no file, or `max`
        return None
    return round(microseconds / period, 2) if microseconds > 0 and period > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
