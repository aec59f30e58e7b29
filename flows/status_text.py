"""`miles status` for people, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from flows.display import summary_text
from flows.output import columns, plain, print_text
from flows.status import RoleStatus, Status

_BAR = 32
_INCIDENTS = 10
_CLEAR = "\x1b[H\x1b[J"


def watch_status(read: Callable[[], Status], every_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Prints it every `every_s` seconds until the run is over; on a terminal in place."""
    while True:
        status = read()
        head = _CLEAR if sys.stdout.isatty() else ""
        print_text(f"{head}{time.strftime('%H:%M:%S', time.localtime(status.now_s))}\n{status_text(status)}\n")
        if status.ledger.closed is not None:
            return
        sleep(every_s)


def status_text(status: Status) -> str:
    """All of it, the most asked for first."""
    return "\n".join([
        f"run {status.run.run_id}  ({status.paths.root})",
        *_progress(status),
        *(f"  {line.strip()}" for line in summary_text(status.summary).splitlines()[1:]),
        *_symptoms(status),
        "",
        *_roles(status),
        *_notes(status),
        *_incidents(status),
    ])  # fmt: skip


def _progress(status: Status) -> list[str]:
    pace, step, steps = status.pace, status.summary["steps"], status.run.recipe.steps
    full = round(_BAR * step / steps)
    lines = [f"{status.state}: {step} steps of {steps}  [{'#' * full}{'.' * (_BAR - full)}] {step / steps:.0%}"]
    speed = f"{_figure(pace.steps_per_h)} steps/h, {_figure(pace.samples_per_h)} trained samples/h (median of the recent steps)"
    if status.ledger.closed is not None:
        return [*lines, f"  speed     {speed}"]
    end = f"UNKNOWN ({pace.why})" if pace.end_unix_s is None else _when(pace.end_unix_s, status.now_s)
    last = "no step yet" if pace.last_step_age_s is None else f"last step {_seconds(pace.last_step_age_s)} ago"
    return [
        *lines,
        f"  end       {end}; {last}",
        f"  speed     {speed}, {_figure(pace.tokens_per_s)} sampled tokens/s now",
    ]


def _symptoms(status: Status) -> list[str]:
    return [f"  {'symptom' if index == 0 else 'also':9} {symptom.row}: {symptom.seen}\n            -> {symptom.advice}"
            for index, symptom in enumerate(status.symptoms)]  # fmt: skip


def _roles(status: Status) -> list[str]:
    head = ("role", "attempt", "job", "node", "progress", "last sign", "state")
    return columns([head, *(_role(role, status) for role in status.roles)])


def _role(role: RoleStatus, status: Status) -> tuple[str, ...]:
    state = role.state
    if role.queue_reason is not None:
        start = role.expected_start_unix_s
        expected = "UNKNOWN" if start is None else _when(start, status.now_s)
        state = f"{state} ({role.queue_reason}), expected to start: {expected}"
    seen = "-" if role.seen_s is None else f"{_seconds(role.seen_s)} ago"
    progress = "-" if role.progress is None else str(role.progress)
    return role.writer, str(role.attempt), role.job_id or "-", role.node or "-", progress, seen, state


def _notes(status: Status) -> list[str]:
    notes = [f"supervisor: {status.supervisor}"]
    asked = status.as_json()["requests"]
    if asked and status.ledger.closed is None:
        notes.append(f"requested: {', '.join(asked)}")
    is_open = status.ledger.closed is None and status.ledger.drained is None
    if is_open and status.queue.why:
        notes.append(f"scheduler: UNKNOWN ({status.queue.why})")
    if is_open and status.table_age_s is not None and status.table_age_s > 2 * status.run.timing.lease_s:
        notes.append(f"states are {_seconds(status.table_age_s)} old: the orchestrator tells nothing newer")
    notes += [f"! {damage}; `miles verify {status.paths.root}` says whether it is damage" for damage in status.damage]
    if status.ledger.drained is not None and status.ledger.closed is None:
        notes.append(f"drained: `miles resume {status.paths.root}` goes on")
    return notes


def _incidents(status: Status) -> list[str]:
    shown: list[dict[str, Any]] = status.as_json()["incidents"][-_INCIDENTS:]
    return [
        plain(f"! {_seconds(item['age_s'])} ago {item['what']} {item['writer']} {item['detail']}".replace("  ", " ").rstrip())
        for item in shown
    ]


def _figure(value: float | None) -> str:
    return "UNKNOWN" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _seconds(value: float | None) -> str:
    """`8 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if value is None:
        return "UNKNOWN"
    for unit, seconds, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if value < most:
            return f"{value / seconds:.{0 if unit != 'h' else 1}f} {unit}"
    return f"{value / 86400:.1f} d"


def _when(unix_s: float, now_s: float) -> str:
    """A time and how far away it is."""
    left = unix_s - now_s
    text = time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
    return f"{text} (in {_seconds(left)})" if left >= 0 else f"{text} ({_seconds(-left)} ago)"
