"""Puzzles are reproducible and solvable through the real tool at every level; the verifier knows the truth by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from miles_core.environments import shell
from miles_core.environments.base import EpisodeFailed, Message
from miles_core.environments.sandbox import PREFIX, Result, Sandbox
from miles_core.environments.sandbox_kind import sandbox_root
from miles_core.environments.shell import REFUSED, ShellEpisode, ShellPuzzleEnvironment
from miles_core.environments.shell_commands import LEVELS, clean, edits, reads
from miles_core.environments.shell_puzzle import FOLDERS, NAMES, SHAPES, WORDS, PuzzleSource
from miles_core.errors import RecipeError
from miles_core.grading.rules import make_verifier
from miles_core.recipe import EnvironmentSpec


def spec_of(level: int, **changes: Any) -> EnvironmentSpec:
    return EnvironmentSpec(
        **{"family": "shell_puzzle", "options": {"level": level}, "tool": "shell", "max_turns": 4, "tool_deadline_s": 60}
        | changes
    )


def environment_of(level: int, **changes: Any) -> ShellPuzzleEnvironment:
    return ShellPuzzleEnvironment(spec_of(level, **changes), f"test.level{level}")


def play(episode: ShellEpisode, *turns: str) -> list[tuple[Message, ...]]:
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
    source, found = PuzzleSource({"level": level}), {}
    for seed in range(200):
        found.setdefault(source.puzzle(seed, "train").kind, seed)
    assert set(found) == set(SHAPES[level].kinds)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_puzzle_is_a_function_of_seed_level_and_split(level: int) -> None:
    one, other = PuzzleSource({"level": level}), PuzzleSource({"level": level})
    first = [one.puzzle(seed, split) for seed in range(40) for split in ("train", "eval")]
    assert [other.puzzle(seed, split) for seed in range(40) for split in ("train", "eval")] == first
    assert all(len(puzzle.calls) <= 3 and len(puzzle.files) == SHAPES[level].files for puzzle in first)
    assert {puzzle.digest for puzzle in first[::2]}.isdisjoint(puzzle.digest for puzzle in first[1::2])


def test_a_puzzle_stays_what_it_was() -> None:
    """Recorded figures and cached base models are of these."""
    assert [PuzzleSource({"level": level}).puzzle(7, "eval").digest[:8] for level in LEVELS] == DIGESTS


DIGESTS = ["b55d99fe", "57e362bc", "78e651c8", "d00f3d79"]


def test_no_word_is_part_of_another() -> None:
    """A search for one word must not find another."""
    names = [name.removesuffix(".txt") for name in NAMES]
    everything = [*WORDS, *names, *FOLDERS]
    assert len(set(everything)) == len(everything)
    assert not [(one, other) for one in everything for other in everything if one != other and one in other]
    assert max(shape.files * shape.lines[1] for shape in SHAPES.values()) < len(WORDS)


@pytest.mark.parametrize("level", LEVELS)
def test_the_reference_solution_of_every_kind_earns_the_reward_through_the_real_tool(level: int) -> None:
    environment, verifier = environment_of(level), make_verifier(spec_of(level))
    for kind, seed in first_of_each_kind(level).items():
        episode = environment.episode(seed, "train")
        puzzle = episode.puzzle
        answers = play(episode, *map(call, puzzle.calls), f" {puzzle.answer}\n")
        facts = episode.facts()
        assert (facts["kind"], facts["turns"], facts["final_answer"]) == (kind, len(puzzle.calls) + 1, puzzle.answer)
        assert [ran["exit_code"] for ran in facts["tool_calls"]] == [0] * len(puzzle.calls), facts
        if level < 4:
            assert puzzle.answer in answers[-2][0].content
        assert verifier.value(seed, facts) == 1.0, facts
        assert verifier.value(seed, facts | {"final_answer": "no"}) == 0.0
        assert verifier.value(seed, facts | {"final_answer": None}) == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_an_answer_without_the_work_earns_nothing(level: int) -> None:
    environment, verifier = environment_of(level), make_verifier(spec_of(level))
    asking = [seed for seed in first_of_each_kind(level).values()]
    for seed in asking:
        episode = environment.episode(seed, "train")
        play(episode, "done" if level == 4 else "unknown")
        assert verifier.value(seed, episode.facts()) == 0.0


def test_a_change_too_many_costs_the_reward() -> None:
    environment, verifier = environment_of(4), make_verifier(spec_of(4))
    seed = first_of_each_kind(4)["rename"]
    episode = environment.episode(seed, "train")
    other = next(name for name in sorted(episode.puzzle.files_after) if name in episode.puzzle.files)
    play(episode, call(episode.puzzle.calls[1]), call(f"rm {other}"), "done")
    assert verifier.value(seed, episode.facts()) == 0.0
    again = environment.episode(seed, "train")
    play(again, call(again.puzzle.calls[1]), call("cat *"), "done")
    assert verifier.value(seed, again.facts()) == 1.0


def test_the_held_out_split_is_judged_on_its_own_puzzle() -> None:
    environment, verifier = environment_of(1), make_verifier(spec_of(1))
    for seed in range(4):
        episode = environment.episode(seed, "eval")
        play(episode, episode.puzzle.answer)
        facts = episode.facts()
        assert verifier.value(seed, facts) == 1.0
        with pytest.raises(ValueError, match="same recipe and code"):
            verifier.value(seed, facts | {"split": "train"})
    with pytest.raises(ValueError, match="same recipe and code"):
        make_verifier(spec_of(2)).value(0, environment.episode(0, "eval").facts() | {"final_answer": "1"})


def test_a_failed_call_says_so_and_the_facts_keep_it() -> None:
    episode = environment_of(1).episode(3, "train")
    answers = play(episode, call("cat nothing.txt"), call("grep  -l nosuchword *"), call("rm alpha.txt"), "4")
    said = [messages[0].content for messages in answers[:3]]
    assert said == ["cat: nothing.txt: No such file or directory exit 1", "exit 1", REFUSED] and answers[3] == ()
    assert [ran["exit_code"] for ran in episode.facts()["tool_calls"]] == [1, 1, None]
    assert episode.facts()["tool_calls"][1]["command"] == "grep -l nosuchword *"


def test_the_turns_end_although_the_model_goes_on_calling() -> None:
    episode = environment_of(1, max_turns=2).episode(3, "train")
    assert play(episode, call("ls"), call("ls"))[-1] == ()
    assert episode.facts()["final_answer"] is None and episode.facts()["turns"] == 2


def test_a_long_output_is_shortened_for_the_model_and_digested_for_the_facts() -> None:
    environment = environment_of(3)
    episode = environment.episode(first_of_each_kind(3)["path"], "train")
    longest = max(episode.puzzle.files, key=lambda name: len(episode.puzzle.files[name]))
    shown = play(episode, call("find ."), call("cat" + f" {longest}" * 8))[1][0].content
    assert len(shown) <= shell.SHOWN_CHARACTERS + 4 and shown.endswith(" ...")
    fact = episode.facts()["tool_calls"][1]
    assert len(fact["output"]) <= shell.FACT_CHARACTERS and len(fact["output_md5"]) == 32


def boxes() -> list[str]:
    """Sandbox directories of this process."""
    return [name for name in os.listdir(sandbox_root()) if name.startswith(PREFIX) and f".{os.getpid()}." in name]


def test_what_reads_is_run_once_a_puzzle_and_never_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: (ran.append(line), real(self, line, due))[1])
    environment = environment_of(4)
    seed = first_of_each_kind(4)["delete"]
    for _ in range(2):
        episode = environment.episode(seed, "train")
        look, change = map(call, episode.puzzle.calls)
        answers = play(episode, look, change, look)
        assert (answers[0][0].content.removeprefix("./"), answers[2][0].content) == (
            episode.puzzle.calls[1].split()[1],
            "exit 1",
        )
    assert Counter(line.split()[0] for line in ran) == {"grep": 2, "rm": 2}
    assert boxes() == []


def test_of_many_that_ask_at_once_one_runs_it_and_the_next_if_that_one_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    begun, real = threading.Event(), Sandbox.run

    def slow(self: Sandbox, line: str, due: float) -> Result:
        ran.append(str(self.path))
        begun.set()
        return real(self, f"sleep 0.3; {line}", due)

    monkeypatch.setattr(Sandbox, "run", slow)
    environment = environment_of(1)

    async def run(gives_up: bool) -> list[Any]:
        begun.clear()
        episodes = [environment.episode(5 + gives_up, "train") for _ in range(5)]
        asked = [asyncio.create_task(episode.respond(call("ls"))) for episode in episodes]
        await asyncio.to_thread(begun.wait, 30)
        if gives_up:
            asked[0].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(episode.close() for episode in episodes))
        return answers[1:]

    answers = asyncio.run(run(False))
    assert len(ran) == 1 and len(set(answers)) == 1 and len(answers[0][0].content.split()) == 3
    answers = asyncio.run(run(True))
    assert len(ran) == 3 and len(set(answers)) == 1 and len(answers[0][0].content.split()) == 3
    assert boxes() == []


def test_episodes_leave_no_directory_also_when_they_are_given_up() -> None:
    environment = environment_of(1)

    async def run() -> None:
        episodes = [environment.episode(seed, "train") for seed in range(6)]
        calls = [asyncio.create_task(episode.respond(call("ls"))) for episode in episodes]
        await asyncio.sleep(0.005)
        for task in calls[::2]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(episode.close() for episode in episodes))

    asyncio.run(run())
    assert boxes() == []


def test_the_event_loop_goes_on_while_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command waits until the loop has turned many times."""
    turned = threading.Event()
    real = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: turned.wait(30) and real(self, line, due))
    episode = environment_of(1).episode(1, "train")

    async def run() -> tuple[Message, ...]:
        answer = asyncio.create_task(episode.respond(call("ls")))
        for _ in range(20):
            await asyncio.sleep(0)
        turned.set()
        try:
            return await answer
        finally:
            await episode.close()

    assert asyncio.run(run())[0].content.split() == sorted(episode.puzzle.files)


