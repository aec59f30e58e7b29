"""`miles doctor`: can this machine run the system on this cluster? Each finding says what was seen and what to change."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.engines import vllm_python, vllm_version
from cluster.profile import ClusterProfile
from cluster.slurm.site import SiteFacts, ask_site
from flows.doctor_files import examine_files
from flows.doctor_nodes import examine_nodes
from flows.doctor_slurm import judge
from flows.findings import Finding, bad, ok, unknown, warn
from miles_core.environments.sandbox_kind import sandbox_kind
from miles_core.errors import MilesError, RecipeError
from miles_core.runtime.machine import read_machine
from tasks.prepare import SOURCE, cache_folder, run_root

PINNED = ("torch", "transformers", "deepspeed", "prefect", "submitit", "pyarrow", "reasoning-gym")
_MIN_FILES, _MIN_PROCESSES = 1024, 512


def examine(profile: ClusterProfile, *, nodes: bool = False) -> list[Finding]:
    """All checks; nothing stays of them but the runs folder. `nodes` also starts one small job on two nodes.

    Raises RecipeError for `nodes` where there are none.
    """
    if nodes and profile.kind != "slurm":
        raise RecipeError(f"--nodes: cluster {profile.name} is this machine alone; give a Slurm profile with --cluster")
    root = run_root(profile, "doctor").parent
    found = [
        _python(), *_packages(), _compiler(), *_limits(), _cpus(), _gpus(profile), _sandbox(), _cache(), _vllm(profile),
        *_hardening(), *_wandb(os.environ), *examine_files(profile, root),
    ]  # fmt: skip
    if profile.kind == "slurm":
        env = slurm_env(profile)
        facts = ask_site(env)
        found += [*judge(profile, facts), *_munge(facts, env)]
        if nodes:
            found += examine_nodes(profile, root)
    return found


def slurm_env(profile: ClusterProfile) -> dict[str, str]:
    """What leads to the profile's cluster, on top of this process's environment."""
    if profile.slurm.devslurm is None:
        return {}
    return {"SLURM_CONF": str(Path(profile.slurm.devslurm).expanduser() / "slurm.conf")}


# --- this machine ----------------------------------------------------------------------------------------------------


def _python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info[:2] == (3, 11):
        return ok("python", f"{version} at {sys.executable}")
    return bad("python", version, "use Python 3.11: the pinned set is for it")


def _packages() -> Iterator[Finding]:
    pins = read_pins(SOURCE / "requirements.txt")
    for name in PINNED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield bad(name, "not installed", "run `make install`")
            continue
        pin = pins.get(name)
        if pin is not None and version.partition("+")[0] != pin:
            yield warn(name, f"{version}, tried with {pin}", "run `make install`")
        else:
            yield ok(name, version)


def read_pins(path: Path) -> dict[str, str]:
    """`name==version` lines of a requirements file; none if it is not there."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name.lower(): version for name, version in re.findall(r"(?m)^([\w.-]+)==([\w.]+)", text)}


def _compiler() -> Finding:
    path = shutil.which("c++") or shutil.which("g++")
    if path:
        return ok("compiler", path)
    return warn("compiler", "no C++ compiler", "DeepSpeed's CPU offload builds a kernel with one; nothing else does")


def _limits() -> Iterator[Finding]:
    """Of this shell; a job may have others."""
    for name, number, least in (
        ("open files", resource.RLIMIT_NOFILE, _MIN_FILES), ("processes", resource.RLIMIT_NPROC, _MIN_PROCESSES),
    ):  # fmt: skip
        soft = resource.getrlimit(number)[0]
        if soft == resource.RLIM_INFINITY or soft >= least:
            yield ok(name, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} at most")
        else:
            flag = "n" if number == resource.RLIMIT_NOFILE else "u"
            yield warn(name, f"{soft} at most", f"`ulimit -{flag} {least}` before the run, and in slurm.setup for its jobs")


def _cpus() -> Finding:
    width = len(os.sched_getaffinity(0))
    if width >= 2:
        return ok("cpus", f"{width} usable")
    return warn("cpus", f"{width} usable", "learner and rollout share one core; a run takes about twice as long")


