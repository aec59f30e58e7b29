"""The environment of terminal tasks: any bash line of the model, in a sandbox of the episode's own.

A turn that calls the tool runs one line in the episode's folder and gets its output; any other turn ends the episode. The
facts then hold the whole folder as text, for a grader that runs the checks (miles_core/grading/terminal.py); what is more
than a small project, or no text, is a named fault in its place. Facts hold no verdict.

The few lines that small models play by the thousand (PLAIN) are functions of the task and of the plain changes before them.
Their results are remembered, and the folder is made, and brought up to date, when the first other line has to run.

Failure: a line that passes a limit of the sandbox is the model's fault, which is told so and goes on, but for one that hangs
again. Where the sandbox holds too little for lines that nobody has read, no task is given out: RecipeError. A plain line cannot
pass a limit, so that, and a sandbox that breaks, are the machine's: EpisodeFailed (infrastructure). Lines run in threads; the
event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.sandbox import Limits, Sandbox, SandboxBroken, Stopped, sweep
from miles_core.environments.sandbox_kind import sandbox_kind
from miles_core.environments.shell import FACT_CHARACTERS, REMEMBERED, shown
from miles_core.environments.terminal_task import FAMILY, Task, TaskSource
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

LIMITS = Limits(file_bytes=64 << 10, disk_bytes=1 << 20, files=128, output_bytes=16 << 10)
"""Of the agent's sandbox."""
MOST_HANGS = 2
"""Lines that run into their deadline, of tool_deadline_s / 2 each: at the last of them the episode ends, without an answer."""
MOST_FILES = 32
"""In the facts ..."""
MOST_BYTES = 16 << 10
"""... with all their names and texts together ..."""
MOST_NAME_BYTES = 200
"""... and of one name with its folders."""
INSTRUCTIONS = (
    "You are in the folder of a small project. A turn that ends in <tool_call>COMMAND</tool_call> runs COMMAND in bash there. "
    "`bash check.sh` says the first thing that is wrong, or ok. You have {turns} turns in all; when the check says ok, answer "
    "done.\n"
)
"""From level 2 on, for models that no warm-up has taught the format."""

PLAIN_READ = re.compile(r"bash check\.sh|ls|cat [a-z]{1,24}\.(?:conf|sh)|grep -l [a-z]{1,24} \*\.conf")
PLAIN_CHANGE = re.compile(r'sed -i "/([a-z]{1,24})/c \1 [0-9]{1,4} " [a-z]{1,24}\.conf')

THREADS = 128
"""Most of them wait: for a short line, or for one of the model's that hangs until its deadline."""

T = TypeVar("T")
Key = tuple[str, tuple[str, ...], str]
"""What decides a result: the task, the plain changes so far, and the line, or none for the folder."""
log = logging.getLogger("miles")


class Folder(NamedTuple):
    """What an episode leaves."""

    files: Mapping[str, str] | None
    """Relative name -> text; None if it is not to be judged ..."""
    fault: str | None
    """... for this reason."""


UNSEEN = Folder(None, None)
"""Of an episode without an answer."""


@dataclass(frozen=True)
class Ran:
    """One call, as the facts see it."""

    command: str
    exit_code: int
    output: str
    stopped: Stopped
    """The limit it passed, if any."""

    @property
    def told(self) -> str:
        """What the model is told."""
        text = shown(self.output, self.exit_code)
        return f"{text} stopped: {self.stopped}" if self.stopped else text

    def as_fact(self) -> dict[str, Any]:
        """Shortened; the digest is of the whole output."""
        digest = hashlib.md5(self.output.encode(errors="replace"), usedforsecurity=False).hexdigest()
        short = {"command": self.command[:FACT_CHARACTERS], "output": self.output[:FACT_CHARACTERS]}
        return {**short, "exit_code": self.exit_code, "stopped": self.stopped, "output_md5": digest}


