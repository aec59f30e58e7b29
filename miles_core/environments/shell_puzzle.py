"""Shell puzzles: a small folder of text files and one question about it, made from a seed; the truth is known by construction.

Level 1: 3 files, 4 kinds of question, one or two calls. Level 2: 6 longer files, pipes. Level 3: 10 files in folders, chains
of up to three calls. Level 4: the folder is to be changed, and a check reads it afterwards. Every puzzle has a reference
solution of at most MOST_CALLS calls, which a test runs through the real tool.

Invariants: a puzzle is a function of (seed, level, split) alone, on every machine; the two splits share no puzzle, because
the hash of question and files decides its split. No word is part of another, and a word is in one file unless a question is
about that. Failure: a wrong option is a RecipeError.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.environments.base import EpisodeFailed, Split
from miles_core.environments.shell_commands import LEVELS
from miles_core.environments.splits import MAX_TRIES, in_eval_split, question_digest
from miles_core.errors import RecipeError

FAMILY = "shell_puzzle"
MOST_CALLS = 3
DONE = "done"
"""The answer to a question that asks for a change."""

_WORDS = (
    "acorn anvil apron arrow atlas badge bagel balm banjo barn basil beacon bench birch bison bloom bolt brick broom brush "
    "cabin camel candle canoe cedar chalk cherry chisel cider clay clover cobra comet coral cotton crane crayon crown "
    "daisy denim desk donkey drum dune eagle easel ember engine fern ferry fiddle flag flute fossil garlic gecko geyser "
    "ginger glove goose grape hammer harbor hazel hedge heron honey hornet ivory jacket jelly jungle kettle kiwi koala "
    "ladder lagoon lemon lily linen lizard magnet mango maple marble meadow melon mint mirror moss mule needle nutmeg oasis "
    "olive onion orchid otter oyster paddle panda parrot peach pebble pencil pepper pigeon pillow planet plum pony puzzle "
    "quartz quilt rabbit radish raven ribbon river rocket saddle salmon sandal shovel silver spider spoon squid statue "
    "sugar sunset swan tiger timber tomato tulip turnip turtle violin walnut whale willow yarn zebra"
)
_NAMES = (
    "alpha bravo delta echo foxtrot golf hotel india juliet kilo lima mike oscar papa quebec romeo sierra tango uniform "
    "victor xray yankee zulu"
)
_FOLDERS = "north south east west upper lower front back inner outer"
WORDS = tuple(_WORDS.split())
"""Lines of files."""
NAMES = tuple(f"{stem}.txt" for stem in _NAMES.split())
"""Files."""
FOLDERS = tuple(_FOLDERS.split())

Files = dict[str, list[str]]


@dataclass(frozen=True)
class Puzzle:
    """One folder and one question."""

    level: int
    kind: str
    question: str
    files: Mapping[str, str]
    """Relative name -> text."""
    calls: tuple[str, ...]
    """A reference solution: what to run, in this order ..."""
    answer: str
    """... and what to say then."""
    files_after: Mapping[str, str]
    """What the folder must hold in the end; the same as `files` below level 4."""

    @functools.cached_property
    def digest(self) -> str:
        """Of level, question and files: it decides the split, and lets a grader prove that it judges the same puzzle."""
        return question_digest(json.dumps([self.level, self.kind, self.question, sorted(self.files.items())]))


class PuzzleSource:
    """Draws puzzles of one level by (seed, split). Raises RecipeError for options that are none."""

    def __init__(self, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - {"level"})
        if unknown:
            raise RecipeError(f"environment.options: {FAMILY} has no option {', '.join(unknown)}; there is: level (1 to 4)")
        self.level = options.get("level", 1)
        if type(self.level) is not int or self.level not in LEVELS:
            raise RecipeError(f"environment.options.level: {FAMILY} has the levels 1, 2, 3 and 4, not {self.level!r}")
        self.puzzle = functools.lru_cache(maxsize=4096)(self._draw)

    def _draw(self, seed: int, split: Split) -> Puzzle:
        """The puzzle of a seed."""
        for tries in range(MAX_TRIES):
            puzzle = make_puzzle(random.Random(f"{FAMILY}/{self.level}/{seed}/{tries}"), self.level)
            if in_eval_split(puzzle.digest) == (split == "eval"):
                return puzzle
        raise EpisodeFailed(f"{FAMILY}: no puzzle of split {split!r} in {MAX_TRIES} draws for seed {seed}", kind="environment")


def make_puzzle(rng: random.Random, level: int) -> Puzzle:
    """A puzzle of a level, of a random kind."""
    shape = SHAPES[level]
    kind = rng.choice(sorted(shape.kinds))
    files = _folder(rng, shape)
    made = shape.kinds[kind](rng, files)
    before = made.files or files
    return Puzzle(
        level=level, kind=kind, question=made.question, files=_texts(before), calls=made.calls, answer=made.answer,
        files_after=_texts(made.files_after or before),
    )  # fmt: skip


def files_digest(files: Mapping[str, bytes | None]) -> str:
    """md5 over names and contents; None stands for what is no regular file."""
    state = hashlib.md5(usedforsecurity=False)
    for name, content in sorted(files.items()):
        state.update(f"{name}\0{-1 if content is None else len(content)}\0".encode(errors="surrogateescape") + (content or b""))
    return state.hexdigest()


def texts_digest(files: Mapping[str, str]) -> str:
    """files_digest of texts."""
    return files_digest({name: text.encode() for name, text in files.items()})


def _texts(files: Files) -> dict[str, str]:
    return {name: "".join(f"{line}\n" for line in lines) for name, lines in files.items()}


@dataclass(frozen=True)
class _Made:
    """What a kind of question makes of a folder."""

    question: str
    calls: tuple[str, ...]
    answer: str
    files: Files | None = None
    """The folder, if the question changed it."""
    files_after: Files | None = None


@dataclass(frozen=True)
class _Shape:
    """Size of a level's folder, and its kinds of question."""

    files: int
    lines: tuple[int, int]
    depth: int
    """Folders above a file, at most."""
    kinds: dict[str, Callable[[random.Random, Files], _Made]]


