"""Deltas between the real roles: a learner that dies and recovers, a replica that follows it, verify proves each version."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from miles_core.errors import DigestMismatch
from miles_core.paths import RunPaths
from miles_core.policy.local_copy import read_version
from miles_core.policy.manifest import DELTA_NAME, weights_digest
from miles_core.recipe import PolicySpec
from miles_core.records import Version
from miles_core.rollout.worker import PolicyFeed
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import EXIT_CODE, VARIABLE
from miles_core.store.publish import digest_file
from miles_core.verify import verify_run
from tests.e2e.tamper import edit_records, of_kind
from tests.protocol.learner_run import STEPS, FakeOrchestrator, FakeTrainer, make_run, read_lineage, run_learner


class WideTrainer(FakeTrainer):
    """The same eight numbers, and a large table of which a step changes a few: so that a delta is worth it."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        table = np.zeros(20_000, dtype=np.float32)
        table[:8] = self.weights
        return super().state_tensors() | {"model.table": torch.from_numpy(table)}


class Engine:
    """Holds what it was given; answers the probe as the learner's trainer does."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Version, str]] = []
        self.trainer = WideTrainer()

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        self.loaded.append((version, weights_digest(tensors)))
        self.trainer.weights = tensors["model.table"][:8].numpy().copy()

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        return self.trainer.logprobs(token_lists, temperature)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[RunConfig, RunPaths]:
    run, paths = make_run(tmp_path / "run", policy=PolicySpec(anchor_every=5))
    FakeOrchestrator(run, paths).write_all()
    return run, paths


def feed_of(run: RunConfig, paths: RunPaths, engine: Engine) -> PolicyFeed:
    context = RoleContext(run, paths, "rollout-0", 1, token="token-r")
    return PolicyFeed(context, engine)  # type: ignore[arg-type]


def poll_until(feed: PolicyFeed, version: Version) -> None:
    for _ in range(2000):
        feed.poll()
        if feed.version == version:
            return
    raise AssertionError(f"stays at {feed.version}, wanted {version}; {feed.waiting}")


def version_faults(paths: RunPaths) -> list[str]:
    return sorted({fault.kind for fault in verify_run(paths.root).faults if fault.kind.startswith(("version", "weights"))})


def test_a_learner_publishes_deltas_and_every_reader_follows(prepared):
    run, paths = prepared
    run_learner(run, paths, trainer=WideTrainer())
    lineage = read_lineage(run, paths)
    assert [lineage.published[Version(step, 1)].base for step in range(STEPS + 1)] == [
        None, (0, 1), (1, 1), (2, 1), (3, 1), None, (5, 1)
    ]  # fmt: skip
    for published in lineage.published.values():
        tensors, _ = read_version(paths, run.run_id, published, lineage)
        assert weights_digest(tensors) == published.weights_digest == lineage.steps[published.version.step].weights_digest
    engine = Engine()
    poll_until(feed_of(run, paths, engine), Version(STEPS, 1))
    assert engine.loaded[-1] == (Version(STEPS, 1), lineage.steps[STEPS].weights_digest)
    assert version_faults(paths) == []


def die(run: RunConfig, paths: RunPaths, where: str) -> None:
    def child() -> None:
        os.environ[VARIABLE] = f"learner:{where}:1"
        run_learner(run, paths, trainer=WideTrainer())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == EXIT_CODE


@pytest.mark.parametrize("where", ["after_step_record:3", "after_publish_data:3", "after_publish:3", "after_publish_data:5"])
def test_a_successor_begins_with_an_anchor_and_a_replica_goes_on(prepared, where):
    run, paths = prepared
    die(run, paths, where)
    engine = Engine()
    feed = feed_of(run, paths, engine)
    newest = read_lineage(run, paths).newest_published
    assert newest is not None
    poll_until(feed, newest.version)
    run_learner(run, paths, 2, trainer=WideTrainer())
    lineage = read_lineage(run, paths)
    of_successor = [published for version, published in sorted(lineage.published.items()) if version.attempt == 2]
    assert of_successor[0].base is None and of_successor[0].version.step == int(where[-1])
    assert all(published.base is None or published.base.attempt == 2 for published in of_successor)
    poll_until(feed, Version(STEPS, 2))
    assert engine.loaded[-1][1] == lineage.steps[STEPS].weights_digest
    assert version_faults(paths) == []


def test_verify_names_every_version_that_a_broken_delta_takes_along(prepared):
    run, paths = prepared
    run_learner(run, paths, trainer=WideTrainer())
    path = paths.version(2, 1) / DELTA_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    faults = verify_run(paths.root).faults
    assert [fault.where for fault in faults if fault.kind == "version_digest"] == ["policy/000/v000002-a1/delta.bin"]
    unproved = [fault.where for fault in faults if fault.kind == "version_weights"]
    assert unproved == [f"policy/000/v{step:06d}-a1" for step in (2, 3, 4)], "the anchor of version 5 needs none of them"
    lineage = read_lineage(run, paths)
    with pytest.raises(DigestMismatch):
        read_version(paths, run.run_id, lineage.published[Version(4, 1)], lineage)


def test_verify_proves_an_anchor_by_its_tensors_and_not_by_its_file_alone(prepared):
    """Bytes, manifest and journal agree on the file; the tensors in it are not those of the step."""
    run, paths = prepared
    run_learner(run, paths, trainer=WideTrainer())
    folder = paths.version(0, 1)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    content = json.loads(manifest.read_bytes())
    content["files"][0]["digest"] = digest_file(weights)
    manifest.write_text(json.dumps(content, separators=(",", ":")))

    def edit(records: list[dict]) -> None:
        of_kind(records, "published")[0]["manifest_digest"] = digest_file(manifest)

    edit_records(paths.journal("learner-0") / "a0001-s000.journal", edit)
    assert version_faults(paths) == ["version_weights"]
