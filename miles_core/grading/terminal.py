"""Judges a terminal task: makes the folder again in a sandbox and runs its checks there.

The reward is 1 for a folder that passes everything and else 0: most of a folder is right before anything was done, so a share
would pay for idleness. What judges is never the agent's: the check is the task's own text, given to bash as a command, so
that no script of the folder can rewrite it while it is read; the data it reads are the task's; and a script that was to be
repaired is run on data that no file shows, with what it must print known here and not in the sandbox.

Invariants: nothing of the agent's runs outside the sandbox, and where that holds too little nothing is judged (RecipeError);
one folder of one task is judged once, and what was found is remembered. Failure: a folder that was not to be judged, and a
script that passes a limit of the sandbox, score 0; a sandbox that breaks, or a check that runs nothing of the agent's and is
stopped, is the machine's fault: "no grade".
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from miles_core.environments.sandbox import Result, Sandbox, SandboxBroken, sweep
from miles_core.environments.terminal import LIMITS, check_sandbox
from miles_core.environments.terminal_task import CHECK_FILE, FAMILY, Task, TaskSource
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

DEADLINE_S = 4.0
"""All checks of one folder together."""
TRIES = 2
"""A script that runs out of time is judged once more: the machine may have stood still."""
ROOM = replace(LIMITS, files=2 * LIMITS.files, disk_bytes=2 * LIMITS.disk_bytes)
"""For an agent's folder that is full, and the task's own files beside it."""
REMEMBERED = 16384
"""Folders."""

log = logging.getLogger("miles")


def check_deadline(deadline_s: float) -> None:
    """Raises RecipeError where a folder that is slow to judge would be given no grade instead of none of its reward."""
    if deadline_s < TRIES * DEADLINE_S:
        raise RecipeError(
            f"grader.deadline_s={deadline_s:g}: a folder of {FAMILY} is judged up to {TRIES} times, {DEADLINE_S:g} s each; set "
            f"it to {TRIES * DEADLINE_S:g} or more"
        )


class TerminalVerifier:
    """See module. Raises RecipeError for options that are none."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        check_sandbox()
        self._source = TaskSource(spec.options)
        self.source = f"{FAMILY}/level{self._source.level}"
        self._passed: OrderedDict[str, bool] = OrderedDict()
        for name in sweep():
            log.info("removed the sandbox directory of a dead process: %s", name)

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        """The reward, 0 or 1. Raises ValueError when the facts are of another task or of none, and SandboxBroken."""
        if facts.get("final_answer") is None:
            return 0.0
        task = self._source.task(task_seed, facts.get("split", "train"))
        if facts.get("task_md5") != task.digest:
            raise ValueError(
                f"task seed {task_seed}: the facts say task_md5={facts.get('task_md5')!r} but this grader makes "
                f"{task.digest!r}; rollout and grader must run the same recipe and code ({self.source})"
            )
        if facts.get("files_fault") is not None:
            return 0.0
        files = _checked(facts.get("files"), task_seed)
        key = hashlib.sha256(json.dumps([task.digest, sorted(files.items())]).encode()).hexdigest()
        if key not in self._passed:
            self._passed[key] = passes(task, files)
            if len(self._passed) > REMEMBERED:
                self._passed.popitem(last=False)
        return float(self._passed[key])


def passes(task: Task, files: Mapping[str, str]) -> bool:
    """Whether a folder is as the task wants it. Raises SandboxBroken."""
    tries = (_judge(task, files) for _ in range(TRIES))
    return next((passed for passed in tries if passed is not None), False)


def _judge(task: Task, files: Mapping[str, str]) -> bool | None:
    """None: out of time."""
    due = time.monotonic() + DEADLINE_S
    box = Sandbox("grader", ROOM)
    try:
        box.fill(_rebuilt(task, files))
        check = _run(box, task, task.files[CHECK_FILE], due)
        if check.stopped or check.exit_code:
            return None if check.stopped == "time" else False
        for case in task.cases:
            ran = _run(box, task, case.command, due)
            if ran.stopped or ran.output.rstrip("\n") != case.prints:
                return None if ran.stopped == "time" else False
        return True
    finally:
        box.close()


def _run(box: Sandbox, task: Task, command: str, due: float) -> Result:
    """Raises SandboxBroken, also for a check that nothing of the agent's could have stopped."""
    result = box.run(command, max(0.1, due - time.monotonic()))
    if result.stopped and not task.cases:
        raise SandboxBroken(f"the check of a {FAMILY} task was stopped ({result.stopped}) after {result.seconds:.1f} s")
    return result


def _rebuilt(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """The agent's folder with the task's own check and data, and nothing of the agent's in their place."""
    given = {name: task.files[name] for name in task.given}
    return {name: text for name, text in files.items() if not any(_in_the_way(name, own) for own in given)} | given


def _in_the_way(one: str, other: str) -> bool:
    """Whether two names cannot both be files, or are the same."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _checked(files: Any, task_seed: int) -> dict[str, str]:
    """Texts by names inside the folder. Raises ValueError for anything else, which no episode reports."""
    if isinstance(files, dict) and all(isinstance(name, str) and isinstance(text, str) for name, text in files.items()):
        outside = [name for name in files if not name or name.startswith("/") or ".." in PurePosixPath(name).parts]
        if not outside:
            return files
        raise ValueError(f"task seed {task_seed}: the facts' files have names that lead out of the folder: {outside[:3]}")
    raise ValueError(f"task seed {task_seed}: the facts have an answer and no files: {str(files)[:100]!r}")
