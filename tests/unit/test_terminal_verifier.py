"""The judge of terminal tasks runs its own check on the agent's folder: what the folder does to be judged well is in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cluster.profile import ClusterProfile
from cluster.sandboxes import open_sandbox
from miles_core.environments import terminal as environment
from miles_core.environments.sandbox import Result, Sandbox, SandboxBroken
from miles_core.environments.sandbox_kind import candidates
from miles_core.environments.terminal import TerminalEnvironment
from miles_core.environments.terminal_task import Task, TaskSource
from miles_core.errors import RecipeError
from miles_core.grading import terminal
from miles_core.grading.rules import make_verifier
from miles_core.grading.terminal import TerminalVerifier, check_deadline, passes
from miles_core.recipe import EnvironmentSpec, load_recipe
from tasks.prepare import ensure_base_model
from tests.unit.terminal_world import boxes, call, environment_of, first_of_each_kind, play, spec_of


def facts_of(task: Task, files: dict[str, str], split: str = "train") -> dict[str, Any]:
    return {"task_md5": task.digest, "split": split, "final_answer": "done", "files": files, "files_fault": None}


def solved(level: int, kind: str) -> tuple[Task, int, dict[str, str]]:
    """A task, its seed and a folder that passes but for its report."""
    seed = first_of_each_kind(level)[kind]
    task = TaskSource({"level": level}).task(seed, "train")
    return task, seed, repaired(task)


def repaired(task: Task) -> dict[str, str]:
    """Its folder with settings and scripts put right, without a shell."""
    files = dict(task.files)
    for setting in task.settings:
        lines = [line for line in files[setting.file].splitlines() if line.split()[0] != setting.key]
        files[setting.file] = "".join(f"{line}\n" for line in (*lines, f"{setting.key} {setting.value}"))
    for line in task.calls:
        name, _, rest = line.partition(" <<'EOF'\n")
        if rest:
            files[name.removeprefix("cat > ")] = rest.removesuffix("EOF")
    return files


@pytest.mark.parametrize(("level", "kind"), [(1, "asked"), (3, "total")])
def test_a_folder_that_is_right_passes_however_it_came_about(level: int, kind: str) -> None:
    task, seed, files = solved(level, kind)
    assert make_verifier(spec_of(level)).value(seed, facts_of(task, files | {"notes.txt": "mine"})) == 1.0
    assert boxes() == []


def test_the_agents_own_check_is_never_asked() -> None:
    task, seed, files = solved(1, "asked")
    lazy = dict(task.files) | {"check.sh": "echo ok\n"}
    assert make_verifier(spec_of(1)).value(seed, facts_of(task, lazy)) == 0.0
    for name in ("check.sh", "check.sh/inside.txt"):
        gone = {other: text for other, text in files.items() if other != "check.sh"} | {name: "exit 1\n"}
        assert make_verifier(spec_of(1)).value(seed, facts_of(task, gone)) == 1.0, name
    facts = environment_facts(seed, "printf 'echo ok\\n' > check.sh", "bash check.sh")
    assert facts["tool_calls"][1]["output"] == "ok\n" and make_verifier(spec_of(1)).value(seed, facts) == 0.0


def environment_facts(seed: int, *lines: str) -> dict[str, Any]:
    episode = environment_of(1).episode(seed, "train")
    play(episode, *map(call, lines), "done")
    return episode.facts()


def test_other_settings_must_stay_and_a_setting_must_be_there_once() -> None:
    task, seed, files = solved(1, "told")
    verifier = make_verifier(spec_of(1))
    name = next(iter(files))
    assert verifier.value(seed, facts_of(task, files | {name: files[name].rstrip("\n")})) == 1.0
    for text in ("", files[name] + files[name], files[name].replace("\n", " x\n"), files[name].replace(" ", "")):
        assert verifier.value(seed, facts_of(task, files | {name: text})) == 0.0, text
    del files[name]
    assert verifier.value(seed, facts_of(task, files)) == 0.0


def script_of(task: Task) -> str:
    return next(name for name in task.files if name.endswith(".sh") and name != "check.sh")


TRICKS = {
    "says what the test wants": "echo {expected}",
    "rewrites the check while it runs": "echo 'exit 0' > check.sh; echo 'exit 0' >> check.sh; echo {expected}",
    "reads what is wanted from the check": "grep -o 'prints .*' check.sh | cut -d' ' -f4 | tr -d \"'\"",
    "reads what is wanted from whoever runs it": "tr '\\0' '\\n' < /proc/$PPID/cmdline | grep -o 'prints .*' | cut -d' ' -f4",
    "changes the data": "echo acorn {expected} > data/*.txt; cat data/*.txt | cut -d' ' -f2",
    "ends whoever runs it": "kill -9 $PPID",
    "fills the folder": "while :; do head -c 60000 /dev/zero > $RANDOM; done",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_a_script_that_only_looks_repaired_earns_nothing(trick: str) -> None:
    task, seed, files = solved(3, "total")
    expected = task.files["check.sh"].split("prints total.sh ")[1].split()[1]
    files[script_of(task)] = TRICKS[trick].format(expected=expected) + "\n"
    assert make_verifier(spec_of(3)).value(seed, facts_of(task, files)) == 0.0
    assert boxes() == []


def test_a_script_that_hangs_earns_nothing_and_a_check_that_is_stopped_without_one_gets_no_grade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "DEADLINE_S", 1.0)
    task, seed, files = solved(3, "total")
    for endless in ("sleep 600", "while :; do echo 1; done"):
        assert not passes(task, files | {"total.sh": f"{endless}\n"})
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: Result(124, "", False, True, due, "time"))
    assert not passes(task, files)
    plain, seed, files = solved(1, "told")
    with pytest.raises(SandboxBroken, match="was stopped"):
        make_verifier(spec_of(1)).value(seed, facts_of(plain, files))
    assert boxes() == []


def test_the_given_data_are_the_tasks_own() -> None:
    task, seed, files = solved(4, "largest")
    verifier = make_verifier(spec_of(4))
    (data,) = [name for name in task.files if name.startswith("data/")]
    report = max((line.split() for line in task.files[data].splitlines()), key=lambda row: int(row[1]))[0]
    assert verifier.value(seed, facts_of(task, files)) == 0.0
    for changed in ({}, {data: "raven 99\n"}):
        assert verifier.value(seed, facts_of(task, files | changed | {"out/report.txt": report})) == 1.0
    without = {name: text for name, text in files.items() if name != data} | {"data": "a file", "out/report.txt": report}
    assert verifier.value(seed, facts_of(task, without)) == 1.0
    assert verifier.value(seed, facts_of(task, files | {"out/report.txt": "raven"})) == float(report == "raven")


def test_a_folder_is_judged_once_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    real = terminal.passes
    monkeypatch.setattr(terminal, "passes", lambda task, files: (judged.append(task.digest), real(task, files))[1])
    task, seed, files = solved(1, "told")
    verifier = make_verifier(spec_of(1))
    assert [verifier.value(seed, facts_of(task, files)) for _ in range(3)] == [1.0] * 3 and len(judged) == 1
    assert verifier.value(seed, facts_of(task, dict(task.files))) == 0.0 and len(judged) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task_md5": "x"}, "same recipe and code"),
        ({"split": "eval"}, "same recipe and code"),
        ({"files": None}, "have an answer and no files"),
        ({"files": ["a"]}, "have an answer and no files"),
        ({"files": {"a": None}}, "have an answer and no files"),
        ({"files": {"../a": "x"}}, "lead out of the folder"),
        ({"files": {"/tmp/a": "x"}}, "lead out of the folder"),
        ({"files": {"a/../../b": "x"}}, "lead out of the folder"),
        ({"files": {"": "x"}}, "lead out of the folder"),
    ],
)
def test_facts_of_another_task_or_of_no_episode_get_no_grade(changes: dict[str, Any], says: str) -> None:
    task, seed, files = solved(1, "told")
    with pytest.raises(ValueError, match=says):
        make_verifier(spec_of(1)).value(seed, facts_of(task, files) | changes)


def test_the_held_out_split_is_judged_on_its_own_task() -> None:
    task = TaskSource({}).task(2, "eval")
    for files, value in ((repaired(task), 1.0), (dict(task.files), 0.0)):
        assert make_verifier(spec_of(1)).value(2, facts_of(task, files, split="eval")) == value


@pytest.mark.parametrize("make", [TerminalVerifier, TerminalEnvironment])
def test_nothing_is_run_where_the_sandbox_is_open(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[EnvironmentSpec], object]
) -> None:
    kinds = {(kind.name, kind.is_closed): kind for kind in candidates()}
    assert {name for name, is_closed in kinds if is_closed} == {"bubblewrap"}
    for (name, is_closed), kind in kinds.items():
        monkeypatch.setattr(environment, "sandbox_kind", lambda kind=kind: kind)
        if is_closed:
            make(spec_of(1))
        else:
            with pytest.raises(RecipeError, match=f"{name}.*Install bubblewrap"):
                make(spec_of(1))


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", **fields})


def test_an_open_sandbox_is_told_before_anything_is_submitted_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.is_closed: kind for kind in candidates()}
    for is_closed, kind in kinds.items():
        monkeypatch.setattr(environment, "sandbox_kind", lambda kind=kind: kind)
        for here in (profile(kind="local"), profile(kind="slurm", slurm={"devslurm": "/tmp/devslurm"})):
            fault = open_sandbox(load_recipe("terminal"), here)
            assert fault is None if is_closed else "Install bubblewrap" in str(fault)
        assert open_sandbox(load_recipe("terminal"), profile(kind="slurm")) is None, "the nodes of a cluster are other machines"
        assert open_sandbox(load_recipe("shell_puzzle"), profile(kind="local")) is None


def test_a_grader_that_has_less_time_than_a_folder_takes_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"grader.deadline_s=7: .*set it to 8 or more"):
        ensure_base_model(load_recipe("terminal", ("grader.deadline_s=7",)))
    check_deadline(8.0)


def test_a_folder_as_full_as_an_agents_may_be_is_judged() -> None:
    """Without its check, which the judge adds."""
    task, seed, files = solved(1, "told")
    del files["check.sh"]
    lines = (*task.calls, "rm check.sh; mkdir d; for n in {1..100}; do mkdir d/$n; done", "ls d | wc -l")
    episode = environment_of(1, max_turns=20).episode(seed, "train")
    play(episode, *map(call, lines), "done")
    assert episode.calls[-1].output == "100\n" and make_verifier(spec_of(1)).value(seed, episode.facts()) == 1.0
    filled = files | {f"d{number}/f": "" for number in range(63)}
    assert passes(task, filled)
