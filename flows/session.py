"""`miles run` and `miles resume`: from names to a supervised run, and what a person reads when it ends.

stdout holds what was asked for: text, or with `as_json` the summary alone; what happens meanwhile then goes to stderr.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.epoch import check_same_cluster, read_closed, read_cluster
from cluster.profile import ClusterProfile, load_cluster
from cluster.rollback import describe, request_rollback
from cluster.schedulers import make_scheduler
from cluster.supervise import Outcome
from flows.display import Display, miles_command
from flows.launch import Hooks, supervise
from flows.output import print_json
from miles_core.errors import MilesError, NeedsRollback, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.recipe import load_recipe
from miles_core.records import Drained, RunClosed
from miles_core.run import RunConfig, read_run
from miles_core.tracking.summary import write_summary
from miles_core.tracking.wandb_tracker import sync_line
from tasks.prepare import ensure_base_model, ensure_run, new_run_id, run_root

CANCELLED_EXIT_CODE = 10
DRAINED_EXIT_CODE = 13
LEFT_EXIT_CODE = 130


@dataclass(frozen=True)
class Session:
    """How a person follows it."""

    takeover: bool = False
    as_json: bool = False


def run_recipe(recipe: str, cluster: str, run_id: str | None, settings: tuple[str, ...], session: Session) -> int:
    """Trains a recipe, or goes on with the run of that id; the exit code. Raises MilesError."""
    resolved, profile = load_recipe(recipe, settings), load_cluster(cluster)
    name = new_run_id(resolved) if run_id is None else run_id
    # Whether its scheduler is there is said before anything is made.
    make_scheduler(profile, run_root(profile, name))
    display = Display(name, resolved.steps, to_stderr=session.as_json)
    with display.task("base model"):
        base_model = ensure_base_model(resolved)
    with display.task("run directory"):
        paths = ensure_run(resolved, profile, name, base_model)
    return _host(paths, profile, display, session, again=("--cluster", cluster))


def resume_run(root: Path, cluster: str | None, session: Session, *, rollback: bool = False) -> int:
    """Goes on with a run by its directory alone; the exit code. `rollback`: from its newest usable checkpoint.

    Raises MilesError, also for a run that is over, that needs a rollback, or that needs none.
    """
    run, paths = read_run(root)
    profile = read_cluster(run)
    if cluster is not None:
        profile = load_cluster(cluster)
        check_same_cluster(run, root, profile)
    _refuse_what_is_over(run, paths, rollback=rollback)
    display = Display(run.run_id, run.recipe.steps, to_stderr=session.as_json)
    if rollback:
        display.say(f"rolled {describe(request_rollback(paths, takeover=session.takeover))}")
    return _host(paths, profile, display, session, again=() if cluster is None else ("--cluster", cluster))


class RunIsOver(MilesError):
    """A cancelled run is not taken up again."""

    exit_code = CANCELLED_EXIT_CODE


def _refuse_what_is_over(run: RunConfig, paths: RunPaths, *, rollback: bool) -> None:
    closed = read_closed(run, paths)
    if closed is None or (rollback and closed.state == "NEEDS_ROLLBACK"):
        return
    if closed.state == "NEEDS_ROLLBACK":
        raise _needs_rollback(run, paths, closed.detail)
    if closed.state == "CANCELLED":
        raise RunIsOver(_cancelled(run, closed))
    raise RunDirectoryError(
        f"run {run.run_id} is COMPLETED, so there is nothing to resume: `miles status {paths.root}` shows its figures, "
        f"`miles run {run.recipe.name}` trains again"
    )


def _host(paths: RunPaths, profile: ClusterProfile, display: Display, session: Session, again: tuple[str, ...]) -> int:
    display.show_run(paths, profile.name)
    try:
        with display:
            hooks = Hooks(display.progress, display.incident)
            outcome = supervise(paths, profile, hooks, takeover=session.takeover, go_on=True)
    except NeedsRollback as error:
        raise NeedsRollback(f"{error}. {_roll_back(paths)}") from error
    except BrokenPipeError:
        print("miles: left, as nobody reads the output any more; the jobs go on", file=sys.stderr)
        raise
    run, paths = read_run(paths.root)
    summary = write_summary(run, paths)
    if session.as_json:
        print_json({**summary, "root": str(paths.root), "report": str(paths.report), "verify": f"miles verify {paths.root}"})
    else:
        if isinstance(outcome, RunClosed):
            display.show_summary(summary, paths)
        if line := sync_line(paths, run.run_id):
            display.say(f"  upload   {line}")
    return _explain_end(run, paths, outcome, display, again)


def _explain_end(run: RunConfig, paths: RunPaths, outcome: Outcome | None, display: Display, again: tuple[str, ...]) -> int:
    command = miles_command()
    go_on = shlex.join([command, "resume", str(paths.root), *again])
    if outcome is None:
        display.say(f"left; the jobs go on. Continue: {go_on}\nEnd: {command} cancel {shlex.quote(str(paths.root))}")
        return LEFT_EXIT_CODE
    if isinstance(outcome, Drained):
        display.say(f"run {run.run_id} is drained: no job of it is left. Continue: {go_on}")
        return DRAINED_EXIT_CODE
    if outcome.state == "NEEDS_ROLLBACK":
        raise _needs_rollback(run, paths, outcome.detail)
    if outcome.state == "CANCELLED":
        display.say(_cancelled(run, outcome))
        return CANCELLED_EXIT_CODE
    return 0


def _needs_rollback(run: RunConfig, paths: RunPaths, detail: str) -> NeedsRollback:
    return NeedsRollback(f"run {run.run_id} needs a rollback: {detail}. {_roll_back(paths)}")


def _roll_back(paths: RunPaths) -> str:
    return f"`miles resume {paths.root} --rollback` drops what is missing and goes on from the newest usable checkpoint"


def _cancelled(run: RunConfig, closed: RunClosed) -> str:
    return f"run {run.run_id} was cancelled: {closed.detail}. Take another --run-id to train again"
