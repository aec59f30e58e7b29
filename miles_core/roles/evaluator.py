"""The evaluator's main: greedy evaluation of versions on held-out tasks (seeds 0..n-1, split eval).

The first and the last version, and with `evaluation.every` some between them: of those that are due the newest that is there.

It waits at half a second a poll and at low priority, so that it takes nothing from the roles that do the work. A point that
an earlier attempt recorded is not made again; one between the first and the last that breaks is passed over. Ends:

- done after the point of the last step;
- on a signal, or when no supervisor was seen for orphan_s, it leaves without a completion record;
- a learner that ended with `needs_rollback` makes no last version; the supervisor closes such a run, and until its signal
  comes the evaluator waits, for a learner that goes on after a rollback publishes under the same run;
- a learner that says `completed` while no version of the last step can be seen, or a version that cannot be read or fails
  its digests or its probe, is an error: a run whose last policy cannot be loaded is not complete.

No grade is never a zero: tasks whose episode broke, or that the verifier does not judge, are tried again, then the role
fails and names them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from miles_core.base_model import check_base_model
from miles_core.errors import LeaseLost, MilesError
from miles_core.evaluation.scoring import SLOTS, score_all, score_tasks
from miles_core.policy.lineage import StepLog
from miles_core.policy.local_copy import read_version
from miles_core.policy.manifest import PolicyManifest
from miles_core.policy.reader import check_probe
from miles_core.records import Done, EvaluationPoint, Published, Version
from miles_core.runtime.context import RoleContext, run_role
from miles_core.runtime.crash import crash_point
from miles_core.runtime.succession import open_journal
from miles_core.runtime.waiting import Watch, gone_after_s

if TYPE_CHECKING:
    import torch

log = logging.getLogger("miles")

LEARNER = "learner-0"
POLL_S = 0.5
LOOK_FOR_DONE_S = 5.0
NICENESS = 10


class Scorer(Protocol):
    """Answers held-out tasks with one policy version, and grades the answers."""

    def load(self, tensors: dict[str, torch.Tensor], manifest: PolicyManifest) -> None:
        """Takes a version's weights and checks its probe. Raises DigestMismatch."""
        ...

    def score(self, seeds: Sequence[int]) -> list[float | None]:
        """The greedy answer's reward in [0, 1] for each task of the eval split; None without one."""
        ...


class GreedyScorer:
    """A Scorer over the torch engine in rollout's dtype, the recipe's environment and its exact verifier."""

    def __init__(self, context: RoleContext) -> None:
        import torch

        from miles_core.environments.registry import make_environment
        from miles_core.grading.rules import make_verifier
        from miles_core.rollout.choice import make_renderer, sampler_class
        from miles_core.rollout.torch_engine import TorchEngine

        recipe, folder = context.recipe, context.paths.base_model
        if recipe.model.lora is not None:
            check_base_model(context.run, context.paths)
        self._spec = recipe.environment
        self._environment = make_environment(self._spec, f"{context.run.run_id}.{context.writer}")
        self._verifier = make_verifier(self._spec)
        self._make = sampler_class(self._spec)
        self._renderer = make_renderer(folder, recipe.model.chat)
        self._engine = TorchEngine.from_folder(
            folder, dtype=recipe.rollout_dtype, weights_dtype=recipe.model.dtype, lora=recipe.model.lora,
            end_id=self._renderer.end_id,
            slots=min(SLOTS, recipe.evaluation.problems), max_tokens=self._spec.max_tokens, version=Version(-1, 0),
            device="cuda" if torch.cuda.is_available() else "cpu",
        )  # fmt: skip

    def load(self, tensors: dict[str, torch.Tensor], manifest: PolicyManifest) -> None:
        """Takes a version's weights and checks its probe. Raises DigestMismatch."""
        self._engine.load_weights(tensors, manifest.version)
        check_probe(manifest, self._engine.logprobs([list(prompt) for prompt in manifest.probe.prompts]))

    def score(self, seeds: Sequence[int]) -> list[float | None]:
        """The greedy answer's reward in [0, 1] for each task of the eval split; None without one."""
        return score_tasks(self._engine, self._environment, self._renderer, self._spec, self._verifier, seeds, make=self._make)


