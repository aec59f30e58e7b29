"""Episodes of terminal tasks: any line runs, only plain ones are remembered, and what an episode leaves is bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from miles_core.environments.base import EpisodeFailed
from miles_core.environments.sandbox import Result, Sandbox
from miles_core.environments.shell import FACT_CHARACTERS
from miles_core.environments.terminal import (
    MOST_BYTES,
    MOST_FILES,
    MOST_NAME_BYTES,
    PLAIN_CHANGE,
    PLAIN_READ,
    TerminalEpisode,
    judgeable,
)
from miles_core.environments.terminal_task import CHECK, TaskSource, change, find
from miles_core.grading.rules import make_verifier
from tests.unit.terminal_world import boxes, call, environment_of, first_of_each_kind, play, spec_of


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every line that reached a shell."""
    lines: list[str] = []
    real = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: (lines.append(line), real(self, line, due))[1])
    return lines


def said(episode: TerminalEpisode, *lines: str) -> list[str]:
    """What the tool says to some lines; the answer is given and the episode closed."""
    return [messages[0].content for messages in play(episode, *map(call, lines), "done")[:-1]]


def test_what_is_plain_runs_once_for_a_task_and_the_same_changes(ran: list[str]) -> None:
    environment, verifier = environment_of(1), make_verifier(spec_of(1))
    seed = first_of_each_kind(1)["asked"]
    task = environment.episode(seed, "train").task
    first, second = environment.episode(seed, "train"), environment.episode(seed, "train")
    assert said(first, *task.calls) == said(second, *task.calls) and ran == list(task.calls)
    assert first.facts() == second.facts()
    wrong = next(change(new._replace(value=60)) for new in task.settings if change(new) in task.calls)
    third = environment.episode(seed, "train")
    complaint = first.calls[0].told
    assert complaint.endswith("exit 1") and said(third, CHECK, wrong, CHECK) == [complaint, "", complaint]
    assert ran[len(task.calls) :] == [wrong, CHECK] and verifier.value(seed, third.facts()) == 0.0
    assert boxes() == []


def test_any_other_line_runs_for_real_on_what_the_plain_changes_made(ran: list[str]) -> None:
    environment = environment_of(1)
    seed = first_of_each_kind(1)["asked"]
    task = environment.episode(seed, "train").task
    assert said(environment.episode(seed, "train"), *task.calls)[-1] == "ok"
    del ran[:]
    edit = task.calls[2]
    episode = environment.episode(seed, "train")
    there = said(episode, edit, "cat *.conf | wc -l; echo $RANDOM >> noise.txt", "ls", CHECK, "cat noise.txt")
    assert ran == [edit, "cat *.conf | wc -l; echo $RANDOM >> noise.txt", "ls", CHECK, "cat noise.txt"]
    assert "noise.txt" in there[2].split() and there[3] == "ok"
    assert episode.facts()["files"]["noise.txt"].strip() == there[4]


def test_plain_lines_are_those_of_the_reference_solution_and_change_settings_alone() -> None:
    source = TaskSource({})
    for seed in range(20):
        for line in source.task(seed, "train").calls:
            assert (PLAIN_READ.fullmatch(line) is None) == line.startswith("sed") == (PLAIN_CHANGE.fullmatch(line) is not None)
    for line in (
        "bash check.sh; id", "bash  check.sh", "cat $(id)", "ls -la", "ls\n", "cat a.conf b.conf", "cat /etc/passwd",
        f"{find('port')} x", 'sed -i "/port/c port $RANDOM " a.conf', 'sed -i "/port/c depth 4 " a.conf',
        'sed -i "/port/c port 4 " check.sh', 'sed -i "/port/c port 4 " ../a.conf', 'sed -i "/port/c port 4 " a.conf; id',
        'sed -i "/port/e id " a.conf',
    ):  # fmt: skip
        assert PLAIN_READ.fullmatch(line) is None and PLAIN_CHANGE.fullmatch(line) is None, line


def test_of_many_that_ask_at_once_one_runs_it_and_the_next_if_that_one_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    begun, real = threading.Event(), Sandbox.run

    def slow(self: Sandbox, line: str, due: float) -> Result:
        ran.append(line)
        begun.set()
        return real(self, f"sleep 0.3; {line}", due)

    monkeypatch.setattr(Sandbox, "run", slow)
    environment = environment_of(1)

    async def run(gives_up: bool) -> list[Any]:
        begun.clear()
        episodes = [environment.episode(5 + gives_up, "train") for _ in range(5)]
        asked = [asyncio.create_task(episode.respond(call("ls"))) for episode in episodes]
        await asyncio.to_thread(begun.wait, 60)
        if gives_up:
            asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(episode.close() for episode in episodes))
        return answers[1:]

    for gives_up, runs in ((False, 1), (True, 3)):
        answers = asyncio.run(run(gives_up))
        assert len(ran) == runs and len(set(answers)) == 1 and len(answers[0][0].content.split()) == 4
    assert boxes() == []


@pytest.mark.parametrize(
    ("line", "stopped"),
    [
        ("sleep 600", "time"),
        ("while :; do echo no end; done", "output"),
        ("for n in {1..200}; do : > $n; done", "disk"),
    ],
)
def test_a_line_that_passes_a_limit_is_told_so_and_costs_no_more(line: str, stopped: str) -> None:
    environment, verifier = environment_of(1, tool_deadline_s=2 if stopped == "time" else 120), make_verifier(spec_of(1))
    seed = first_of_each_kind(1)["told"]
    episode = environment.episode(seed, "train")
    (told,) = said(episode, line)
    facts = episode.facts()
    assert told.endswith(f"stopped: {stopped}") and facts["tool_calls"][0]["stopped"] == stopped
    assert len(told) < 500 and len(facts["tool_calls"][0]["output"]) <= FACT_CHARACTERS
    assert (facts["files_fault"] is not None) == (stopped == "disk") and boxes() == []
    assert verifier.value(seed, facts) == 0.0


