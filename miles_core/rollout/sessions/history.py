"""The history of one session: a tree with a checkpoint for every turn that was sampled.

Invariants: a checkpoint never changes, and its tokens begin with those of its parent, bit for bit; a request attaches to a
checkpoint if the whole conversation up to it is what the request begins with, message for message, and what is stored, not
the agent's spelling of it, goes on. Searching changes nothing. Messages that an agent puts into the assistant's mouth are
no checkpoints.

*linear*: one line. A request goes on from its end, or takes back its last turn and tries again; what differs further up is
refused. *branching*: nothing is taken back; a request attaches to the deepest checkpoint that it goes on from (of equals, to
the newest), or starts another root.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from miles_core.records import Version
from miles_core.rollout.chat import ChatMessage, Tools
from miles_core.rollout.sessions.errors import BadMessages, Conflict

if TYPE_CHECKING:
    from miles_core.routers import Experts

Kind = Literal["linear", "branching"]
Replay = Literal["strict", "json"]
MAX_CHECKPOINTS = 1024
MAX_TAKEN_BACK = 1
"""Turns of a linear history that a request may take back."""
Messages = tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Sampled:
    """One turn as the engine sampled it. n = number of its tokens, the end token included."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[n]"""
    versions: tuple[Version, ...]
    """[n]"""
    ended: bool
    """False: it was cut by a limit."""
    admitted: Version
    """Of the engine when it took the turn ..."""
    completed: Version
    """... and when it gave it back."""
    experts: Experts | None = None
    """[m, layers, k] of the m positions that the engine computed for this turn: up to the one before the newest token."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A sampled turn and what was appended for it."""

    seq: int
    """Order of the commits."""
    parent: Checkpoint | None
    messages: Messages
    """What the request appended to the parent's conversation."""
    prompt: tuple[int, ...]
    """Their tokens."""
    sampled: Sampled
    reply: ChatMessage
    depth: int
    """Checkpoints up to and with this one."""
    start: int
    """Tokens of the parent's conversation."""
    tools: Tools = ()
    """What the model was offered at the root."""
    committed_s: float = 0.0
    """Unix seconds."""

    @property
    def sampled_at(self) -> int:
        """Position of the first sampled token."""
        return self.start + len(self.prompt)

    @property
    def end(self) -> int:
        """Tokens of the conversation up to and with this turn."""
        return self.sampled_at + len(self.sampled.tokens)

    def path(self) -> list[Checkpoint]:
        """From the root to this one."""
        found: list[Checkpoint] = []
        node: Checkpoint | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def tokens(self) -> tuple[int, ...]:
        """The whole conversation up to and with this turn."""
        return tuple(token for node in self.path() for token in (*node.prompt, *node.sampled.tokens))


@dataclass(frozen=True)
class Attachment:
    """Where a request goes on."""

    parent: Checkpoint | None
    messages: Messages
    """What it appends."""
    takes_back: Checkpoint | None = None
    """The last turn of a linear history, if this is another try at it."""