@pytest.mark.parametrize("stopped", ["time", "disk", "memory"])
def test_an_allowed_command_that_is_stopped_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, stopped: Any) -> None:
    monkeypatch.setattr(Sandbox, "run", lambda self, line, due: Result(124, "", False, stopped == "time", due, stopped))
    episode = environment_of(1).episode(1, "train")
    with pytest.raises(EpisodeFailed, match=f"'ls' was stopped \\({stopped}\\)") as failure:
        play(episode, call("ls"))
    assert failure.value.kind == "infrastructure" and boxes() == []


def test_no_room_for_a_directory_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    episode = environment_of(1).episode(1, "train")
    monkeypatch.setattr("miles_core.environments.sandbox.sandbox_root", lambda: tmp_path / "gone")
    with pytest.raises(EpisodeFailed, match="no directory for a sandbox") as failure:
        play(episode, call("ls"))
    assert failure.value.kind == "infrastructure"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 5}, "levels 1, 2, 3 and 4, not 5"),
        ({"level": "2"}, "not '2'"),
        ({"level": True}, "not True"),
        ({"levels": 1}, "no option levels"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        ShellPuzzleEnvironment(spec_of(1, options=options))


ALLOWED = {
    1: ("ls", "ls *", "cat alpha.txt", "wc -l *", "grep -l kiwi *", "head -n 1 alpha.txt", "cat ./north/alpha.txt"),
    2: ("grep -l kiwi * | wc -l", "sort alpha.txt | head -n 1", "sed -n 3p alpha.txt", "grep -c kiwi alpha.txt"),
    3: ("grep -rl kiwi .", "find north -type f | wc -l", "find . -name alpha.txt"),
    4: ("mv a.txt north", "rm north/a.txt", "mkdir north", "sed -i s/kiwi/plum/ a.txt", "sort -o b.txt a.txt"),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_each_level_allows_its_commands_and_those_below(level: int) -> None:
    for since, lines in ALLOWED.items():
        assert all((reads(line, level) != edits(line, level)) == (since <= level) for line in lines), since
    assert not any(edits(line, level) for line in ALLOWED[1])


REFUSED_LINES = (
    "", "bash", "ls; id", "ls && id", "ls & ls", "ls || id", "ls > a.txt", "ls 2>&1", "cat < a.txt", "cat /etc/passwd",
    "cat ../a.txt", "cat a/../b.txt", "cat ~", "cat $HOME", "echo $(id)", "cat `id`", "ls -la", "cat 'a.txt'", 'cat "a.txt"',
    "cat a\\ b", "cat {a,b}.txt", "cat ?.txt", "cat [a]*.txt", "cat *.txt", "cat .*", "grep -l ki.wi *", "grep -l -f *",
    "head -n 1 -", "cat -", "ls | ls | ls | ls", "ls |ls", "ls|ls", "ls | bash", "ls | xargs rm", "find . -delete",
    "find / -type f", "sed -n 1e a.txt", "sed -i s/a/b/e a.txt", "sed -i s/a/b/w a.txt", "sed s/a/b/ a.txt", "rm -rf .", "rm *",
    "rm .", "mv a.txt ..", "mv * north", "cp -r a b", "mkdir -p a", "sort -o a.txt", "sort --compress-program=x", "awk 1 a.txt",
    "python a.txt", "find . -exec ls", "wc -l --files-from=x",
    "tail -f a.txt", "tail -n 99999 a.txt", "cat a.txt #", "!ls", "ls\tid", "ls\nid",
    "cat é.txt", "cat a.txt\u2028id", "cat " + "a" * 25 + ".txt", "cat" + " a" * 9, "ln -s a.txt b.txt", "chmod 777 a.txt",
)  # fmt: skip


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_everything_else_is_refused_at_every_level(line: str) -> None:
    assert not any(reads(line, level) or edits(line, level) for level in LEVELS), line


def test_blanks_are_made_single_before_the_grammar_reads() -> None:
    assert clean(" grep\t -l\n kiwi  * ") == "grep -l kiwi *"


def test_nothing_of_a_refused_line_reaches_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "__init__", lambda *args: pytest.fail("a sandbox was made"))
    episode = environment_of(4).episode(0, "train")
    assert [messages[0].content for messages in play(episode, call("ls; id"), call("cat /etc/passwd"))] == [REFUSED] * 2


def test_the_instructions_name_only_what_is_allowed() -> None:
    assert "4 turns" in environment_of(2).episode(0, "train").opening()[0].content
    assert environment_of(1).episode(0, "train").opening()[0].content == PuzzleSource({}).puzzle(0, "train").question
