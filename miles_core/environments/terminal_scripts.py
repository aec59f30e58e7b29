"""Scripts of terminal tasks: small bash programs over lines of a name and a number, each with lines that are wrong.

What a script prints, right or wrong, is known here in Python, so a task never has a fault that its own data do not show.
"""

from __future__ import annotations

import functools
import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

DATA = "data"
"""Folder of what the scripts read."""
HIDDEN_CASES = 2
_ROWS = (4, 8)
_WORDS = "acorn badge cedar delta ember fjord gecko heron igloo jelly kayak lemon maple nutmeg olive pearl quartz raven"
_NAMES = tuple(_WORDS.split())
_NUMBERS = range(11, 100)

Rows = tuple[tuple[str, int], ...]


class Case(NamedTuple):
    """A command, and all that it must print."""

    command: str
    prints: str


class Fault(NamedTuple):
    """A wrong line in place of a right one."""

    line: int
    """Its index in the script."""
    text: str
    prints: Callable[[Rows], str]


@dataclass(frozen=True)
class Script:
    """One program."""

    name: str
    about: str
    """What it does, behind its name."""
    lines: tuple[str, ...]
    prints: Callable[[Rows], str]
    faults: tuple[Fault, ...]
    edges: tuple[int, ...] = ()
    """Numbers that tell it from nearly right ones: the data that nobody sees have them."""

    @property
    def text(self) -> str:
        """The right program."""
        return _text(self.lines)


@dataclass(frozen=True)
class Repair:
    """A script as the agent finds it, the data its test runs it on, and data it does not see."""

    script: Script
    files: dict[str, str]
    data: str
    """Name of the test's data."""
    expected: str
    """What the right script prints for them."""
    cases: tuple[Case, ...]


def draw_repair(rng: random.Random, name: str) -> Repair:
    """A fault of script `name`, data that show it, and other data for which the right script prints something else."""
    script = SCRIPTS[name]
    fault = rng.choice(script.faults)
    rows = _draw_rows(rng, lambda rows: fault.prints(rows) != script.prints(rows))
    expected = script.prints(rows)
    hidden: list[Rows] = []
    for _ in range(HIDDEN_CASES):
        known = (expected, *map(script.prints, hidden))
        fits = functools.partial(_is_new, script, fault, known)
        hidden.append(_draw_rows(rng, fits, script.edges))
    data = f"{DATA}/{rng.choice(_NAMES)}.txt"
    wrong = (*script.lines[: fault.line], fault.text, *script.lines[fault.line + 1 :])
    return Repair(
        script=script, files={script.name: _text(wrong), data: _lines_of(rows)}, data=data, expected=expected,
        cases=tuple(
            Case(f"printf %s {shlex.quote(_lines_of(rows))} | bash {script.name}", script.prints(rows)) for rows in hidden
        ),
    )  # fmt: skip


def _is_new(script: Script, fault: Fault, known: tuple[str, ...], rows: Rows) -> bool:
    """Whether the right script prints for these rows what it printed for no others, and what the wrong one does not."""
    return script.prints(rows) not in (*known, fault.prints(rows))


def _draw_rows(rng: random.Random, fits: Callable[[Rows], bool], edges: tuple[int, ...] = ()) -> Rows:
    """Distinct names and distinct numbers, `edges` among them; a few draws are enough for every script and fault."""
    others = [number for number in _NUMBERS if number not in edges]
    while True:
        count = rng.randint(*_ROWS)
        numbers = [*edges, *rng.sample(others, count - len(edges))]
        rng.shuffle(numbers)
        rows = tuple(zip(rng.sample(_NAMES, count), numbers, strict=True))
        if fits(rows):
            return rows


def _lines_of(rows: Rows) -> str:
    return "".join(f"{name} {number}\n" for name, number in rows)


def _text(lines: tuple[str, ...]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _total(rows: Rows) -> int:
    return sum(number for _, number in rows)


def _largest(rows: Rows) -> tuple[str, int]:
    return max(rows, key=lambda row: row[1])


def _over(rows: Rows, limit: int) -> int:
    return sum(number > limit for _, number in rows)


def _sorted_names(rows: Rows) -> list[str]:
    return sorted(name for name, _ in rows)


_LOOP = "while read -r name number; do"
SCRIPTS = {
    "total": Script(
        "total.sh", "prints the sum of the numbers that it reads",
        ("total=0", _LOOP, "  total=$((total + number))", "done", 'echo "$total"'), lambda rows: str(_total(rows)),
        (
            Fault(0, "total=1", lambda rows: str(_total(rows) + 1)),
            Fault(2, "  total=$((total - number))", lambda rows: str(-_total(rows))),
            Fault(2, "  total=$number", lambda rows: str(rows[-1][1])),
        ),
    ),
    "largest": Script(
        "largest.sh", "prints the name with the largest number of those that it reads",
        (
            "best= most=0", _LOOP, '  if [ "$number" -gt "$most" ]; then', "    best=$name most=$number", "  fi", "done",
            'echo "$best"',
        ),
        lambda rows: _largest(rows)[0],
        (
            Fault(2, '  if [ "$number" -lt "$most" ]; then', lambda rows: ""),
            Fault(3, "    best=$name", lambda rows: rows[-1][0]),
            Fault(6, 'echo "$most"', lambda rows: str(_largest(rows)[1])),
        ),
    ),
    "over": Script(
        "over.sh", "counts the numbers over 50 that it reads",
        ("count=0", _LOOP, '  if [ "$number" -gt 50 ]; then count=$((count + 1)); fi', "done", 'echo "$count"'),
        lambda rows: str(_over(rows, 50)),
        (
            Fault(2, '  if [ "$number" -gt 70 ]; then count=$((count + 1)); fi', lambda rows: str(_over(rows, 70))),
            Fault(2, '  if [ "$number" -gt 50 ]; then count=$((count + 2)); fi', lambda rows: str(2 * _over(rows, 50))),
            Fault(4, 'echo "$((count - 1))"', lambda rows: str(_over(rows, 50) - 1)),
        ),
        edges=(50, 51),
    ),
    "names": Script(
        "names.sh", "prints the names that it reads in alphabetical order, one a line",
        (_LOOP, '  echo "$name"', "done | sort"), lambda rows: "\n".join(_sorted_names(rows)),
        (
            Fault(1, '  echo "$number"', lambda rows: "\n".join(sorted(str(number) for _, number in rows))),
            Fault(2, "done | sort -r", lambda rows: "\n".join(reversed(_sorted_names(rows)))),
            Fault(2, "done", lambda rows: "\n".join(name for name, _ in rows)),
        ),
    ),
}  # fmt: skip
