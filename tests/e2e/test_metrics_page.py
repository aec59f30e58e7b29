"""docs/metrics.md names every metric that a run writes, and no other: in the metric shards and in the feed of W&B."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_core.records import DROP_REASONS
from miles_core.run import all_writers, read_run
from miles_core.tracking.metrics import read_metrics
from miles_core.tracking.tracker_feed import LEARNER_NAMES, TrackerFeed

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "metrics.md").read_text()
CONDITIONAL = "*only "
"""Marks rows of what a run of the quickstart does not write."""


def rows(*sections: str) -> list[list[str]]:
    """Cells of the tables below these headings."""
    found = []
    for section in sections:
        text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        lines = [line for line in text.splitlines() if line.startswith("| `")]
        assert lines, f"no table below {section}"
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return found


def names_in(cell: str) -> set[str]:
    """Names of a cell, with {a,b} and <reason> written out."""
    names = set()
    for name in re.findall(r"`([^`]+)`", cell):
        head, brace, tail = name.partition("{")
        names |= {f"{head}{part}" for part in tail.rstrip("}").split(",")} if brace else {name}
    reasons = {name.replace("<reason>", reason) for name in names for reason in DROP_REASONS if "<reason>" in name}
    return {name for name in names if "<" not in name} | reasons


def roles_of(root: Path) -> set[str]:
    return {f"slurm/alive_{writer.rpartition('-')[0]}" for writer in all_writers(read_run(root)[0].recipe)}


def fed(root: Path) -> set[str]:
    """Names of everything that the tracker would log of a run."""
    run, paths = read_run(root)
    feed = TrackerFeed(run, paths)
    while feed.poll():
        pass
    found = [row for _, row, _ in feed.take_steps(-1, finishing=True)] + [row for _, row in feed.take_evaluations(-1)]
    return {name for row in [*found, feed.gauges(())] for name in row}


def test_every_name_of_the_feed_is_in_the_page_and_the_other_way_round(finished_run: Path) -> None:
    tables = rows("Axes", "Per step", "Gauges")
    always = {name for row in tables if CONDITIONAL not in " ".join(row) for name in names_in(row[0])}
    sometimes = {name for row in tables for name in names_in(row[0])} - always
    seen = fed(finished_run)
    assert seen - always - sometimes - roles_of(finished_run) == set(), "not in docs/metrics.md"
    assert always - seen - {"wall_s"} == set(), "in docs/metrics.md as always there, but no run writes it"
    assert roles_of(finished_run) <= seen and "`slurm/alive_<role>`" in PAGE


def test_every_field_of_the_shards_is_in_the_page_and_the_other_way_round(finished_run: Path) -> None:
    always: dict[str, set[str]] = {}
    sometimes: dict[str, set[str]] = {}
    for event, writers, fields in rows("In the shards"):
        where = sometimes if CONDITIONAL in writers else always
        where.setdefault(event.strip("`"), set()).update(names_in(fields) - {"n", "mean", "min", "p50", "max"})
    seen: dict[str, set[str]] = {}
    for _, point in read_metrics(read_run(finished_run)[1].metrics("x-0", 1).parent.parent):
        seen.setdefault(point["event"], set()).update(set(point) - {"event", "unix_s"})
    extra = {event: names - always.get(event, set()) - sometimes.get(event, set()) for event, names in seen.items()}
    assert {event: names for event, names in extra.items() if names} == {}, "not in docs/metrics.md"
    missing = {event: names - seen.get(event, set()) for event, names in always.items()}
    assert {event: names for event, names in missing.items() if names} == {}, "in docs/metrics.md, but no run writes it"


def test_what_is_written_only_sometimes_is_written_by_somebody() -> None:
    """Rows that a run of the quickstart cannot prove name keys that stand in the source."""
    source = "\n".join(path.read_text() for path in (REPOSITORY / "miles_core").rglob("*.py"))
    keys = {wandb: own for own, wandb in LEARNER_NAMES.items()}
    shards = {name for _, writers, fields in rows("In the shards") if CONDITIONAL in writers for name in names_in(fields)}
    feed = {name for row in rows("Per step", "Gauges") if CONDITIONAL in " ".join(row) for name in names_in(row[0])}
    for name in {*shards, *(keys.get(name, name.partition("/")[2]) for name in feed)}:
        own = name.removesuffix("_no_replay")
        assert re.search(rf"[\"'(, ]{re.escape(own)}(?:[\"']|=)", source), f"nobody writes {name}"
