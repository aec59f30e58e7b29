"""The plan of a drill: which faults, on whom, how often; a YAML file, by name in configs/drills.

faults:
  - {role: rollout, kind: kill, repeat: 2}
  - {role: controller, kind: kill}
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from miles_core.recipe import Closed, explain, find_config, read_yaml

Target = Literal[
    "orchestrator", "rollout", "grader", "learner", "evaluator", "supervisor", "controller", "all", "disk", "prefect"
]
"""A role, or what is not a role and can fail all the same."""
Kind = Literal["kill", "cancel", "hang", "node_kill", "node_zombie", "stall", "fill", "away"]

Round = tuple[Target, Kind, int]
"""Whom, what, and the number of its repetition."""

OF_A_ROLE: tuple[Kind, ...] = ("kill", "cancel", "hang", "node_kill", "node_zombie")
KINDS: dict[Target, tuple[Kind, ...]] = {
    "orchestrator": OF_A_ROLE,
    "rollout": OF_A_ROLE,
    "grader": OF_A_ROLE,
    "learner": OF_A_ROLE,
    "evaluator": OF_A_ROLE,
    "supervisor": ("kill",),
    "controller": ("kill",),
    "all": ("stall",),
    "disk": ("fill",),
    "prefect": ("away",),
}
"""What can be done to whom."""


class Fault(Closed):
    """One line of a plan."""

    role: Target
    """Whom it hits; of several replicas each in turn."""
    kind: Kind
    """kill: SIGKILL of the process. cancel: scancel of its job. hang: SIGSTOP. node_kill: its node dies with all that runs
    there. node_zombie: its node stands still past the lease and comes back when everything on it was replaced. stall: all
    roles and the supervisor stand still for twice the lease. fill: no room is left where the run directory is. away: the
    Prefect server does not answer. For `controller`, kill is slurmctld's, which is started again after away_s."""
    repeat: int = Field(default=1, ge=1)
    """How often."""

    @model_validator(mode="after")
    def _kind_fits(self) -> Self:
        if self.kind not in KINDS[self.role]:
            raise ValueError(f"role {self.role} has no kind {self.kind!r}, only {', '.join(KINDS[self.role])}")
        return self


class Plan(Closed):
    """A whole plan."""

    faults: tuple[Fault, ...] = Field(min_length=1)
    """Injected one after the other; of those that repeat, one round after the other."""
    away_s: float = Field(default=10.0, gt=0)
    """How long the controller or Prefect is away, and the disk full."""
    disk_max_mib: int = Field(default=0, ge=0)
    """`fill` is done only on a filesystem that is at most this large: a tmpfs or a quota made for it. 0: never."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Until the run is productive, a fault is noticed, the run is productive again: each of them, with its wait in a queue."""

    def rounds(self) -> list[Round]:
        """In the order of injection."""
        most = max(fault.repeat for fault in self.faults)
        return [(fault.role, fault.kind, turn) for turn in range(most) for fault in self.faults if turn < fault.repeat]


def load_plan(name: str) -> Plan:
    """Reads a plan by name (configs/drills) or file. Raises RecipeError."""
    path = find_config(name, "drills")
    try:
        return Plan.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(error, f"plan {path}", keys_in="cluster/faults/plan.py") from error