def judgeable(found: Mapping[str, bytes | None]) -> Folder:
    """A folder's files as facts, or the fault that keeps it from being judged. None stands for what is no regular file."""
    if len(found) > MOST_FILES:
        return Folder(None, f"{len(found)} files, more than {MOST_FILES}")
    texts: dict[str, str] = {}
    size = 0
    for name, content in sorted(found.items()):
        name_bytes = os.fsencode(name)
        size += len(name_bytes) + len(content or b"")
        if len(name_bytes) > MOST_NAME_BYTES:
            return Folder(None, f"a name of {len(name_bytes)} bytes, more than {MOST_NAME_BYTES}")
        if content is None:
            return Folder(None, f"{name!a} is no regular file that can be read")
        try:
            texts[name_bytes.decode()] = content.decode()
        except UnicodeDecodeError:
            return Folder(None, f"{name!a} is no text in UTF-8")
    if size > MOST_BYTES:
        return Folder(None, f"{size} bytes of names and texts, more than {MOST_BYTES}")
    return Folder(texts, None)


@dataclass
class TerminalEpisode:
    """One task. The sandbox is made, used and closed in threads; `_guard` orders its making and its end."""

    home: TerminalEnvironment
    task: Task
    seed: int
    split: Split
    final_answer: str | None = None
    turns: int = 0
    calls: list[Ran] = field(default_factory=list)
    folder: Folder = UNSEEN
    """When the answer was given."""
    _changes: tuple[str, ...] = ()
    """Plain ones, as long as nothing else ran ..."""
    _num_applied: int = 0
    """... and how many of them the sandbox has seen."""
    _is_plain: bool = True
    """Whether only plain lines ran."""
    _sandbox: Sandbox | None = None
    _closed: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def opening(self) -> tuple[Message, ...]:
        """What is to be done."""
        before = "" if self.task.level == 1 else INSTRUCTIONS.format(turns=self.home.spec.max_turns)
        return (Message("user", before + self.task.question),)

    async def respond(self, content: str) -> tuple[Message, ...]:
        """The output of a call, or nothing: an answer was given or the turns are used up. Raises EpisodeFailed."""
        self.turns += 1
        line = tool_call(content)
        if line is None:
            self.final_answer = content.strip()
            self.folder = await self._look()
            return ()
        self.calls.append(await self._call(line.strip()))
        hangs = sum(ran.stopped == "time" for ran in self.calls)
        is_over = self.turns >= self.home.spec.max_turns or hangs >= MOST_HANGS
        return () if is_over else (Message("tool", self.calls[-1].told),)

    async def _call(self, line: str) -> Ran:
        changes = PLAIN_CHANGE.fullmatch(line) is not None
        if not self._is_plain or not (changes or PLAIN_READ.fullmatch(line)):
            self._is_plain = False
            return await self.home.in_thread(lambda: self._run(line))
        ran = await self.home.once((self.task.digest, self._changes, line), lambda: self._run_plain(line, changes=changes))
        if changes:
            self._changes = (*self._changes, line)
        return ran

    async def _look(self) -> Folder:
        if any(ran.stopped == "disk" for ran in self.calls):
            return Folder(None, "a call left more in the folder than the sandbox holds")
        if self._is_plain and not self._changes:
            return Folder(self.task.files, None)
        if not self._is_plain:
            return await self.home.in_thread(self._read)
        return await self.home.once((self.task.digest, self._changes, ""), self._read)

    def _read(self) -> Folder:
        return judgeable(self._box().files())

    def _run(self, line: str) -> Ran:
        return self._run_in(self._box(), line)

    def _run_plain(self, line: str, *, changes: bool) -> Ran:
        ran = self._run_in(self._box(), line, is_plain=True)
        self._num_applied += changes
        return ran

    def _run_in(self, box: Sandbox, line: str, *, is_plain: bool = False) -> Ran:
        result = box.run(line, self.home.spec.tool_deadline_s / 2)
        if result.stopped == "closed" or (result.stopped and is_plain):
            raise SandboxBroken(f"{line!r} was stopped ({result.stopped}) after {result.seconds:.1f} s")
        return Ran(line, result.exit_code, result.output, result.stopped)

    def _box(self) -> Sandbox:
        """The sandbox, with all plain changes."""
        with self._guard:
            if self._closed:
                raise SandboxBroken("the episode is over")
            if self._sandbox is None:
                self._sandbox = Sandbox(self.home.owner, LIMITS)
                self._sandbox.fill(self.task.files)
            box = self._sandbox
        for line in self._changes[self._num_applied :]:
            self._run_in(box, line, is_plain=True)
            self._num_applied += 1
        return box

    def facts(self) -> dict[str, Any]:
        """What happened; `final_answer` is None when the episode ended without one, and then the folder is not told."""
        return {
            "task_md5": self.task.digest,
            "split": self.split,
            "family": FAMILY,
            "level": self.task.level,
            "kind": self.task.kind,
            "final_answer": self.final_answer,
            "turns": self.turns,
            "tool_calls": [ran.as_fact() for ran in self.calls],
            "files": None if self.folder.files is None else dict(self.folder.files),
            "files_fault": self.folder.fault,
        }

    async def close(self) -> None:
        """Ends a running command and removes the folder. Raises EpisodeFailed if that cannot be done."""
        await self.home.in_thread(self._end, closing=True)

    def _end(self) -> None:
        with self._guard:
            self._closed = True
        if self._sandbox is not None:
            self._sandbox.close()


