"""Tasks from reasoning-gym, any family by name, with or without a calculator, with or without solved examples in front.

Invariants: a task is a function of (family, options, prompt, seed, split) alone, on every machine; the two splits share no
question, because the hash of what is asked decides its split; the examples' questions are in neither. Failure: a wrong
family, option or wording is a RecipeError when the environment is made; a split without questions raises EpisodeFailed. The
library takes seconds to import, so it is imported when the first source is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

from miles_core.environments.base import EpisodeFailed, Message, Split
from miles_core.environments.calculator import calculate
from miles_core.environments.splits import MAX_TRIES, in_eval_split, question_digest
from miles_core.environments.tool_call import tool_call
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec, PromptSpec

_OWN_OPTIONS = ("seed", "size")
UNREPRODUCIBLE = frozenset({"isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"})
"""Families whose questions follow Python's per-process string hash: two processes disagree on a seed (version 0.1.25)."""


@dataclass(frozen=True)
class Task:
    """One drawn entry. `dataset` is the library object that judges answers to it."""

    question: str
    """As it is asked."""
    entry: dict[str, Any]
    dataset: Any
    digest: str
    """Of the question: it decides the split, and lets a grader prove that it judges the same question."""


class TaskSource:
    """Draws entries of one family by (seed, split). Raises RecipeError."""

    def __init__(self, family: str, options: dict[str, Any], prompt: PromptSpec | None = None) -> None:
        import reasoning_gym

        self._library: Any = reasoning_gym
        self.family = family
        self.options = options
        self._prompt = PromptSpec() if prompt is None else prompt
        self._check_names()
        try:
            self._shared = self._make(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise RecipeError(
                f"environment.options: reasoning-gym refuses {options} for {family!r}: {error}. There are: {self._defaults()}"
            ) from error
        self._reseeds = self._probe()
        self._entry(0)  # A wording that cannot be filled in is refused now.
        self.shots = self._draw_shots(self._prompt.shots)
        """The solved examples: tasks that are never drawn."""
        self._shown = frozenset(shot.digest for shot in self.shots)
        self.task = functools.lru_cache(maxsize=4096)(self._draw)

    def _check_names(self) -> None:
        known = self._library.factory.DATASETS
        if self.family not in known:
            close = difflib.get_close_matches(self.family, known, n=5, cutoff=0.4) or sorted(known)[:5]
            raise RecipeError(
                f"environment.family: reasoning-gym has no family {self.family!r}; close names: {', '.join(close)} "
                f"({len(known)} in all, see reasoning_gym.factory.DATASETS)"
            )
        if self.family in UNREPRODUCIBLE:
            raise RecipeError(
                f"environment.family: {self.family!r} asks different questions for one seed in different processes, so its "
                f"answers cannot be graded elsewhere; choose another family"
            )
        allowed = self._defaults()
        unknown = sorted(set(self.options) - set(allowed))
        if unknown:
            raise RecipeError(
                f"environment.options: {self.family!r} has no option {', '.join(unknown)} (seed and size are set by the "
                f"environment). There are: {allowed}"
            )

    def _defaults(self) -> dict[str, Any]:
        """Option names of the family with their defaults (None where there is none)."""
        fields = dataclasses.fields(self._library.factory.DATASETS[self.family][1])
        return {f.name: None if f.default is dataclasses.MISSING else f.default for f in fields if f.name not in _OWN_OPTIONS}

    def _make(self, seed: int) -> Any:
        return self._library.create_dataset(self.family, seed=seed, size=1, **self.options)

    def _probe(self) -> bool:
        """Whether one dataset object may be re-seeded for every draw; some families build state from the seed at the start."""
        for seed in (1, 2, 1):
            expected = self._make(seed)[0]
            self._shared.seed = seed
            drawn = self._shared[0]
            if (drawn["question"], drawn["answer"]) != (expected["question"], expected["answer"]):
                return False
        return True

    def _draw(self, seed: int, split: Split) -> Task:
        """The task of a seed. Raises EpisodeFailed when MAX_TRIES draws found no question of the split."""
        for tries in range(MAX_TRIES):
            task = self._entry(_library_seed(f"{seed}/{tries}"))
            if in_eval_split(task.digest) == (split == "eval") and task.digest not in self._shown:
                return task
        raise EpisodeFailed(
            f"reasoning-gym {self.family} {self.options}: no question of split {split!r} in {MAX_TRIES} draws for seed {seed}; "
            f"the family has too few questions with these options, widen environment.options",
            kind="environment",
        )

    def _draw_shots(self, number: int) -> tuple[Task, ...]:
        """The first `number` different questions of a row of their own."""
        found: dict[str, Task] = {}
        for tries in range(MAX_TRIES):
            if len(found) == number:
                return tuple(found.values())
            task = self._entry(_library_seed(f"shot/{tries}"))
            found.setdefault(task.digest, task)
        raise RecipeError(
            f"environment.prompt.shots={number}: {MAX_TRIES} draws of {self.family!r} with {self.options} gave {len(found)} "
            f"different questions; lower it or widen environment.options"
        )

    def _entry(self, library_seed: int) -> Task:
        dataset = self._shared if self._reseeds else self._make(library_seed)
        dataset.seed = library_seed
        entry = dataset[0]
        question = self._worded(entry)
        return Task(question, entry, dataset, question_digest(question))

    def _worded(self, entry: dict[str, Any]) -> str:
        wording = self._prompt.wording
        if wording is None:
            return str(entry["question"])
        try:
            return wording.format_map(entry["metadata"])
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise RecipeError(
                f"environment.prompt.wording: {wording!r} cannot be filled in ({type(error).__name__}: {error}). Fields of "
                f"{self.family!r} are: {', '.join(sorted(entry['metadata']))}; a brace itself is written twice"
            ) from error


def _library_seed(text: str) -> int:
    """31 bits: some families hand the seed to numpy, which takes no more than 32."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


@dataclass
class ReasoningGymEpisode:
    """One question; a turn that calls the calculator is answered, any other turn is the final answer."""

    spec: EnvironmentSpec
    task: Task
    seed: int
    split: Split
    lead: tuple[Message, ...] = ()
    """What stands in front of the question."""
    final_answer: str | None = None
    turns: int = 0
    tool_calls: list[dict[str, str]] = field(default_factory=list)

    def opening(self) -> tuple[Message, ...]:
        """The question, behind what the prompt puts in front of it."""
        return (*self.lead, Message("user", self.task.question))

    async def respond(self, content: str) -> tuple[Message, ...]:
        """The tool's result, or nothing: the answer was given or the turns are used up."""
        self.turns += 1
        expression = tool_call(content) if self.spec.tool == "calculator" else None
        if expression is None:
            self.final_answer = content.strip()
            return ()
        result = calculate(expression)
        self.tool_calls.append({"expression": expression, "result": result})
        return (Message("tool", result),) if self.turns < self.spec.max_turns else ()

    def facts(self) -> dict[str, Any]:
        """What happened; `final_answer` is None when the episode ended without one."""
        return {
            "question_seed": self.seed,
            "question_md5": self.task.digest,
            "split": self.split,
            "family": self.spec.family,
            "final_answer": self.final_answer,
            "turns": self.turns,
            "tool_calls": list(self.tool_calls),
        }

    async def close(self) -> None:
        """Holds nothing."""


class ReasoningGymEnvironment:
    """An Environment over one reasoning-gym family. Raises RecipeError."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._source = TaskSource(spec.family, spec.options, spec.prompt)
        self._lead = _lead(spec.prompt, self._source.shots)

    def episode(self, seed: int, split: Split) -> ReasoningGymEpisode:
        """A fresh episode of task `seed`. Raises EpisodeFailed if the split has no question."""
        return ReasoningGymEpisode(self.spec, self._source.task(seed, split), seed, split, self._lead)


def _lead(prompt: PromptSpec | None, shots: tuple[Task, ...]) -> tuple[Message, ...]:
    """System message and solved examples."""
    lead = [] if prompt is None or prompt.system is None else [Message("system", prompt.system)]
    for shot in shots:
        lead += [Message("user", shot.question), Message("assistant", str(shot.entry["answer"]))]
    return tuple(lead)
