"""The train flow: hosts the supervisor and shows it in Prefect.

Prefect decides and shows; the journals are the truth. Retries enter again with the same run id and adopt what lives, so a
lost role that could not be replaced (NodesLost) costs no other role anything. An API error never stops the loop.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from cluster.profile import load_cluster
from cluster.supervise import Progress
from flows.display import summary_text
from flows.launch import Hooks, supervise
from miles_core.errors import MilesError
from miles_core.paths import RunPaths
from miles_core.recipe import load_recipe
from miles_core.records import Incident
from miles_core.run import read_run
from miles_core.tracking.summary import write_summary
from tasks.prepare import ensure_base_model, ensure_run, new_run_id

_REPORT_EVERY_S = 30.0

ensure_base_model_task = task(name="base model", retries=2, retry_delay_seconds=5)(ensure_base_model)
ensure_run_task = task(name="run directory", retries=2, retry_delay_seconds=5)(ensure_run)
write_summary_task = task(name="summary")(write_summary)


def run_id_of_this_flow_run(recipe_name: str) -> str:
    """One flow run, one run id, over all its retries."""
    return f"{recipe_name}-{str(flow_run.get_id())[:13]}"


@flow(name="train", retries=3, retry_delay_seconds=30, flow_run_name="{recipe}-on-{cluster}")
def train(
    recipe: str = "chain_sum", cluster: str = "local", run_id: str | None = None, settings: list[str] | None = None
) -> str:
    """Trains `recipe` on `cluster`; returns the run directory. `settings` are `a.b=c` changes to the recipe."""
    resolved, profile = load_recipe(recipe, tuple(settings or ())), load_cluster(cluster)
    name = run_id or (run_id_of_this_flow_run(resolved.name) if flow_run.get_id() else new_run_id(resolved))
    base_model = ensure_base_model_task(resolved)
    paths: RunPaths = ensure_run_task(resolved, profile, name, base_model)
    get_run_logger().info("run directory %s", paths.root)
    reporter = PrefectReporter(name)
    closed = supervise(paths, profile, Hooks(reporter.progress, reporter.incident))
    if closed is None:
        raise MilesError(f"the supervisor of {name} was asked to leave; its jobs go on. Run the flow again with run_id={name}")
    run, paths = read_run(paths.root)
    reporter.summary(write_summary_task(run, paths), paths)
    if closed.state != "COMPLETED":
        raise MilesError(f"run {name} ended as {closed.state}: {closed.detail}")
    return str(paths.root)


class PrefectReporter:
    """Shows a run in Prefect, best effort: whatever the API answers, the run goes on."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._log = get_run_logger()
        self._artifact: UUID | None = None
        self._reported_at = -_REPORT_EVERY_S
        self._reported_step = -1

    def progress(self, progress: Progress) -> None:
        """A progress bar and a log line, at most every 30 s."""
        finished = progress.step == progress.steps != self._reported_step
        if progress.seconds - self._reported_at < _REPORT_EVERY_S and not finished:
            return
        self._reported_at, self._reported_step = progress.seconds, progress.step
        self._log.info("step %s/%s reward=%s", progress.step, progress.steps, progress.mean_reward)
        self._best_effort(self._show_progress, 100.0 * progress.step / progress.steps)

    def incident(self, incident: Incident) -> None:
        """A warning in the flow run's log."""
        self._log.warning("%s %s %s", incident.what, incident.writer, incident.detail)

    def summary(self, summary: dict[str, Any], paths: RunPaths) -> None:
        """The figures as a markdown artifact."""
        text = f"# {self._run_id}\n\n```\n{summary_text(summary)}\n```\n\nRun directory: `{paths.root}`\n"
        key = f"run-{self._run_id}".lower().replace("_", "-").replace(".", "-")
        self._best_effort(lambda: create_markdown_artifact(markdown=text, key=key, description="Figures of the run"))

    def _show_progress(self, percent: float) -> None:
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, description=f"{self._run_id}: steps trained")  # type: ignore[assignment]
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent)

    def _best_effort(self, call: Any, *arguments: Any) -> None:
        import httpx

        try:
            call(*arguments)
        except (PrefectException, httpx.HTTPError, OSError) as error:
            logging.getLogger("miles").warning("Prefect was not told: %s", error)
