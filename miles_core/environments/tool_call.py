"""How a model calls a tool: a turn that ends in `<tool_call>...</tool_call>`. Any other turn is the final answer."""

from __future__ import annotations

import re

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(?P<content>(?:(?!<tool_call>).)*)</tool_call>\s*\Z", re.DOTALL)


def tool_call(content: str) -> str | None:
    """What a turn hands to the tool, or None for a turn that ends in no call."""
    found = _CALL.search(content)
    return found["content"] if found else None
