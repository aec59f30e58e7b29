"""Where a run's roles run: site facts of one cluster. What is trained is miles_core/recipe/; never mixed."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from miles_core.recipe import Closed, Recipe, Timing, explain, find_config, read_yaml

Role = Literal["orchestrator", "rollout", "grader", "learner", "evaluator"]


class Resources(Closed):
    """What one job of a role asks for."""

    partition: str | None = None
    """Slurm partition; null = the cluster's default."""
    nodes: int = Field(default=1, ge=1)
    """Nodes per job; several only for the learner."""
    tasks: int = Field(default=1, ge=1)
    """Ranks per node, each a process; several only for the learner. One per GPU where there are GPUs."""
    cpus: int = Field(default=1, ge=1)
    """CPUs per rank; also the threads of torch in it."""
    gpus: int = Field(default=0, ge=0)
    """GPUs per node."""
    mem_mb: int | None = Field(default=None, ge=1)
    """Memory per node in MiB; null = the partition's default."""
    time_min: int = Field(default=480, ge=1)
    """Walltime of one job in minutes."""

    @property
    def ranks(self) -> int:
        """Processes of one job."""
        return self.nodes * self.tasks


class SlurmSite(Closed):
    """Site facts of a Slurm cluster."""

    account: str | None = None
    """--account."""
    qos: str | None = None
    """--qos."""
    reservation: str | None = None
    """--reservation."""
    constraint: str | None = None
    """--constraint."""
    exclude: tuple[str, ...] = ()
    """Nodes never to use."""
    setup: tuple[str, ...] = ()
    """Shell lines before the role starts (modules, environments)."""
    extra: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any further sbatch flag by its long name, for example {licenses: 'matlab:1'}; true = a flag without value."""
    signal_lead_s: int = Field(default=60, ge=1)
    """USR2 is sent this long before the walltime ends."""
    devslurm: str | None = None
    """Folder of a throw-away cluster (`miles devslurm up`); null on a real site, which is found through SLURM_CONF or PATH."""


class ClusterProfile(Closed):
    """Where the roles run and how its filesystem behaves."""

    name: str
    """Profile name."""
    kind: Literal["local", "slurm"]
    """`local`: processes of this machine. `slurm`: batch jobs."""
    runs_root: str = "runs"
    """Folder that holds run directories, on the filesystem that all nodes share. A relative one is below the working folder."""
    timing: Timing = Timing()
    """Filesystem and lease times."""
    write_mib_s: float | None = Field(default=None, gt=0)
    """MiB a second that one process writes and syncs below runs_root, as `miles doctor` measures it; null = not known. With it
    a checkpoint that cannot fit slurm.signal_lead_s is refused at submit."""
    scheduler_poll_s: float = Field(default=1.0, gt=0)
    """Pause between two scheduler queries; 30 and more on a real cluster."""
    drain_s: float = Field(default=60.0, gt=0)
    """After the end of a run roles have this long to leave by themselves; then they are cancelled."""
    role_failures: int = Field(default=3, ge=0)
    """Failures of one role without progress between them before the run stops with NodesLost."""
    exclude_s: float = Field(default=1800.0, gt=0)
    """A node on which a role was lost is avoided for this long."""
    exclude_max: int = Field(default=2, ge=0)
    """Never avoid more nodes than this at once."""
    resources: dict[Role, Resources] = Field(default_factory=dict)
    """Resources by role; a missing role takes the defaults."""
    pools: dict[str, Resources] = Field(default_factory=dict)
    """Resources of single rollout pools, by pool name; others take resources.rollout."""
    vllm_python: str | None = None
    """Interpreter of rollout pools with `engine: vllm`, on a filesystem that all nodes share; null: .venv-vllm/bin/python
    beside the project's own environment, where `make vllm` puts it."""
    slurm: SlurmSite = SlurmSite()
    """Slurm facts; unused when kind is local."""

    @model_validator(mode="after")
    def _ranks_are_possible(self) -> Self:
        roles = {f"resources.{role}": wanted for role, wanted in self.resources.items() if role != "learner"}
        for where, wanted in (roles | {f"pools.{name}": wanted for name, wanted in self.pools.items()}).items():
            if wanted.ranks > 1:
                raise ValueError(
                    f"{where}: nodes={wanted.nodes}, tasks={wanted.tasks}, but only the learner may have more than one "
                    f"rank; set both to 1 (more replicas of a role: see the recipe)"
                )
        learner = self.resources_for("learner")
        if self.kind == "local" and learner.nodes > 1:
            raise ValueError(
                f"resources.learner: nodes={learner.nodes}, but kind: local is one machine; set nodes: 1 and tasks to the "
                f"number of ranks"
            )
        if learner.gpus and learner.tasks != learner.gpus:
            raise ValueError(
                f"resources.learner: gpus={learner.gpus} and tasks={learner.tasks} per node, but each rank drives one GPU; set "
                f"tasks: {learner.gpus}"
            )
        return self

    def resources_for(self, role: Role, pool: str | None = None) -> Resources:
        """Resources of one job of `role` (for rollout: of `pool`)."""
        if role == "rollout" and pool is not None and pool in self.pools:
            return self.pools[pool]
        return self.resources.get(role, Resources())


def short_lead(profile: ClusterProfile, recipe: Recipe) -> str:
    """A sentence where rollout jobs are told to leave later ahead than an episode may last (I10); else empty."""
    lead_s, episode_s = profile.slurm.signal_lead_s, recipe.environment.episode_deadline_s
    if profile.kind != "slurm" or lead_s >= episode_s:
        return ""
    return (
        f"slurm.signal_lead_s={lead_s} of the cluster profile is less than environment.episode_deadline_s={episode_s:g}: an "
        f"episode that needs longer than the lead is lost when its job reaches its limit, and sampled again; raise "
        f"signal_lead_s to {math.ceil(episode_s)} or lower the deadline"
    )


def load_cluster(name: str) -> ClusterProfile:
    """Reads a cluster profile by name (configs/clusters) or file. Raises RecipeError."""
    path = find_config(name, "clusters")
    try:
        return ClusterProfile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(error, f"cluster profile {path}", keys_in="cluster/profile.py") from error