class Evaluator:
    """One attempt of the evaluator."""

    def __init__(self, context: RoleContext, make_scorer: Callable[[], Scorer]) -> None:
        self._context, self._make_scorer = context, make_scorer
        self._scorer: Scorer | None = None
        self._learner = StepLog(context.follow(LEARNER), context.rollbacks)

    def run(self) -> None:
        """Records all points, then the completion record; returns early when asked to leave. Raises MilesError, LeaseLost."""
        journal, accepted = open_journal(self._context)
        versions = [item.record.version for item in accepted if isinstance(item.record, EvaluationPoint)]
        recorded = {version.step for version in versions if not self._context.rollbacks.abandons(version)}
        last = max(recorded, default=-1)
        while last < self._context.recipe.steps:
            published = self._wait_for(self._due_after(last))
            point = None if published is None else self._evaluate_or_pass(published)
            if published is None or (self._context.leave.is_set() and point is None):
                log.info("leaving before the next point after that of step %d", last)
                return
            last = published.version.step
            if point is not None:
                journal.write(point)
                self._context.progress += 1
                crash_point("evaluator", "after_point", last, self._context.attempt)
        self._context.finish(journal, "completed")

    def _due_after(self, step: int) -> list[int]:
        """Steps of versions that are wanted next, ascending; of the first one nobody wants another first."""
        steps, every = self._context.recipe.steps, self._context.recipe.evaluation.every
        if step < 0:
            return [0]
        between = range(every, steps, every) if every is not None else ()
        return [*(due for due in between if due > step), steps]

    def _wait_for(self, due: Sequence[int]) -> Published | None:
        """The published version of the highest of these steps that has one; None when this role shall leave."""
        step = due[0]
        self._context.state = f"waiting: version {step}"
        watch = Watch(self._context, f"policy version {step}", max(POLL_S, self._context.timing.poll_s))
        looked = self._context.clock()
        done_since: float | None = None
        while not self._context.leave.is_set():
            self._poll()
            if there := {version.step for version in self._learner.published}.intersection(due):
                return self._learner.published_at(max(there))
            if self._context.clock() - looked >= LOOK_FOR_DONE_S:
                looked = self._context.clock()
                done_since = self._check_not_over(due[-1], done_since)
            watch.pause()
        return None

    def _poll(self) -> None:
        try:
            self._learner.poll()
        except OSError as error:
            log.warning("learner's journal not read: %s", error)

    def _check_not_over(self, step: int, done_since: float | None) -> float | None:
        """Raises MilesError when the learner completed and its last version stays out of sight."""
        try:
            done = Done.model_validate_json(self._context.fs.read(self._context.paths.done(LEARNER)))
        except OSError:
            return None
        current = done.attempt == self._context.leases.newest(LEARNER)
        if done.outcome != "completed" or not current:
            return None
        now = self._context.clock()
        since = now if done_since is None else done_since
        if now - since >= gone_after_s(self._context):
            raise MilesError(
                f"the learner (attempt {done.attempt}) is done, but its accepted journal holds no published version of step "
                f"{step}; run `miles verify`"
            )
        return since

    def _evaluate_or_pass(self, published: Published) -> EvaluationPoint | None:
        """As _evaluate; None also where a version between the first and the last broke: its point is missed."""
        step = published.version.step
        try:
            return self._evaluate(published)
        except LeaseLost:
            raise
        except (MilesError, OSError, ValueError) as error:
            if step in (0, self._context.recipe.steps):
                raise
            log.warning("no point of step %d: %s", step, error)
            self._context.metrics.log("evaluation_missed", step=step, why=str(error)[:300])
            return None

    def _evaluate(self, published: Published) -> EvaluationPoint | None:
        """The point of a version; None when this role shall leave. Raises MilesError."""
        version, problems = published.version, self._context.recipe.evaluation.problems
        self._context.state = f"evaluating: version {version.step}"
        started = self._context.clock()
        self._context.reads = version
        try:
            tensors, manifest = read_version(
                self._context.paths, self._context.run.run_id, published, self._learner, fs=self._context.fs,
                deadline_s=gone_after_s(self._context), clock=self._context.clock, sleep=self._context.sleep,
            )  # fmt: skip
        finally:
            self._context.reads = None
        if self._scorer is None:
            self._scorer = self._make_scorer()
        self._scorer.load(tensors, manifest)
        self._context.version = version
        values = score_all(self._scorer.score, range(problems), self._context.leave.is_set, self._advance)
        if values is None:
            return None
        point = EvaluationPoint(
            version=version,
            weights_digest=published.weights_digest,
            num_problems=problems,
            greedy_score=sum(values) / problems,
            seconds=round(self._context.clock() - started, 3),
        )
        dtype = self._context.recipe.rollout_dtype
        self._context.metrics.log(
            "evaluation", step=version.step, greedy_score=point.greedy_score, seconds=point.seconds, dtype=dtype
        )
        log.info("version %s: greedy score %.4f on %d problems, in %s", tuple(version), point.greedy_score, problems, dtype)
        return point

    def _advance(self, number: int) -> None:
        self._context.progress += number


def main(context: RoleContext) -> None:
    """Evaluates the run; torch is imported when the first version is there."""
    os.nice(NICENESS)
    Evaluator(context, lambda: GreedyScorer(context)).run()


if __name__ == "__main__":
    sys.exit(run_role("evaluator", main))
