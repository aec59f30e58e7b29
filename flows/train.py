"""The train flow, and what all flows that host a supervisor share.

Prefect decides and shows; the journals are the truth. Retries enter again with the same run id and adopt what lives, so a
lost role that could not be replaced (NodesLost) costs no other role anything. An API error never stops the loop.

How a flow process ends, and what becomes of the jobs:
- cancelled in Prefect: it asks the run to end, and cancels its jobs in the time that Prefect leaves it; what it does not
  manage the reap flow does. Where no worker brings the cancellation the reporter finds it (prefect_report.py).
- TERM or INT from anybody else (a worker that is restarted, a node that goes down): the flow run is Crashed, the jobs go on.
- killed: the jobs go on; the same flow again, or `resume`, adopts them.
- drained (`miles drain`): no job is left, the flow run is Completed and named Drained. A flow that is started then goes on
  with the run; a retry, or the automation behind a crash, obeys the request.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any, NoReturn

from prefect import flow, get_run_logger, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Abort, TerminationSignal
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed

from cluster.epoch import read_closed
from cluster.profile import ClusterProfile, load_cluster
from flows.launch import request_cancel, supervise
from flows.limits import LimitedScheduler
from flows.prefect_report import API_ERRORS, RUN_DIR_LABEL, PrefectReporter, is_cancelled, this_is_cancelled
from miles_core.errors import MilesError, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe, load_recipe
from miles_core.records import Drained, RunClosed
from miles_core.run import RunConfig, read_run
from miles_core.tracking.summary import write_summary
from tasks.prepare import ensure_base_model, ensure_run, new_run_id

log = logging.getLogger("miles")

ensure_base_model_task = task(name="base model", retries=2, retry_delay_seconds=5)(ensure_base_model)
ensure_run_task = task(name="run directory", retries=2, retry_delay_seconds=5)(ensure_run)


def run_id_of_this_flow_run(recipe_name: str) -> str:
    """One flow run, one run id, over all its retries."""
    return f"{recipe_name}-{str(flow_run.get_id())[:13]}"


def request_cancel_on_cancellation(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Leaves the request to cancel in the run directory, where a person cancelled the flow run, and says what remains.

    Prefect also calls this hook when a worker shuts down; the server then knows nothing of a cancellation, and the jobs go on.
    """
    logger = flow_run_logger(flow_run, flow)
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(flow_run.id)
    root = current.labels.get(RUN_DIR_LABEL)
    if not is_cancelled(current):
        logger.warning("nobody cancelled this flow run: the jobs of %s go on", root)
    elif root is None:
        logger.warning("this flow run had no run directory yet; nothing is left of it")
    else:
        run, paths = read_run(Path(str(root)))
        closed = read_closed(run, paths)
        if closed is None:
            request_cancel(paths)
            logger.warning("jobs of %s may remain: the reap flow or `miles cancel %s` ends them", run.run_id, root)
        else:
            logger.info("run %s is %s; no job of it is left", run.run_id, closed.state)


@flow(
    name="train", retries=3, retry_delay_seconds=30, flow_run_name="{recipe}-on-{cluster}",
    on_cancellation=[request_cancel_on_cancellation],
)  # fmt: skip
def train(
    recipe: str = "chain_sum", cluster: str = "local", run_id: str | None = None, settings: list[str] | None = None
) -> str | State[None]:
    """Trains `recipe` on `cluster`; returns the run directory. `settings` are `a.b=c` changes to the recipe."""
    resolved, profile = load_recipe(recipe, tuple(settings or ())), load_cluster(cluster)
    name = run_id or (run_id_of_this_flow_run(resolved.name) if flow_run.get_id() else new_run_id(resolved))
    return train_run(resolved, profile, name)


def is_first_try() -> bool:
    """Somebody started this flow run; it does not enter again by itself."""
    return int(flow_run.get_run_count()) <= 1


def train_run(recipe: Recipe, profile: ClusterProfile, run_id: str) -> str | State[None]:
    """From a recipe to the end of its run; returns the run directory."""
    base_model = ensure_base_model_task(recipe)
    paths: RunPaths = ensure_run_task(recipe, profile, run_id, base_model)
    run, paths = read_run(paths.root)
    return host(run, paths, profile, go_on=is_first_try())


def host(run: RunConfig, paths: RunPaths, profile: ClusterProfile, *, go_on: bool) -> str | State[None]:
    """Supervises a prepared run in this flow run; returns its directory, or Completed, named Drained, if it was drained, or
    Cancelled where the flow run was, or Crashed where the directory is gone.

    `go_on` takes up a run that was drained before. Raises MilesError unless it COMPLETED.
    """
    logger = get_run_logger()
    logger.info("run directory %s", paths.root)
    with PrefectReporter(run, paths, logger) as reporter:
        try:
            closed = supervise(paths, profile, reporter.hooks, around=LimitedScheduler, go_on=go_on)
        except RunDirectoryError as error:
            if paths.run_file.exists():
                raise
            # A flow that fails is tried again, and would make the run anew beside its jobs.
            return Crashed(message=str(error))
        if closed is None:
            _leave(paths, profile, reporter)
        if isinstance(closed, Drained):
            message = f"all jobs of run {run.run_id} have left; the resume deployment or `miles resume {paths.root}` goes on"
            logger.info(message)
            return Completed(name="Drained", message=message)
        reporter.closed(closed, write_summary(run, paths))
    if closed.state == "CANCELLED" and _this_is_cancelled():
        return Cancelled(message=closed.detail)
    if closed.state != "COMPLETED":
        raise MilesError(f"run {run.run_id} ended as {closed.state}: {closed.detail}")
    return str(paths.root)


def _leave(paths: RunPaths, profile: ClusterProfile, reporter: PrefectReporter) -> NoReturn:
    """The supervisor was asked to leave: ends the run if it was cancelled in Prefect, and the process in any case."""
    if not _this_is_cancelled():
        log.warning("asked to leave: the jobs of %s go on", paths.root)
        raise TerminationSignal(signal.SIGTERM)
    request_cancel(paths)
    closed = supervise(paths, profile, reporter.hooks)
    if isinstance(closed, RunClosed):
        reporter.closed(closed, write_summary(*read_run(paths.root)))
    # The worker that sent the signal sets the final state.
    raise Abort


def _this_is_cancelled() -> bool:
    try:
        return this_is_cancelled()
    except API_ERRORS as error:
        log.warning("whether this flow run was cancelled is not known, so the jobs go on: %s", error)
        return False
