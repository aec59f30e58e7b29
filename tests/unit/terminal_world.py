"""What tests of terminal tasks share: specs, an episode played to its end, a seed of every kind."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from miles_core.environments.base import Message
from miles_core.environments.sandbox import PREFIX
from miles_core.environments.sandbox_kind import sandbox_root
from miles_core.environments.terminal import TerminalEnvironment, TerminalEpisode
from miles_core.environments.terminal_task import KINDS, TaskSource
from miles_core.recipe import EnvironmentSpec
from tests.unit.sandbox_world import need_bubblewrap


def spec_of(level: int, **changes: Any) -> EnvironmentSpec:
    """Needs bubblewrap: nothing else is good enough for these tasks."""
    need_bubblewrap()
    return EnvironmentSpec(
        **{"family": "terminal", "options": {"level": level}, "tool": "shell", "max_turns": 16, "tool_deadline_s": 120}
        | changes
    )


def environment_of(level: int, **changes: Any) -> TerminalEnvironment:
    return TerminalEnvironment(spec_of(level, **changes), f"test.level{level}")


def play(episode: TerminalEpisode, *turns: str) -> list[tuple[Message, ...]]:
    """The answers to some turns; the episode is closed."""

    async def run() -> list[tuple[Message, ...]]:
        try:
            return [await episode.respond(turn) for turn in turns]
        finally:
            await episode.close()

    return asyncio.run(run())


def call(line: str) -> str:
    return f"<tool_call>{line}</tool_call>"


def first_of_each_kind(level: int) -> dict[str, int]:
    """A training seed per kind."""
    source, found = TaskSource({"level": level}), {}
    for seed in range(60):
        found.setdefault(source.task(seed, "train").kind, seed)
    assert set(found) == set(KINDS[level])
    return found


def boxes() -> list[str]:
    """Sandbox directories of this process."""
    return [name for name in os.listdir(sandbox_root()) if name.startswith(PREFIX) and f".{os.getpid()}." in name]
