"""The sbatch text of one role's job. Pure: no Slurm is needed to make it.

submitit writes the text and checks the parameters; nothing of ours is pickled (I17). The job runs the role's own command
line, `python -u -m miles_core.roles.<role> --run-dir D ...`, from the run's code snapshot. submitit's public `submit` would
pickle a function, so its text writer `_make_submission_file_text` is called directly: private, hence the pinned version and
a test that pins the text. What its parameters cannot say:

- Its srun line cannot be `exec`ed and runs even for one rank. With use_srun off, the command is ours: `exec python ...` for
  one rank, `exec srun ... python ...` for several. Either way the last process of the script is the role (or its srun), so the
  job's exit code is the role's own and no shell swallows a signal.
- srun ends with the highest code of all ranks. With kill-on-bad-exit the first rank that leaves has the others killed, and
  their 143 hides its code; so ranks leave by themselves (learner/ranks.py), and who is still there one signal lead after the
  first is killed.
- `B:USR2` sends the warning to that process alone; srun forwards it to the ranks. Without `B:` Slurm signals only steps,
  and a job without srun has none.
- Log names, no-requeue, reservation, export, chdir and the site's own flags go through `additional_parameters`, which it
  writes without checks; so a flag that we set ourselves is refused here.
- Its default `wckey=submitit` is taken out: sites that enforce wckeys would refuse the job.

Each rank is a task of the one srun; who it is says SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.
"""

from __future__ import annotations

import shlex

from submitit import SlurmExecutor

from cluster.profile import SlurmSite
from cluster.role_env import quoted, role_env
from cluster.scheduler import JobSpec
from miles_core.errors import RecipeError

NO_CODE_EXIT_CODE = 66
"""The job's exit code when the code snapshot is not there (EX_NOINPUT)."""

OWN_FLAGS = {
    "job-name": "it is made of the run and the role",
    "comment": "it carries the token of the attempt",
    "output": "logs have a fixed place in the run directory",
    "error": "logs have a fixed place in the run directory",
    "open-mode": "logs are appended to",
    "chdir": "jobs run in the code snapshot of the run",
    "export": "the environment is passed on",
    "signal": "set slurm.signal_lead_s",
    "requeue": "the supervisor starts lost roles again, not Slurm",
    "no-requeue": "it is always set",
    "array": "each role is a job of its own",
    "wrap": "the command is the role's",
    "ntasks": "set resources.learner.nodes and tasks",
    "ntasks-per-node": "set resources.learner.tasks",
    "partition": "set resources.<role>.partition",
    "nodes": "set resources.<role>.nodes",
    "cpus-per-task": "set resources.<role>.cpus",
    "gpus-per-node": "set resources.<role>.gpus",
    "mem": "set resources.<role>.mem_mb",
    "time": "set resources.<role>.time_min",
    "account": "set slurm.account",
    "qos": "set slurm.qos",
    "reservation": "set slurm.reservation",
    "constraint": "set slurm.constraint",
    "exclude": "set slurm.exclude",
}
"""Flags that `slurm.extra` may not hold, and what to do instead."""


class _Writer(SlurmExecutor):
    """submitit's writer of sbatch text, also where srun is not in PATH."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def sbatch_text(spec: JobSpec, site: SlurmSite) -> str:
    """The script that `sbatch` gets for this job. Raises RecipeError for a flag or a lead that cannot be."""
    _check_lead(spec, site)
    writer = _Writer(folder=spec.log_dir)
    writer.update_parameters(**_parameters(spec, site))
    return str(writer._make_submission_file_text(_command(spec, site), uid=spec.token))


def _check_lead(spec: JobSpec, site: SlurmSite) -> None:
    if site.signal_lead_s >= spec.resources.time_min * 60:
        raise RecipeError(
            f"slurm.signal_lead_s: {site.signal_lead_s} s is not less than the walltime of {spec.writer} "
            f"({spec.resources.time_min} min), so it would be told to leave at its start; raise resources time_min"
        )


def _parameters(spec: JobSpec, site: SlurmSite) -> dict[str, object]:
    wanted = spec.resources
    return {
        "job_name": spec.name,
        "comment": spec.comment,
        "partition": wanted.partition,
        "time": wanted.time_min,
        "nodes": wanted.nodes,
        "ntasks_per_node": wanted.tasks,
        "cpus_per_task": wanted.cpus,
        "gpus_per_node": wanted.gpus or None,
        "mem": f"{wanted.mem_mb}M" if wanted.mem_mb else None,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "exclude": ",".join(sorted({*site.exclude, *spec.exclude})) or None,
        "wckey": None,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": _setup(spec, site),
        "additional_parameters": _further_flags(spec, site),
    }


def _further_flags(spec: JobSpec, site: SlurmSite) -> dict[str, object]:
    flags: dict[str, object] = {
        "output": f"{_log_folder(spec)}/%j_0.out",
        "signal": f"B:USR2@{site.signal_lead_s}",
        "no-requeue": True,
        "export": "ALL",
        "chdir": str(spec.run_dir),
    }
    if site.reservation:
        flags["reservation"] = site.reservation
    return flags | _site_flags(site)


def _site_flags(site: SlurmSite) -> dict[str, object]:
    flags: dict[str, object] = {}
    for key, value in site.extra.items():
        name = key.lstrip("-").replace("_", "-")
        if name in OWN_FLAGS:
            raise RecipeError(f"slurm.extra: {key} = {value!r} is not taken, --{name} is set by us: {OWN_FLAGS[name]}")
        if value is not False:
            flags[name] = value
    return flags


def _setup(spec: JobSpec, site: SlurmSite) -> list[str]:
    exports = [f"export {name}={quoted(name, value)}" for name, value in sorted(role_env(spec).items())]
    return [*site.setup, *exports, f"cd {shlex.quote(str(spec.run_dir / 'code'))} || exit {NO_CODE_EXIT_CODE}"]


def _command(spec: JobSpec, site: SlurmSite) -> str:
    wanted = spec.resources
    if wanted.ranks == 1:
        return f"exec {shlex.join(spec.command)}"
    srun = (
        "srun", f"--nodes={wanted.nodes}", f"--ntasks={wanted.ranks}", f"--ntasks-per-node={wanted.tasks}",
        f"--output={_log_folder(spec)}/%j_%t.out", "--open-mode=append", "--unbuffered",
        f"--cpus-per-task={wanted.cpus}", "--kill-on-bad-exit=0", f"--wait={site.signal_lead_s}",
    )  # fmt: skip
    return f"exec {shlex.join(srun)} {shlex.join(spec.command)}"


def _log_folder(spec: JobSpec) -> str:
    """As Slurm reads file names: a percent sign of the path itself is doubled."""
    return str(spec.log_dir).replace("%", "%%")
