"""The environment that every scheduler gives to a role, and what must not leak into one.

A variable of the submitting shell or job changes the meaning of a Slurm command (SBATCH_PARTITION, SQUEUE_FORMAT) or of a
role (SLURM_CPU_BIND pins all ranks to few cores, SLURM_JOB_ID names the wrong job). So all of Slurm's are dropped, but for
those that say where the cluster is and who we are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from cluster.scheduler import JobSpec

SCRUBBED_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SACCT_",
    "PMIX_", "PMI_", "PMI2_",
)  # fmt: skip
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})


def without_slurm(base: Mapping[str, str]) -> dict[str, str]:
    """A copy of `base` without the variables of an enclosing job or of someone's Slurm defaults."""
    return {name: value for name, value in base.items() if name in KEPT or not name.startswith(SCRUBBED_PREFIXES)}


def quoted(name: str, value: str) -> str:
    """A variable's value as shell text. The run's code comes first in PYTHONPATH; what the site's setup or the submitting
    shell put there stays behind it, so that an environment of one's own is found."""
    return shlex.quote(value) + ("${PYTHONPATH:+:$PYTHONPATH}" if name == "PYTHONPATH" else "")


def role_env(spec: JobSpec) -> dict[str, str]:
    """Variables set for one job; `spec.env` wins. MILES_RANKS tells a role of several ranks how many must meet."""
    threads, ranks = str(spec.resources.cpus), spec.resources.ranks
    several = {"MILES_RANKS": str(ranks)} if ranks > 1 else {}
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **several, **spec.env}
