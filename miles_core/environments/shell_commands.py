"""The commands a shell puzzle allows: a closed grammar that a line must match whole before bash sees it.

Nothing of the shell's language passes but `*` and, from level 2 on, a pipe of at most three commands: no quotes, variables,
substitution, redirection, lists, paths that leave the folder. Each level has the commands its questions need.
"""

from __future__ import annotations

import re

MAX_STAGES = 3
_WORD = r"[a-z]{1,24}"
_NUMBER = r"[0-9]{1,3}"
_NAME = r"[a-z]{1,24}(?:\.txt)?"
_PATH = rf"(?:\./)?{_NAME}(?:/{_NAME}){{0,5}}"
_PLACE = rf"(?:\.|{_PATH})"
_FILES = rf"(?: (?:\*|{_PATH})){{0,8}}"
_READ: dict[int, tuple[str, ...]] = {
    1: (rf"(?:ls|cat|wc -l){_FILES}", rf"grep -l {_WORD}{_FILES}", rf"(?:head|tail) -n {_NUMBER}{_FILES}"),
    2: (rf"grep -c {_WORD}{_FILES}", rf"sort(?: -r)?{_FILES}", rf"sed -n {_NUMBER}p{_FILES}"),
    3: (rf"grep -rl {_WORD} {_PLACE}", rf"find {_PLACE}(?: -type [fd])?(?: -name {_NAME})?"),
}  # fmt: skip
_EDIT: dict[int, tuple[str, ...]] = {
    4: (rf"(?:mv|cp) {_PATH} {_PLACE}", rf"rm {_PATH}", rf"mkdir {_PATH}", rf"sed -i s/{_WORD}/{_WORD}/ {_PATH}",
        rf"sort -o {_PATH} {_PATH}"),
}  # fmt: skip
LEVELS = (1, 2, 3, 4)


def _pattern(table: dict[int, tuple[str, ...]], level: int) -> re.Pattern[str]:
    allowed = [pattern for since, patterns in table.items() if since <= level for pattern in patterns]
    return re.compile("|".join(allowed) if allowed else r"(?!)")


_READS = {level: _pattern(_READ, level) for level in LEVELS}
_EDITS = {level: _pattern(_EDIT, level) for level in LEVELS}


def clean(line: str) -> str:
    """A line with single blanks, as the grammar reads it and bash gets it."""
    return " ".join(line.split())


def reads(line: str, level: int) -> bool:
    """Whether a clean line is allowed at a level and changes nothing."""
    stages = line.split(" | ")
    most = 1 if level == 1 else MAX_STAGES
    return len(stages) <= most and all(_READS[level].fullmatch(stage) for stage in stages)


def edits(line: str, level: int) -> bool:
    """Whether a clean line is allowed at a level and changes files."""
    return _EDITS[level].fullmatch(line) is not None
