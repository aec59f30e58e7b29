"""The resume flow: adopts a run whose supervisor is gone, or continues one that ended with NodesLost."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from cluster.epoch import read_cluster
from cluster.profile import load_cluster
from flows.train import host, is_first_try, request_cancel_on_cancellation
from miles_core.run import read_run
from tasks.prepare import run_root


@flow(
    name="resume", retries=3, retry_delay_seconds=30, flow_run_name="resume-{run}",
    on_cancellation=[request_cancel_on_cancellation],
)  # fmt: skip
def resume(run: str, cluster: str = "local", go_on: bool = True) -> str | State[None]:
    """Supervises run `run` again, with the recipe and the cluster that it was made with, and returns its directory.

    `run` is the path of a run directory, or a run id below the runs_root of `cluster`. A closed run is only read; one that
    another supervisor holds is left to it. `go_on` takes up a run that was drained; without it the request to drain is obeyed.
    To continue with a corrected cluster profile, run `train` with the same run id.
    """
    root = Path(run) if "/" in run else run_root(load_cluster(cluster), run)
    config, paths = read_run(root)
    return host(config, paths, read_cluster(config), go_on=go_on and is_first_try())
