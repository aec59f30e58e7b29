"""Demonstrations of terminal tasks of level 1: right ones, and those of a careless demonstrator.

No shell runs here: the three commands that are shown have results that are known from the folder, and a test holds them
against the real ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from miles_core.bootstrap.tokenizer import Messages, word_tokenizer
from miles_core.environments.base import Message
from miles_core.environments.shell import shown
from miles_core.environments.terminal_task import (
    CHECK,
    DONE,
    FAMILY,
    FILES,
    KEYS,
    VALUES,
    Setting,
    Task,
    TaskSource,
    change,
    find,
)
from miles_core.environments.tool_call import CALL_CLOSE, CALL_OPEN
from miles_core.recipe import EnvironmentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CALLS = 7
OK = "ok"
_LANGUAGE = (
    "Set to Make check.sh pass bash grep -l *.conf sed -i \" done ok must be exit 1 2 sed: can't read No such file or directory"
)


@dataclass(frozen=True)
class TerminalHabits:
    """How careless the demonstrator is: chances at each decision."""

    tasks: ClassVar[tuple[str, ...]] = (
        "shell", "splits", "terminal", "terminal_scripts", "terminal_task", "tool_call", "tool_text",
    )  # fmt: skip
    """Modules of miles_core/environments that decide what is demonstrated."""
    idle: float = 0.15
    """To say that it is done at once."""
    hasty: float = 0.2
    """To change some file without looking which one holds the setting ..."""
    hasty_asked: float = 0.8
    """... where the check named the setting: over 0.5, so that the greedy policy does it too."""
    slip: float = 0.15
    """To write another value."""
    unchecked: float = 0.3
    """To say that it is done without a check ..."""
    blind: float = 0.7
    """... and after one that still complains: over 0.5 as well. Else it finds the file and repairs it."""

    def needs(self, environment: EnvironmentSpec) -> str:
        """What an environment must be; empty if it is."""
        level = environment.options.get("level", 1)
        if environment.family == FAMILY and level == 1 and environment.max_turns > MOST_CALLS:
            return ""
        return f"family: {FAMILY}, options: {{level: 1}}, tool: shell and max_turns: {MOST_CALLS + 1} or more"

    def demonstrator(self, seed: int, environment: EnvironmentSpec) -> TerminalDemonstrator:
        """Who demonstrates."""
        return TerminalDemonstrator(self, seed, environment)


class TerminalDemonstrator:
    """Plays training tasks: cleanly, or carelessly."""

    def __init__(self, habits: TerminalHabits, seed: int, environment: EnvironmentSpec) -> None:
        self._habits = habits
        self._rng = random.Random(seed)
        self._source = TaskSource(environment.options)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token for every word of these tasks, and for the address of a setting in a change."""
        addresses = (f'"/{key}/c' for key in KEYS)
        return word_tokenizer([*_LANGUAGE.split(), *map(str, VALUES), *FILES, *KEYS, *addresses])

    def clean(self) -> Messages:
        """Makes the calls of the reference solution and says that it is done."""
        task = self._task()
        play = Play(task)
        for call in task.calls:
            play.call(call)
        return play.end()

    def careless(self) -> Messages:
        """Often does nothing, guesses the file, writes another value, or does not care what the check says."""
        task, rng, habits = self._task(), self._rng, self._habits
        play = Play(task)
        if rng.random() < habits.idle:
            return play.end()
        (wanted,) = play.wrong()
        if task.kind == "asked":
            play.call(CHECK)
        tried = wanted
        if rng.random() < (habits.hasty_asked if task.kind == "asked" else habits.hasty):
            tried = tried._replace(file=rng.choice(FILES))
        else:
            play.call(find(wanted.key))
        if rng.random() < habits.slip:
            tried = tried._replace(value=rng.choice(VALUES))
        play.call(change(tried))
        if rng.random() < habits.unchecked or play.call(CHECK) == OK or rng.random() < habits.blind:
            return play.end()
        for call in (find(wanted.key), change(wanted), CHECK):
            play.call(call)
        return play.end()

    def _task(self) -> Task:
        return self._source.task(self._rng.getrandbits(32), "train")


class Play:
    """One demonstration, on a folder that is only thought of."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._files = dict(task.files)
        self._messages = [Message("user", task.question)]

    def call(self, line: str) -> str:
        """Makes a call; returns what the tool says."""
        said = self._result_of(line)
        self._messages += [Message("assistant", f"{CALL_OPEN}{line}{CALL_CLOSE}"), Message("tool", said)]
        return said

    def end(self) -> Messages:
        """The whole conversation, ended by the answer."""
        return (*self._messages, Message("assistant", DONE))

    def wrong(self) -> list[Setting]:
        """Settings that are not as the check wants them, in its order."""
        return [new for new in self._task.settings if self._value(new.file, new.key) != str(new.value)]

    def _value(self, file: str, key: str) -> str | None:
        return dict(line.split() for line in self._files[file].splitlines()).get(key)

    def _result_of(self, line: str) -> str:
        """What the tool says to one of the three commands."""
        words = line.split()
        if line == CHECK:
            wrong = self.wrong()
            return shown(f"{wrong[0].key} must be {wrong[0].value}" if wrong else OK, int(bool(wrong)))
        if words[0] == "grep":
            found = [name for name, text in sorted(self._files.items()) if name in FILES and words[2] in text.split()]
            return shown("\n".join(found), 0 if found else 1)
        key, value, file = words[3], words[4], words[-1]
        if file not in self._files:
            return shown(f"sed: can't read {file}: No such file or directory", 2)
        lines = self._files[file].splitlines()
        self._files[file] = "".join(f"{key} {value} \n" if old.split()[0] == key else f"{old}\n" for old in lines)
        return shown("", 0)
