"""The evaluator: two points, each once over all attempts, from verified weights only; no grade is never a zero."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_core.errors import DeadlineExceeded, DigestMismatch, MilesError
from miles_core.evaluation.scoring import value_or_none
from miles_core.paths import RunPaths
from miles_core.policy.manifest import PolicyManifest, Probe, probe_prompts
from miles_core.policy.publisher import publish_version
from miles_core.recipe import EnvironmentSpec, EvaluationSpec
from miles_core.records import Cut, Cuts, Done, EvaluationPoint, Published, StepDone, Version
from miles_core.roles.evaluator import Evaluator, GreedyScorer, Scorer
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import Reading, read_cut
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder
from miles_core.store.publish import publish_bytes
from tests.protocol.learner_run import STEPS, VISIBILITY_S, make_run

FAKE_PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)


class FakeLearner:
    """One learner attempt, as far as the evaluator sees it: a lease, a journal, versions, a completion record."""

    def __init__(self, run: RunConfig, paths: RunPaths, attempt: int = 1, cuts: tuple[Cut, ...] = ()) -> None:
        self.run, self.paths, self.attempt = run, paths, attempt
        fs = FileSystem()
        LeaseFolder(fs, paths.leases, run.run_id).acquire("learner-0", attempt, "token-l")
        self.journal = JournalWriter(
            fs, paths.journal("learner-0"), run_id=run.run_id, writer="learner-0", attempt=attempt, token="token-l"
        )
        self.journal.write(Cuts(cuts=cuts))

    def publish(
        self, step: int, tensors: dict[str, torch.Tensor] | None = None, probe: Probe = FAKE_PROBE, run_id: str = ""
    ) -> Published:
        """Writes a step record and publishes its version."""
        published = publish_version(
            FileSystem(), self.paths, run_id=run_id or self.run.run_id, version=Version(step, self.attempt),
            tensors=tensors or {"w": torch.full((2,), float(step))}, probe=probe, learner_token="token-l",
        )  # fmt: skip
        record = StepDone(
            step=step, batch_id="", manifest_digest="", weights_digest=published.weights_digest, staleness=0, mean_reward=0
        )
        self.journal.append(record)
        self.journal.write(published)
        return published

    def finish(self, outcome: str) -> None:
        """Publishes the completion record."""
        done = Done(
            writer="learner-0", attempt=self.attempt, outcome=outcome, journal_bytes=self.journal.bytes,
            journal_hash=self.journal.hash,
        )  # fmt: skip
        publish_bytes(FileSystem(), self.paths.done("learner-0"), done.model_dump_json().encode())


class FakeScorer:
    """Scores step / 10 on every task; `breaks` says how often a seed's episode breaks first."""

    def __init__(self, breaks: dict[int, int] | None = None, on_score: Callable[[], None] = lambda: None) -> None:
        self.breaks, self.on_score = breaks or {}, on_score
        self.versions: list[Version] = []
        self.asked: list[list[int]] = []
        self.value = 0.0

    def load(self, tensors: dict[str, torch.Tensor], manifest: PolicyManifest) -> None:
        self.versions.append(manifest.version)
        self.value = float(tensors["w"][0]) / 10

    def score(self, seeds: Sequence[int]) -> list[float | None]:
        self.on_score()
        self.asked.append(list(seeds))
        return [self._one(seed) for seed in seeds]

    def _one(self, seed: int) -> float | None:
        self.breaks[seed] = self.breaks.get(seed, 0) - 1
        return self.value if self.breaks[seed] < 0 else None


def evaluator_context(run: RunConfig, paths: RunPaths, attempt: int = 1) -> RoleContext:
    """Its sleeps are short: the waits are those of the real role, the pauses are not."""
    return RoleContext(
        run, paths, "evaluator-0", attempt, token=f"token-e{attempt}", sleep=lambda seconds: time.sleep(min(seconds, 0.02))
    )


def evaluate(context: RoleContext, scorer: Scorer) -> None:
    """Runs one attempt in this thread."""
    context.start()
    try:
        Evaluator(context, lambda: scorer).run()
    finally:
        context.stop()
        context.metrics.close()


def points(run: RunConfig, paths: RunPaths, attempts: int = 1) -> list[EvaluationPoint]:
    """All accepted points: the cuts of a successor that does not come, and what lies before them."""
    context = evaluator_context(run, paths, attempts + 1)
    context.leases.acquire("evaluator-0", attempts + 1, "reader")
    reading = Reading(FileSystem(), context.leases, VISIBILITY_S)
    cuts = context.cut_predecessors().cuts
    records = [item.record for cut in cuts for item in read_cut(reading, paths.journal("evaluator-0"), cut)]
    return [record for record in records if isinstance(record, EvaluationPoint)]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[RunConfig, RunPaths]:
    return make_run(tmp_path / "run")


