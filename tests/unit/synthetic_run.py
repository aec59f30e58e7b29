"""A run directory made by hand, step by step: real journals, leases, shards and metric shards, no roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.grading.base import Grade
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe, Timing
from miles_core.records import (
    Batch,
    BatchGroup,
    BatchMember,
    Cuts,
    Drop,
    EvaluationPoint,
    Graded,
    GradeEntry,
    GradeRef,
    GradesChosen,
    GroupIssued,
    Incident,
    Intent,
    JobEnded,
    Published,
    RunClosed,
    ShardEntry,
    ShardSealed,
    StepDone,
    Submitted,
    TrajectoryRef,
    Version,
)
from miles_core.run import RunConfig, all_writers
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder, Machine
from miles_core.store.publish import digest_bytes
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from miles_core.trajectories.shards import encode_shard

MADE_S = 1_790_000_000.0
HOSTILE = "<script>alert('x')</script>"
WORDS = ("What is 1 + 1 ? ", "\n", HOSTILE, "two", " & ", "2")
"""Text of token 0, 1, ..."""


class SyntheticRun:
    """Writes what the roles of a run of `steps` steps would; `train(k)` adds step k with everything around it."""

    def __init__(self, root: Path, steps: int = 8, wandb: bool = True) -> None:
        root.mkdir(mode=0o755)
        recipe = Recipe.model_validate({
            "name": "synthetic", "steps": steps, "model": {"path": "none"}, "environment": {"family": "chain_sum"},
            "orchestrator": {"prompts": 2, "samples": 2}, "tracking": {"wandb": wandb, "project": "tests"},
        })  # fmt: skip
        self.paths = RunPaths(root)
        self.run = RunConfig(
            run_id="synthetic-1", recipe=recipe, timing=Timing(visibility_s=0.0), cluster={"name": "paper", "secret": "hush"},
            code_digest="c0de", base_model_digest="ba5e", created_s=MADE_S,
        )  # fmt: skip
        self.paths.run_file.write_text(self.run.model_dump_json())
        self.now_s = MADE_S + 10.0
        self._fs = FileSystem()
        self.leases = LeaseFolder(self._fs, self.paths.leases, self.run.run_id)
        self.paths.leases.mkdir()
        self.journals = {writer: self.open(writer) for writer in ("supervisor-0", *all_writers(recipe))}
        self._start()

    def open(self, writer: str, attempt: int = 1) -> JournalWriter:
        """Takes a lease and opens the attempt's journal."""
        machine = Machine(cpu="Fast CPU", cpus=8, gpus=("H200", "H200"))
        self.leases.acquire(writer, attempt, f"{writer}.{attempt}", host=f"n{attempt}", machine=machine)
        folder = self.paths.journal(writer)
        journal = JournalWriter(
            self._fs, folder, run_id=self.run.run_id, writer=writer, attempt=attempt, token=f"{writer}.{attempt}"
        )
        if writer.split("-", maxsplit=1)[0] not in ("rollout", "grader"):
            journal.write(Cuts())
        return journal

    def write(self, writer: str, *records: Any) -> None:
        """Appends records to a journal, synced."""
        for record in records:
            self.journals[writer].write(record)
        self.journals[writer].flush()

    def point(self, writer: str, event: str, **values: Any) -> None:
        """Appends a metric point."""
        path = self.paths.metrics(writer, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps({"event": event, "unix_s": self.now_s, **values}) + "\n")

    def _start(self) -> None:
        for index, writer in enumerate(all_writers(self.run.recipe)):
            self.write("supervisor-0", Intent(writer=writer, attempt=1, token="t", reason="first"))
            self.write("supervisor-0", Submitted(writer=writer, attempt=1, job_id=str(100 + index)))
        self.write("learner-0", StepDone(
            step=0, batch_id="", manifest_digest="", weights_digest="w0", staleness=0, mean_reward=0.0
        ))  # fmt: skip
        self._publish(0)

    def train(self, step: int, *, points: bool = True, metrics: dict[str, float] | None = None) -> None:
        """Samples, grades, batches and trains step `step`; `points` False: its metric points are still in buffers.

        `metrics`: further ones of the learner.
        """
        self.now_s += 5.0
        group = f"g{step}.o1"
        members = self._sample(step, group)
        grades = [
            (member.ref.trajectory_id, Grade(value=member.reward, std=0, source="s", timestamp=self.now_s))
            for member in members
        ]
        self.write("orchestrator-0", GroupIssued(group_id=group, task_seed=step, num_samples=2))
        self.write("grader-0", Graded(
            order_id="o", entries=tuple(GradeEntry(trajectory_id=name, grade=grade) for name, grade in grades)
        ))  # fmt: skip
        chosen = tuple(GradeRef(trajectory_id=name, grader="grader-0", grader_attempt=1, grade=grade) for name, grade in grades)
        staleness = step - 1 - members[0].oldest_step
        self.write("orchestrator-0", GradesChosen(grades=chosen), Batch(
            step=step, batch_id=f"b{step}.o1", groups=(BatchGroup(group_id=group, members=members),), staleness=staleness
        ))  # fmt: skip
        self.write("learner-0", StepDone(
            step=step, batch_id=f"b{step}.o1", manifest_digest="m", weights_digest=f"w{step}", staleness=staleness,
            mean_reward=0.5,
            metrics={"loss": -0.1 * step, "k3": 0.01, "entropy": 0.5, "grad_norm": 1.0, "tokens": 40.0, **(metrics or {})},
        ))  # fmt: skip
        self._publish(step)
        if points:
            self.add_points(step)

    def add_points(self, step: int) -> None:
        """The metric points of a step."""
        self.point("rollout-0", "rollout", tokens=40 * step, trajectories=2 * step, active=1, version=step - 1)
        self.point("rollout-0", "busy", start_s=self.now_s - 4, end_s=self.now_s - 1)
        self.point("orchestrator-0", "batch", step=step, sampled_tokens={"n": 2, "mean": 3, "min": 2, "p50": 3, "max": 4})
        self.point("orchestrator-0", "orchestrator", open=3, ready=1, in_flight=2, in_grading=1, ungraded=0)
        self.point("learner-0", "busy", start_s=self.now_s - 2, end_s=self.now_s)
        self.point(
            "learner-0", "step", step=step, attempt=1, wait_s=90.0 if step == 1 else 1.0, read_s=0.1, train_s=2.0, publish_s=0.1
        )

    def _sample(self, step: int, group: str) -> tuple[BatchMember, ...]:
        rows = [self._trajectory(step, group, index) for index in range(2)]
        data = encode_shard(rows)
        path = self.paths.shard("rollout-0", 1, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entries = tuple(
            ShardEntry(
                trajectory_id=row.trajectory_id, sample_id=row.sample_id, group_id=group, order_id="o", row=index,
                status="complete", versions=(Version(max(0, step - 2), 1),), num_tokens=len(row.tokens),
                num_sampled_tokens=row.num_sampled,
            )
            for index, row in enumerate(rows)
        )  # fmt: skip
        name, digest = self.paths.relative(path), digest_bytes(data)
        self.write("rollout-0", ShardSealed(path=name, size_bytes=len(data), digest=digest, rows=entries))
        return tuple(
            BatchMember(
                ref=TrajectoryRef(trajectory_id=row.trajectory_id, shard=name, row=index, shard_digest=digest),
                oldest_step=max(0, step - 2), reward=float(index),
            )
            for index, row in enumerate(rows)
        )  # fmt: skip

    def _trajectory(self, step: int, group: str, index: int) -> Trajectory:
        mask = np.array([0, 0, 1, 1, 1, 1], np.uint8)
        runs = (VersionRun(2, max(0, step - 2), 1), *((VersionRun(4, step - 1, 1),) if step > 1 else ()))
        return Trajectory(
            trajectory_id=f"{group}/{index}@rollout-0.a1", sample_id=f"{group}/{index}", group_id=group, order_id="o",
            producer="rollout-0", producer_attempt=1, task_seed=step, tokens=np.arange(6, dtype=np.int32), loss_mask=mask,
            logprobs=np.where(mask, -0.5, 0).astype(np.float32), versions=runs, temperature=1.0, status="complete",
            turns=(Turn("user", 0, 1), Turn("assistant", 2, 6)),
        )  # fmt: skip

    def _publish(self, step: int) -> None:
        self.write("learner-0", Published(
            version=Version(step, 1), weights_digest=f"w{step}", folder="policy/x", manifest_digest="m", size_bytes=1000
        ))  # fmt: skip

    def drop(self, group: str) -> None:
        """A stale group."""
        self.write("orchestrator-0", GroupIssued(group_id=group, task_seed=1, num_samples=2))
        self.write("orchestrator-0", Drop(group_id=group, reason="stale"))
        self.point("orchestrator-0", "drop", group=group, reason="stale", detail="", sampled_tokens={"n": 2, "mean": 9.0})

    def evaluate(self, step: int, score: float) -> None:
        """A greedy point."""
        self.write("evaluator-0", EvaluationPoint(
            version=Version(step, 1), weights_digest="w", num_problems=4, greedy_score=score, seconds=1.0
        ))  # fmt: skip

    def lose(self, writer: str, detail: str) -> None:
        """A job that ended, its incident, and the next attempt."""
        self.write(
            "supervisor-0",
            JobEnded(writer=writer, attempt=1, job_id="100", cause="infrastructure", state="NODE_FAIL", nodes=("n1",)),
            Incident(what="role_lost", writer=writer, detail=detail, unix_s=self.now_s),
            Intent(writer=writer, attempt=2, token="t", reason=detail),
            Submitted(writer=writer, attempt=2, job_id="200"),
        )

    def close(self) -> None:
        """The supervisor's last word."""
        self.write("supervisor-0", RunClosed(state="COMPLETED", unix_s=self.now_s + 1))

    def add_tokenizer(self) -> None:
        """A tokenizer whose token i is WORDS[i]."""
        from tokenizers import Tokenizer, decoders, models

        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0]))
        tokenizer.decoder = decoders.Fuse()
        self.paths.base_model.mkdir()
        tokenizer.save(str(self.paths.base_model / "tokenizer.json"))
