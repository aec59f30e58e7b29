"""An evaluation: figures that say what they are worth, and a job that may be killed, warned, cancelled or asked for twice."""

from __future__ import annotations

import json
import math
import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.profile import ClusterProfile
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Snapshot
from flows.evaluating import Asked, question_of, result_text
from miles_core.base_model import model_files, weights_digest
from miles_core.errors import DigestMismatch, NodesLost, RecipeError, RunDirectoryError
from miles_core.evaluation import job
from miles_core.evaluation.figures import bootstrap, figure_of, figures_of, gain_of, pass_at, wilson
from miles_core.evaluation.folder import EvaluationFolder, ModelSource, Part, Question
from miles_core.recipe import EnvironmentSpec
from tasks import evaluate as steps
from tests.unit.test_export import published_run
from tests.unit.tiny_models import save_tiny_model

ENVIRONMENT = EnvironmentSpec(family="chain_sum", tool="calculator", max_turns=2, max_new_tokens=4, max_tokens=120)


# --- figures


def test_wilson_is_the_interval_of_the_score_test() -> None:
    for successes, number in ((0, 10), (7, 10), (10, 10), (433, 512)):
        low, high = wilson(successes, number)
        assert 0 <= low <= successes / number <= high <= 1
        for end in {low, high} - {0.0, 1.0}:
            z = abs(successes / number - end) / math.sqrt(end * (1 - end) / number)
            assert z == pytest.approx(1.959964, rel=1e-6)


def test_the_bootstrap_covers_what_the_normal_interval_does_and_repeats() -> None:
    values = np.random.default_rng(3).random(400).tolist()
    half = 1.96 * np.std(values) / 20
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.1 * half)


def answers(rng: np.random.Generator, gained: float, number: int = 200) -> tuple[list[float], list[float]]:
    """Problems of very different difficulty before and after a training that solves `gained` more of them."""
    difficulty = rng.random(number)
    return (difficulty < 0.3).astype(float).tolist(), (difficulty < 0.3 + gained).astype(float).tolist()


def test_a_gain_is_found_by_pairs_and_its_interval_covers_the_true_one() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):
        figure = gain_of(*answers(rng, 0.1))
        covered += figure.low <= 0.1 <= figure.high
    assert covered >= 53, "95 % of 60, less two standard deviations"
    before, after = answers(rng, 0.1)
    figure = gain_of(before, after)
    alone = bootstrap(after)[1] - bootstrap(after)[0]
    assert figure == gain_of(before, after) and figure.interval == "bootstrap" and figure.low > 0
    assert figure.high - figure.low < 0.8 * alone, "an interval of pairs leaves out what both have in common"
    assert figure.mean == pytest.approx(np.mean(after) - np.mean(before))


def test_no_gain_is_not_taken_for_one() -> None:
    rng = np.random.default_rng(1)
    before = rng.integers(0, 2, 200).astype(float).tolist()
    figure = gain_of(before, rng.permutation(before).tolist())
    assert figure.mean == 0 and figure.low < 0 < figure.high
    assert (gain_of(before, before).low, gain_of(before, before).high) == (0, 0)
    with pytest.raises(ValueError):
        gain_of(before, before[1:])


