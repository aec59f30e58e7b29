"""Terminal tasks: a small project folder that its own check finds wrong, made from a seed.

A folder holds settings (`*.conf`, lines of a key and a number), from level 3 on a bash script and its data, and `check.sh`,
which says the first thing that is wrong or `ok`. Level 1: 3 files, one setting to find and to change. Level 2: 6 files in
folders; two settings, one that is missing, a whole file, a key with a new name. Level 3: a script with one wrong line, which
its test shows. Level 4: two settings, a script and a report of what it prints. Every task has a reference solution of at
most MOST_CALLS calls, which a test runs through the real tool.

Invariants: a task is a function of (seed, level, split) alone, on every machine; the two splits share none, because the hash
of question and folder decides. No folder passes its check as it is made. No key is part of another or of a file's name, and
below `rename` a key is in one file. Failure: a wrong option is a RecipeError.
"""

from __future__ import annotations

import functools
import json
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from miles_core.environments.base import EpisodeFailed, Split
from miles_core.environments.splits import MAX_TRIES, in_eval_split, question_digest
from miles_core.environments.terminal_scripts import DATA, SCRIPTS, Case, Repair, draw_repair
from miles_core.errors import RecipeError

FAMILY = "terminal"
LEVELS = (1, 2, 3, 4)
MOST_CALLS = 12
DONE = "done"
CHECK_FILE = "check.sh"
CHECK = f"bash {CHECK_FILE}"
REPORT = "out/report.txt"

_KEYS = (
    "port timeout retries workers depth width height limit weight speed volume delay quota burst margin rounds shards lanes "
    "hops slots"
)
_FILES = "app cache client cron gate mail proxy search server store agent panel"
KEYS = tuple(_KEYS.split())
FILES = tuple(f"{stem}.conf" for stem in _FILES.split())
VALUES = range(10, 60)
FOLDERS = ("conf", "conf/web", "conf/jobs")

_HEAD = r"""# Says the first thing that is wrong, or ok.
wrong() { echo "$*"; exit 1; }
setting() {
  found=
  while read -r key value || [ -n "$key" ]; do [ "$key" = "$2" ] && found=$found,$value; done < "$1"
  [ "$found" = ",$3" ] || wrong "$2 must be $3"
}
"""
_GONE = r"""gone() { ! grep -q "^$2 " "$1" || wrong "$1 still has $2"; }
"""
_PRINTS = r"""prints() {
  said=$(bash "$1" < "$2" 2>&1)
  [ "$said" = "$3" ] || wrong "bash $1 < $2 printed ${said:-nothing} and must print $3"
}
"""

Conf = dict[str, dict[str, int]]
"""File -> key -> value, in the order of the lines."""


class Setting(NamedTuple):
    """What a check wants of one file."""

    file: str
    key: str
    value: int


@dataclass(frozen=True)
class Task:
    """One folder and what is to be done in it."""

    level: int
    kind: str
    question: str
    files: Mapping[str, str]
    """Relative name -> text, the check's too."""
    settings: tuple[Setting, ...]
    """What the check wants of settings, in its order."""
    calls: tuple[str, ...]
    """A reference solution: what to run, in this order."""
    cases: tuple[Case, ...] = ()
    """Runs of the repaired script on data that no file of the folder shows; empty where nothing of the agent's is run."""

    @functools.cached_property
    def digest(self) -> str:
        """Of level, question and files: it decides the split, and lets a grader prove that it judges the same task."""
        return question_digest(json.dumps([self.level, self.kind, self.question, sorted(self.files.items())]))

    @property
    def given(self) -> tuple[str, ...]:
        """Names of files that a grader takes from here and never from the agent: the check and the data it reads."""
        return tuple(name for name in self.files if name == CHECK_FILE or name.startswith(f"{DATA}/"))


class TaskSource:
    """Draws tasks of one level by (seed, split). Raises RecipeError for options that are none."""

    def __init__(self, options: dict[str, Any]) -> None:
        unknown = sorted(set(options) - {"level"})
        if unknown:
            raise RecipeError(f"environment.options: {FAMILY} has no option {', '.join(unknown)}; there is: level (1 to 4)")
        self.level = options.get("level", 1)
        if type(self.level) is not int or self.level not in LEVELS:
            raise RecipeError(f"environment.options.level: {FAMILY} has the levels 1, 2, 3 and 4, not {self.level!r}")
        self.task = functools.lru_cache(maxsize=4096)(self._draw)

    def _draw(self, seed: int, split: Split) -> Task:
        """The task of a seed."""
        for tries in range(MAX_TRIES):
            task = make_task(random.Random(f"{FAMILY}/{self.level}/{seed}/{tries}"), self.level)
            if in_eval_split(task.digest) == (split == "eval"):
                return task
        raise EpisodeFailed(f"{FAMILY}: no task of split {split!r} in {MAX_TRIES} draws for seed {seed}", kind="environment")


