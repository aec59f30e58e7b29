"""RunPaths: the only place that builds a path in a run directory, and the check that it can be trusted (I17)."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import RunDirectoryError


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run directory. Journal folders hold segments of one writer (or, for orders, of one receiver)."""

    root: Path

    @property
    def run_file(self) -> Path:
        return self.root / "run.json"

    @property
    def provenance(self) -> Path:
        """What the run was made from."""
        return self.root / "provenance.json"

    @property
    def dirty_diff(self) -> Path:
        """What the code snapshot has and its git commit has not."""
        return self.root / "provenance.diff"

    @property
    def code(self) -> Path:
        """Snapshot of the code that the jobs run."""
        return self.root / "code"

    @property
    def base_model(self) -> Path:
        """The base model's folder (or a link to the cache)."""
        return self.root / "base_model"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def heartbeats(self) -> Path:
        return self.root / "heartbeats"

    @property
    def liveness_table(self) -> Path:
        """Written by the orchestrator for everybody else."""
        return self.root / "orchestrator" / "liveness.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "learner" / "checkpoints"

    def ranks(self, attempt: int) -> Path:
        """Where rank 0 of a learner attempt listens for its siblings."""
        return self.root / "learner" / "ranks" / f"a{attempt}.json"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def summary(self) -> Path:
        return self.reports / "summary.json"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.reports / "index.html"

    @property
    def drill(self) -> Path:
        """What a drill did to the run, and what it cost."""
        return self.reports / "drill.json"

    @property
    def drill_filler(self) -> Path:
        """Takes all room while a drill fills the disk."""
        return self.root / ".tmp.drill_filler"

    def rollback(self, number: int) -> Path:
        """Record of a rollback, read by every job at its start."""
        return self.root / "supervisor" / f"rollback-{number:03d}.json"

    @property
    def cancel_request(self) -> Path:
        """Its presence asks the supervisor to cancel the run."""
        return self.root / "supervisor" / "cancel_requested"

    @property
    def drain_request(self) -> Path:
        """Its presence asks the supervisor to let all jobs leave and to start nobody: the run goes on later."""
        return self.root / "supervisor" / "drain_requested"

    def journal(self, writer: str) -> Path:
        """Folder of a writer's own journal."""
        role, _, replica = writer.rpartition("-")
        folder = {
            "supervisor": "supervisor/journal",
            "orchestrator": "orchestrator/journal",
            "learner": "learner/steps",
            "evaluator": "evaluations/journal",
            "rollout": f"trajectories/{writer}/manifest",
            "grader": f"grades/{writer}",
        }.get(role)
        if folder is None or not replica.isdigit():
            raise ValueError(f"no journal for {writer!r}")
        return self.root / folder

    def orders(self, receiver: str) -> Path:
        """Folder of the orders for one rollout replica or grader, written by the orchestrator."""
        return self.root / "orders" / receiver

    def shard(self, writer: str, attempt: int, number: int) -> Path:
        """A trajectory shard; folders fan out by the thousand (I16)."""
        return self.root / "trajectories" / writer / f"{number // 1000:03d}" / f"a{attempt}-{number:06d}.arrow"

    def version(self, step: int, attempt: int) -> Path:
        """Folder of policy version (step, learner attempt)."""
        return self.root / "policy" / f"{step // 1000:03d}" / f"v{step:06d}-a{attempt}"

    def checkpoint(self, step: int, attempt: int) -> Path:
        return self.checkpoints / f"step_{step:06d}-a{attempt}"

    def done(self, writer: str) -> Path:
        """Completion record of a role."""
        return self.root / "done" / f"{writer}.json"

    def metrics(self, writer: str, attempt: int) -> Path:
        return self.root / "metrics" / writer / f"a{attempt}.jsonl"

    def logs(self, writer: str, attempt: int) -> Path:
        """Folder of one attempt's logs."""
        return self.root / "logs" / writer / f"attempt_{attempt}"

    def relative(self, path: Path) -> str:
        """A path as records name it."""
        return str(path.relative_to(self.root))

    def resolve(self, name: str) -> Path:
        """The path of a name in a record. RunDirectoryError for a name that leaves the run directory."""
        path = self.root / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise RunDirectoryError(f"{self.root}: a record names {name!r}, which is outside the run directory")
        return path


def check_trusted(root: Path) -> None:
    """Refuses a run directory that is missing, unreadable or writable by others (I17)."""
    try:
        info = os.stat(root)
        os.listdir(root)
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{root}: no such run directory; `miles runs` lists the ones there are") from error
    except NotADirectoryError as error:
        raise RunDirectoryError(f"{root} is a file, not a run directory") from error
    except PermissionError as error:
        raise RunDirectoryError(f"{root}: not readable by you; ask its owner, or run as its owner") from error
    if info.st_uid != os.getuid() and info.st_uid != 0:
        raise RunDirectoryError(
            f"{root} belongs to uid {info.st_uid}, you are uid {os.getuid()}: a run directory is as trusted as its owner, "
            f"so only the owner may work in it"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunDirectoryError(
            f"{root} is writable by others (mode {stat.S_IMODE(info.st_mode):o}): others could change what runs. "
            f"Run `chmod go-w {root}` after checking who wrote there"
        )
