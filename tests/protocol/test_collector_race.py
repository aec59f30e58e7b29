"""Real readers that race the real collector: nothing wrong is served, and all arrive (I11, I12)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from miles_core.errors import DeadlineExceeded, DigestMismatch
from miles_core.policy.lineage import StepLog
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import Probe, tensor_entries
from miles_core.policy.publisher import Publisher
from miles_core.recipe import PolicySpec
from miles_core.records import Cuts, StepDone, Version
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from tests.protocol.learner_run import learner_context, make_run
from tests.protocol.test_collector import Epoch, Run, deletions, evaluated, versions_on_disk

PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)


class SlowReader(FileSystem):
    """Now and then a read of a version begins only after the collector took it, or after the last one was published."""

    def __init__(self, draw: random.Random, published: threading.Event) -> None:
        self._draw, self._published = draw, published

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        if "policy" in path.parts and self._draw.random() < 0.05:
            while path.exists() and not self._published.is_set():
                time.sleep(0.002)
        return super().read(path, offset, limit)


class Race:
    """A publisher, a collector that deletes as early as it may, and readers, each a thread."""

    def __init__(self, run: Run, last: Version) -> None:
        self.config, self.paths = run
        self.last = last
        self.truth: dict[Version, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.published, self.over = threading.Event(), threading.Event()
        self.arrived: list[Version | None] = []

    def publish(self) -> None:
        import torch

        context = learner_context(self.config, self.paths)
        context.leases.acquire("learner-0", 1, context.token)
        journal = context.journal()
        journal.write(Cuts())
        spec = PolicySpec(anchor_every=3, anchor_ratio=9)
        publisher = Publisher(FileSystem(), self.paths, spec, run_id=self.config.run_id, learner_token="t")
        numbers = np.random.default_rng(0)
        weights = numbers.standard_normal(3000).astype(np.float32)
        for step in range(self.last.step + 1):
            weights[numbers.integers(0, weights.size, 20)] += 1
            tensors = {"w": torch.from_numpy(weights.copy())}
            prepared = publisher.prepare(Version(step, 1), tensors, tensor_entries(tensors), PROBE)
            published = publisher.write(prepared)
            self.truth[Version(step, 1)] = weights.tobytes()
            journal.append(
                StepDone(
                    step=step, batch_id="", manifest_digest="", weights_digest=published.weights_digest, staleness=0,
                    mean_reward=0.0,
                )
            )  # fmt: skip
            journal.write(published)
        self.published.set()

    def collect(self, epoch: Epoch) -> None:
        while not self.over.is_set():
            epoch.tick()
            time.sleep(0.002)

    def read(self, number: int) -> None:
        draw = random.Random(number)
        reader = RoleContext(self.config, self.paths, f"rollout-{number}", 1, fs=SlowReader(draw, self.published))
        steps = StepLog(reader.follow("learner-0"))
        copy = PolicyCopy(self.paths, self.config.run_id, steps, fs=reader.fs)
        deadline_s = time.monotonic() + 60
        while copy.version != self.last and time.monotonic() < deadline_s:
            steps.poll()
            newest = steps.newest_published
            if newest is None or copy.version == newest.version:
                time.sleep(0.001)
                continue
            try:
                tensors, _ = copy.read(newest)
            except DeadlineExceeded:
                self.counts["gone under the reader"] += 1
            except DigestMismatch as error:
                self.wrong.append(str(error))
                return
            else:
                self.counts["served"] += 1
                if tensors["w"].numpy().tobytes() != self.truth[newest.version]:
                    self.wrong.append(f"other bytes as version {newest.version}")
        self.arrived.append(copy.version)


def test_readers_that_race_the_collector_are_never_served_wrong_bytes_and_all_arrive(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1000)
    evaluated(run, 0)
    race, epoch = Race(run, Version(199, 1)), Epoch(run)
    threads = [threading.Thread(target=race.collect, args=(epoch,))]
    threads += [threading.Thread(target=race.read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    race.publish()
    for thread in threads[1:]:
        thread.join(60)
    race.over.set()
    threads[0].join(60)
    assert race.wrong == []
    assert race.arrived == [race.last] * 4
    assert race.counts["gone under the reader"] > 0, f"the collector never got in anybody's way: {race.counts}"
    epoch.settle()
    assert len(versions_on_disk(run)) <= 6 < len(deletions(run))
