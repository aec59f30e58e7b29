"""Every exception that crosses a module border.

A message says what failed, the value seen, where (job, node, path) and what to do next. Catch only at named borders: a
subprocess call, a filesystem retry, a role's main, the command line.
"""

from __future__ import annotations


class MilesError(Exception):
    """Base of all errors that are shown to a person as one message, without a traceback."""

    exit_code = 1


class RecipeError(MilesError):
    """A recipe or a cluster profile is wrong: names the key, the value and the fix."""

    exit_code = 2


class RunDirectoryError(MilesError):
    """A run directory is missing, unreadable, of another run, or writable by others (I17)."""

    exit_code = 2


class HeldElsewhere(MilesError):
    """Another live supervisor holds this run (I3): names the holder and `--takeover`."""

    exit_code = 3


class VerifyFailed(MilesError):
    """`miles verify` found faults."""

    exit_code = 4


class NodesLost(MilesError):
    """A role cannot be replaced inside the loop: its budget is spent or no usable node is left."""

    exit_code = 5


class NeedsRollback(MilesError):
    """A learner cannot replay up to the last accepted step (I8): names what is missing."""

    exit_code = 6


class SchedulerError(MilesError):
    """Slurm refused or could not be reached. `ambiguous` = the request may have been accepted all the same (I13)."""

    exit_code = 7

    def __init__(self, message: str, *, ambiguous: bool = False, transient: bool = False) -> None:
        super().__init__(message)
        self.ambiguous = ambiguous
        self.transient = transient


class DeadlineExceeded(MilesError):
    """A bounded wait ended (I15): names what it waited for."""

    exit_code = 8


class RankLost(MilesError):
    """Another rank of the same job died, failed or does not answer: names it and its node."""

    exit_code = 11


class JournalCorrupt(MilesError):
    """A bad frame with good frames behind it, or a stream that differs from its announced hash (I2)."""

    exit_code = 9


class DigestMismatch(MilesError):
    """Bytes differ from the digest that announced them (I1, I11, I17)."""

    exit_code = 9


class DrillFailed(MilesError):
    """A fault of a drill did not fire, did not go well, or left something behind."""

    exit_code = 12


class LeaseLost(MilesError):
    """This attempt is not the current one. `why` is `twin` or `superseded`; neither exit is a failure (I3)."""

    exit_code = 0

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message)
        self.why = why
