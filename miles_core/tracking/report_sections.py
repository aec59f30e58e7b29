"""The report's lanes and tables, as HTML; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from miles_core.records import DROP_REASONS, Incident, split_writer
from miles_core.run import all_writers
from miles_core.store.lease import Lease
from miles_core.tracking.machines import place_text
from miles_core.tracking.report_charts import number, ticks
from miles_core.tracking.report_data import Lane, ReportData
from miles_core.tracking.summary import Span

ROLE_COLOURS = {"learner": "s1", "orchestrator": "s5", "rollout": "s3", "grader": "s4", "evaluator": "s2"}
_MOST_LANES = 48
_MOST_INCIDENTS = 200
_PIXELS = 1000


def span_text(seconds: float | None) -> str:
    """Seconds as `42 s`, `3 min 20 s` or `5 h 12 min`."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = (), kind: str = "") -> str:
    """A table of cells that are HTML already."""
    marks = [' class="n"' if index in numeric else "" for index in range(len(head))]
    top = "".join(f"<th{mark}>{html.escape(name)}</th>" for mark, name in zip(marks, head, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{mark}>{cell}</td>' for mark, cell in zip(marks, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="card scroll {kind}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def lanes_section(data: ReportData) -> str:
    """A lane for every role and replica: when its attempts lived, when they worked, and what went wrong."""
    end_s = max(data.end_s, 1.0)
    shown = data.lanes[:_MOST_LANES]
    made_s = data.ledger.run.created_s
    rows = "".join(_lane(lane, made_s, end_s) for lane in shown)
    whole_run = [incident for incident in data.ledger.incidents if not incident.writer]
    if whole_run:
        rows += f'<div class="name">run</div><div class="track">{_flags(whole_run, made_s, end_s)}</div><div></div>'
    left_out = len(data.lanes) - len(shown)
    note = f" {left_out} more replicas are not drawn." if left_out else ""
    return (
        f'<div class="card"><div class="lanes">{rows}<div></div>{_scale(end_s)}<div></div></div>'
        f'<p class="note">Pale: an attempt lived. Full: it worked; the figure on the right is its share of the run. A number '
        f"marks a further attempt, a red flag an incident.{note}</p></div>"
    )


def _lane(lane: Lane, made_s: float, end_s: float) -> str:
    colour = ROLE_COLOURS.get(split_writer(lane.writer)[0], "s1")
    life = "".join(_rect("life", attempt.start_s, attempt.end_s, end_s) for attempt in lane.attempts)
    work = "".join(_rect("work", start, end, end_s, 3, 14) for start, end in _as_pixels(lane.busy, end_s))
    marks = "".join(
        f'<em style="left:{_percent(attempt.start_s, end_s)}" title="attempt {attempt.number}: {html.escape(attempt.reason)}">'
        f"{attempt.number}</em>"
        for attempt in lane.attempts
        if attempt.number > 1
    )
    share = f"{100 * lane.busy_s / end_s:.0f}%" if lane.busy else ""
    return (
        f'<div class="name">{html.escape(lane.writer)}</div><div class="track {colour}">'
        f'<svg viewBox="0 0 {_PIXELS} 20" preserveAspectRatio="none" aria-hidden="true">{life}{work}</svg>{marks}'
        f'{_flags(lane.incidents, made_s, end_s)}</div><div class="busy">{share}</div>'
    )


def _rect(kind: str, start_s: float, end_s: float, all_s: float, top: int = 0, height: int = 20) -> str:
    x, width = start_s / all_s * _PIXELS, max(1.0, (end_s - start_s) / all_s * _PIXELS)
    return f'<rect class="{kind}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}"/>'


def _as_pixels(spans: Sequence[Span], end_s: float) -> list[Span]:
    """Spans closer than can be seen, as one."""
    seen: list[Span] = []
    for start, end in spans:
        if seen and start - seen[-1][1] < end_s / _PIXELS:
            seen[-1] = seen[-1][0], max(seen[-1][1], end)
        else:
            seen.append((start, end))
    return seen


def _percent(at_s: float, end_s: float) -> str:
    return f"{100 * min(max(at_s / end_s, 0.0), 1.0):.2f}%"


def _flags(incidents: Sequence[Incident], made_s: float, end_s: float) -> str:
    return "".join(
        f'<i style="left:{_percent(incident.unix_s - made_s, end_s)}" '
        f'title="{html.escape(incident.what)}: {html.escape(incident.detail)}"></i>'
        for incident in incidents
    )


def _scale(end_s: float) -> str:
    size, unit = (3600.0, "h") if end_s > 7200 else (60.0, "min") if end_s > 240 else (1.0, "s")
    marks = "".join(
        f'<span style="left:{_percent(tick * size, end_s)}">{number(tick)} {unit}</span>' for tick in ticks(0, end_s / size, 5)
    )
    return f'<div class="scale">{marks}</div>'


def drops_table(data: ReportData) -> str:
    """Groups by what became of them."""
    groups, dropped = data.summary["groups"], data.summary["groups"]["dropped"]
    issued = max(1, groups["issued"])
    rows = [("trained", groups["trained"], "s3"), ("open", groups["open"], "s1")]
    rows += [(f"dropped: {reason.replace('_', ' ')}", dropped.get(reason, 0), "s2") for reason in DROP_REASONS]
    cells = [
        (
            name, str(count), f"{100 * count / issued:.1f}%",
            f'<div class="meter" style="width:{100 * count / issued:.2f}%;background:var(--{colour})"></div>' if count else "",
        )
        for name, count, colour in rows
    ]  # fmt: skip
    head = ("groups", "count", "of issued", "")
    return table(head, cells, numeric=(1, 2), kind="groups")


def jobs_table(data: ReportData, leases: Mapping[str, Sequence[Lease]]) -> str:
    """Every writer with its attempts, job ids, where it ran, and how earlier attempts ended."""
    ledger = data.ledger
    ends: dict[str, list[str]] = {}
    for end in ledger.job_ends:
        where = f" on {', '.join(end.nodes)}" if end.nodes else ""
        ends.setdefault(end.writer, []).append(f"a{end.attempt}: {end.cause} ({end.state}){where}")
    rows = []
    for writer in all_writers(ledger.run.recipe):
        ids = dict.fromkeys(record.job_id for record in ledger.submitted[writer])
        state = "done" if writer in ledger.done else "open"
        places = dict.fromkeys(map(place_text, leases.get(writer, ())))
        rows.append((
            html.escape(writer), str(len(ledger.intents[writer])), html.escape(", ".join(ids) or "-"), state,
            html.escape("; ".join(places) or "-"), html.escape("; ".join(ends.get(writer, [])) or "-"),
        ))  # fmt: skip
    return table(("role", "attempts", "job ids", "state", "where", "lost attempts"), rows, numeric=(1,))


def incidents_table(data: ReportData) -> str:
    """What a person will ask about, oldest first."""
    incidents = data.ledger.incidents
    if not incidents:
        return '<p class="hint">None.</p>'
    made_s = data.ledger.run.created_s
    rows = [
        (
            span_text(max(0.0, incident.unix_s - made_s)), html.escape(incident.what.replace("_", " ")),
            html.escape(incident.writer or "-"), html.escape(incident.detail),
        )
        for incident in incidents[-_MOST_INCIDENTS:]
    ]  # fmt: skip
    return table(("after", "what", "role", "detail"), rows)