def make_task(rng: random.Random, level: int) -> Task:
    """A task of a level, of a random kind."""
    kind = rng.choice(sorted(KINDS[level]))
    made = KINDS[level][kind](rng)
    settings = tuple(Setting(file, key, value) for file in sorted(made.wanted) for key, value in made.wanted[file].items())
    check = [f"setting {setting.file} {setting.key} {setting.value}" for setting in settings]
    lines = "".join(f"{line}\n" for line in (*made.before, *check, *made.checks, "echo ok"))
    return Task(
        level=level, kind=kind, question=made.question, settings=settings, calls=made.calls, cases=made.cases,
        files={**_texts(made.conf), **made.others, CHECK_FILE: _HEAD + made.helpers + lines},
    )  # fmt: skip


def find(key: str) -> str:
    """The call that names the file of a key, at level 1."""
    return f"grep -l {key} *.conf"


def change(setting: Setting) -> str:
    """The call that changes a setting. Words stand apart: to a model whose tokens are words it is seven of them."""
    return f'sed -i "/{setting.key}/c {setting.key} {setting.value} " {setting.file}'


@dataclass(frozen=True)
class _Made:
    """What a kind of task makes."""

    question: str
    conf: Conf
    """Settings as the agent finds them ..."""
    wanted: Conf
    """... and as the check wants them."""
    calls: tuple[str, ...]
    helpers: str = ""
    """Functions of the check, beside the common ones."""
    before: tuple[str, ...] = ()
    """Its lines in front of those about settings, which run nothing of the agent's ..."""
    checks: tuple[str, ...] = ()
    """... and behind them, where a script of the agent's may run."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Files that hold no settings."""
    cases: tuple[Case, ...] = ()


def _texts(conf: Conf) -> dict[str, str]:
    return {name: "".join(f"{key} {value}\n" for key, value in lines.items()) for name, lines in conf.items()}


def _project(rng: random.Random, files: int, folders: tuple[str, ...] = ()) -> Conf:
    """Files of two or three settings; every key once."""
    keys = iter(rng.sample(KEYS, 3 * files))
    names = [f"{rng.choice(folders)}/{name}" if folders else name for name in rng.sample(FILES, files)]
    return {name: {next(keys): rng.choice(VALUES) for _ in range(rng.randint(2, 3))} for name in names}


def _with(conf: Conf, *settings: Setting) -> Conf:
    """A copy with some settings changed, or added at the end of their file."""
    changed = {name: dict(lines) for name, lines in conf.items()}
    for setting in settings:
        changed.setdefault(setting.file, {})[setting.key] = setting.value
    return changed


def _new_setting(rng: random.Random, conf: Conf, but: str = "") -> Setting:
    """Another value for a setting of some file, `but` that one."""
    file = rng.choice([name for name in sorted(conf) if name != but])
    key = rng.choice(list(conf[file]))
    return Setting(file, key, rng.choice([value for value in VALUES if value != conf[file][key]]))


def _unused_key(rng: random.Random, conf: Conf) -> str:
    used = {key for lines in conf.values() for key in lines}
    return rng.choice([key for key in KEYS if key not in used])


# Level 1


def _told(rng: random.Random) -> _Made:
    conf = _project(rng, 3)
    new = _new_setting(rng, conf)
    return _Made(f"Set {new.key} to {new.value}", conf, _with(conf, new), (find(new.key), change(new), CHECK))


def _asked(rng: random.Random) -> _Made:
    conf = _project(rng, 3)
    new = _new_setting(rng, conf)
    return _Made(f"Make {CHECK_FILE} pass", conf, _with(conf, new), (CHECK, find(new.key), change(new), CHECK))


# Level 2


def _two_changes(rng: random.Random, conf: Conf) -> tuple[Conf, tuple[str, ...]]:
    """Two settings in two files, and the calls that put them right as the check names them."""
    first = _new_setting(rng, conf)
    both = sorted((first, _new_setting(rng, conf, but=first.file)))
    calls = [call for new in both for call in (f"grep -rl {new.key} conf", change(new), CHECK)]
    return _with(conf, *both), (CHECK, *calls)


