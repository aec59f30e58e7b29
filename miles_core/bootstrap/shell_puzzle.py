"""Demonstrations of shell puzzles of level 1: right ones, and those of a careless demonstrator.

No shell runs here: the three commands that are shown have results that are known from the files, and a test holds them
against the real ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from miles_core.bootstrap.tokenizer import Messages, word_tokenizer
from miles_core.environments.base import Message
from miles_core.environments.shell import shown
from miles_core.environments.shell_puzzle import FAMILY, NAMES, WORDS, Puzzle, PuzzleSource
from miles_core.environments.tool_call import CALL_CLOSE, CALL_OPEN
from miles_core.recipe import EnvironmentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CALLS = 3
_LANGUAGE = (
    "Count Name Print the lines line first of file that contains wc grep head tail cat ls -l -n * exit error: not allowed ... "
    "No such or directory"
)


@dataclass(frozen=True)
class ShellHabits:
    """How careless the demonstrator is: chances at each decision."""

    tasks: ClassVar[tuple[str, ...]] = ("shell", "shell_commands", "shell_puzzle", "splits", "tool_call", "tool_text")
    """Modules of miles_core/environments that decide what is demonstrated."""
    guess: float = 0.2
    """To answer at once, with something that occurs in the puzzle ..."""
    wrong: float = 0.25
    """... else to call something else than what helps ..."""
    impatient: float = 0.75
    """... and, of two calls, to answer after the first with what it gave: over 0.5, so that the greedy policy does it too."""

    def needs(self, environment: EnvironmentSpec) -> str:
        """What an environment must be; empty if it is."""
        level = environment.options.get("level", 1)
        if environment.family == FAMILY and level == 1 and environment.max_turns > 2:
            return ""
        return f"family: {FAMILY}, options: {{level: 1}}, tool: shell and max_turns: 3 or more"

    def demonstrator(self, seed: int, environment: EnvironmentSpec) -> ShellDemonstrator:
        """Who demonstrates."""
        return ShellDemonstrator(self, seed, environment)


class ShellDemonstrator:
    """Plays training puzzles: cleanly, or carelessly."""

    def __init__(self, habits: ShellHabits, seed: int, environment: EnvironmentSpec) -> None:
        self._habits = habits
        self._rng = random.Random(seed)
        self._source = PuzzleSource(environment.options)
        self._most_calls = min(MOST_CALLS, environment.max_turns - 1)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token for every word of these puzzles."""
        return word_tokenizer([*_LANGUAGE.split(), *map(str, range(21)), *NAMES, *WORDS])

    def clean(self) -> Messages:
        """Makes the calls of the reference solution and gives the answer."""
        puzzle = self._puzzle()
        return _episode(puzzle, puzzle.calls, puzzle.answer)

    def careless(self) -> Messages:
        """Often guesses, makes calls that do not help, or stops half way."""
        puzzle, rng, habits = self._puzzle(), self._rng, self._habits
        calls: list[str] = []
        done = 0
        while done < len(puzzle.calls):
            if len(calls) == self._most_calls or rng.random() < habits.guess:
                return _episode(puzzle, calls, self._guess(puzzle))
            if done == 1 and rng.random() < habits.impatient:
                return _episode(puzzle, calls, puzzle.calls[1].split()[-1])
            if rng.random() < habits.wrong:
                calls.append(self._beside(puzzle, puzzle.calls[done]))
            else:
                calls.append(puzzle.calls[done])
                done += 1
        return _episode(puzzle, calls, puzzle.answer)

    def _puzzle(self) -> Puzzle:
        return self._source.puzzle(self._rng.getrandbits(32), "train")

    def _guess(self, puzzle: Puzzle) -> str:
        """Something of the right sort."""
        if puzzle.answer.isdigit():
            return str(self._rng.randint(1, 6))
        return self._rng.choice(NAMES if puzzle.answer in NAMES else WORDS)

    def _beside(self, puzzle: Puzzle, right: str) -> str:
        """A call of this language that is not the right one."""
        name = self._rng.choice(sorted(puzzle.files))
        word = self._rng.choice(puzzle.files[name].split())
        operand = right.rsplit(maxsplit=1)[-1]
        about = operand if operand != "*" and self._rng.random() < 0.5 else name
        others = {f"wc -l {about}", f"head -n 1 {about}", f"grep -l {word} *"} - {right}
        return self._rng.choice(sorted(others))


def result_of(puzzle: Puzzle, call: str) -> str:
    """What the tool says to one of the three commands of level 1."""
    command, operand = call.split(maxsplit=1)[0], call.split()[2 if call.startswith("grep") else -1]
    if command == "wc":
        return shown(f"{len(puzzle.files[operand].split())} {operand}\n", 0)
    if command == "head":
        return shown(puzzle.files[operand].split()[0], 0)
    found = [name for name in sorted(puzzle.files) if operand in puzzle.files[name].split()]
    return shown("\n".join(found), 0 if found else 1)


def _episode(puzzle: Puzzle, calls: tuple[str, ...] | list[str], answer: str) -> Messages:
    played = [
        message
        for call in calls
        for message in (Message("assistant", f"{CALL_OPEN}{call}{CALL_CLOSE}"), Message("tool", result_of(puzzle, call)))
    ]
    return (Message("user", puzzle.question), *played, Message("assistant", answer))
