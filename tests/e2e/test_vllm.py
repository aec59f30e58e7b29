"""vLLM, in the environment that it has for itself: the contract of all engines, and a run whose replicas sample with it.

Where that environment is missing these tests are skipped with the sentence that says how to get it; with CI=true they fail.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.engines import DEFAULT_VLLM_PYTHON, vllm_version
from cluster.slurm.devslurm import DevSlurm, slurm_available
from miles_core.errors import RecipeError
from miles_core.tracking.metrics import read_metrics
from miles_core.trajectories.shards import read_shard
from tests.e2e.runs import REPOSITORY, ledger_of, miles, start_miles, summary_of
from tests.slurm.site import cluster_file
from tests.unit.tiny_models import save_tiny_model

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.timeout(1200)]


def need(missing: str | None) -> None:
    """Skips where something is missing; fails under CI=true."""
    if missing is not None and os.environ.get("CI") == "true":
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(missing)


@pytest.fixture(scope="module", autouse=True)
def vllm_installed() -> None:
    try:
        vllm_version(DEFAULT_VLLM_PYTHON)
    except RecipeError as error:
        need(str(error))


def passed_with_vllm(tmp_path: Path, *arguments: str) -> re.Match[str]:
    """What pytest says at the end, in the environment that has vLLM."""
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "t")]
    done = subprocess.run(
        [str(DEFAULT_VLLM_PYTHON), "-m", "pytest", *options, *arguments], cwd=REPOSITORY,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ended = re.search(r"(\d+) passed(?:, (\d+) deselected)?", done.stdout)
    assert ended is not None, done.stdout[-2000:]
    return ended


def test_vllm_holds_the_contract_of_all_engines(tmp_path: Path) -> None:
    """The same tests that the torch engine passes in this environment."""
    contract = ("tests/unit/test_engine_contract.py", "tests/unit/test_engine_experts.py")
    ended = passed_with_vllm(tmp_path, "-k", "vllm", *contract)
    assert int(ended[1]) == int(ended[2]), "as many tests as the torch engine has, and none skipped"


def test_what_vllm_alone_has(tmp_path: Path) -> None:
    """Tensor parallel, a killed worker, an engine that is made again in a thread: what GPUs need, on this machine's cores."""
    assert passed_with_vllm(tmp_path, "tests/unit/vllm_own.py")[1] == "14"


@pytest.fixture(scope="module")
def devslurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevSlurm]:
    """A cluster of these tests alone: it runs beside those of tests/slurm."""
    need(slurm_available())
    cluster = DevSlurm(tmp_path_factory.mktemp("vllm") / "devslurm")
    cluster.up()
    yield cluster
    cluster.down()


@pytest.mark.parametrize(("recipe", "steps"), [("chain_sum_vllm", 5), ("terminal_vllm", 3)])
def test_two_replicas_on_slurm_sample_with_vllm_and_the_run_learns_from_them(
    tmp_path: Path, devslurm: DevSlurm, recipe: str, steps: int
) -> None:
    settings = (
        f"steps={steps}", "evaluation.problems=32", "orchestrator.prompts=8", "orchestrator.samples=8",
        "orchestrator.max_staleness=1", "orchestrator.capacity_batches=2",
    )  # fmt: skip
    arguments = [part for setting in settings for part in ("--set", setting)]
    cluster = cluster_file(tmp_path, devslurm, timing={"visibility_s": 0.5, "lease_s": 60})
    run = start_miles(tmp_path, "run", recipe, "--cluster", str(cluster), "--run-id", recipe, *arguments)
    assert run.wait(timeout=1100) == 0, (tmp_path / "output").read_text()
    root = tmp_path / "runs" / recipe
    summary = summary_of(root)
    assert summary["state"] == "COMPLETED" and summary["steps"] == steps and summary["groups"]["open"] == 0
    verified = miles(tmp_path, "verify", str(root))
    assert verified.returncode == 0, verified.stdout
    check_engines(root, steps)
    if recipe == "chain_sum_vllm":
        check_export(tmp_path, root)


def test_the_learner_replays_the_experts_that_vllm_chose(tmp_path: Path) -> None:
    """A mixture of random weights: nothing is learnt, everything is recorded."""
    model = save_tiny_model(tmp_path / "model", "qwen3_moe", hidden_size=64, head_dim=32, moe_intermediate_size=32)
    settings = (
        f"model.path={model}", "model.bootstrap=null", "rollout.pools=[{engine: vllm, slots: 16}]", "rollout.dtype=float32",
        "steps=2", "evaluation.problems=8", "orchestrator.prompts=4", "orchestrator.samples=4",
    )  # fmt: skip
    arguments = [part for setting in settings for part in ("--set", setting)]
    run = start_miles(tmp_path, "run", "chain_sum_moe", "--run-id", "mixture", *arguments)
    assert run.wait(timeout=600) == 0, (tmp_path / "output").read_text()
    root = tmp_path / "runs" / "mixture"
    rows = [row for shard in root.glob("trajectories/*/*/*.arrow") for row in read_shard(shard)]
    assert len(rows) >= 32 and all(row.experts is not None and len(row.experts) == len(row.tokens) - 1 for row in rows)
    metrics = ledger_of(root)[2].steps.steps[1].metrics
    assert metrics["routing_missing_tokens"] == metrics["routing_changed_frac"] == 0, "float32 here and there"
    assert metrics["logprob_gap_max"] < 1e-4


def check_engines(root: Path, steps: int) -> None:
    """Both replicas gave samples that were trained, and what they say of each token is what the learner computes."""
    _, paths, ledger = ledger_of(root)
    members = [m.ref.trajectory_id for batch in ledger.batches.values() for group in batch.groups for m in group.members]
    assert {name.rpartition("@")[2].partition(".")[0] for name in members} == {"rollout-0", "rollout-1"}
    first = ledger.steps.steps[1].metrics
    assert first["logprob_gap_mean"] < 1e-4, "at step 1 the learner's weights are those that sampled"
    points = [point for _, point in read_metrics(paths.metrics("x-0", 1).parent.parent) if point["event"] == "step"]
    assert len(points) == steps and all(point["logprob_gap_mean"] >= 0 for point in points), "reported every step"


def check_export(folder: Path, root: Path) -> None:
    """What is exported answers in vLLM, which loads it as any model, as in transformers; in the dtype that was trained."""
    exported = miles(folder, "export", str(root), str(folder / "model"))
    assert exported.returncode == 0, exported.stderr
    sums = [f"{number} + {5 * number % 83} - {number % 7}" for number in range(11, 23)]
    questions = [f"State the final answer to the following arithmetic problem: {terms} =" for terms in sums]
    done = subprocess.run(
        [str(DEFAULT_VLLM_PYTHON), str(REPOSITORY / "tests" / "e2e" / "exported_model.py"), str(folder / "model"), *questions],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["dtype"] == "torch.float32" and found["vllm"] == found["transformers"]
    assert len(set(map(tuple, found["vllm"]))) > len(questions) // 2, "the answers tell the questions apart"
