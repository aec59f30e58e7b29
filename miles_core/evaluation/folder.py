"""The folder of one evaluation: what is asked, the parts that are done, the result.

    <runs_root>/evaluations/<id>/
      evaluation.json            what is asked                                                                (once)
      code/  model/              snapshot of the code that the job runs; the model, or a link to it
      attempts/a<n>.json         one per attempt, made before its job is submitted
      parts/<what>-<first>.json  values of up to 64 tasks each
      result.json                figures and all values                                                       (once)
      logs/evaluator-0/attempt_<n>/<job>_0.out

The id is made of what is asked, so the same question is the same folder: asked again it is answered from `result.json`, or
goes on where it was. Every file is published whole and says the same whoever writes it, so two jobs of one evaluation waste
time and harm nothing; there is no lease.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from miles_core.errors import RunDirectoryError
from miles_core.evaluation.figures import Figures
from miles_core.paths import check_trusted
from miles_core.recipe import Closed, EnvironmentSpec
from miles_core.store.fs import FileSystem
from miles_core.store.publish import digest_bytes, publish_bytes, publish_exclusive

T = TypeVar("T", bound=Closed)

PARENT = "evaluations"
RUN_FILE = "evaluation.json"


class ModelSource(Closed):
    """Which model."""

    path: str
    """A model folder, or a run directory."""
    digest: str
    """Of a folder its weight files', of a run the version's weights digest."""
    run_id: str | None = None
    step: int | None = None
    """Policy version of a run; None for a folder."""
    learner_attempt: int | None = None


class Question(Closed):
    """What is asked."""

    schema_version: Literal[1] = 1
    model: ModelSource
    environment: EnvironmentSpec
    recipe: str | None
    """Name of the recipe that the environment is of; None: it was given by family."""
    chat: str | None = None
    """`model.chat` of that recipe: how messages become tokens."""
    dtype: Literal["float32", "bfloat16"]
    problems: int
    """Held-out tasks: seeds 0 to problems - 1 of the eval split."""
    samples: int
    """Per task, beside the greedy answer."""
    temperature: float
    """Of the samples."""
    seed: int
    """Of the sampling."""
    code_digest: str = ""
    """Of the code snapshot that answers."""

    @property
    def recipe_digest(self) -> str:
        """xxh3-128 of the environment as resolved: equal for equal tasks."""
        return digest_bytes(self.environment.model_dump_json().encode())

    @property
    def evaluation_id(self) -> str:
        """`<name>-<10 hex digits>`: the name is for people, the digits are of all that decides the answer."""
        model = self.model.model_copy(update={"path": ""})
        same = self.model_copy(update={"model": model, "recipe": None, "code_digest": ""})
        label = self.model.run_id or Path(self.model.path).name
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-._")[:40] or "model"
        version = "" if self.model.step is None else f"-step{self.model.step}"
        return f"{name}{version}-{digest_bytes(same.model_dump_json().encode())[:10]}"


class Result(Closed):
    """Content of result.json."""

    schema_version: Literal[1] = 1
    evaluation_id: str
    question: Question
    recipe_digest: str
    figures: Figures
    greedy: tuple[float, ...]
    """Value of each task, by seed."""
    samples: tuple[tuple[float, ...], ...]
    """By task, the values of its samples; empty without samples."""


class Part(Closed):
    """The values of some tasks."""

    values: tuple[float, ...]


class Attempt(Closed):
    """One job."""

    token: str
    parts: int
    """That were done before it."""


class EvaluationFolder:
    """Paths and files of one evaluation. Raises RunDirectoryError for files that are not what they should be."""

    def __init__(self, root: Path) -> None:
        self.root, self._fs = root, FileSystem()
        self.code, self.model = root / "code", root / "model"
        self.result_file, self.cancel_request = root / "result.json", root / "cancel_requested"

    def logs(self, attempt: int) -> Path:
        """Folder of an attempt's log."""
        return self.root / "logs" / "evaluator-0" / f"attempt_{attempt}"

    def publish_question(self, question: Question) -> None:
        """Makes the folder one that a job can work in."""
        publish_exclusive(self._fs, self.root / RUN_FILE, question.model_dump_json(indent=2).encode())

    def read_question(self) -> Question | None:
        """What is asked; None before that is there. Refuses a folder that others may write to."""
        check_trusted(self.root)
        return self._read(self.root / RUN_FILE, Question)

    def read_result(self) -> Result | None:
        """The answer; None before it is there."""
        return self._read(self.result_file, Result)

    def publish_result(self, result: Result) -> None:
        """Writes the answer."""
        publish_bytes(self._fs, self.result_file, result.model_dump_json(indent=2).encode())

    def read_part(self, name: str) -> Part | None:
        """A part that is done."""
        return self._read(self._part(name), Part)

    def publish_part(self, name: str, part: Part) -> None:
        """Writes a part."""
        publish_bytes(self._fs, self._part(name), part.model_dump_json().encode())

    def count_parts(self) -> int:
        """How many are done."""
        return len(list((self.root / "parts").glob("*.json")))

    def attempts(self) -> dict[int, Attempt]:
        """All attempts so far, ascending."""
        numbers = sorted(int(path.stem[1:]) for path in (self.root / "attempts").glob("a*.json"))
        found = {number: self._read(self._attempt(number), Attempt) for number in numbers}
        return {number: attempt for number, attempt in found.items() if attempt is not None}

    def claim_attempt(self, number: int, attempt: Attempt) -> bool:
        """False if somebody else made this attempt."""
        return publish_exclusive(self._fs, self._attempt(number), attempt.model_dump_json().encode())

    def _attempt(self, number: int) -> Path:
        return self.root / "attempts" / f"a{number}.json"

    def _part(self, name: str) -> Path:
        return self.root / "parts" / f"{name}.json"

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return kind.model_validate_json(self._fs.read(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise RunDirectoryError(f"{path} is not readable as {kind.__name__}: {error.errors()[0]['msg']}") from error
