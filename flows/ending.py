"""`miles cancel` and `miles drain`: a request in the run directory, obeyed by the supervisor that lives, or by this process.

The request stays whatever happens here: the next supervisor obeys it. Every wait has a deadline.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.drain import DrainRequest, request_drain
from cluster.epoch import read_closed, read_cluster, read_outcome
from cluster.supervise import Outcome
from flows.display import miles_command
from flows.launch import Hooks, request_cancel, supervise
from flows.output import plain, print_json
from miles_core.errors import DeadlineExceeded, HeldElsewhere, SchedulerError
from miles_core.paths import RunPaths
from miles_core.records import Drained, Incident
from miles_core.run import RunConfig, read_run

CANCEL_DEADLINE_S = 120.0
"""A cluster or a supervisor that does not answer for this long keeps nobody waiting."""
LEFT_EXIT_CODE = 130


def cancel_run(root: Path, *, as_json: bool) -> int:
    """Ends a run and all its jobs; the exit code. Raises MilesError."""
    run, paths = read_run(root)
    closed = read_closed(run, paths)
    if closed is not None:
        return _tell(as_json, f"run {run.run_id} is already {closed.state}", _facts(run, paths, closed))
    request_cancel(paths)
    _say(as_json, f"asked run {run.run_id} to end")
    outcome = _obeyed(run, paths, "cancel", lambda: read_closed(run, paths), CANCEL_DEADLINE_S)
    if outcome is None:
        return _left(as_json, "cancel", run, paths)
    return _tell(as_json, f"run {run.run_id}: {_state(outcome)}", _facts(run, paths, outcome))


def drain_run(root: Path, leave_s: float, *, as_json: bool) -> int:
    """Lets all jobs of a run leave, so that it can go on later; the exit code. Raises MilesError."""
    run, paths = read_run(root)
    known = read_outcome(run, paths)
    if known is not None and not isinstance(known, Drained):
        return _tell(as_json, f"run {run.run_id} is already {known.state}; no job of it is left", _facts(run, paths, known))
    request_drain(paths, DrainRequest(leave_s=leave_s))
    if known is not None:
        return _tell(as_json, f"run {run.run_id} is already drained. {_go_on(paths)}", _facts(run, paths, known))
    late_s = read_cluster(run).drain_s
    _say(
        as_json,
        f"asked run {run.run_id} to drain: its jobs have {leave_s:g} s to save and leave; what is still there then is named, "
        f"and cancelled {late_s:g} s later",
    )
    deadline_s = leave_s + late_s + CANCEL_DEADLINE_S
    outcome = _obeyed(run, paths, "drain", lambda: read_outcome(run, paths), deadline_s)
    if outcome is None:
        return _left(as_json, "drain", run, paths)
    text = f"run {run.run_id}: {_state(outcome)}"
    if isinstance(outcome, Drained):
        late = f"; cancelled, as they did not leave: {', '.join(outcome.cancelled)}" if outcome.cancelled else ""
        text = f"run {run.run_id} is drained: no job of it is left{late}. {_go_on(paths)}"
    return _tell(as_json, text, _facts(run, paths, outcome))


def _obeyed(
    run: RunConfig, paths: RunPaths, verb: str, read: Callable[[], Outcome | None], deadline_s: float
) -> Outcome | None:
    """How it ended, by whoever supervises; None when this process was asked to leave in the middle."""
    try:
        return supervise(paths, read_cluster(run), Hooks(on_incident=_say_incident), unreachable_s=CANCEL_DEADLINE_S)
    except HeldElsewhere:
        return wait_for_outcome(read, verb, paths.root, deadline_s)
    except (SchedulerError, DeadlineExceeded) as error:
        request = paths.cancel_request if verb == "cancel" else paths.drain_request
        raise type(error)(
            f"{error}\nThe request stays in {request}: the next supervisor obeys it. Run `miles {verb}` again when the cluster "
            f"answers; jobs that it did not hear of yet go on"
        ) from error


def wait_for_outcome(read: Callable[[], Outcome | None], verb: str, root: Path, deadline_s: float) -> Outcome:
    """What the live supervisor makes of the request. Raises DeadlineExceeded."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        outcome = read()
        if outcome is not None:
            return outcome
        time.sleep(0.5)
    raise DeadlineExceeded(
        f"{root}: its supervisor did not {verb} the run within {deadline_s:.0f} s; the request stays. Look at `miles status "
        f"{root}`, or take over with `miles resume {root} --takeover`"
    )


# --- words -----------------------------------------------------------------------------------------------------------


def _facts(run: RunConfig, paths: RunPaths, outcome: Outcome) -> dict[str, Any]:
    """What a script reads."""
    facts = {"run_id": run.run_id, "root": str(paths.root), "state": _state(outcome)}
    if isinstance(outcome, Drained):
        return {**facts, "cancelled": list(outcome.cancelled), "resume": f"miles resume {paths.root}"}
    return {**facts, "detail": outcome.detail}


def _state(outcome: Outcome) -> str:
    return "DRAINED" if isinstance(outcome, Drained) else outcome.state


def _go_on(paths: RunPaths) -> str:
    return f"Continue: {shlex.join([miles_command(), 'resume', str(paths.root)])}"


def _left(as_json: bool, verb: str, run: RunConfig, paths: RunPaths) -> int:
    facts = {"run_id": run.run_id, "root": str(paths.root), "state": "RUNNING", "detail": f"left in the middle of a {verb}"}
    _tell(as_json, f"left before the run had ended; the request stays. Run `miles {verb} {paths.root}` again", facts)
    return LEFT_EXIT_CODE


def _tell(as_json: bool, text: str, facts: dict[str, Any]) -> int:
    if as_json:
        print_json(facts)
    else:
        print(text)
    return 0


def _say(as_json: bool, text: str) -> None:
    """Something on the way: not for stdout where that is JSON."""
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def _say_incident(incident: Incident) -> None:
    print(plain(f"! {incident.what} {incident.writer} {incident.detail}".replace("  ", " ").rstrip()), file=sys.stderr)
