"""The calculator tool: integer sums and products, read by one strict pattern. Nothing is ever evaluated as code.

A malformed or cut expression is answered with a short error text, so the model can try again; the text never repeats the
model's own words.
"""

from __future__ import annotations

import re

MAX_EXPRESSION_CHARS = 128
_NUMBER = r"-?[0-9]{1,12}"
_EXPRESSION = re.compile(rf" *{_NUMBER}(?: *[-+*] *{_NUMBER}){{0,15}} *")
_TERM = re.compile(rf"([-+*]?) *({_NUMBER})")


def calculate(expression: str) -> str:
    """The value of `12 + 7 * -3` in decimal digits, or a text that begins with `error:`."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        return "error: expression too long"
    if not _EXPRESSION.fullmatch(expression):
        return "error: not an expression"
    total = product = 0
    for operator, digits in _TERM.findall(expression):
        if operator == "*":
            product *= int(digits)
        else:
            total += product
            product = -int(digits) if operator == "-" else int(digits)
    return str(total + product)
