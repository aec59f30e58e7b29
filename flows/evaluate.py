"""The evaluate flow: a model folder or a version of a run, scored on held-out tasks by a job of the cluster.

A question is its own folder, so a retry, or the same flow again, adopts the job and goes on behind the parts that are done.
Cancelled in Prefect it cancels the job; killed, the job goes on.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger

from cluster.profile import load_cluster
from flows.evaluating import Asked, question_of, result_text
from flows.prefect_report import API_ERRORS, artifact_key, is_cancelled
from miles_core.errors import MilesError
from tasks.evaluate import as_json, cancel, ensure_folder, ensure_result, folder_of

log = logging.getLogger("miles")


def cancel_job_on_cancellation(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Ends the job of a flow run that somebody cancelled."""
    logger = flow_run_logger(flow_run, flow)
    with get_client(sync_client=True) as client:
        current = client.read_flow_run(flow_run.id)
    if not is_cancelled(current):
        logger.warning("nobody cancelled this flow run: its job goes on")
        return
    given = dict(flow_run.parameters)
    profile = load_cluster(str(given.pop("cluster", "local")))
    try:
        jobs = cancel(folder_of(question_of(_asked(**given)), profile), profile)
        logger.info("cancelled jobs %s", jobs)
    except MilesError as error:
        logger.warning("%s", error)


@flow(
    name="evaluate", retries=3, retry_delay_seconds=30, flow_run_name="evaluate-{model}",
    on_cancellation=[cancel_job_on_cancellation],
)  # fmt: skip
def evaluate(
    model: str,
    cluster: str = "local",
    recipe: str | None = None,
    family: str | None = None,
    problems: int = 256,
    samples: int = 0,
    temperature: float = 1.0,
    settings: list[str] | None = None,
) -> dict[str, object]:
    """Scores `model` (a folder, RUN or RUN@STEP) and returns the figures; see `miles evaluate`.

    Of a run that trains give RUN@STEP: a retry, or a cancel, of RUN alone would mean another version.
    """
    profile = load_cluster(cluster)
    question = question_of(_asked(model, recipe, family, problems, samples, temperature, settings))
    folder = folder_of(question, profile)
    ensure_folder(question, folder)
    result = ensure_result(folder, profile, get_run_logger().info)
    text = result_text(result, folder)
    get_run_logger().info("%s", text)
    try:
        create_markdown_artifact(f"```\n{text}\n```", key=artifact_key("evaluation", question.evaluation_id))
    except API_ERRORS as error:
        log.warning("Prefect was not told: %s", error)
    return as_json(result, folder)


def _asked(
    model: str,
    recipe: str | None = None,
    family: str | None = None,
    problems: int = 256,
    samples: int = 0,
    temperature: float = 1.0,
    settings: list[str] | None = None,
) -> Asked:
    return Asked(model, recipe, family, tuple(settings or ()), problems, samples, temperature)
