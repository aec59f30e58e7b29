"""Ten thousand deliveries of versions by a filesystem that tears, flips, delays and loses: nothing wrong is served (I1, I11).

One delivery is one version that a learner writes, or one try of a reader to reach an announced version. Writers meet failed
and half-done calls and die between data and manifest; readers see names and bytes late and out of order, get flipped and cut
bytes, lose files to a collector, and ask for versions in any order. What a reader returns is hashed here, from its bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import xxhash

from miles_core.errors import DeadlineExceeded, DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import Change, Probe, TensorEntry, tensor_entries
from miles_core.policy.publisher import Publisher
from miles_core.policy.retention import retained
from miles_core.recipe import PolicySpec
from miles_core.records import Published, Version
from tests.protocol.faulty_fs import FakeClock, FaultyFS, Server

RUN, ROOT = "r1", Path("/run")
VISIBILITY_S = 10.0
PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)
WORLDS, ROUNDS, READERS = 4, 27, 3
"""Per part; each round is one version and two tries of each reader."""
PARTS = 16
T = TypeVar("T")


class Crash(BaseException):
    """The end of a learner's process."""


class Reader(PolicyCopy):
    """Now and then it breaks off before a tensor of a delta, as when memory runs out; then it goes on with what it has."""

    draw = random.Random()
    breaks = 0.0

    def _change(self, change: Change, target: TensorEntry, payload: bytes) -> None:
        if self.draw.random() < self.breaks:
            raise MemoryError
        super()._change(change, target, payload)


class BadReads(FaultyFS):
    """A reader's node: now and then a read has a flipped bit, or ends early."""

    spoil = 0.0
    spoiled = 0

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        data = super().read(path, offset, limit)
        draw = self.server.random
        if not data or draw.random() >= self.spoil:
            return data
        self.spoiled += 1
        position = draw.randrange(len(data))
        if draw.random() < 0.3:
            return data[:position]
        return data[:position] + bytes([data[position] ^ (1 << draw.randrange(8))]) + data[position + 1 :]


def identity(tensors: dict) -> str:
    """What tensors are, by their bytes: says the same as no code under test."""
    import torch

    parts = [
        f"{name}/{tensor.dtype}/{tuple(tensor.shape)}/".encode() + bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        for name, tensor in sorted(tensors.items())
    ]
    return xxhash.xxh3_128_hexdigest(b"\0".join(parts))