@pytest.mark.parametrize(("number", "solved"), [(5, 2), (6, 0), (4, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_solution(number: int, solved: int) -> None:
    for k in range(1, number + 1):
        draws = list(combinations([True] * solved + [False] * (number - solved), k))
        assert pass_at(k, number, solved) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_figures_say_which_interval_is_theirs() -> None:
    plain = figures_of([1.0, 0.0, 1.0, 1.0], [])
    assert plain.greedy.mean == 0.75 and plain.greedy.interval == "wilson" and plain.sampled is None and not plain.pass_at
    assert figure_of([0.5, 1.0]).interval == "bootstrap"
    found = figures_of([0.0, 1.0], [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert found.sampled is not None and found.sampled.mean == pytest.approx((0.375 + 1) / 2)
    assert {k: figure.mean for k, figure in found.pass_at.items()} == pytest.approx({1: 0.625, 2: 0.75, 4: 1.0})
    assert {figure.interval for figure in found.pass_at.values()} == {"bootstrap"}


# --- questions


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", seed=1)


def ask(model: Path, **changes: Any) -> Asked:
    return Asked(str(model), **({"recipe": "chain_sum", "problems": 3} | changes))


def test_a_question_is_known_by_all_that_decides_its_answer(model: Path, tmp_path: Path) -> None:
    question = question_of(ask(model))
    assert question.dtype == "float32" and question.recipe == "chain_sum"
    assert question.evaluation_id == question_of(ask(model)).evaluation_id and question.evaluation_id.startswith("model-")
    others: list[dict[str, Any]] = [
        {"problems": 4}, {"samples": 1}, {"temperature": 0.5}, {"seed": 1}, {"dtype": "bfloat16"},
        {"settings": ("environment.options.max_terms=4",)}, {"family": "chain_sum"},
    ]  # fmt: skip
    ids = {question_of(ask(model, **changes)).evaluation_id for changes in others}
    assert len(ids) == len(others) and question.evaluation_id not in ids
    save_tiny_model(tmp_path / "other", seed=2)
    save_tiny_model(model, seed=2)
    assert question_of(ask(model)).evaluation_id != question.evaluation_id
    assert question_of(ask(model)).model.digest == question_of(ask(tmp_path / "other")).model.digest


def test_a_version_of_a_run_brings_its_own_tasks(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    newest, first = question_of(Asked(str(paths.root))), question_of(Asked(f"{paths.root}@0", problems=9))
    assert (newest.model.step, first.model.step, first.model.run_id) == (2, 0, run.run_id)
    assert newest.environment == run.recipe.environment and newest.recipe == "tiny" and first.problems == 9
    assert first.evaluation_id.startswith("tiny-1-step0-")
    with pytest.raises(RunDirectoryError, match="has not published version 7; there are: 0, 1, 2"):
        question_of(Asked(f"{paths.root}@7"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": None}, "names no tasks: give --recipe NAME or --family"),
        ({"dtype": "float16"}, r"dtype: .*float32.*got 'float16'"),
        ({"settings": ("learner.lr=1",)}, "takes environment.* alone"),
        ({"settings": ("environment.max_tokens=1",)}, "environment is not valid"),
        ({"recipe": "no_such_recipe"}, "no recipe named 'no_such_recipe'"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        question_of(ask(model, **changes))


def test_tasks_that_nobody_could_draw_are_refused_before_a_job_is_submitted(model: Path, tmp_path: Path, profile: Any) -> None:
    question = question_of(ask(model, family="no_such_family"))
    with pytest.raises(RecipeError, match="reasoning-gym has no family 'no_such_family'"):
        steps.ensure_folder(question, steps.folder_of(question, profile))


def test_what_is_no_model_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(RecipeError, match=r"has no config\.json: give a model folder"):
        question_of(ask(tmp_path / "adapter"))
    with pytest.raises(RunDirectoryError, match=r"is no run directory, so it has no version 3"):
        question_of(Asked(f"{model}@3", recipe="chain_sum"))
    with pytest.raises(RunDirectoryError, match="no run 'nowhere'"):
        question_of(Asked("nowhere", recipe="chain_sum"))


# --- the job


def small_question(model: Path, **changes: Any) -> Question:
    source = ModelSource(path=str(model), digest=weights_digest(model_files(model)))
    fields: dict[str, Any] = {
        "model": source, "environment": ENVIRONMENT, "recipe": None, "dtype": "float32", "problems": 3, "samples": 2,
        "temperature": 1.0, "seed": 0,
    }  # fmt: skip
    return Question(**(fields | changes))


def prepared(root: Path, question: Question) -> EvaluationFolder:
    folder = EvaluationFolder(root)
    root.mkdir(mode=0o755)
    folder.model.symlink_to(question.model.path)
    folder.publish_question(question)
    return folder


class CountingAnswers:
    """Answers with seed / 10, and more for samples."""

    asked: list[tuple[int | None, list[int]]]

    def __init__(self, folder: EvaluationFolder, question: Question) -> None:
        pass

    def score_of(self, sample: int | None) -> Any:
        def score(seeds: Any) -> list[float]:
            type(self).asked.append((sample, list(seeds)))
            return [min(1.0, seed / 100 + (0.0 if sample is None else 0.1 * sample)) for seed in seeds]

        return score


def test_a_job_goes_on_behind_the_parts_that_are_done(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CountingAnswers.asked = []
    monkeypatch.setattr(job, "Answers", CountingAnswers)
    folder = prepared(tmp_path / "e", small_question(model, problems=70, samples=1))
    leave = threading.Event()
    folder.publish_part("greedy-000000", Part(values=tuple(seed / 100 for seed in range(64))))
    leave.set()
    assert job.work(folder, leave) == 75 and CountingAnswers.asked == [] and folder.read_result() is None
    leave.clear()
    assert job.work(folder, leave) == 0
    assert [(sample, seeds[0], len(seeds)) for sample, seeds in CountingAnswers.asked] == [
        (None, 64, 6),
        (0, 0, 64),
        (0, 64, 6),
    ]
    result = folder.read_result()
    assert result is not None and result.greedy == tuple(seed / 100 for seed in range(70))
    assert result.figures.greedy.mean == pytest.approx(0.345) and [len(row) for row in result.samples] == [1] * 70
    before = folder.result_file.read_bytes()
    assert job.work(folder, leave) == 0 and folder.result_file.read_bytes() == before and len(CountingAnswers.asked) == 3


def test_a_real_model_answers_and_samples_differ_by_their_draw(model: Path, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "e", small_question(model))
    assert job.main(["--folder", str(folder.root), "--attempt", "1"]) == 0
    result = folder.read_result()
    assert result is not None and len(result.greedy) == 3 and [len(row) for row in result.samples] == [2, 2, 2]
    assert all(line in result_text(result, folder) for line in ("greedy    0.0000 [0.0000, 0.5615]", "pass@2", "Wilson"))
    answers, drawn = job.Answers(folder, result.question), []
    from miles_core.rollout.sampler import sample_many

    for draw in (1, 1, 2):
        parts = (answers._engine, answers._environment, answers._renderer, ENVIRONMENT)
        rows = sample_many(*parts, range(3), split="eval", temperature=1.0, draw=draw)
        drawn.append([row.tokens.tolist() for row in rows])
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_model_folder_that_changed_since_is_not_scored(model: Path, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "e", small_question(model))
    save_tiny_model(model, seed=5)
    with pytest.raises(DigestMismatch, match=r"has weights .* now, asked about were"):
        job.work(folder, threading.Event())


# --- who waits for it


class FakeJobs:
    """A scheduler whose jobs do what the test says: `plays` are called in turn when a job is looked at."""

    def __init__(self, *plays: Any) -> None:
        self.plays, self.specs, self.cancelled = list(plays), [], []
        self.jobs: dict[str, JobView] = {}

    def submit(self, spec: JobSpec) -> str:
        job_id = str(len(self.specs) + 1)
        self.specs.append(spec)
        self.jobs[job_id] = JobView(job_id, spec.run_id, spec.writer, spec.attempt, spec.token, Phase.RUNNING)
        return job_id

    def snapshot(self, run_id: str) -> Snapshot:
        for job_id, view in self.jobs.items():
            if view.phase is Phase.RUNNING and self.plays:
                cause = self.plays.pop(0)()
                if cause is not None:
                    self.jobs[job_id] = JobView(
                        job_id, view.run_id, view.writer, view.attempt, view.token, Phase.ENDED, cause
                    )  # fmt: skip
        return Snapshot(ok=True, jobs=tuple(self.jobs.values()))

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        self.cancelled += job_ids


@pytest.fixture
def profile(tmp_path: Path) -> ClusterProfile:
    return ClusterProfile.model_validate(
        {"name": "here", "kind": "local", "runs_root": str(tmp_path / "runs"), "role_failures": 1}
    )


def wait_for_result(folder: EvaluationFolder, profile: ClusterProfile, jobs: FakeJobs, monkeypatch: Any) -> Any:
    monkeypatch.setattr(steps, "make_scheduler", lambda profile, root: jobs)
    time_s = [0.0]

    def sleep(seconds: float) -> None:
        time_s[0] += 30 * seconds

    return steps.ensure_result(folder, profile, lambda text: None, clock=lambda: time_s[0], sleep=sleep)


def test_attempts_follow_until_the_answer_is_there(model: Path, profile: Any, monkeypatch: Any) -> None:
    """One the infrastructure ended, one that was warned behind a part, one that fails, then one that ends well."""
    question = small_question(model, samples=0, problems=70)
    folder = steps.folder_of(question, profile)
    steps.ensure_folder(question, folder)
    steps.ensure_folder(question, folder)
    CountingAnswers.asked = []
    monkeypatch.setattr(job, "Answers", CountingAnswers)

    def one_part() -> Cause:
        folder.publish_part("greedy-000000", Part(values=tuple(seed / 100 for seed in range(64))))
        return Cause.FAILED

    def the_rest() -> Cause:
        job.work(folder, threading.Event())
        return Cause.COMPLETED

    jobs = FakeJobs(lambda: None, lambda: Cause.INFRASTRUCTURE, one_part, lambda: Cause.FAILED, the_rest)
    result = wait_for_result(folder, profile, jobs, monkeypatch)
    assert [spec.attempt for spec in jobs.specs] == [1, 2, 3, 4] and len({spec.token for spec in jobs.specs}) == 4
    assert jobs.specs[0].env["PYTHONPATH"] == str(folder.code.resolve()) and (folder.code / "miles_core").is_dir()
    assert result.figures.greedy.mean == pytest.approx(0.345)
    assert wait_for_result(folder, profile, FakeJobs(), monkeypatch) == result, "asked again it is read"


def test_attempts_that_get_nowhere_end_it(model: Path, profile: Any, monkeypatch: Any) -> None:
    question = small_question(model)
    folder = steps.folder_of(question, profile)
    steps.ensure_folder(question, folder)
    jobs = FakeJobs(*[lambda: Cause.FAILED] * 5)
    with pytest.raises(NodesLost, match=r"2 attempts of evaluation .* ended without a new part"):
        wait_for_result(folder, profile, jobs, monkeypatch)
    assert len(jobs.specs) == 2
    CountingAnswers.asked = []
    monkeypatch.setattr(job, "Answers", CountingAnswers)
    mended = FakeJobs(lambda: Cause.FAILED, lambda: job.work(folder, threading.Event()) or Cause.COMPLETED)
    mended.jobs = dict(jobs.jobs)
    mended.specs = list(jobs.specs)
    wait_for_result(folder, profile, mended, monkeypatch)
    assert [spec.attempt for spec in mended.specs] == [1, 2, 3, 4], "asked again, it is tried again"


def test_an_attempt_that_nobody_can_find_is_given_up_later(model: Path, profile: Any, monkeypatch: Any) -> None:
    """Whoever made it died before its job was submitted."""
    from miles_core.evaluation.folder import Attempt

    question = small_question(model, problems=2, samples=0)
    folder = steps.folder_of(question, profile)
    steps.ensure_folder(question, folder)
    assert folder.claim_attempt(1, Attempt(token="t", parts=0)) and not folder.claim_attempt(1, Attempt(token="u", parts=0))
    CountingAnswers.asked = []
    monkeypatch.setattr(job, "Answers", CountingAnswers)
    jobs = FakeJobs(lambda: job.work(folder, threading.Event()) or Cause.COMPLETED)
    wait_for_result(folder, profile, jobs, monkeypatch)
    assert [spec.attempt for spec in jobs.specs] == [2]


def test_a_cancel_ends_the_job_and_whoever_waits(model: Path, profile: Any, monkeypatch: Any) -> None:
    question = small_question(model)
    folder = steps.folder_of(question, profile)
    with pytest.raises(RunDirectoryError, match="never asked on here"):
        steps.cancel(folder, profile)
    steps.ensure_folder(question, folder)
    jobs = FakeJobs(lambda: None, lambda: steps.cancel(folder, profile) and None)
    with pytest.raises(steps.EvaluationCancelled, match="the same command goes on"):
        wait_for_result(folder, profile, jobs, monkeypatch)
    assert jobs.cancelled == ["1"] and folder.cancel_request.exists()


def test_a_version_is_exported_for_its_job_and_leaves_only_its_answer(tmp_path: Path, profile: Any, monkeypatch: Any) -> None:
    _, paths = published_run(tmp_path / "run")
    question = question_of(Asked(f"{paths.root}@1", problems=2))
    folder = steps.folder_of(question, profile)
    steps.ensure_folder(question, folder)
    assert json.loads((folder.model / "miles_export.json").read_text())["weights_digest"] == question.model.digest
    CountingAnswers.asked = []
    monkeypatch.setattr(job, "Answers", CountingAnswers)
    jobs = FakeJobs(lambda: job.work(folder, threading.Event()) or Cause.COMPLETED)
    found = steps.as_json(wait_for_result(folder, profile, jobs, monkeypatch), folder)
    assert not folder.model.exists() and found["seeds"] == [0, 1] and found["recipe_digest"] == question.recipe_digest
