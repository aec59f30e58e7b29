"""The Environment protocol: where tasks come from and how an episode answers the model.

An environment reports facts; graders judge them (miles_core/grading). Episodes are async, cancellable, and every call has
a deadline. Tasks are named by a seed, so an order is a number and anyone can make the same task again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Message:
    """One message of the conversation, before tokenisation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str


class Episode(Protocol):
    """One run through a task."""

    def opening(self) -> tuple[Message, ...]:
        """Messages the model sees first."""
        ...

    async def respond(self, content: str) -> tuple[Message, ...]:
        """Answers one model turn with the messages to append; an empty tuple ends the episode. Raises EpisodeFailed."""
        ...

    def facts(self) -> dict[str, Any]:
        """What happened so far (JSON): the final answer, tool calls, exit codes. No verdict."""
        ...

    async def close(self) -> None:
        """Frees whatever the episode holds; called exactly once, also after a failure or a cancel."""
        ...


class Environment(Protocol):
    """A source of tasks."""

    def episode(self, seed: int, split: Split) -> Episode:
        """A fresh episode of task `seed`. The two splits share no question, whatever the seeds."""
        ...


class EpisodeFailed(Exception):
    """The environment, not the model, broke. `kind` is `infrastructure` or `environment`; neither costs reward. `facts` are
    what an agent had until then: they are judged where the episode had met a limit."""

    def __init__(
        self, message: str, kind: Literal["infrastructure", "environment"], facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.facts = facts or {}
