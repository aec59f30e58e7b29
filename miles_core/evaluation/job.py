"""The main of an evaluation's job: python -m miles_core.evaluation.job --folder D --attempt N.

Works through the parts that are not there yet, publishes each when it is done, then the result. TERM and USR2 let the part in
hand go and end it with the exit code of a role that was warned (75): the next attempt goes on behind the last part.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.base_model import WEIGHT_SUFFIXES, model_files, weights_digest
from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.evaluation.figures import figures_of
from miles_core.evaluation.folder import EvaluationFolder, Part, Question, Result
from miles_core.evaluation.scoring import SLOTS, Score, score_all, score_tasks
from miles_core.runtime.context import DRAINED_EXIT_CODE, exit_code_of, start_logging

log = logging.getLogger("miles")


@dataclass(frozen=True)
class Piece:
    """Up to SLOTS tasks, answered once each."""

    name: str
    sample: int | None
    """None: greedy."""
    seeds: range


def pieces(question: Question) -> Iterator[Piece]:
    """All parts of an evaluation, the greedy ones first."""
    for sample in (None, *range(question.samples)):
        for first in range(0, question.problems, SLOTS):
            what = "greedy" if sample is None else f"sample{sample:04d}"
            yield Piece(f"{what}-{first:06d}", sample, range(first, min(first + SLOTS, question.problems)))


class Answers:
    """The model of an evaluation, answering its tasks."""

    def __init__(self, folder: EvaluationFolder, question: Question) -> None:
        import torch

        from miles_core.environments.registry import make_environment
        from miles_core.grading.rules import make_verifier
        from miles_core.records import Version
        from miles_core.rollout.choice import make_renderer, sampler_class
        from miles_core.rollout.torch_engine import TorchEngine

        spec = question.environment
        self._question = question
        self._environment = make_environment(spec, f"{question.evaluation_id}.evaluator-0")
        self._verifier = make_verifier(spec)
        self._make = sampler_class(spec)
        self._renderer = make_renderer(folder.model, question.chat)
        self._engine = TorchEngine.from_folder(
            folder.model, dtype=question.dtype, end_id=self._renderer.end_id, slots=min(SLOTS, question.problems),
            max_tokens=spec.max_tokens, version=Version(question.model.step or 0, question.model.learner_attempt or 0),
            device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip

    def score_of(self, sample: int | None) -> Score:
        """How tasks are answered: greedily, or by one sample of each."""
        question = self._question
        temperature, draw = (0.0, 0) if sample is None else (question.temperature, question.seed * 1_000_003 + sample + 1)
        return lambda seeds: score_tasks(
            self._engine, self._environment, self._renderer, question.environment, self._verifier, seeds,
            temperature=temperature, draw=draw, make=self._make,
        )  # fmt: skip


def work(folder: EvaluationFolder, leave: threading.Event) -> int:
    """Does what is left; the exit code. Raises MilesError."""
    question = folder.read_question()
    if question is None:
        raise RunDirectoryError(f"{folder.root} has no evaluation.json: it is not the folder of an evaluation")
    todo = [piece for piece in pieces(question) if folder.read_part(piece.name) is None]
    if todo:
        check_model(folder, question)
        answers = Answers(folder, question)
        for piece in todo:
            values = score_all(answers.score_of(piece.sample), piece.seeds, leave.is_set)
            if values is None:
                log.info("leaving before part %s", piece.name)
                return DRAINED_EXIT_CODE
            folder.publish_part(piece.name, Part(values=tuple(values)))
            log.info("part %s: mean %.4f", piece.name, sum(values) / len(values))
    folder.publish_result(result_of(folder, question))
    return 0


def check_model(folder: EvaluationFolder, question: Question) -> None:
    """A folder that was given must be what was asked about; an export was proved when it was made. Raises DigestMismatch."""
    if question.model.step is not None:
        return
    found = weights_digest(model_files(folder.model, WEIGHT_SUFFIXES))
    if found != question.model.digest:
        raise DigestMismatch(f"{question.model.path} has weights {found} now, asked about were {question.model.digest}")


def result_of(folder: EvaluationFolder, question: Question) -> Result:
    """From all parts."""
    rows: dict[int | None, list[float]] = {}
    for piece in pieces(question):
        part = folder.read_part(piece.name)
        if part is None or len(part.values) != len(piece.seeds):
            raise RunDirectoryError(f"{folder.root}: part {piece.name} is not whole; remove it and evaluate again")
        rows.setdefault(piece.sample, []).extend(part.values)
    greedy = rows.pop(None)
    samples = tuple(zip(*rows.values(), strict=True))
    return Result(
        evaluation_id=question.evaluation_id, question=question, recipe_digest=question.recipe_digest,
        figures=figures_of(greedy, samples), greedy=tuple(greedy), samples=samples,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="One attempt of an evaluation; started by `miles evaluate`.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args(argv)
    start_logging(f"role=evaluator-0 attempt={arguments.attempt}")
    leave = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        log.info("signal=%s: leaving", signal.Signals(number).name)
        leave.set()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, on_signal)
    return exit_code_of(lambda: work(EvaluationFolder(arguments.folder), leave))


if __name__ == "__main__":
    sys.exit(main())
