"""reports/index.html: one run on one page that opens without a network.

Style, script and drawings are inside; it loads nothing and uses no library. Everything that a model, an environment, a
scheduler or a person wrote is escaped. Built from the files alone, for a live run as for a finished one.
"""

from __future__ import annotations

import html
import json
import time
from pathlib import Path
from typing import Any

from miles_core.paths import RunPaths
from miles_core.provenance import Provenance, read_provenance
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import UNKNOWN
from miles_core.store.publish import Durability, publish_bytes
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.machines import read_leases
from miles_core.tracking.report_charts import figure, number
from miles_core.tracking.report_data import ReportData, collect
from miles_core.tracking.report_figures import all_figures
from miles_core.tracking.report_samples import samples_section
from miles_core.tracking.report_sections import drops_table, incidents_table, jobs_table, lanes_section, span_text
from miles_core.tracking.summary import summarize

_HERE = Path(__file__).resolve().parent
_STATES = {"COMPLETED": "good", "RUNNING": "live", "DRAINED": "live"}


def write_report(run: RunConfig, paths: RunPaths) -> Path:
    """Builds the page, publishes it and returns its path. OSError."""
    ledger = read_ledger(run, paths)
    data = collect(ledger, paths, summarize(ledger, paths))
    path = paths.report
    publish_bytes(FileSystem(), path, render(data, paths).encode(), Durability.RENAMED)
    return path


def render(data: ReportData, paths: RunPaths) -> str:
    """The whole page."""
    run = data.ledger.run
    style, script = ((_HERE / name).read_text() for name in ("report.css", "report.js"))
    body = "\n".join((
        _header(data), _tiles(data), *_chart_sections(data),
        "<h2>Who worked when</h2>", lanes_section(data),
        '<div class="two"><section><h2>Groups</h2>', drops_table(data),
        "</section><section><h2>Jobs</h2>", jobs_table(data, read_leases(run, paths)), "</section></div>",
        "<h2>Incidents</h2>", incidents_table(data),
        "<h2>Sampled trajectories</h2>", samples_section(data.ledger, paths),
        _provenance(run, read_provenance(paths)),
    ))  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(run.run_id)}</title>\n<style>\n{style}</style></head>\n<body><main>\n{body}\n</main>"
        f'<div id="pointer"></div>\n<script>\n{script}</script></body></html>\n'
    )


def _header(data: ReportData) -> str:
    run, state = data.ledger.run, data.ledger.state
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.created_s))
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    cluster = html.escape(str(run.cluster.get("name", "unknown")))
    detail = data.ledger.closed.detail if data.ledger.closed is not None else ""
    return (
        f'<header><h1>{html.escape(run.run_id)}<span class="state {_STATES.get(state, "bad")}">{state}</span></h1>'
        f"<p>Recipe {html.escape(run.recipe.name)} on {cluster}, made {made} UTC. This page: {now} UTC.</p>"
        + (f"<p>{html.escape(detail)}</p>" if detail else "")
        + "</header>"
    )


def _tiles(data: ReportData) -> str:
    summary = data.summary
    reward, greedy, staleness, seconds = (summary[key] for key in ("reward", "eval", "staleness", "seconds"))
    groups, disk = summary["groups"], summary["disk"].values()
    kept, deleted = (sum(part[key] for part in disk) for key in ("bytes", "deleted_bytes"))
    tiles = [
        (f"{summary['steps']} / {data.ledger.run.recipe.steps}", "steps trained"),
        (_change(reward["first5"], reward["last5"]), "reward, sampled: first and last 5 steps"),
        (_change(greedy["greedy_before"], greedy["greedy_after"]), f"greedy score on {greedy['n']} held-out problems"),
        (f"{number(staleness['mean'])} / {number(staleness['max'])}", f"staleness, mean / max, bound {staleness['bound']}"),
        (f"{number(summary['tokens_per_s'])} /s", "sampled tokens per busy second"),
        (span_text(seconds["total"]), f"in all, of it {span_text(seconds['setup'])} set-up"),
        (span_text(seconds["both_busy"]), "learner and rollout busy at once"),
        (f"{groups['trained']} / {groups['issued']}", f"groups trained / issued, {groups['open']} open"),
        (f"{number(kept)}B / {number(deleted)}B", "versions, checkpoints and shards: kept / deleted"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>' for value, name in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _change(before: float | None, after: float | None) -> str:
    return f"{number(before)} → {number(after)}"


def _chart_sections(data: ReportData) -> list[str]:
    sections = []
    for title, figures in all_figures(data):
        cards = "".join(figure(chart, wide=wide) for chart, wide in figures)
        sections.append(f'<h2>{html.escape(title)}</h2><div class="grid">{cards}</div>')
    return sections


def _provenance(run: RunConfig, record: Provenance | None) -> str:
    """The recipe, and what the run was made from; not who made it and how: a page is passed on."""
    made_from = UNKNOWN if record is None else record.model_dump(mode="json", include={"git", "data", "packages"})
    facts: dict[str, Any] = {
        "code digest": run.code_digest,
        "base model digest": run.base_model_digest,
        "recipe": run.recipe.model_dump(mode="json"),
        "made from": made_from,
    }
    text = html.escape(json.dumps(facts, indent=2))
    return f"<details><summary>Recipe, digests, code, packages</summary><pre>{text}</pre></details>"