def _two(rng: random.Random) -> _Made:
    conf = _project(rng, 6, FOLDERS)
    wanted, calls = _two_changes(rng, conf)
    return _Made(f"Make {CHECK_FILE} pass", conf, wanted, calls)


def _missing(rng: random.Random) -> _Made:
    conf = _project(rng, 6, FOLDERS)
    new = Setting(rng.choice(sorted(conf)), _unused_key(rng, conf), rng.choice(VALUES))
    question = f"A setting is missing in {new.file}. Make {CHECK_FILE} pass"
    return _Made(question, conf, _with(conf, new), (CHECK, f"echo {new.key} {new.value} >> {new.file}", CHECK))


def _create(rng: random.Random) -> _Made:
    wanted = _project(rng, 6, FOLDERS)
    file = rng.choice(sorted(wanted))
    lines = [f"{key} {value}" for key, value in wanted[file].items()]
    folder = file.rpartition("/")[0]
    question = f"Write the file {file} with these lines: {', '.join(lines)}"
    call = rf"mkdir -p {folder} && printf '%s\n' {' '.join(map(shlex.quote, lines))} > {file}"
    return _Made(question, {name: conf for name, conf in wanted.items() if name != file}, wanted, (call, CHECK))


def _rename(rng: random.Random) -> _Made:
    conf = _project(rng, 6, FOLDERS)
    old = _unused_key(rng, conf)
    holders = sorted(rng.sample(sorted(conf), 2))
    conf = _with(conf, *(Setting(file, old, rng.choice(VALUES)) for file in holders))
    new = _unused_key(rng, conf)
    wanted = {name: {new if key == old else key: value for key, value in lines.items()} for name, lines in conf.items()}
    return _Made(
        f"The setting {old} is called {new} now. Rename it in every file; its values stay", conf, wanted,
        (f"grep -rl {old} conf", f'sed -i "s/^{old} /{new} /" {" ".join(holders)}', CHECK),
        helpers=_GONE, before=tuple(f"gone {file} {old}" for file in holders),
    )  # fmt: skip


# Levels 3 and 4


def _tested(repair: Repair) -> str:
    """The line of a check that runs a script on its data."""
    return f"prints {repair.script.name} {repair.data} {shlex.quote(repair.expected)}"


def _repair_calls(repair: Repair) -> tuple[str, ...]:
    name = repair.script.name
    return (f"cat {name}", f"cat > {name} <<'EOF'\n{repair.script.text}EOF", CHECK)


def _script(rng: random.Random, name: str) -> _Made:
    repair = draw_repair(rng, name)
    question = f"{repair.script.name} {repair.script.about}. Its test fails: make {CHECK_FILE} pass by repairing the script"
    return _Made(
        question, {}, {}, (CHECK, *_repair_calls(repair)), helpers=_PRINTS, checks=(_tested(repair),), others=repair.files,
        cases=repair.cases,
    )  # fmt: skip


def _project_with(rng: random.Random, name: str) -> _Made:
    conf, repair = _project(rng, 4, FOLDERS), draw_repair(rng, name)
    wanted, calls = _two_changes(rng, conf)
    run = f"bash {repair.script.name} < {repair.data}"
    holds = f'[ "$report" = {shlex.quote(repair.expected)} ] || wrong {REPORT} must hold what {shlex.quote(run)} prints'
    return _Made(
        f"Two settings and {repair.script.name} are wrong, and a report is missing. {repair.script.name} "
        f"{repair.script.about}. Make {CHECK_FILE} pass",
        conf, wanted, (*calls, *_repair_calls(repair), f"mkdir -p out && {run} > {REPORT}", CHECK),
        # The report is read before a script runs that could write it.
        helpers=_PRINTS, before=(f"report=$(cat {REPORT} 2>&1)",), checks=(_tested(repair), holds), others=repair.files,
        cases=repair.cases,
    )  # fmt: skip


KINDS: dict[int, dict[str, Callable[[random.Random], _Made]]] = {
    1: {"told": _told, "asked": _asked},
    2: {"two": _two, "missing": _missing, "create": _create, "rename": _rename},
    3: {name: functools.partial(_script, name=name) for name in SCRIPTS},
    4: {name: functools.partial(_project_with, name=name) for name in SCRIPTS},
}
