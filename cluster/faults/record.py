"""reports/drill.json: what a drill did to a run, and what each fault cost."""

from __future__ import annotations

from collections import Counter

from cluster.faults.plan import Kind, Round, Target
from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem
from miles_core.store.publish import publish_bytes


class FaultRecord(Closed):
    """One fault of a drill."""

    role: Target
    kind: Kind
    fired: bool
    """It took effect: what it was meant to end has ended, what it was meant to stop stood still."""
    noticed_s: float | None = None
    """Until the supervisor recorded the loss, or the full disk; of a supervisor, until the next one had the run. None: nothing
    of the kind is recorded."""
    productive_s: float | None = None
    """Until the lost role's successor had done work; where nobody was lost, until a step was trained after it was over."""
    lost_samples: int = 0
    """Samples, and trajectories to grade, that an attempt had in hand when it was cut: they were given out again."""
    verify: bool = False
    """`verify` of the live run found nothing afterwards."""
    others_unchanged: bool = False
    """All other roles have the job they had before."""
    detail: str = ""
    """Whom it hit, and what went wrong."""

    @property
    def is_good(self) -> bool:
        """What a plan asks for."""
        return self.fired and self.productive_s is not None and self.verify and self.others_unchanged

    def as_line(self) -> str:
        """For people."""
        good = "good" if self.is_good else "NOT GOOD"
        return (
            f"{good}: {self.role} {self.kind} fired {yes(self.fired)}, noticed {seconds(self.noticed_s)}, productive "
            f"{seconds(self.productive_s)}, lost {self.lost_samples}, verify {yes(self.verify)}, others unchanged "
            f"{yes(self.others_unchanged)} ({self.detail})"
        )


class DrillFile(Closed):
    """Content of reports/drill.json."""

    faults: tuple[FaultRecord, ...] = ()


def left_of(rounds: list[Round], faults: list[FaultRecord]) -> list[Round]:
    """Rounds without a good record."""
    good = Counter((fault.role, fault.kind) for fault in faults if fault.is_good)
    left = []
    for role, kind, turn in rounds:
        if good[role, kind]:
            good[role, kind] -= 1
        else:
            left.append((role, kind, turn))
    return left


def read_drill(paths: RunPaths) -> DrillFile:
    """What was done so far. ValidationError for a file of another version."""
    return DrillFile.model_validate_json(paths.drill.read_bytes()) if paths.drill.exists() else DrillFile()


def write_drill(paths: RunPaths, faults: list[FaultRecord]) -> None:
    """Replaces the file."""
    publish_bytes(FileSystem(), paths.drill, DrillFile(faults=tuple(faults)).model_dump_json(indent=1).encode() + b"\n")


def seconds(value: float | None) -> str:
    """For people."""
    return "-" if value is None else f"{value:.1f} s"


def yes(fact: bool) -> str:
    """For people; what is not as it should be catches the eye."""
    return "yes" if fact else "NO"
