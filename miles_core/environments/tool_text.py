"""What of a tool's output a model is shown: text. For environments and agents of one's own too.

    tool_text(output, most=2000)      # bytes or text, whatever a program wrote, without end or not

Terminal escapes and control characters are gone, of a line that was written over the last state stays, bytes that are no text
are one sentence, and of what is too long the beginning and the end stay.
"""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]|\x1b"
)
"""CSI sequences (colours, cursor), strings (titles, links) up to their end, and two-character escapes."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""All but tabulator and newline, once carriage returns and backspaces were obeyed."""
_UNREADABLE = 0.1
"""A larger share of zero bytes and of bytes that are no text is a binary file ..."""
_FEW = 8
"""... and so many are not."""
_LOOKED_AT = 1 << 20
"""Characters at either end that are looked at; between them nobody would see the rest anyway."""


def tool_text(output: str | bytes, most: int) -> str:
    """`most` characters, and a sentence between beginning and end where there were more."""
    size, is_long = len(output), len(output) > 2 * _LOOKED_AT
    begin = _decoded(output[:_LOOKED_AT] if is_long else output)
    if sum(map(begin.count, ("\0", "\ufffd"))) > max(_FEW, _UNREADABLE * len(begin)):
        return f"[{size} bytes that are no text]"
    begin = _cleaned(begin)
    if not is_long and len(begin) <= most:
        return begin
    end, whole = (_cleaned(_decoded(output[-_LOOKED_AT:])), size) if is_long else (begin, len(begin))
    tail = most // 4
    return f"{begin[: most - tail]}\n[... cut, {whole} characters in all ...]\n{end[len(end) - tail :]}"


def _decoded(output: str | bytes) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output


def _cleaned(text: str) -> str:
    text = _ESCAPE.sub("", text)
    if "\b" in text:
        text = _rubbed_out(text)
    if "\r" in text:
        text = "\n".join(map(_last_state, text.replace("\r\n", "\n").split("\n")))
    return _CONTROL.sub("", text)


def _rubbed_out(text: str) -> str:
    """Backspaces obeyed: bold and underlined words of manual pages, spinners."""
    kept: list[str] = []
    for char in text:
        if char != "\b":
            kept.append(char)
        elif kept and kept[-1] != "\n":
            kept.pop()
    return "".join(kept)


def _last_state(line: str) -> str:
    """Of a line that was written over, such as a progress bar's, the last that stood there."""
    return next((part for part in reversed(line.split("\r")) if part), "")
