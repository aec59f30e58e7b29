"""What Prefect is told of a run: events, artifacts, the flow run's name, tags and labels; and whether it was cancelled there.

All of it best effort. A cancellation is looked for, because who should bring it, the worker, gives up when the server was away.
The supervisor's loop never waits for the API: calls are made in order by a thread of their own, and one that fails, hangs or
finds no place costs a log line. The run directory tells the same, and is the truth.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from cluster.epoch import WRITER, supervisor_context
from cluster.supervise import Progress
from flows.display import summary_text
from flows.launch import Hooks, request_cancel
from miles_core.errors import MilesError
from miles_core.paths import RunPaths
from miles_core.records import Incident, Intent, RunClosed, Submitted, split_writer
from miles_core.run import RunConfig, all_writers
from miles_core.tracking.ledger import read_all

log = logging.getLogger("miles")
Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]

API_ERRORS = (PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError)
"""What the client raises when the API is away, refuses, or answers nonsense."""
RUN_DIR_LABEL = "miles.run_dir"
EVENTS = {"role_lost", "role_replaced", "role_stalled", "node_down", "nodes_lost"}
"""Incidents that are events, too; all others are in the log and in the report."""
_REPORT_EVERY_S = 30.0
_CLOSE_DEADLINE_S = 20.0
_MAX_WAITING = 100


def is_cancelled(run: FlowRun) -> bool:
    """Somebody cancelled this flow run, says the server."""
    return run.state is not None and (run.state.is_cancelling() or run.state.is_cancelled())


def this_is_cancelled() -> bool:
    """Whether the flow run that this process executes was cancelled; false outside of one. Raises API_ERRORS."""
    run_id = flow_run.get_id()
    if run_id is None:
        return False
    with get_client(sync_client=True) as client:
        return is_cancelled(client.read_flow_run(UUID(run_id)))


class Teller:
    """Calls the API on a thread of its own, one call after the other."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_WAITING)
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="prefect", daemon=True)
        self._thread.start()

    def tell(self, call: Callable[[], object]) -> None:
        """Returns at once; a call that finds no place is dropped."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            log.warning("Prefect answers too slowly: something was not told")

    def close(self, deadline_s: float = _CLOSE_DEADLINE_S) -> None:
        """Waits for what was told, at most `deadline_s`."""
        try:
            self._calls.put(None, timeout=deadline_s)
        except queue.Full:
            log.warning("Prefect did not answer within %g s: the last reports are only in the run directory", deadline_s)
            return
        self._thread.join(deadline_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except (*API_ERRORS, MilesError) as error:
                log.warning("Prefect was not told: %s", error)


class PrefectReporter:
    """Shows one run in Prefect; `hooks` are the supervisor's."""

    def __init__(self, run: RunConfig, paths: RunPaths, logger: Logger = log, teller: Teller | None = None) -> None:
        """`logger` is the flow run's own, which shows what it gets in Prefect."""
        self._run, self._paths, self._log = run, paths, logger
        self._teller = teller or Teller()
        self._progress: UUID | None = None
        self._reported_at, self._reported_step = -_REPORT_EVERY_S, -1
        self._roles: tuple[tuple[str, str], ...] = ()
        self._is_table_due = True

    def __enter__(self) -> Self:
        self._teller.tell(self._name_flow_run)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._teller.close()

    @property
    def hooks(self) -> Hooks:
        """For flows.launch.supervise."""
        return Hooks(self.progress, self.incident)

    def progress(self, progress: Progress) -> None:
        """A progress bar and a log line at most every 30 s, and the table of jobs where something happened to one."""
        self._roles = progress.roles
        finished = progress.step == progress.steps != self._reported_step
        if progress.seconds - self._reported_at < _REPORT_EVERY_S and not finished:
            return
        self._reported_at, self._reported_step = progress.seconds, progress.step
        self._log.info("step %s/%s reward=%s", progress.step, progress.steps, progress.mean_reward)
        self._teller.tell(lambda: self._show_progress(100.0 * progress.step / progress.steps))
        self._teller.tell(self._obey_cancellation)
        if self._is_table_due and progress.seconds >= _REPORT_EVERY_S:
            self._is_table_due = False
            self._teller.tell(self._show_jobs)

    def incident(self, incident: Incident) -> None:
        """A warning in the flow run's log, and an event where people react to it."""
        self._log.warning("%s %s %s", incident.what, incident.writer, incident.detail)
        self._is_table_due = True
        if incident.what in EVENTS:
            payload = {"writer": incident.writer, "detail": incident.detail, "unix_s": incident.unix_s}
            self._teller.tell(lambda: self._emit(incident.what, payload))

    def closed(self, closed: RunClosed, summary: dict[str, Any]) -> None:
        """The last word: an event, the figures with where the report is, and the jobs as they ended."""
        name = f"run_{closed.state.lower()}"
        self._teller.tell(lambda: self._emit(name, {"detail": closed.detail, "steps": summary["steps"]}))
        text = self._summary_text(summary)
        self._teller.tell(lambda: create_markdown_artifact(text, key=self._key(), description="Figures of the run"))
        self._teller.tell(self._show_jobs)

    # --- calls of the API, on the teller's thread --------------------------------------------------------------------

    def _name_flow_run(self) -> None:
        """A name and tags that people search for, and the label that the cancellation hook and automations read."""
        run_id = flow_run.get_id()
        if run_id is None:
            return
        tags = {*flow_run.get_tags(), f"run:{self._run.run_id}", f"recipe:{self._run.recipe.name}"}
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(UUID(run_id), {RUN_DIR_LABEL: str(self._paths.root.resolve())})
            client.update_flow_run(UUID(run_id), name=flow_run_name(self._run), tags=sorted(tags))

    def _obey_cancellation(self) -> None:
        is_open = self._paths.run_file.exists() and not self._paths.cancel_request.exists()
        if is_open and this_is_cancelled():
            log.warning("this flow run was cancelled: ending run %s", self._run.run_id)
            request_cancel(self._paths)

    def _emit(self, what: str, payload: dict[str, Any]) -> None:
        resource = {"prefect.resource.id": f"miles.run.{self._run.run_id}", "prefect.resource.name": self._run.run_id}
        emit_event(f"miles.{what}", resource, payload=payload)

    def _show_progress(self, percent: float) -> None:
        if self._progress is None:
            made: Any = create_progress_artifact(percent, description=f"{self._run.run_id}: steps trained")
            self._progress = made
        else:
            update_progress_artifact(self._progress, progress=percent)

    def _show_jobs(self) -> None:
        rows = jobs_table(self._run, self._paths, dict(self._roles))
        create_table_artifact(rows, key=self._key("jobs"), description=f"Jobs of {self._run.run_id}")

    def _summary_text(self, summary: dict[str, Any]) -> str:
        report = self._paths.report.resolve()
        return (
            f"# {self._run.run_id}\n\n```\n{summary_text(summary)}\n```\n\nReport: [{report}]({report.as_uri()})\n\n"
            f"Proof: `miles verify {self._paths.root.resolve()}`\n"
        )

    def _key(self, suffix: str = "") -> str:
        return artifact_key("run", self._run.run_id, suffix)