def _gpus(profile: ClusterProfile) -> Finding:
    """Of this machine; those of the cluster's nodes are judged with its partitions."""
    gpus = read_machine().gpus
    seen = f"{len(gpus)} here ({', '.join(sorted(set(gpus)))})" if gpus else "none here"
    asked = sorted(role for role, wanted in profile.resources.items() if wanted.gpus)
    if gpus or profile.kind == "slurm" or not asked:
        return ok("gpus", seen)
    fix = "on a local cluster resources.gpus has no meaning; roles use the CPU"
    return warn("gpus", f"{seen}; {', '.join(asked)} ask for some", fix)


def _sandbox() -> Finding:
    try:
        kind = sandbox_kind()
    except OSError as error:
        return bad("sandbox", str(error), "install bash; without it no environment with a shell tool runs")
    if not kind.missing:
        return ok("sandbox", kind.name)
    return warn(
        "sandbox", f"{kind.name}: {'; '.join(kind.missing)}",
        f"install bubblewrap before a recipe runs commands of the model ({'; '.join(kind.reasons) or 'it is not there'})",
    )  # fmt: skip


def _hardening() -> Iterator[Finding]:
    """What a role could take for itself (runtime/hardening.py), tried by a process of its own. Of this shell; a job may have
    other limits."""
    command = [sys.executable, "-m", "miles_core.runtime.hardening"]
    try:
        done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, timeout=60, check=True)
        holds = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield unknown("hardening", str(error))
        return
    for hold in holds:
        yield Finding(hold["name"], "warn" if hold["fix"] else "ok", hold["seen"], hold["fix"])


def _cache() -> Finding:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor."):
            return ok("base model cache", str(folder))
    except (OSError, MilesError) as error:
        return bad("base model cache", str(error), "set MILES_CACHE to a folder that you may write to")


def _vllm(profile: ClusterProfile) -> Finding:
    """Whether a recipe with `engine: vllm` would run; a profile that names an interpreter for it must name one that can."""
    python = vllm_python(profile)
    if profile.vllm_python is None and not python.exists():
        return ok("vLLM", "not installed; `make vllm` does, for recipes with engine: vllm")
    try:
        return ok("vLLM", f"{vllm_version(python)} at {python}")
    except RecipeError as error:
        return bad("vLLM", str(error), "without it no recipe with engine: vllm starts")


def _wandb(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What a run with `tracking.wandb` would do, and whether the model hub may be asked."""
    mode = environ.get("WANDB_MODE", "offline")
    netrc = Path(environ.get("NETRC", "~/.netrc")).expanduser()
    has_key = "WANDB_API_KEY" in environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
    if mode == "online" and not has_key:
        fix = "run `wandb login`, or leave WANDB_MODE unset: runs stay offline"
        yield warn("W&B", "WANDB_MODE=online, but no key is here", fix)
    else:
        yield ok("W&B", f"{mode}{'' if has_key else ', no key here'}")
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name) in ("1", "true", "True")]
    proxy = [name for name in ("HTTPS_PROXY", "https_proxy") if environ.get(name)]
    yield ok("network", "; ".join([
        f"model hub not asked ({offline[0]})" if offline else "model hub asked only for a model.path that is no folder",
        f"proxy of {proxy[0]}" if proxy else "no proxy",
    ]))  # fmt: skip


def _munge(facts: SiteFacts, env: Mapping[str, str]) -> Iterator[Finding]:
    """A credential can be made here, by the way that the cluster's own configuration names."""
    if not facts.config.get("AuthType", "").endswith("munge"):
        return
    socket = re.search(r"socket=([^,\s]+)", facts.config.get("AuthInfo", ""))
    argv = ["munge", "--no-input", *([f"--socket={socket[1]}"] if socket else [])]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False, env={**os.environ, **env})
    except (OSError, subprocess.TimeoutExpired) as error:
        yield unknown("munge", str(error), "is the munge package on this machine?")
        return
    if done.returncode == 0:
        yield ok("munge", "makes a credential")
    else:
        yield bad("munge", done.stderr.strip() or f"`munge` ended with {done.returncode}", "start munged here")
