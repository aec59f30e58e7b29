"""What a program writes to a terminal, to a pipe, without end or in bytes that are no text, as a model is shown it."""

from __future__ import annotations

import pytest

from miles_core.environments.shell import shown
from miles_core.environments.tool_text import tool_text


@pytest.mark.parametrize(
    ("output", "seen"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("", ""),
        ("\x1b[1;31mred\x1b[0m \x1b[38;5;9mpale\x1b[m", "red pale"),
        ("\x1b]0;a title\x07name\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "namelink"),
        ("\x1b]0;a title that does not end\nnext", "\nnext"),
        ("\x1b(Bbox\x1b=\x1b", "box"),
        ("\x1b[2J\x1b[Hcleared\x1b[", "cleared"),
        ("10 %\r50 %\r100 %\r\ndone\r\n", "100 %\ndone\n"),
        ("N\bNA\bAM\bME\bE _\bx \b\b\b\b\b\b\b\b\b\b\b\b!", "!"),
        ("bell\x07 null\x00 del\x7f \x9b31mc1\u2028", "bell null del c1"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        (bytes(range(256)) * 8, "[2048 bytes that are no text]"),
        (b"\x00" * 5000, "[5000 bytes that are no text]"),
        ("日本語 ok", "日本語 ok"),
    ],
)
def test_what_a_program_writes_becomes_text(output: str | bytes, seen: str) -> None:
    assert tool_text(output, most=4000) == seen


def test_of_what_is_too_long_beginning_and_end_stay() -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    found = tool_text(text, most=100)
    begin, note, end = found.partition("\n[... cut, 8890 characters in all ...]\n")
    assert note and text.startswith(begin) and text.endswith(end) and (len(begin), len(end)) == (75, 25)
    assert tool_text("x" * 100, most=100) == "x" * 100


def test_what_has_no_end_is_looked_at_at_its_ends_alone() -> None:
    for flood in (b"y\n" * (40 << 20), "\x1b[" * (4 << 20) + "end", b"\0" * (8 << 20)):
        found = tool_text(flood, most=400)
        assert len(found) < 500 and ("characters in all" in found or "no text" in found)
    assert tool_text("a" * (3 << 20) + "end", most=400).endswith("aend")


def test_the_shell_shows_text() -> None:
    assert shown("\x1b[32mok\x1b[0m\n", 0) == "ok" and shown("a\r\nb\x00\n", 1) == "a\nb exit 1"