class World:
    """One run: a learner that is replaced when it dies, and readers on other nodes."""

    def __init__(self, seed: int) -> None:
        self.clock, self.draw = FakeClock(), random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.server = Server(self.clock, VISIBILITY_S, seed=seed, holes=True)
        self.writer_fs = self.server.node("learner")
        self.lineage, self.truth = Lineage(), dict[Version, str]()
        self.attempt, self.step, self.counts = 0, -1, Counter[str]()
        self.spec = PolicySpec(anchor_every=self.draw.randint(2, 8), anchor_ratio=self.draw.choice([0.5, 1.0, 9.0]))
        self.weights = {
            "a": self.numbers.standard_normal(1500).astype(np.float32),
            "b": self.numbers.integers(0, 2**16, 800, dtype=np.uint16),
        }
        self.readers = [self._reader(f"reader-{index}") for index in range(READERS)]
        self._replace_learner()

    def _reader(self, name: str) -> Reader:
        fs = BadReads(self.server, name)
        reader = Reader(RunPaths(ROOT), RUN, self.lineage, fs=fs, clock=fs.clock, sleep=self.clock.advance)
        reader.draw = self.draw
        return reader

    def _replace_learner(self) -> None:
        self.attempt += 1
        self.publisher = Publisher(self.writer_fs, RunPaths(ROOT), self.spec, run_id=RUN, learner_token="t")
        self.counts["learners"] += 1

    # --- the learner

    def tensors(self) -> dict:
        """The weights as torch has them: float32, bfloat16, an empty tensor, and one that comes and goes."""
        import torch

        tensors = {
            "a": torch.from_numpy(self.weights["a"].copy()),
            "b": torch.from_numpy(self.weights["b"].copy()).view(torch.bfloat16),
            "empty": torch.empty(0, 2),
        }
        return tensors | ({"now and then": torch.full((3,), float(self.step))} if self.draw.random() < 0.5 else {})

    def train(self) -> None:
        """A few elements change, sometimes all, sometimes none; sometimes back to what they were."""
        for array in self.weights.values():
            share = self.draw.choice([0.0, 0.01, 0.01, 0.05, 1.0 if self.draw.random() < 0.1 else 0.02])
            chosen = self.numbers.random(array.size) < share
            array[chosen] = array[chosen] + 1 if array.dtype == np.uint16 else -array[chosen]

    def publish(self) -> None:
        """Insists as the role does, over failed calls; or dies before the record."""
        self.step += 1
        self.counts["deliveries"] += 1
        tensors = self.tensors()
        version = Version(self.step, self.attempt)
        prepared = self.publisher.prepare(version, tensors, tensor_entries(tensors), PROBE)
        dies = self.draw.choice(["after data", "after manifest", *[""] * 18])
        self.writer_fs.rate = self.draw.choice([0.0, 0.05, 0.3])
        try:
            published = self._insist(prepared, dies)
        except Crash:
            self.counts["deaths"] += 1
            self.step -= 1
            self._replace_learner()
            return
        self.truth[version] = identity(tensors)
        self.lineage.published[version] = published
        self.counts["deltas" if published.base else "anchors"] += 1

    def _insist(self, prepared, dies: str) -> Published:
        def after_data() -> None:
            if dies == "after data":
                raise Crash

        while True:
            try:
                published = self.publisher.write(prepared, after_data)
                break
            except OSError:
                self.counts["failed writes"] += 1
                self.clock.advance(self.draw.random())
        if dies:
            raise Crash
        return published

    def collect(self) -> None:
        """Deletes what need not stay, as the supervisor would."""
        keep = retained(self.lineage.published)
        for version, published in self.lineage.published.items():
            folder = RunPaths(ROOT).resolve(published.folder)
            if version not in keep:
                for name in list(self.server.listings[folder]):
                    if self.server.current(name) is not None:
                        self.server.set_name(name, "learner", None)
                        self.counts["deleted"] += 1

    # --- readers

    def deliver(self, reader: Reader, published: Published, deadline_s: float = 0.0) -> bool:
        """One try; True if it was served. A refusal is fine, other bytes than the learner's are not."""
        self.counts["deliveries"] += 1
        try:
            tensors, manifest = reader.read(published, deadline_s=deadline_s)
        except (OSError, DeadlineExceeded, DigestMismatch, RunDirectoryError, MemoryError) as refused:
            self.counts[type(refused).__name__] += 1
            return False
        assert manifest.version == reader.version == published.version
        assert manifest.weights_digest == published.weights_digest
        assert identity(tensors) == self.truth[published.version], f"wrong bytes served as {published.version}"
        self.counts["served"] += 1
        return True

    def some_version(self) -> Published:
        """Mostly the newest, else any that was ever announced: late and out of order."""
        newest = self.lineage.newest_published
        assert newest is not None
        if self.draw.random() < 0.7:
            return newest
        return self.lineage.published[self.draw.choice(list(self.lineage.published))]

    def disturb(self, reader: Reader) -> None:
        """Sets how bad a reader's node is; now and then its process is new."""
        fs = reader._fs
        assert isinstance(fs, BadReads)
        fs.rate, fs.spoil = self.draw.choice([0.0, 0.0, 0.1, 0.5]), self.draw.choice([0.0, 0.0, 0.1, 0.5])
        reader.breaks = self.draw.choice([0.0, 0.0, 0.3])
        if self.draw.random() < 0.05:
            reader._drop()

    def round(self) -> None:
        """One version, then every reader tries twice at any time after it."""
        self.train()
        self.publish()
        if self.draw.random() < 0.3:
            self.collect()
        for reader in self.readers * 2:
            if not self.lineage.published:
                return
            self.disturb(reader)
            self.clock.advance(self.draw.choice([0.0, 0.1, VISIBILITY_S / 2, 2 * VISIBILITY_S]))
            self.deliver(reader, self.some_version())

    def end(self) -> None:
        """Nothing fails any more: everybody reaches the newest version."""
        self.writer_fs.heal()
        while not self.lineage.published:
            self.publish()
        newest = self.lineage.newest_published
        assert newest is not None
        for reader in self.readers:
            fs = reader._fs
            assert isinstance(fs, BadReads)
            fs.heal()
            fs.spoil = reader.breaks = 0.0
            self.counts["spoiled"] += fs.spoiled
            assert self.deliver(reader, newest, deadline_s=3 * VISIBILITY_S), "a reader did not end on a verified version"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_wrong_digest_is_served_and_every_reader_ends_on_a_verified_version(part: int) -> None:
    total = Counter[str]()
    for number in range(WORLDS):
        world = World(seed=1000 * part + number)
        for _ in range(ROUNDS):
            world.round()
        world.end()
        total += world.counts
    assert total["deliveries"] >= 10_000 / PARTS
    refusals = ("DigestMismatch", "DeadlineExceeded", "MemoryError")
    for seen in ("served", "deltas", "anchors", "deaths", "failed writes", "deleted", "spoiled", *refusals):
        assert total[seen] > 0, f"nothing of {seen!r} happened: {total}"
    assert total["served"] > total["deliveries"] / 4, total
