"""How a recorded conversation differs from a fresh rendering of its messages: a figure, never the record.

Both are cut at their control tokens. `special_token_count` and `special_token_type`: the structure differs, so the format
rewrites what it wrote; `non_assistant_text`: what users and tools said reads otherwise; `assistant_text`: a model's own words
do, which is no fault where a model may spell what no tokenizer would (the others should not occur).
"""

from __future__ import annotations

from miles_core.errors import RecipeError
from miles_core.rollout.session import Renderer
from miles_core.rollout.sessions.history import Checkpoint


def mismatches(renderer: Renderer, leaf: Checkpoint) -> set[str]:
    """The kinds in which the conversation up to the leaf's own turn differs; `not_rendered` if there is no fresh rendering."""
    path = leaf.path()
    messages = tuple(message for node in path for message in (*node.messages, node.reply))[:-1]
    try:
        fresh = renderer.opening(messages, leaf.tools)
    except RecipeError:
        return {"not_rendered"}
    recorded = leaf.tokens()[: leaf.sampled_at]
    if recorded == fresh:
        return set()
    own = {at for node in path for at in range(node.sampled_at, node.end)}
    cuts = [(at, token) for at, token in enumerate(recorded) if token in renderer.special_ids]
    cuts_fresh = [(at, token) for at, token in enumerate(fresh) if token in renderer.special_ids]
    if len(cuts) != len(cuts_fresh):
        return {"special_token_count"}
    found = set()
    if [token for _, token in cuts] != [token for _, token in cuts_fresh]:
        found.add("special_token_type")
    for (begin, end), (begin_fresh, end_fresh) in zip(
        _between(cuts, len(recorded)), _between(cuts_fresh, len(fresh)), strict=True
    ):
        if renderer.text(recorded[begin:end]) != renderer.text(fresh[begin_fresh:end_fresh]):
            found.add("assistant_text" if own & set(range(begin, end)) else "non_assistant_text")
    return found


def _between(cuts: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The half-open spans between control tokens, also before the first and behind the last."""
    begins = [0, *(at + 1 for at, _ in cuts)]
    return list(zip(begins, [*(at for at, _ in cuts), length], strict=True))