def _folder(rng: random.Random, shape: _Shape) -> Files:
    """Files of one-word lines; every word once. With folders, at least two of them hold files."""
    names = rng.sample(NAMES, shape.files)
    words = iter(rng.sample(WORDS, shape.files * shape.lines[1]))
    tops = rng.sample(FOLDERS, 3) if shape.depth else []
    folders = ["", *("".join(f"{part}/" for part in (top, *_below_top(rng, shape.depth - 1))) for top in tops)]
    places = [*folders[1:3], *(rng.choice(folders) for _ in names)]
    return {
        place + name: [next(words) for _ in range(rng.randint(*shape.lines))]
        for place, name in zip(places, names, strict=False)
    }


def _below_top(rng: random.Random, most: int) -> list[str]:
    return rng.sample(FOLDERS, rng.randint(0, most))


def _find(rng: random.Random, files: Files, *, but: int = 0) -> tuple[str, str]:
    """A file and a word in it, not among its first `but` lines."""
    name = rng.choice([name for name in sorted(files) if len(files[name]) > but] or sorted(files))
    return name, rng.choice(files[name][but:] or files[name])


def _other(rng: random.Random, files: Files, *, than: tuple[str, ...]) -> str:
    return rng.choice([name for name in sorted(files) if name not in than])


def _unused_word(rng: random.Random, files: Files) -> str:
    used = {word for lines in files.values() for word in lines}
    return rng.choice([word for word in WORDS if word not in used])


def _unused_name(rng: random.Random, files: Files) -> str:
    used = {name.rpartition("/")[2] for name in files}
    return rng.choice([name for name in NAMES if name not in used])


# Level 1


def _count(rng: random.Random, files: Files) -> _Made:
    name = rng.choice(sorted(files))
    return _Made(f"Count the lines of {name}", (f"wc -l {name}",), str(len(files[name])))