@dataclass
class History:
    """See module."""

    kind: Kind = "linear"
    replay: Replay = "strict"
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """In the order of their commits."""
    taken_back: int = 0
    """Turns that a linear history gave up."""
    _line: Messages = ()
    """The whole conversation of a linear history."""
    _next: int = 0

    def attach(self, messages: Messages) -> Attachment:
        """Where a conversation goes on. Raises BadMessages or Conflict; changes nothing."""
        if not messages or messages[-1].role == "assistant":
            raise BadMessages("messages: give at least one, and let the last not be the assistant's: the model writes that one")
        found = self._on_line(messages) if self.kind == "linear" else self._in_tree(messages)
        if found.parent is not None and not found.parent.sampled.ended:
            raise Conflict(
                f"turn {found.parent.depth} was cut by a limit (finish_reason `length`): nothing can follow it. Try the turn "
                f"again from the message before it, or end the episode"
            )
        return found

    def _on_line(self, messages: Messages) -> Attachment:
        # What nearly every request begins with, in one comparison: the walk below costs a late turn more than an early one.
        known = len(self._line)
        if known and messages[:known] == self._line:
            return Attachment(self.checkpoints[-1], messages[known:])
        matched: Checkpoint | None = None
        at = 0
        for node in self.checkpoints:
            length = self._length(node, messages, at)
            if length == 0:
                break
            matched, at = node, at + length
        rest = self.checkpoints[0 if matched is None else matched.depth :]
        if not rest:
            return Attachment(matched, messages[at:])
        self._refuse_other_past(rest, messages, at)
        return Attachment(matched, messages[at:], takes_back=rest[0])

    def _refuse_other_past(self, rest: Sequence[Checkpoint], messages: Messages, at: int) -> None:
        """Takes back one turn for another try; a reply that was changed is no other try."""
        behind = messages[at:]
        lost = rest[0]
        is_changed = len(behind) > len(lost.messages) and behind[len(lost.messages)].role == "assistant"
        if len(rest) <= MAX_TAKEN_BACK and not (is_changed and self._same(lost.messages, behind)):
            return
        stored = (*lost.messages, lost.reply)
        same = [self._same_message(*pair) for pair in zip(stored, behind, strict=False)]
        number = at + (same.index(False) if False in same else len(same))
        raise BadMessages(
            f"messages[{number}] is not what this session holds there, and {len(rest)} turns of the model lie behind it: a "
            f"history only grows, and at most its last turn can be tried again. Send the assistant's messages back as they came"
            f"{self._spelling(lost, behind)}"
        )

    def _spelling(self, lost: Checkpoint, behind: Messages) -> str:
        number = len(lost.messages)
        if len(behind) <= number or behind[number].role != "assistant":
            return ""
        return f"; turn {lost.depth} said {lost.reply.content[:80]!r}, the request has {behind[number].content[:80]!r}"

    def _in_tree(self, messages: Messages) -> Attachment:
        children: dict[int | None, list[Checkpoint]] = {}
        for node in self.checkpoints:
            children.setdefault(None if node.parent is None else node.parent.seq, []).append(node)
        best: tuple[int, int, Checkpoint | None] = (0, -1, None)
        open_: list[tuple[Checkpoint | None, int]] = [(None, 0)]
        while open_:
            parent, at = open_.pop()
            for node in children.get(None if parent is None else parent.seq, ()):
                length = self._length(node, messages, at)
                if length and at + length < len(messages):
                    best = max(best, (at + length, node.seq, node), key=lambda item: item[:2])
                    open_.append((node, at + length))
        return Attachment(best[2], messages[best[0] :])

    def _length(self, node: Checkpoint, messages: Messages, at: int) -> int:
        """Messages of a checkpoint, if the request has them from `at` on; 0 if not."""
        length = len(node.messages) + 1
        if len(messages) < at + length or not self._same_message(node.reply, messages[at + length - 1]):
            return 0
        return length if self._same(node.messages, messages[at : at + length]) else 0

    def _same(self, stored: Messages, sent: Messages) -> bool:
        return len(sent) >= len(stored) and all(map(self._same_message, stored, sent))

    def _same_message(self, stored: ChatMessage, sent: ChatMessage) -> bool:
        if stored is sent or stored == sent:
            return True
        if self.replay == "strict" or len(stored.tool_calls) != len(sent.tool_calls):
            return False
        plain = (stored.role, stored.content, stored.tool_call_id) == (sent.role, sent.content, sent.tool_call_id)
        return plain and all(
            (mine.call_id, mine.name) == (theirs.call_id, theirs.name) and same_json(mine.arguments, theirs.arguments)
            for mine, theirs in zip(stored.tool_calls, sent.tool_calls, strict=True)
        )

    def commit(
        self,
        at: Attachment,
        prompt: tuple[int, ...],
        sampled: Sampled,
        reply: ChatMessage,
        tools: Tools = (),
        committed_s: float = 0.0,
    ) -> Checkpoint:
        """Adds a sampled turn. Raises Conflict, and changes nothing, if a linear history moved since `attach`."""
        if len(self.checkpoints) >= MAX_CHECKPOINTS:
            raise Conflict(f"the session has {MAX_CHECKPOINTS} turns, which is the most: end it and open another")
        if self.kind == "linear":
            self._take_back(at)
        parent = at.parent
        depth, start = (1, 0) if parent is None else (parent.depth + 1, parent.end)
        node = Checkpoint(self._next, parent, at.messages, prompt, sampled, reply, depth, start, tools, committed_s)
        self.checkpoints.append(node)
        if self.kind == "linear":
            self._line = (*self._line, *at.messages, reply)
        self._next += 1
        return node

    def _take_back(self, at: Attachment) -> None:
        last = self.checkpoints[-1] if self.checkpoints else None
        if last is not (at.takes_back or at.parent):
            raise Conflict(
                "another call on this session was answered first, and a linear history has one line: send calls one behind "
                "another, or take `history: branching`"
            )
        if at.takes_back is not None:
            lost = self.checkpoints.pop()
            self._line = self._line[: -len(lost.messages) - 1]
            self.taken_back += 1

    def leaves(self) -> Iterator[Checkpoint]:
        """Checkpoints that nothing goes on from, in the order of their commits."""
        parents = {node.parent.seq for node in self.checkpoints if node.parent is not None}
        return (node for node in self.checkpoints if node.seq not in parents)


def same_json(one: str, other: str) -> bool:
    """Whether two texts are the same JSON (1.0 is 1, true is not); texts that are none must be the same text."""
    try:
        return _canonical(one) == _canonical(other)
    except (ValueError, RecursionError):
        return one == other


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
