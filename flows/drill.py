"""`miles drill`: rehearses failures on a run that this command starts or continues; what it does is cluster/faults/drill.py.

The supervisor is a child of this process, the very `miles run` that a person types (the train flow where the plan takes
Prefect away). It leaves when this process is asked to; the jobs then go on, and the same command continues both the run and
what is left of the plan. Exit code 12: a fault did not fire or did not go well, or something of the run is left.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from cluster.faults.drill import Drill
from cluster.faults.host import HostedSupervisor
from cluster.faults.plan import load_plan
from cluster.faults.record import FaultRecord, read_drill, seconds, yes
from cluster.faults.site import check_plan
from cluster.profile import load_cluster
from cluster.schedulers import make_scheduler
from miles_core.errors import DrillFailed
from miles_core.paths import RunPaths
from miles_core.recipe import load_recipe
from tasks.prepare import ensure_base_model, ensure_run, new_run_id, run_root


def drill_recipe(
    recipe: str, cluster: str, plan_name: str, run_id: str | None, settings: Sequence[str], *, as_json: bool
) -> None:
    """Drills one run to its end. Raises RecipeError for a plan that this place does not allow, and DrillFailed."""
    resolved, profile, plan = load_recipe(recipe, tuple(settings)), load_cluster(cluster), load_plan(plan_name)
    name = run_id or new_run_id(resolved)
    make_scheduler(profile, run_root(profile, name))
    check_plan(plan, profile, RunPaths(run_root(profile, name)))
    paths = ensure_run(resolved, profile, name, ensure_base_model(resolved))
    under_prefect = any(fault.role == "prefect" for fault in plan.faults)
    host = HostedSupervisor(supervisor_argv(recipe, cluster, name, settings, under_prefect=under_prefect))
    output = sys.stderr if as_json else sys.stdout

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=output, flush=True)

    # As Ctrl-C: what a fault stopped must be let go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"drill of {len(plan.rounds())} faults on run {name}, {paths.root}; record {paths.drill}")
    try:
        outcome = Drill(paths.root, profile, plan, host, say).run()
    except (KeyboardInterrupt, DrillFailed):
        print_table(read_drill(paths).faults, output)
        say("left; the jobs go on, and the same command continues the run and the plan")
        raise
    finally:
        host.leave()
    if as_json:
        print(json.dumps(outcome, indent=2))
    else:
        print_outcome(outcome)
    if not outcome["ok"]:
        raise DrillFailed(f"the drill of {name} failed: {'; '.join(outcome['problems'])}")


def supervisor_argv(recipe: str, cluster: str, run_id: str, settings: Sequence[str], *, under_prefect: bool) -> list[str]:
    """What a person types to train; under Prefect, the flow in a process of its own."""
    if under_prefect:
        call = f"train({recipe!r}, {cluster!r}, {run_id!r}, {list(settings)!r})"
        return [sys.executable, "-c", f"from flows.train import train; {call}"]
    changes = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "flows.cli", "run", recipe, "--cluster", cluster, "--run-id", run_id, *changes]


def print_outcome(outcome: dict[str, Any]) -> None:
    """The table at the end, and what is wrong."""
    records = [FaultRecord.model_validate(record) for record in outcome["faults"]]
    print_table(records, sys.stdout)
    good = sum(record.is_good for record in records)
    print(f"{good} of {len(records)} faults good; run {outcome['run_id']}: {outcome['state']}, {outcome['directory']}")
    for problem in outcome["problems"]:
        print(f"! {problem}")


def print_table(records: Sequence[FaultRecord], output: TextIO) -> None:
    """One row for each fault."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("role", "kind", "fired", "noticed", "productive", "lost", "verify", "others"):
        table.add_column(column)
    for record in records:
        table.add_row(
            record.role, record.kind, yes(record.fired), seconds(record.noticed_s), seconds(record.productive_s),
            str(record.lost_samples), yes(record.verify), yes(record.others_unchanged),
        )  # fmt: skip
    Console(file=output, highlight=False, markup=False, soft_wrap=True).print(table)
