"""Builders for tests around the learner: a run directory, an orchestrator that wrote all its batches, a tiny exact trainer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from miles_core.learner.loop import Learner
from miles_core.paths import RunPaths
from miles_core.policy.lineage import StepLog
from miles_core.recipe import EnvironmentSpec, EvaluationSpec, LearnerSpec, ModelSpec, OrchestratorSpec, Recipe, Timing
from miles_core.records import Batch, BatchGroup, BatchMember, Cut, Cuts, FileDigest, RunEnded, TrajectoryRef
from miles_core.rollbacks import read_rollbacks
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import Follower, Reading
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder
from miles_core.store.publish import digest_bytes
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import encode_shard

STEPS = 6
VISIBILITY_S = 0.02
PROBE = ((1, 2, 3), (4, 5, 6, 7))
RUN_ID = "tiny-1"
RUN_LEASE_S = 0.4


def make_run(
    root: Path, run_id: str = RUN_ID, *, base_model_digest: str = "", **recipe_changes: Any
) -> tuple[RunConfig, RunPaths]:
    """An empty run directory: 6 steps of 2 groups x 2 samples, a checkpoint every 2 steps."""
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    fields: dict[str, Any] = {
        "name": "tiny", "steps": STEPS, "model": ModelSpec(bootstrap="chain_sum"),
        "environment": EnvironmentSpec(family="chain_sum", tool="calculator", max_turns=2),
        "orchestrator": OrchestratorSpec(prompts=2, samples=2, max_staleness=STEPS),
        "learner": LearnerSpec(checkpoint_every=2), "evaluation": EvaluationSpec(problems=5),
    }  # fmt: skip
    run = RunConfig(
        run_id=run_id, recipe=Recipe(**(fields | recipe_changes)),
        timing=Timing(visibility_s=VISIBILITY_S, lease_s=RUN_LEASE_S, poll_s=0.01, sync_s=0.001), cluster={},
        code_digest="", base_model_digest=base_model_digest, created_s=0.0,
    )  # fmt: skip
    paths = RunPaths(root)
    paths.run_file.write_text(run.model_dump_json())
    for folder in (paths.leases, paths.heartbeats):
        folder.mkdir()
    return run, paths


def make_rows(step: int, versions: tuple[VersionRun, ...]) -> list[Trajectory]:
    """The 2 x 2 trajectories of a batch, a function of the step."""
    return [_row(step, number, index, versions) for number in range(2) for index in range(2)]


def _row(step: int, number: int, index: int, versions: tuple[VersionRun, ...]) -> Trajectory:
    group = f"g{2 * step + number}.o1"
    return Trajectory(
        trajectory_id=f"{group}/{index}@rollout-0.a1", sample_id=f"{group}/{index}", group_id=group, order_id=f"w{step}.o1",
        producer="rollout-0", producer_attempt=1, task_seed=step,
        tokens=np.array([1, step, number, index, 2], np.int32), loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -0.25, -0.125], np.float32), versions=versions,
        turns=(Turn("user", 0, 2), Turn("assistant", 2, 5)), temperature=1.0, status="complete",
    )  # fmt: skip


class FakeOrchestrator:
    """One orchestrator attempt, as far as the learner sees it: a lease, a journal, shards of rollout-0."""

    def __init__(self, run: RunConfig, paths: RunPaths, attempt: int = 1, cuts: tuple[Cut, ...] = ()) -> None:
        self.paths = paths
        fs = FileSystem()
        LeaseFolder(fs, paths.leases, run.run_id).acquire("orchestrator-0", attempt, "token-o")
        self.journal = JournalWriter(
            fs, paths.journal("orchestrator-0"), run_id=run.run_id, writer="orchestrator-0", attempt=attempt, token="token-o"
        )
        self.journal.write(Cuts(cuts=cuts))
        self.ends: dict[int, tuple[int, str]] = {}
        """Stream position and hash behind each batch."""

    def shard(self, step: int) -> Path:
        """Where the rows of a batch are."""
        return self.paths.shard("rollout-0", 1, step)

    def batch(self, step: int, *, versions: tuple[VersionRun, ...] = (VersionRun(2, 0, 1),), **changes: Any) -> Batch:
        """Writes the rows of a batch to a shard and returns its record, not yet journaled."""
        rows = make_rows(step, versions)
        data = encode_shard(rows)
        self.shard(step).parent.mkdir(parents=True, exist_ok=True)
        self.shard(step).write_bytes(data)
        name, digest = self.paths.relative(self.shard(step)), digest_bytes(data)
        oldest = min(run.step for run in versions)
        members = [
            BatchMember(
                ref=TrajectoryRef(trajectory_id=row.trajectory_id, shard=name, row=index, shard_digest=digest),
                oldest_step=oldest,
                reward=float((step + index) % 3 == 0),
            )
            for index, row in enumerate(rows)
        ]
        groups = tuple(BatchGroup(group_id=rows[first].group_id, members=tuple(members[first : first + 2])) for first in (0, 2))
        batch = Batch(step=step, batch_id=f"b{step}.o1", groups=groups, staleness=step - 1 - oldest)
        return batch.model_copy(update=changes)

    def write(self, batch: Batch) -> None:
        """Journals a batch."""
        self.journal.write(batch)
        self.ends[batch.step] = (self.journal.bytes, self.journal.hash)

    def write_all(self, steps: int = STEPS) -> None:
        """Journals all batches of a run, sampled by the base model."""
        for step in range(1, steps + 1):
            self.write(self.batch(step))

    def end(self, steps: int = STEPS) -> None:
        """Journals the end of the run."""
        self.journal.write(RunEnded(state="COMPLETED", steps=steps))


class FakeTrainer:
    """Momentum descent on eight numbers: a step depends on the weights, the optimizer state, the rows and the step."""

    def __init__(self, *, noise: float = 0.0, on_train: Callable[[int], None] = lambda step: None) -> None:
        self.weights = np.linspace(-1, 1, 8, dtype=np.float32)
        self.momentum = np.zeros(8, dtype=np.float32)
        self.noise, self.on_train = noise, on_train
        self.loaded: list[str] = []
        self.trained: list[int] = []

    def train(
        self,
        trajectories: list[Trajectory],
        advantages: npt.NDArray[np.float32],
        step: int,
        staleness: int,
        kl_weights: npt.NDArray[np.float64] | None,
    ) -> dict[str, float]:
        self.on_train(step)
        self.trained.append(step)
        gradient = np.zeros(8, dtype=np.float32)
        for row, advantage in zip(trajectories, advantages, strict=True):
            gradient += advantage * np.bincount(row.tokens % 8, minlength=8).astype(np.float32)
        self.momentum = np.float32(0.9) * self.momentum + gradient + np.float32(self.noise)
        self.weights = self.weights - np.float32(0.01 / step) * self.momentum * (1 + self.weights**2)
        return {"loss": float(np.abs(gradient).sum()), "grad_norm": float(np.sqrt((gradient**2).sum()))}

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        return [-np.abs(self.weights[np.array(tokens[1:]) % 8]) / np.float32(temperature) for tokens in token_lists]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        weights = torch.from_numpy(self.weights.copy())
        return {"model.b.weight": weights.reshape(2, 4), "model.a.weight": weights.to(torch.bfloat16)}

    def save(self, folder: Path) -> tuple[FileDigest, ...]:
        (folder / "zero").mkdir()
        np.save(folder / "weights.npy", self.weights)
        np.save(folder / "zero" / "momentum.npy", self.momentum)
        return ()

    def load(self, folder: Path, files: tuple[FileDigest, ...]) -> None:
        self.loaded.append(folder.name)
        self.weights = np.load(folder / "weights.npy")
        self.momentum = np.load(folder / "zero" / "momentum.npy")


def learner_context(run: RunConfig, paths: RunPaths, attempt: int = 1, **changes: Any) -> RoleContext:
    """A learner attempt that has not started."""
    return RoleContext(run, paths, "learner-0", attempt, token=f"token-l{attempt}", **changes)


def run_learner(
    run: RunConfig, paths: RunPaths, attempt: int = 1, *, trainer: FakeTrainer | None = None, context: RoleContext | None = None
) -> FakeTrainer:
    """Runs one learner attempt in this thread until it is done, leaves or raises."""
    trainer = trainer or FakeTrainer()
    context = context or learner_context(run, paths, attempt)
    context.start()
    try:
        Learner(context, lambda: trainer, PROBE).run()
    finally:
        context.stop()
        context.metrics.close()
    return trainer


def read_lineage(run: RunConfig, paths: RunPaths) -> StepLog:
    """The learner's lineage, as a fresh reader of the run directory accepts it. Its clock runs ahead: no pause is needed."""
    leases = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    reading = Reading(FileSystem(), leases, VISIBILITY_S, clock=itertools.count(0.0, 10.0).__next__)
    steps = StepLog(Follower(reading, paths.journal("learner-0"), "learner-0"), read_rollbacks(FileSystem(), paths))
    empty_polls = 0
    while empty_polls < 5:
        empty_polls = 0 if steps.poll() else empty_polls + 1
    return steps


def digests(steps: StepLog) -> dict[int, str]:
    """Weights digest of every accepted step."""
    return {step: record.weights_digest for step, record in sorted(steps.steps.items())}


def metric_points(paths: RunPaths, attempt: int, event: str) -> list[dict[str, Any]]:
    """Points of one kind that a learner attempt logged."""
    lines = paths.metrics("learner-0", attempt).read_text().splitlines()
    return [point for point in map(json.loads, lines) if point["event"] == event]