def check_sandbox() -> None:
    """Raises RecipeError where a line of the model would reach this user's files, processes or network."""
    kind = sandbox_kind()
    if not kind.is_closed:
        raise RecipeError(
            f"environment.family: {FAMILY} runs whatever a model writes, but the sandbox here ({kind.name}) is open: "
            f"{'; '.join(kind.missing)} ({'; '.join(kind.reasons)}). Install bubblewrap on the nodes of rollout and "
            f"grader and allow unprivileged user namespaces; `miles doctor` shows what holds"
        )


class TerminalEnvironment:
    """An Environment of tasks of one level. `owner` names the run and the role. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec, owner: str = "nobody") -> None:
        check_sandbox()
        self.spec, self.owner = spec, owner
        self._source = TaskSource(spec.options)
        self._memory: OrderedDict[Key, Any] = OrderedDict()
        self._running: dict[Key, asyncio.Event] = {}
        self._threads = ThreadPoolExecutor(THREADS, "terminal")
        # Apart from the others: an end must not wait behind commands.
        self._closers = ThreadPoolExecutor(2, "terminal-close")
        for name in sweep():
            log.info("removed the sandbox directory of a dead process: %s", name)

    def episode(self, seed: int, split: Split) -> TerminalEpisode:
        """A fresh episode of task `seed`."""
        return TerminalEpisode(self, self._source.task(seed, split), seed, split)

    async def in_thread(self, function: Callable[[], T], *, closing: bool = False) -> T:
        """Runs something that blocks. Raises EpisodeFailed for a sandbox that broke."""
        pool = self._closers if closing else self._threads
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function)
        except SandboxBroken as error:
            raise EpisodeFailed(str(error), kind="infrastructure") from error

    async def once(self, key: Key, run: Callable[[], T]) -> T:
        """What `run` gives for this key: the samples of a group ask for it at about the same time, one runs it.

        If that one fails or is given up, the next one runs it. Raises EpisodeFailed.
        """
        while key not in self._memory:
            if key not in self._running:
                return await self._first(key, run)
            await self._running[key].wait()
        found: T = self._memory[key]
        return found

    async def _first(self, key: Key, run: Callable[[], T]) -> T:
        ended = self._running[key] = asyncio.Event()
        try:
            found = await self.in_thread(run)
        finally:
            del self._running[key]
            ended.set()
        self._memory[key] = found
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)
        return found