def in_thread(target: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except MilesError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def wait_for(what: Callable[[], Any], name: str) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, f"waited for {name}"
        time.sleep(0.01)


def test_the_first_and_the_last_version_are_evaluated_as_they_come(prepared):
    run, paths = prepared
    context, scorer = evaluator_context(run, paths), FakeScorer()
    thread, errors = in_thread(lambda: evaluate(context, scorer))
    learner = FakeLearner(run, paths)
    first = learner.publish(0)
    wait_for(lambda: context.progress and context.state == f"waiting: version {STEPS}", "the point of version 0")
    for step in range(1, STEPS):
        learner.publish(step)
    last = learner.publish(STEPS)
    thread.join(30)
    assert not thread.is_alive() and errors == []
    assert scorer.versions == [(0, 1), (STEPS, 1)]
    assert scorer.asked == [[0, 1, 2, 3, 4]] * 2
    found = points(run, paths)
    assert [(point.version, point.weights_digest) for point in found] == [
        (first.version, first.weights_digest),
        (last.version, last.weights_digest),
    ]
    assert [point.greedy_score for point in found] == pytest.approx([0.0, STEPS / 10])
    assert {point.num_problems for point in found} == {5}
    assert Done.model_validate_json(paths.done("evaluator-0").read_bytes()).outcome == "completed"


def test_a_point_that_was_recorded_is_not_made_again(prepared):
    run, paths = prepared
    learner = FakeLearner(run, paths)
    learner.publish(0)
    context = evaluator_context(run, paths)
    thread, errors = in_thread(lambda: evaluate(context, FakeScorer()))
    wait_for(lambda: context.state == f"waiting: version {STEPS}", "the point of version 0")
    context.leave.set()
    thread.join(30)
    assert errors == [] and not paths.done("evaluator-0").exists()
    learner.publish(STEPS)
    scorer = FakeScorer()
    evaluate(evaluator_context(run, paths, attempt=2), scorer)
    assert scorer.versions == [(STEPS, 1)]
    assert [point.version.step for point in points(run, paths, attempts=2)] == [0, STEPS]


def test_of_a_step_published_twice_the_highest_attempt_is_evaluated(prepared):
    run, paths = prepared
    learner = FakeLearner(run, paths)
    learner.publish(0)
    learner.publish(STEPS)
    cut = Cut(writer="learner-0", attempt=1, bytes=learner.journal.bytes, hash=learner.journal.hash)
    FakeLearner(run, paths, attempt=2, cuts=(cut,)).publish(STEPS)
    scorer = FakeScorer()
    evaluate(evaluator_context(run, paths), scorer)
    assert scorer.versions == [(0, 1), (STEPS, 2)]


def test_tasks_that_broke_are_asked_again_and_count_once(prepared):
    run, paths = prepared
    FakeLearner(run, paths).publish(0)
    context = evaluator_context(run, paths)
    scorer = FakeScorer(breaks={1: 1, 3: 2})
    scorer.on_score = lambda: context.leave.set() if len(scorer.asked) == 2 else None
    evaluate(context, scorer)
    assert scorer.asked == [[0, 1, 2, 3, 4], [1, 3], [3]]
    assert [point.num_problems for point in points(run, paths)] == [5]


def test_a_task_that_never_gets_a_grade_is_no_zero_but_a_failure(prepared):
    run, paths = prepared
    FakeLearner(run, paths).publish(0)
    with pytest.raises(MilesError, match=r"1 of 5 evaluation tasks broke 3 times, first seeds \[2\]"):
        evaluate(evaluator_context(run, paths), FakeScorer(breaks={2: 99}))
    assert points(run, paths) == []


class Judge:
    """Gives what it is asked to give, as a researcher's verifier may."""

    source = "judge@1"

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        if isinstance(facts["gives"], Exception):
            raise facts["gives"]
        return facts["gives"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("gives", [2.0, -0.1, float("nan"), None, "many", KeyError("answer")])
def test_what_a_grader_would_refuse_is_no_score_here_either(gives, caplog):
    assert value_or_none(Judge(), 7, {"gives": gives}) is None
    assert "evaluation task 7: no grade" in caplog.text
    assert value_or_none(Judge(), 7, {"gives": True}) == 1.0


def test_asked_to_leave_between_two_parts_it_leaves_without_a_point(tmp_path):
    run, paths = make_run(tmp_path / "run", evaluation=EvaluationSpec(problems=100))
    FakeLearner(run, paths).publish(0)
    context = evaluator_context(run, paths)
    scorer = FakeScorer(on_score=context.leave.set)
    evaluate(context, scorer)
    assert len(scorer.asked) == 1 and points(run, paths) == []


def test_a_version_that_was_changed_or_is_foreign_or_gone_is_not_evaluated(prepared):
    run, paths = prepared
    published = FakeLearner(run, paths).publish(0)
    weights = paths.resolve(published.folder) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DigestMismatch):
        evaluate(evaluator_context(run, paths), FakeScorer())
    weights.unlink()
    with pytest.raises(DeadlineExceeded, match="was announced"):
        evaluate(evaluator_context(run, paths, attempt=2), FakeScorer())
    assert points(run, paths, attempts=2) == []


def test_a_version_of_another_run_is_not_evaluated(prepared):
    run, paths = prepared
    FakeLearner(run, paths).publish(0, run_id="run-b")
    with pytest.raises(MilesError, match=f"run run-b, this is run {run.run_id}"):
        evaluate(evaluator_context(run, paths), FakeScorer())


def hurried(context: RoleContext) -> RoleContext:
    """The same role with a clock on which every look takes seconds."""
    began = time.monotonic()
    context.clock = lambda: began + 500 * (time.monotonic() - began)
    return context


def test_a_learner_that_is_done_without_its_last_version_is_an_error(prepared):
    run, paths = prepared
    learner = FakeLearner(run, paths)
    learner.publish(0)
    learner.finish("completed")
    with pytest.raises(MilesError, match=f"no published version of step {STEPS}"):
        evaluate(hurried(evaluator_context(run, paths)), FakeScorer())


def test_a_learner_that_needs_a_rollback_is_waited_for_until_the_signal_comes(prepared):
    run, paths = prepared
    learner = FakeLearner(run, paths)
    learner.publish(0)
    learner.finish("needs_rollback")
    context = hurried(evaluator_context(run, paths))
    thread, errors = in_thread(lambda: evaluate(context, FakeScorer()))
    wait_for(lambda: context.state == f"waiting: version {STEPS}", "the point of version 0")
    time.sleep(0.2)
    assert thread.is_alive()
    context.leave.set()
    thread.join(30)
    assert errors == [] and not paths.done("evaluator-0").exists()


def test_real_weights_are_loaded_probed_and_graded(tmp_path):
    """The scorer of the real role, on a tiny random model: engine, environment, verifier and probe fit together."""
    from tests.unit.tiny_models import save_tiny_model, tiny_model

    run, paths = make_run(
        tmp_path / "run",
        environment=EnvironmentSpec(family="chain_sum", tool="calculator", max_turns=2, max_new_tokens=4, max_tokens=120),
        evaluation=EvaluationSpec(problems=3),
    )
    save_tiny_model(paths.base_model, seed=1)
    model = tiny_model(seed=2)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    prompts = probe_prompts(model.config.vocab_size)
    with torch.no_grad():
        logits = model(torch.tensor(prompts)).logits[:, :-1]
    answers = torch.log_softmax(logits, -1).gather(-1, torch.tensor(prompts)[:, 1:, None])[..., 0].tolist()
    probe = Probe(prompts=prompts, logprobs=tuple(map(tuple, answers)), dtype="float32", tolerance=1e-3)
    learner = FakeLearner(run, paths)
    learner.publish(0, tensors, probe)
    learner.publish(
        STEPS, tensors, probe.model_copy(update={"logprobs": tuple(tuple(v + 0.1 for v in row) for row in answers)})
    )
    context = evaluator_context(run, paths)
    scorer = GreedyScorer(context)
    with pytest.raises(DigestMismatch, match=rf"probe of policy version \({STEPS}, 1\)"):
        evaluate(context, scorer)
    assert [point.greedy_score for point in points(run, paths)] == [0.0]
    assert scorer.score([0, 1]) == [0.0, 0.0]


def test_between_the_first_and_the_last_the_newest_that_is_due_is_evaluated(tmp_path):
    """One that falls behind passes over what is old, and over what it cannot read; training is not asked."""
    run, paths = make_run(tmp_path / "run", evaluation=EvaluationSpec(problems=5, every=1))
    learner, scorer = FakeLearner(run, paths), FakeScorer()
    learner.publish(0)
    context = evaluator_context(run, paths)
    thread, errors = in_thread(lambda: evaluate(context, scorer))
    wait_for(lambda: context.state == "waiting: version 1", "the point of version 0")
    context.leave.set()
    thread.join(30)
    learner.publish(1)
    learner.publish(2)
    broken = paths.resolve(learner.publish(3).folder) / "model.safetensors"
    broken.write_bytes(b"x" + broken.read_bytes()[1:])
    context = evaluator_context(run, paths, attempt=2)
    thread, errors = in_thread(lambda: evaluate(context, scorer))
    wait_for(lambda: context.state == "waiting: version 4", "version 3 to be passed over")
    learner.publish(4)
    wait_for(lambda: context.state == "waiting: version 5", "the point of version 4")
    for step in range(5, STEPS + 1):
        learner.publish(step)
    thread.join(30)
    assert not thread.is_alive() and errors == []
    found = [(point.version.step, point.greedy_score) for point in points(run, paths, attempts=2)]
    steps = [step for step, _ in found]
    assert steps[:2] == [0, 4] and steps[-1] == STEPS and set(steps) <= {0, 4, 5, STEPS}
    assert [score for _, score in found] == pytest.approx([step / 10 for step in steps])
    assert paths.metrics("evaluator-0", 2).read_text().count('"evaluation_missed"') == 1
