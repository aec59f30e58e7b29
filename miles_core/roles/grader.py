"""python -m miles_core.roles.grader --run-dir D --replica I --attempt N: one attempt of one grader of tier L1 (rules)."""

from __future__ import annotations

import sys

from miles_core.runtime.context import RoleContext, run_role


def main(context: RoleContext) -> None:
    """Opens the journal first, so that this attempt is seen while the verifier's library loads."""
    journal = context.journal()

    from miles_core.grading.ranking import make_ranker
    from miles_core.grading.rules import make_verifier
    from miles_core.grading.worker import GraderWorker

    ranking = context.recipe.grader.ranking
    ranker = None if ranking is None else make_ranker(ranking)
    GraderWorker(context, journal, make_verifier(context.recipe.environment), ranker).run()


if __name__ == "__main__":
    sys.exit(run_role("grader", main))
