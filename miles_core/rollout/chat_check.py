"""Proves a chat format append-only for a tokenizer, or says where it is not.

A session never renders a finished turn again, so a format that rewrites history does not break it; but the model then sees
other tokens in training than a server that renders afresh would give it. Every probe is a conversation built both ways:
turn by turn as a session does, and afresh. `differs`: the texts are not the same, the format rewrites what it wrote before;
`merges`: the same text is cut into other tokens where two pieces meet, which a session settles by what was sampled;
`refused`: the format has no form for these roles.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.environments.base import Message
from miles_core.errors import RecipeError
from miles_core.rollout.session import Renderer

Verdict = Literal["append-only", "merges", "differs", "refused"]
SHOWN_TOKENS = 12


def _talk(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role, content) for role, content in turns)


PROBES = {
    "two turns": _talk(("user", "1 + 1?"), ("assistant", "2"), ("user", "and 2 + 2?"), ("assistant", "4"), ("user", "thanks")),
    "system": _talk(("system", "Be short."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "sure?")),
    "tool result": _talk(("user", "1 + 1?"), ("assistant", "I call."), ("tool", "2"), ("assistant", "2"), ("user", "sure?")),
    "two tool results": _talk(("user", "go"), ("assistant", "I call twice."), ("tool", "2"), ("tool", "3")),
    "empty reply": _talk(("user", "1 + 1?"), ("assistant", ""), ("user", "well?")),
    "reply with blanks around": _talk(("user", "1 + 1?"), ("assistant", " \n 2 \n"), ("user", "sure?")),
    "reply that thinks": _talk(
        ("user", "1 + 1?"), ("assistant", "<think>\nadd\n</think>\n\n2"), ("user", "sure?"), ("assistant", "yes"), ("user", "?")
    ),
    "line breaks at the border": _talk(("user", "\n\n1 + 1?\n"), ("assistant", "\n\n2"), ("user", "\n\nsure?")),
    "control tokens in text": _talk(("user", "say <|im_end|><|eot_id|><|end|>"), ("assistant", "no"), ("user", "<|im_start|>")),
}  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What one conversation showed."""

    name: str
    verdict: Verdict
    detail: str = ""


def check_append_only(renderer: Renderer, tokenizer: Any) -> list[Probe]:
    """One Probe per conversation."""
    return [_check(renderer, tokenizer, name, messages) for name, messages in PROBES.items()]


def _check(renderer: Renderer, tokenizer: Any, name: str, messages: tuple[Message, ...]) -> Probe:
    try:
        fresh, grown = list(renderer.opening(messages)), _grown(renderer, tokenizer, messages)
    except RecipeError as error:
        return Probe(name, "refused", str(error))
    if fresh == grown:
        return Probe(name, "append-only")
    at = next((i for i, (a, b) in enumerate(zip(fresh, grown, strict=False)) if a != b), min(len(fresh), len(grown)))
    begin = max(0, at - SHOWN_TOKENS // 2)
    texts = [tokenizer.decode(ids[begin : at + SHOWN_TOKENS], skip_special_tokens=False) for ids in (fresh, grown)]
    same = tokenizer.decode(fresh, skip_special_tokens=False) == tokenizer.decode(grown, skip_special_tokens=False)
    return Probe(name, "merges" if same else "differs", f"at token {at} afresh {texts[0]!r}, turn by turn {texts[1]!r}")


def _grown(renderer: Renderer, tokenizer: Any, messages: tuple[Message, ...]) -> list[int]:
    """The conversation as a session builds it, each reply sampled as its text is tokenised."""
    ids: list[int] = []
    for said, part in itertools.groupby(messages, lambda message: message.role == "assistant"):
        group = tuple(part)
        if said:
            ids += [*tokenizer(group[0].content, add_special_tokens=False).input_ids, renderer.end_id]
        else:
            ids += renderer.continuation(group) if ids else renderer.opening(group)
    return ids
