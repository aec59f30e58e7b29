"""Exact resume (I8): a learner fed the same recorded batches ends in the same bytes, wherever it was killed.

The role's own main with DeepSpeed and a tiny model, in real processes that a crash point ends as SIGKILL would; two ranks
speak gloo. The processes are forked from one that has imported everything, so an attempt costs its training and not a start.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from miles_core.base_model import model_files, weights_digest
from miles_core.errors import RankLost
from miles_core.paths import RunPaths
from miles_core.policy.local_copy import read_version
from miles_core.recipe import LearnerSpec, LoraSpec, ModelSpec
from miles_core.run import RunConfig
from miles_core.runtime.crash import EXIT_CODE, VARIABLE
from tests.protocol.learner_run import STEPS, FakeOrchestrator, digests, make_run, metric_points, read_lineage
from tests.unit.tiny_models import save_tiny_model

PLACES = (
    "before_train", "after_train", "after_step_record", "before_publish", "after_publish_data", "after_publish",
    "before_checkpoint", "after_checkpoint_files", "after_checkpoint",
)  # fmt: skip
EVERY = 2
"""Steps between two checkpoints."""
DEADLINE_S = 240.0
Exact = tuple[dict[int, str], dict[str, str]]
"""Digest of the weights of each step; of the last checkpoint's files, which hold the optimizer's state."""

preloading = multiprocessing.get_context("forkserver")
preloading.set_forkserver_preload(["tests.protocol.learner_imports"])


def places(seed: int, number: int) -> list[str]:
    """`learner:name:step`, each at most once: first every name, then at random."""
    draw = random.Random(seed)
    steps = {name: range(EVERY, STEPS + 1, EVERY) if "checkpoint" in name else range(1, STEPS + 1) for name in PLACES}
    every = [f"learner:{name}:{draw.choice(steps[name])}" for name in PLACES]
    others = sorted({f"learner:{name}:{step}" for name in PLACES for step in steps[name]} - set(every))
    return [*every, *draw.sample(others, max(0, number - len(every)))][:number]


def act_as_rank(root: str, attempt: int, rank: int, ranks: int, crash_at: str) -> None:
    """One rank of one attempt, as its job starts it."""
    paths = RunPaths(Path(root))
    output = os.open(paths.root / f"a{attempt}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "MILES_TOKEN": f"token-l{attempt}", "MILES_JOB_ID": f"job{attempt}", "MILES_RANKS": str(ranks),
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ranks), "SLURM_LOCALID": str(rank), VARIABLE: crash_at,
    }  # fmt: skip
    from miles_core.roles.learner import start

    sys.exit(start(["--run-dir", root, "--attempt", str(attempt)]))


def run_attempt(paths: RunPaths, attempt: int, ranks: int, crash_at: str = "") -> list[int | None]:
    """Exit codes of its ranks."""
    started: list[BaseProcess] = []
    for rank in range(ranks):
        started.append(preloading.Process(target=act_as_rank, args=(str(paths.root), attempt, rank, ranks, crash_at)))
        started[-1].start()
    for process in started:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    return codes


def exact(run: RunConfig, paths: RunPaths) -> Exact:
    """What must be the same, of a run whose last version loads with its digests."""
    lineage = read_lineage(run, paths)
    newest = lineage.newest_published
    assert newest is not None and newest.version.step == STEPS
    read_version(paths, run.run_id, newest, lineage)
    saved = lineage.checkpoints[max(lineage.checkpoints)]
    assert saved.step == STEPS
    return digests(lineage), {file.name: file.digest for file in saved.files}


def learn(
    folder: Path, base_model: Path, ranks: int, *crashes: str, lr: float = 1e-3, lora: LoraSpec | None = None
) -> tuple[RunConfig, RunPaths]:
    """A run whose learner dies at these places, one attempt each, and then ends."""
    spec = LearnerSpec(checkpoint_every=EVERY, zero_stage=1 if ranks == 1 else 3, lr=lr)
    digest = weights_digest(model_files(base_model))
    run, paths = make_run(folder, learner=spec, model=ModelSpec(path=str(base_model), lora=lora), base_model_digest=digest)
    paths.base_model.symlink_to(base_model)
    FakeOrchestrator(run, paths).write_all()
    for attempt, place in enumerate(crashes, 1):
        codes = run_attempt(paths, attempt, ranks, f"{place}:{attempt}")
        log = (folder / f"a{attempt}-0.log").read_text()
        assert sorted(codes) == [EXIT_CODE, *[RankLost.exit_code] * (ranks - 1)], f"{place}: {codes}\n{log}"  # type: ignore[type-var]
    last = len(crashes) + 1
    codes = run_attempt(paths, last, ranks)
    assert codes == [0] * ranks, f"{codes}\n{(folder / f'a{last}-0.log').read_text()}"
    return run, paths


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model")


TWICE = (
    ("learner:after_step_record:3", "learner:after_train:3"),
    ("learner:before_train:5", "learner:after_checkpoint_files:6"),
    ("learner:after_publish_data:4", "learner:after_publish:5"),
)
CRASHES: tuple[tuple[str, ...], ...] = (*((place,) for place in places(seed=7, number=20)), *TWICE)
OF_TWO_RANKS = (
    ("rank1:before_train:4", "rank1:before_load:0"),
    ("learner:after_train:3", "rank1:before_state_tensors:0"),
    ("rank1:before_logprobs:0", "rank1:before_start:0"),
    ("rank1:before_save:0", "learner:after_checkpoint_files:6"),
)
"""The others cost too much for every test run: benchmarks/determinism.py does all CRASHES with two ranks."""


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Callable[..., Exact]:
    """By number of ranks and what is trained."""

    @cache
    def make(ranks: int, lora: LoraSpec | None = None) -> Exact:
        found = exact(*learn(tmp_path_factory.mktemp("uncrashed") / "run", base_model, ranks, lora=lora))
        assert len(set(found[0].values())) > STEPS // 2, "hardly a step changed the weights: equal bytes would say nothing"
        return found

    return make


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "crashes"),
    [*((1, crashes) for crashes in CRASHES), *((2, crashes) for crashes in OF_TWO_RANKS)],
    ids=lambda value: str(value) if isinstance(value, int) else "+".join(value),
)
def test_wherever_the_learner_dies_it_ends_in_the_same_bytes(
    tmp_path: Path, base_model: Path, uncrashed: Callable[..., Exact], ranks: int, crashes: tuple[str, ...]
) -> None:
    run, paths = learn(tmp_path / "run", base_model, ranks, *crashes)
    assert exact(run, paths) == uncrashed(ranks)
    last = len(crashes) + 1
    assert all(point["bit_exact"] for point in metric_points(paths, last, "replay"))


LORA = LoraSpec(rank=4)
OF_AN_ADAPTER = ((1, (*TWICE[0], "learner:after_checkpoint_files:4")), (2, OF_TWO_RANKS[0]))


@pytest.mark.parametrize(("ranks", "crashes"), OF_AN_ADAPTER)
def test_an_adapter_ends_in_the_same_bytes_too(
    tmp_path: Path, base_model: Path, uncrashed: Callable[..., Exact], ranks: int, crashes: tuple[str, ...]
) -> None:
    run, paths = learn(tmp_path / "run", base_model, ranks, *crashes, lora=LORA)
    assert exact(run, paths) == uncrashed(ranks, LORA)
    assert all(point["bit_exact"] for point in metric_points(paths, len(crashes) + 1, "replay"))


def test_another_learning_rate_gives_other_bytes(tmp_path: Path, base_model: Path, uncrashed: Callable[..., Exact]) -> None:
    """So equal bytes say something."""
    run, paths = learn(tmp_path / "run", base_model, 1, lr=2e-4)
    assert exact(run, paths)[0] != uncrashed(1)[0]
