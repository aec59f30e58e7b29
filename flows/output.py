"""What commands print, and how a command ends whose reader left.

Text is for people and JSON for scripts; stdout holds one or the other, never both. There is no colour and no prompt where
there is no terminal.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

READER_LEFT_EXIT_CODE = 141
"""As a shell tells a program that SIGPIPE ended: `miles status RUN | head`."""


def print_text(text: str) -> None:
    """Lines on stdout, in one write: a reader that wants only the first of them (`| head`) has them all before it leaves."""
    encoding = sys.stdout.encoding or "utf-8"
    # A name of a file may hold what is no text.
    sys.stdout.write(f"{text}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def plain(text: str) -> str:
    """Text that somebody else wrote (a job's last lines, the scheduler's answer), as it may go to a terminal: lines stay lines,
    what would steer the terminal or turn the direction of writing is a `?`."""
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print_text(json.dumps(value, indent=2))


def columns(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Rows as lines, each column as wide as its widest cell; the last one is not padded."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)] if rows else []
    return [
        gap.join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows
    ]


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the command with 141 and without a word when nobody reads its output any more."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        _discard_stdout()
        raise SystemExit(READER_LEFT_EXIT_CODE) from error


def _discard_stdout() -> None:
    """What the interpreter still flushes at its end goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
