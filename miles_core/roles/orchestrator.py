"""The orchestrator's main: python -m miles_core.roles.orchestrator --run-dir D --replica 0 --attempt 1."""

from __future__ import annotations

import sys

from miles_core.orchestrator.loop import Orchestrator
from miles_core.runtime.context import RoleContext, run_role


def main(context: RoleContext) -> None:
    """One attempt, until the run is over or it shall leave."""
    Orchestrator(context).run()


if __name__ == "__main__":
    sys.exit(run_role("orchestrator", main))
