"""`miles compare`: why two runs differ, in ten lines, and then their figures side by side."""

from __future__ import annotations

import json
import sys

from flows.damage import bad_frames
from miles_core.tracking.compare import Comparison, Group, code_diff

_READ = ("learner-0", "orchestrator-0", "evaluator-0", "supervisor-0")
_MOST_CHARACTERS = 180
"""Of the differences of one group; all of them are in --json."""
_VALUE_CHARACTERS = 60


def print_comparison(comparison: Comparison, *, as_json: bool, with_diff: bool) -> None:
    """Prints it as text or JSON, damage on stderr; `with_diff` adds the unified diff of the two code snapshots."""
    for name, side in zip("ab", comparison.sides, strict=True):
        for damage in bad_frames(side.paths, _READ):
            print(f"{name}: {damage}: its figures end there; `miles verify` proves it", file=sys.stderr)
    diff = list(code_diff(*(side.paths for side in comparison.sides))) if with_diff else None
    if as_json:
        print(json.dumps({**comparison.as_json(), **({} if diff is None else {"code_diff": diff})}, indent=2))
        return
    print("\n".join([*reason_lines(comparison), "", *figure_lines(comparison)]))
    if diff is not None:
        print("\n".join(["", *(diff or ["the code snapshots are equal"])]))


def reason_lines(comparison: Comparison) -> list[str]:
    """Ten lines: the two runs, a line for each kind of thing, and what follows."""
    heads = [
        _clipped(f"{name}           {side.run.run_id}: {side.ledger.state}, {side.summary['steps']} steps; {side.command}")
        for name, side in zip("ab", comparison.sides, strict=True)
    ]
    return [*heads, *(f"{group.name:<12}{_group_text(group)}" for group in comparison.groups), f"=> {conclusion(comparison)}"]


def _group_text(group: Group) -> str:
    differences = [f"{item.field}: {_value(item.first)} | {_value(item.second)}" for item in group.differences]
    note = f" ({group.note})" if group.note else ""
    if not differences:
        return group.verdict + note
    text = "" if group.verdict == "differs" else f"{group.verdict}{note}; "
    kept: list[str] = []
    for difference in differences:
        if kept and len(text) + sum(map(len, kept)) + len(difference) > _MOST_CHARACTERS:
            break
        kept.append(difference)
    left_out = len(differences) - len(kept)
    more = f"; {left_out} more (--json)" if left_out else ""
    return text + "; ".join(kept) + more + (note if group.verdict == "differs" else "")


def _value(text: str) -> str:
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 3]}..."


def _clipped(line: str) -> str:
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def conclusion(comparison: Comparison) -> str:
    """What follows from the differences and from the digests of the weights."""
    weights, inputs = comparison.weights, comparison.inputs
    if weights.common_steps == 0 and weights.differ_from is None:
        trained = "no step that both have trained"
    elif weights.differ_from is None:
        trained = f"the same weights after each of the {weights.common_steps} steps that both have"
    else:
        trained = f"weights differ from step {weights.differ_from} on"
    if inputs == "differs":
        names = [group.name for group in comparison.groups if group.verdict == "differs"]
        return f"differ in {', '.join(names)}; {trained}"
    if inputs == "UNKNOWN":
        return f"equal as far as the records go, the rest is UNKNOWN; {trained}"
    circumstances = [group.name for group in comparison.groups if group.verdict == "differs"]
    return f"equal: the same recipe, code, packages, model and data{_but(circumstances)}; {trained}"


def _but(names: list[str]) -> str:
    return f" ({' and '.join(names)} differ)" if names else ""


def figure_lines(comparison: Comparison) -> list[str]:
    """The figures of both runs, one a line."""
    rows = [(name, *(_figure(value) for value in values)) for name, values in comparison.results.items()]
    widths = [max(len(row[column]) for row in [("", "a", "b"), *rows]) + 2 for column in range(3)]
    return [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [("", "a", "b"), *rows]
    ]


def _figure(value: object) -> str:
    if value is None:
        return "UNKNOWN"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
