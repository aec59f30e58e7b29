"""Named crash points, for tests: MILES_CRASH_AT=<role>:<name>:<number>[:<attempt>] ends that process there, as SIGKILL would.

Nothing is flushed and nothing is cleaned up. Without the variable a point costs one lookup and does nothing.
"""

from __future__ import annotations

import os

VARIABLE = "MILES_CRASH_AT"
EXIT_CODE = 9


def crash_point(role: str, name: str, number: int, attempt: int = 1) -> None:
    """Ends the process if the variable names this point; `number` is the step, order ... at hand.

    The variable names attempt 1 unless it says otherwise, so that a successor with the same environment survives.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    spec = wanted if wanted.count(":") >= 3 else f"{wanted}:1"
    if spec == f"{role}:{name}:{number}:{attempt}":
        os._exit(EXIT_CODE)
