"""The deployments of prefect.yaml against a real Prefect server: nightly, resume, cancel, reap, and a server that goes away."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.epoch import read_closed
from miles_core.run import all_writers, read_run
from miles_core.verify import verify_run
from tests.e2e.prefect_server import Server, background, prefect, prefect_server
from tests.e2e.runs import REPOSITORY, SHORT, ledger_of, wait_for, wait_for_step
from tests.unit.sleeping_run import SleepingRun

pytestmark = [pytest.mark.xdist_group("prefect"), pytest.mark.timeout(900)]

AWAY_S = 60.0
SLOW = ["steps=12", *SHORT[1:], "orchestrator.max_staleness=0", "orchestrator.capacity_batches=1", "learner.correction=none",
        "rollout.shard_rows=1000", "rollout.shard_age_s=20"]  # fmt: skip
"""Every batch waits for the age of its shard: four minutes of a run that need next to no CPU."""
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Site:
    """Server, worker and a folder of runs that all tests of this module share."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server, self.env, self.runs = folder, server, server.env, folder / "runs"
        self.cluster = folder / "cluster.yaml"
        profile = yaml.safe_load((REPOSITORY / "configs/clusters/local.yaml").read_text())
        self.cluster.write_text(yaml.safe_dump(profile | {"runs_root": str(self.runs)}))

    def start(self, deployment: str, **values: object) -> str:
        """Starts a deployment; the id of its flow run."""
        found = self.ask(f"deployments/name/{deployment}", None)
        query = {"parameters": values, "state": {"type": "SCHEDULED"}}
        return str(self.ask(f"deployments/{found['id']}/create_flow_run", query)["id"])

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"flow_runs/{flow_run_id}", None)
        return found

    def ended(self, flow_run_id: str, deadline_s: float = 120) -> dict[str, Any]:
        """The flow run once it has ended."""
        try:
            wait_for(f"{flow_run_id} to end", lambda: self.flow_run(flow_run_id)["state_type"] in FINAL, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{(self.folder / 'worker.log').read_text()[-6000:]}") from error
        return self.flow_run(flow_run_id)

    def ask(self, path: str, query: dict[str, Any] | None) -> Any:
        """GET, or POST with a query; again while the server's database is busy or it does not answer on a loaded machine, as
        Prefect's own client does."""
        method, url = "GET" if query is None else "POST", f"{self.env['PREFECT_API_URL']}/{path}"
        answers: list[httpx.Response] = []

        def is_answered() -> bool:
            try:
                answers.append(httpx.request(method, url, json=query, timeout=30))
            except httpx.TimeoutException:
                return False
            return answers[-1].status_code != 503

        wait_for(f"an answer of {url}", is_answered, 120)
        answers[-1].raise_for_status()
        return answers[-1].json()

    def events_of(self, run_id: str) -> set[str]:
        """Names of a run's events."""
        query = {"filter": {"resource": {"id": [f"miles.run.{run_id}"]}}, "limit": 50}
        return {event["event"] for event in self.ask("events/filter", query)["events"]}

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        """All artifacts of one key."""
        found: list[dict[str, Any]] = self.ask("artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("prefect")
    with prefect_server(folder) as server:
        yield Site(folder, server)


class Line:
    """A TCP line to the server that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._is_up = True
        self.refused = 0
        """Connections since the cut that found nobody."""
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From here on the server is not there."""
        self._is_up = False
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def mend(self) -> None:
        self._is_up = True

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if not self._is_up:
                client.close()
                self.refused += 1
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_dead_api_stops_nothing_a_crash_cancels_nothing_and_cancel_ends_the_jobs(site: Site) -> None:
    line = Line(int(httpx.URL(site.env["PREFECT_API_URL"]).port or 0))
    # By itself: a worker gives its flows its own PREFECT_API_URL, whatever the deployment says.
    env = site.env | {"PREFECT_API_URL": f"http://127.0.0.1:{line.port}/api"}
    with SleepingRun(site.runs, "held", lease_s=5) as held:
        argv = [sys.executable, "-c", f"from flows.resume import resume; resume({str(held.paths.root)!r})"]
        everybody = {(writer, 1) for writer in all_writers(held.run.recipe)}
        with background(site.folder / "flow.log", env, *argv) as process:
            wait_for("all roles", lambda: held.running_jobs() == everybody, 60)
            line.cut()
            held.kill("rollout-0")
            wait_for("the replacement", lambda: ("rollout-0", 2) in held.running_jobs(), 60)
            wait_for("the flow to miss the server", lambda: line.refused, 60)
            line.mend()
            process.terminate()
            assert process.wait(timeout=60) != 0
        survivors = held.running_jobs()
        assert survivors == everybody - {("rollout-0", 1)} | {("rollout-0", 2)}
        resumed = site.start("resume/resume", run=str(held.paths.root))
        wait_for("the next supervisor", (held.paths.leases / "supervisor-0.a3").exists, 60)
        wait_for("its first look", lambda: site.flow_run(resumed)["labels"].get("miles.run_dir"), 60)
        assert held.running_jobs() == survivors
        held.kill("rollout-0")
        wait_for("the event", lambda: "miles.role_replaced" in site.events_of("held"), 60)
        prefect(site.env, "flow-run", "cancel", resumed)
        assert site.ended(resumed)["state_type"] == "CANCELLED"
        assert not held.live_jobs()
    closed = read_closed(held.run, held.paths)
    assert closed is not None and closed.state == "CANCELLED"


def test_reap_ends_what_a_dead_run_left_and_nothing_else(site: Site) -> None:
    values = {"cluster": str(site.cluster), "orphan_s": 0.1}
    with SleepingRun(site.runs, "dead") as dead, SleepingRun(site.runs, "live", lease_s=5) as live:
        dead.take()
        for sleeping in (dead, live):
            sleeping.start_job()
            wait_for("the job's process", sleeping.running_jobs, 60)
        with live.beating():
            assert site.ended(site.start("reap/reap", dry_run=True, **values))["state_type"] == "COMPLETED"
            assert dead.live_jobs() == {("learner-0", 1)}
            assert site.ended(site.start("reap/reap", **values))["state_type"] == "COMPLETED"
        assert not dead.live_jobs() and live.live_jobs() == {("learner-0", 1)}


def test_a_run_whose_directory_is_gone_is_not_made_anew_beside_its_jobs(site: Site) -> None:
    with SleepingRun(site.runs, "gone", lease_s=5) as gone:
        resumed = site.start("resume/resume", run=str(gone.paths.root))
        wait_for("all roles", lambda: gone.running_jobs() == {(writer, 1) for writer in all_writers(gone.run.recipe)}, 120)
        away = gone.paths.root.with_name("away")
        gone.paths.root.rename(away)
        try:
            assert site.ended(resumed)["state_type"] == "CRASHED" and site.flow_run(resumed)["run_count"] == 1
            assert not gone.paths.run_file.exists()
        finally:
            shutil.rmtree(gone.paths.root, ignore_errors=True)  # what heartbeats made anew
            away.rename(gone.paths.root)


def test_automations_are_made_once(site: Site) -> None:
    argv = [sys.executable, "-m", "flows.automations"]
    for verb in ("made", "updated"):
        done = subprocess.run(argv, cwd=REPOSITORY, env=site.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.count(verb) == 2, done.stdout + done.stderr
    assert len(site.ask("automations/filter", {})) == 2


def test_the_second_nightly_skips_itself_and_the_first_outlives_a_server_that_is_away_for_a_minute(site: Site) -> None:
    values = {"recipe": "chain_sum", "cluster": str(site.cluster), "settings": SLOW}
    first = site.start("nightly/nightly", **values)
    wait_for("the first nightly's supervisor", lambda: list(site.runs.glob("chain_sum-*/leases/supervisor-0.a1")), 120)
    second = site.ended(site.start("nightly/nightly", **values))
    assert (second["state_type"], second["state_name"]) == ("COMPLETED", "Skipped"), second["state"]
    assert "lives" in second["state"]["message"]
    (root,) = site.runs.glob("chain_sum-*")
    wait_for_step(root, 1)
    site.server.stop()
    before, left_at = ledger_of(root)[2].steps.newest_step, time.monotonic()
    assert not site.server.answers()
    time.sleep(AWAY_S)
    is_over, step = read_closed(*read_run(root)) is not None, ledger_of(root)[2].steps.newest_step
    site.server.start()
    assert time.monotonic() - left_at >= AWAY_S and step > before and not is_over
    done = site.ended(first, 400)
    assert (done["state_type"], done["run_count"]) == ("COMPLETED", 1), done["state"]
    verification = verify_run(root)
    assert (verification.state, verification.faults) == ("COMPLETED", [])
    assert done["name"] == root.name and f"run:{root.name}" in done["tags"]
    assert "miles.run_completed" in wait_for("events", lambda: site.events_of(root.name), 30)
    (summary,) = site.artifacts(f"run-{root.name.replace('_', '-')}")
    assert str(root / "reports" / "index.html") in summary["data"]
    jobs = json.loads(site.artifacts(f"run-{root.name.replace('_', '-')}-jobs")[-1]["data"])
    assert {(row["role"], row["attempt"]) for row in jobs} >= {("learner", 1), ("orchestrator", 1)}


def test_a_worker_that_missed_its_server_brings_no_cancellation_and_the_flow_finds_it(site: Site) -> None:
    """The last one here: the worker is not restarted."""
    site.server.stop()
    wait_for("the worker to give up", lambda: "cancellation will fail" in (site.folder / "worker.log").read_text(), 120)
    site.server.start()
    with SleepingRun(site.runs, "late", lease_s=5) as late:
        resumed = site.start("resume/resume", run=str(late.paths.root))
        wait_for("all roles", lambda: late.running_jobs() == {(writer, 1) for writer in all_writers(late.run.recipe)}, 120)
        prefect(site.env, "flow-run", "cancel", resumed)
        assert site.ended(resumed)["state_type"] == "CANCELLED"
        assert not late.live_jobs()