def flow_run_name(run: RunConfig) -> str:
    """`<recipe>-<run id>`; an id that begins with the recipe's name says so once."""
    name = run.recipe.name
    return run.run_id if run.run_id.startswith(f"{name}-") else f"{name}-{run.run_id}"


def artifact_key(*parts: str) -> str:
    """Prefect's keys are lower-case letters, digits and dashes."""
    text = "-".join(part for part in parts if part).lower()
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in text)


def jobs_table(run: RunConfig, paths: RunPaths, states: dict[str, str]) -> list[dict[str, Any]]:
    """One row a role, from the supervisor's journal; `states` by writer, as the supervisor last saw them."""
    records = read_all(supervisor_context(run, paths, 0).reading, paths.journal(WRITER))
    return [_row(writer, records, states.get(writer, "")) for writer in all_writers(run.recipe)]


def _row(writer: str, records: Sequence[Any], state: str) -> dict[str, Any]:
    attempts = [record.attempt for record in records if isinstance(record, Intent) and record.writer == writer]
    job_ids = [record.job_id for record in records if isinstance(record, Submitted) and record.writer == writer]
    role, replica = split_writer(writer)
    return {
        "role": role, "replica": replica, "attempt": max(attempts, default=0), "job ids": ", ".join(dict.fromkeys(job_ids)),
        "state": state,
    }  # fmt: skip
