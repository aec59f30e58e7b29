"""The environment of shell puzzles: a real bash in a fresh directory per episode.

A turn that calls the tool runs one allowed command (shell_commands.py) in the episode's sandbox and gets its output; any
other turn is the answer. What reads only is a function of the puzzle, the changes so far and the command, so its result is
remembered: the directory is made when the first command has to run. Facts say what was run, how it ended and, where a puzzle
asks for changes, what the folder holds in the end; they hold no verdict.

Failure: no allowed command can take long or much, so one that is stopped, and a sandbox that breaks, are the machine's
fault: EpisodeFailed (infrastructure). Commands run in threads; the event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.sandbox import Result, Sandbox, SandboxBroken, sweep
from miles_core.environments.shell_commands import clean, edits, reads
from miles_core.environments.shell_puzzle import FAMILY, Puzzle, PuzzleSource, files_digest, texts_digest
from miles_core.environments.tool_call import tool_call
from miles_core.environments.tool_text import tool_text
from miles_core.recipe import EnvironmentSpec

SHOWN_CHARACTERS = 400
"""Of one output, to the model."""
FACT_CHARACTERS = 160
"""Of one command or output, in the facts; the digest is of the whole."""
REMEMBERED = 16384
"""Results kept per process."""
REFUSED = "error: not allowed"
INSTRUCTIONS = (
    "You are in a folder of small text files. Use the tool: a turn that ends in <tool_call>COMMAND</tool_call> runs one shell "
    "command (ls, cat, wc -l, grep, head -n, tail -n, sort, sed -n, find, mv, cp, rm, mkdir, sed -i s/a/b/; pipes, but no "
    "quotes). You have {turns} turns in all. End with the answer alone.\n"
)
"""From level 2 on, for models that no warm-up has taught the format."""

T = TypeVar("T")
Key = tuple[str, tuple[str, ...], str]
"""What decides a result: the puzzle, the changes so far, the command."""
log = logging.getLogger("miles")


@dataclass(frozen=True)
class _Ran:
    """One call, as the facts see it."""

    command: str
    exit_code: int | None
    """None: refused before any shell saw it."""
    output: str

    def as_fact(self) -> dict[str, Any]:
        digest = hashlib.md5(self.output.encode(errors="replace"), usedforsecurity=False).hexdigest()
        shown = {"command": self.command[:FACT_CHARACTERS], "output": self.output[:FACT_CHARACTERS]}
        return {**shown, "exit_code": self.exit_code, "output_md5": digest}


def shown(output: str, exit_code: int | None) -> str:
    """What the model is told of a call: the output as text, shortened, and the exit code unless it is 0."""
    text = tool_text(output, most=len(output)).strip()
    text = f"{text[:SHOWN_CHARACTERS]} ..." if len(text) > SHOWN_CHARACTERS else text
    return text if exit_code in (None, 0) else f"{text} exit {exit_code}".strip()


@dataclass
class ShellEpisode:
    """One puzzle. The sandbox is made, used and closed in threads; `_guard` orders its making and its end."""

    home: ShellPuzzleEnvironment
    puzzle: Puzzle
    seed: int
    split: Split
    final_answer: str | None = None
    turns: int = 0
    calls: list[_Ran] = field(default_factory=list)
    files_md5: str | None = None
    """Of the folder when the episode ended; only where the puzzle asks for changes."""
    _changes: tuple[str, ...] = ()
    _sandbox: Sandbox | None = None
    _closed: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def opening(self) -> tuple[Message, ...]:
        """The question."""
        before = "" if self.puzzle.level == 1 else INSTRUCTIONS.format(turns=self.home.spec.max_turns)
        return (Message("user", before + self.puzzle.question),)

    async def respond(self, content: str) -> tuple[Message, ...]:
        """The output of a call, or nothing: the answer was given or the turns are used up. Raises EpisodeFailed."""
        self.turns += 1
        line = tool_call(content)
        if line is None:
            self.final_answer = content.strip()
        else:
            self.calls.append(await self._call(clean(line)))
        if line is not None and self.turns < self.home.spec.max_turns:
            return (Message("tool", shown(self.calls[-1].output, self.calls[-1].exit_code)),)
        if self.puzzle.files_after != self.puzzle.files:
            self.files_md5 = await self.home.in_thread(self._look)
        return ()

    async def _call(self, line: str) -> _Ran:
        if edits(line, self.puzzle.level):
            ran = await self.home.in_thread(lambda: self._run(line))
            self._changes = (*self._changes, line)
            return ran
        if not reads(line, self.puzzle.level):
            return _Ran(line, None, REFUSED)
        return await self.home.once((self.puzzle.digest, self._changes, line), lambda: self._run(line))

    def _run(self, line: str) -> _Ran:
        result: Result = self._box().run(line, self.home.spec.tool_deadline_s / 2)
        if result.stopped:
            raise SandboxBroken(f"{line!r} was stopped ({result.stopped}) after {result.seconds:.1f} s")
        return _Ran(line, result.exit_code, result.output)

    def _look(self) -> str:
        return texts_digest(self.puzzle.files) if self._sandbox is None else files_digest(self._sandbox.files())

    def _box(self) -> Sandbox:
        with self._guard:
            if self._closed:
                raise SandboxBroken("the episode is over")
            if self._sandbox is None:
                self._sandbox = Sandbox(self.home.owner)
                self._sandbox.fill(self.puzzle.files)
            return self._sandbox

    def facts(self) -> dict[str, Any]:
        """What happened; `final_answer` is None when the episode ended without one."""
        return {
            "puzzle_seed": self.seed,
            "puzzle_md5": self.puzzle.digest,
            "split": self.split,
            "family": FAMILY,
            "level": self.puzzle.level,
            "kind": self.puzzle.kind,
            "final_answer": self.final_answer,
            "turns": self.turns,
            "tool_calls": [ran.as_fact() for ran in self.calls],
            "files_md5": self.files_md5,
        }

    async def close(self) -> None:
        """Ends a running command and removes the directory. Raises EpisodeFailed if that cannot be done."""
        await self.home.in_thread(self._end, closing=True)

    def _end(self) -> None:
        with self._guard:
            self._closed = True
        if self._sandbox is not None:
            self._sandbox.close()


class ShellPuzzleEnvironment:
    """An Environment of puzzles of one level. `owner` names the run and the role. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec, owner: str = "nobody") -> None:
        self.spec, self.owner = spec, owner
        self._source = PuzzleSource(spec.options)
        self._memory: OrderedDict[Key, _Ran] = OrderedDict()
        self._running: dict[Key, asyncio.Event] = {}
        width = max(4, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(width, "shell")
        # Apart from the others: an end must not wait behind commands.
        self._closers = ThreadPoolExecutor(2, "shell-close")
        for name in sweep():
            log.info("removed the sandbox directory of a dead process: %s", name)

    def episode(self, seed: int, split: Split) -> ShellEpisode:
        """A fresh episode of puzzle `seed`."""
        return ShellEpisode(self, self._source.puzzle(seed, split), seed, split)

    async def in_thread(self, function: Callable[[], T], *, closing: bool = False) -> T:
        """Runs something that blocks. Raises EpisodeFailed for a sandbox that broke."""
        pool = self._closers if closing else self._threads
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except SandboxBroken as error:
            raise EpisodeFailed(str(error), kind="infrastructure") from error

    async def once(self, key: Key, run: Callable[[], _Ran]) -> _Ran:
        """The result of a command that only reads: the samples of a group ask for it at about the same time, one runs it.

        If that one fails or is given up, the next one runs it. Raises EpisodeFailed.
        """
        while True:
            if key in self._memory:
                return self._memory[key]
            if key not in self._running:
                break
            await self._running[key].wait()
        ended = self._running[key] = asyncio.Event()
        try:
            ran = await self.in_thread(run)
        finally:
            del self._running[key]
            ended.set()
        self._memory[key] = ran
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)
        return ran