def test_a_second_line_that_hangs_ends_the_episode_without_an_answer() -> None:
    seed = first_of_each_kind(1)["told"]
    episode = environment_of(1, tool_deadline_s=1).episode(seed, "train")
    first, second = play(episode, call("sleep 600"), call("sleep 601"))
    assert first[0].content.endswith("stopped: time") and second == () and boxes() == []
    assert make_verifier(spec_of(1)).value(seed, episode.facts()) == 0.0


def test_a_folder_that_a_line_shut_is_open_to_the_next() -> None:
    assert said(environment_of(1).episode(3, "train"), "chmod 000 .", "echo on > x; cat x")[1] == "on"


@pytest.mark.parametrize("when", ["asked", "caught up"])
def test_a_plain_line_that_is_stopped_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    environment = environment_of(1)
    seed = first_of_each_kind(1)["told"]
    lines = environment.episode(seed, "train").task.calls[:2]
    if when == "caught up":
        said(environment.episode(seed, "train"), *lines)
        lines = (*lines, "pwd")
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: Result(124, "", False, True, due, "time"))
    with pytest.raises(EpisodeFailed, match=r"was stopped \(time\)") as failure:
        play(environment.episode(seed, "train"), *map(call, lines))
    assert failure.value.kind == "infrastructure" and boxes() == []


def test_the_turns_end_although_the_model_goes_on_calling() -> None:
    episode = environment_of(1, max_turns=2).episode(3, "train")
    assert play(episode, call("ls"), call("ls"))[-1] == ()
    facts = episode.facts()
    assert facts["final_answer"] is None and facts["files"] is None and facts["files_fault"] is None
    assert make_verifier(spec_of(1)).value(3, facts) == 0.0


def test_the_folder_is_told_as_it_is_in_the_end_and_survives_json() -> None:
    lines = (
        "mkdir -p a/b && printf 'x\\0\\r\\n\\xc3\\xbc' > 'a/b/c d.txt'",
        "rm *.conf",
        "cat > here.txt <<'EOF'\n$HOME\n\tEOF\nEOF",
    )
    episode = environment_of(1).episode(3, "train")
    said(episode, *lines)
    files = json.loads(json.dumps(episode.facts()))["files"]
    assert files == {"a/b/c d.txt": "x\0\r\nü", "here.txt": "$HOME\n\tEOF\n", "check.sh": episode.task.files["check.sh"]}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("for n in {1..40}; do : > $n; done", f"44 files, more than {MOST_FILES}"),
        (f"head -c {MOST_BYTES} /dev/zero > big.txt", f"more than {MOST_BYTES}"),
        ("ln -s /etc/passwd link", "'link' is no regular file"),
        ("mkfifo pipe", "'pipe' is no regular file"),
        ("printf '\\xff' > bytes.txt", "'bytes.txt' is no text in UTF-8"),
        (": > $'\\xff'", r"'\udcff' is no text in UTF-8"),
        (f"mkdir -p {'d' * 150}/{'e' * 60} && : > {'d' * 150}/{'e' * 60}/f", f"more than {MOST_NAME_BYTES}"),
    ],
)
def test_a_folder_that_is_no_small_project_is_a_fault_with_a_name_and_scores_nothing(line: str, fault: str) -> None:
    environment, verifier = environment_of(1), make_verifier(spec_of(1))
    seed = first_of_each_kind(1)["told"]
    episode = environment.episode(seed, "train")
    said(episode, *episode.task.calls, line)
    facts = json.loads(json.dumps(episode.facts()))
    assert facts["files"] is None and fault in facts["files_fault"], facts["files_fault"]
    assert verifier.value(seed, facts) == 0.0


def test_the_bounds_themselves_are_allowed() -> None:
    assert judgeable({f"{n:0>2}": b"" for n in range(MOST_FILES)}).fault is None
    assert judgeable({"x": b"a" * (MOST_BYTES - 1)}).fault is None and judgeable({"x": b"a" * MOST_BYTES}).fault is not None
    assert judgeable({"x" * MOST_NAME_BYTES: b""}).fault is None


def test_a_broken_sandbox_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    episode = environment_of(1).episode(1, "train")
    monkeypatch.setattr("miles_core.environments.sandbox.sandbox_root", lambda: tmp_path / "gone")
    with pytest.raises(EpisodeFailed, match="no directory for a sandbox") as failure:
        play(episode, call("pwd"))
    assert failure.value.kind == "infrastructure"


def test_episodes_leave_no_directory_also_when_they_are_given_up() -> None:
    environment = environment_of(1)

    async def run() -> None:
        episodes = [environment.episode(seed, "train") for seed in range(6)]
        calls = [asyncio.create_task(episode.respond(call("pwd"))) for episode in episodes]
        await asyncio.sleep(0.005)
        for task in calls[::2]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(episode.close() for episode in episodes))

    asyncio.run(run())
    assert boxes() == []


def test_the_instructions_are_for_models_that_no_warm_up_taught() -> None:
    assert "16 turns" in environment_of(2).episode(0, "train").opening()[0].content
    assert environment_of(1).episode(0, "train").opening()[0].content == TaskSource({}).task(0, "train").question
