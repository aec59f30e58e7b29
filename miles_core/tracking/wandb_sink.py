"""The process that talks to W&B: reads messages on stdin, one JSON object a line, and ends with its input.

Started by wandb_tracker.ProcessSink, so that neither wandb's import, nor a slow network, nor a crash of it touches the
supervisor. When the supervisor dies, its end of the pipe closes and everything that was sent is still written.

    {"start": {...}}    first line: keyword arguments of wandb.init
    {"row": {...}}      one history row; `{"rollouts": {"columns": [...], "rows": [...]}}` beside it becomes a table
    {"config": {...}}   configuration known only later
    {"summary": {...}}  figures of the run
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

AXES = {
    "train/*": "train/step",
    "eval/*": "eval/step",
    **dict.fromkeys(("slurm/*", "grader/*", "queue/*"), "wall_s"),
    **dict.fromkeys(
        ("reward/*", "off_policy/*", "len/*", "time/*", "perf/*", "kl/*", "routing/*", "clip/*", "entropy/*", "drops/*"),
        "policy_version",
    ),
}
"""Which axis each group of metrics is drawn over; `step=` of wandb's own is never given."""


def quiet_settings(**changes: Any) -> Any:
    """Settings that record what is sent and nothing else: no console, host facts, git state, code or system counters."""
    import wandb

    return wandb.Settings(
        console="off", silent=True, init_timeout=30.0, save_code=False, disable_code=True, disable_git=True,
        disable_job_creation=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
        x_save_requirements=False, **changes,
    )  # fmt: skip


def start_run(arguments: dict[str, Any]) -> Any:
    """wandb.init, offline where the server cannot be reached."""
    import wandb
    import wandb.errors

    try:
        run = wandb.init(settings=quiet_settings(), resume="allow", **arguments)
    except (wandb.errors.Error, OSError) as error:
        print(f"W&B is not reachable, going on offline: {error}", file=sys.stderr)
        wandb.teardown()  # else the run id counts as in use
        run = wandb.init(settings=quiet_settings(), resume="allow", **{**arguments, "mode": "offline"})
    for axis in sorted({*AXES.values()}):
        run.define_metric(axis, hidden=axis != "policy_version")
    for pattern, axis in AXES.items():
        run.define_metric(pattern, step_metric=axis)
    return run


def handle(run: Any, message: dict[str, Any]) -> None:
    """One message."""
    import wandb

    row = dict(message.get("row", {}))
    if "rollouts" in message:
        table = message["rollouts"]
        row["rollouts"] = wandb.Table(columns=table["columns"], data=table["rows"])
    if row:
        run.log(row)
    if "config" in message:
        run.config.update(message["config"], allow_val_change=True)
    if "summary" in message:
        run.summary.update(message["summary"])


def serve(lines: TextIO) -> None:
    """Until the input ends; a last line that was cut short is left."""
    run = start_run(json.loads(lines.readline())["start"])
    for line in lines:
        if line.endswith("\n"):
            handle(run, json.loads(line))
    run.finish()


if __name__ == "__main__":
    serve(sys.stdin)