def _which(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    return _Made(f"Name the file that contains {word}", (f"grep -l {word} *",), name)


def _count_of(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    question = f"Count the lines of the file that contains {word}"
    return _Made(question, (f"grep -l {word} *", f"wc -l {name}"), str(len(files[name])))


def _first_of(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files, but=1)
    question = f"Print the first line of the file that contains {word}"
    return _Made(question, (f"grep -l {word} *", f"head -n 1 {name}"), files[name][0])


# Level 2


def _last_of(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    question = f"Print the last line of the file that contains {word}"
    return _Made(question, (f"grep -l {word} *", f"tail -n 1 {name}"), files[name][-1])


def _nth_of(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    number = rng.randint(1, len(files[name]))
    question = f"Print line {number} of the file that contains {word}"
    return _Made(question, (f"grep -l {word} *", f"sed -n {number}p {name}"), files[name][number - 1])


def _files_with(rng: random.Random, files: Files) -> _Made:
    word, holders = _unused_word(rng, files), rng.sample(sorted(files), rng.randint(1, len(files) - 1))
    files = {name: list(lines) for name, lines in files.items()}
    for name in holders:
        files[name].insert(rng.randint(0, len(files[name])), word)
    return _Made(f"Count the files that contain {word}", (f"grep -l {word} * | wc -l",), str(len(holders)), files)


def _sorted_first(rng: random.Random, files: Files) -> _Made:
    name = rng.choice(sorted(files))
    question = f"Print the line of {name} that comes first in alphabetical order"
    return _Made(question, (f"sort {name} | head -n 1",), min(files[name]))


def _follow(rng: random.Random, files: Files) -> _Made:
    first = rng.choice(sorted(files))
    second = _other(rng, files, than=(first,))
    files = files | {first: [*files[first], second]}
    question = f"The last line of {first} names a file. Print the first line of that file"
    return _Made(question, (f"tail -n 1 {first}", f"head -n 1 {second}"), files[second][0], files)


# Level 3


def _path(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    return _Made(f"Name the file, with its folders, that contains {word}", (f"grep -rl {word} .",), name)


def _below(rng: random.Random, files: Files) -> _Made:
    folder = rng.choice(sorted({name.partition("/")[0] for name in files if "/" in name}))
    inside = [name for name in files if name.startswith(f"{folder}/")]
    return _Made(f"Count the files in folder {folder} and below", (f"find {folder} -type f | wc -l",), str(len(inside)))


def _deep_first(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files, but=1)
    question = f"Print the first line of the file that contains {word}"
    return _Made(question, (f"grep -rl {word} .", f"head -n 1 {name}"), files[name][0])


def _follow_twice(rng: random.Random, files: Files) -> _Made:
    first = rng.choice(sorted(files))
    second = _other(rng, files, than=(first,))
    third = _other(rng, files, than=(first, second))
    files = files | {first: [*files[first], second], second: [*files[second], third]}
    question = f"The last line of {first} names a file, and its last line another. Print the first line of that other"
    calls = (f"tail -n 1 {first}", f"tail -n 1 {second}", f"head -n 1 {third}")
    return _Made(question, calls, files[third][0], files)


# Level 4


def _changed(question: str, calls: tuple[str, ...], after: Files) -> _Made:
    return _Made(f"{question}. Then say {DONE}", calls, DONE, files_after=after)


def _without(files: Files, name: str) -> Files:
    return {other: lines for other, lines in files.items() if other != name}


def _delete(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    calls = (f"grep -rl {word} .", f"rm {name}")
    return _changed(f"Delete the file that contains {word}", calls, _without(files, name))


def _move(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    own = name.rpartition("/")[0]
    folder = rng.choice(sorted({other.rpartition("/")[0] for other in files} - {own, ""}))
    target = f"{folder}/{name.rpartition('/')[2]}"
    question = f"Move the file that contains {word} into folder {folder}"
    return _changed(question, (f"grep -rl {word} .", f"mv {name} {folder}"), _without(files, name) | {target: files[name]})


def _rename(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    folder, new = name.rpartition("/")[0], _unused_name(rng, files)
    target = f"{folder}/{new}" if folder else new
    calls = (f"grep -rl {word} .", f"mv {name} {target}")
    question = f"Rename the file that contains {word} to {new}, in its folder"
    return _changed(question, calls, _without(files, name) | {target: files[name]})


def _replace(rng: random.Random, files: Files) -> _Made:
    name, word = _find(rng, files)
    new = _unused_word(rng, files)
    calls = (f"grep -rl {word} .", f"sed -i s/{word}/{new}/ {name}")
    question = f"Write {new} in place of {word} in the file that contains it"
    return _changed(question, calls, files | {name: [new if line == word else line for line in files[name]]})


def _sort_into(rng: random.Random, files: Files) -> _Made:
    name, new = rng.choice(sorted(files)), _unused_name(rng, files)
    question = f"Write the lines of {name} in alphabetical order to a new file {new}"
    return _changed(question, (f"sort -o {new} {name}",), files | {new: sorted(files[name])})


SHAPES = {
    1: _Shape(3, (1, 6), 0, {"count": _count, "which": _which, "count_of": _count_of, "first_of": _first_of}),
    2: _Shape(
        6, (3, 12), 0,
        {"last_of": _last_of, "nth_of": _nth_of, "files_with": _files_with, "sorted_first": _sorted_first, "follow": _follow},
    ),
    3: _Shape(
        10, (3, 12), 3, {"path": _path, "below": _below, "deep_first": _deep_first, "follow_twice": _follow_twice}
    ),
    4: _Shape(
        8, (2, 8), 2,
        {"delete": _delete, "move": _move, "rename": _rename, "replace": _replace, "sort_into": _sort_into},
    ),
}  # fmt: skip
