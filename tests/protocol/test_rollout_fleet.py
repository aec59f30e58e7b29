"""A replica of several engines and the published versions: none serves before the probe of each holds, and one that died
serves again only with the version in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_core.errors import DigestMismatch
from miles_core.policy.manifest import PolicyManifest, Probe
from miles_core.records import Published, Version
from miles_core.rollout.router import FIRST_MEND_S, RoutedEngine
from miles_core.rollout.worker import PolicyFeed
from tests.protocol.receiver_world import World
from tests.unit.toy_engines import Toy


class Replica:
    """The feed of two engines; what is published as step n are the weights -1 - n."""

    def __init__(self, world: World) -> None:
        self.world, self.made = world, list[Toy]()
        self.reads = list[Version]()
        self.fleet = RoutedEngine(self._make, 2, clock=world.clock)
        self.feed = PolicyFeed(world.context(), self.fleet, self._read, self.fleet)

    def _make(self, index: int) -> Toy:
        self.made.append(Toy(2, Version(-1, 0), f"engine {index}"))
        return self.made[-1]

    def _read(self, published: Published) -> tuple[dict[str, float], PolicyManifest]:
        self.reads.append(published.version)
        right = -1.0 - published.version.step
        probe = Probe(prompts=((1, 2, 3),), logprobs=((right, right),), dtype="float32", tolerance=1e-3)
        return {"weights": right}, PolicyManifest(
            run_id="r1", version=published.version, weights_digest="w", files=(), tensors=(), probe=probe, learner_token="t"
        )

    def poll(self, seconds: float = 0.0) -> None:
        for _ in range(1 + int(seconds)):
            self.feed.poll()
            self.world.clock.sleep(1.0)


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    world = World(tmp_path, "rollout-0")
    world.publish(0)
    return Replica(world)


def computes_wrong(toy: Toy) -> None:
    def load(tensors: dict[str, Any], version: Version) -> None:
        toy.weights, toy.version = -7.0, version

    toy.load_weights = load  # type: ignore[method-assign]


def test_no_engine_serves_before_the_probe_of_each_holds(replica: Replica) -> None:
    for toy in replica.made:
        computes_wrong(toy)
    replica.poll()
    assert replica.feed.version is None and not any(toy.is_closed for toy in replica.made)
    assert "differ from the learner's" in replica.feed.waiting
    with pytest.raises(DigestMismatch, match=r"policy version \(0, 1\).*could not be loaded"):
        replica.poll(60)


def test_an_engine_that_alone_computes_wrong_never_serves_and_the_others_do(replica: Replica) -> None:
    computes_wrong(replica.made[1])
    replica.poll()
    assert replica.feed.version == (0, 1) and replica.made[1].is_closed and replica.fleet.free_slots == 2


def test_an_engine_that_dies_in_its_probe_leaves_the_others_serving(replica: Replica) -> None:
    replica.made[0].dies_at = "probe"
    replica.poll()
    assert replica.feed.version == (0, 1) and replica.made[0].is_closed and not replica.made[1].is_closed


def test_an_engine_made_again_serves_with_the_version_in_use_when_its_probe_holds(replica: Replica) -> None:
    replica.poll()
    replica.made[0].dies_at = "load"
    replica.world.publish(1)
    replica.poll()
    assert replica.feed.version == (1, 1) and replica.fleet.free_slots == 2
    make = replica.fleet._make

    def make_wrong(index: int) -> Any:
        computes_wrong(made := replica._make(index))
        return made

    replica.fleet._make = make_wrong
    replica.poll(FIRST_MEND_S)
    assert replica.fleet.free_slots == 2 and replica.made[2].is_closed and replica.feed.version == (1, 1)
    replica.fleet._make = make
    replica.poll(2 * FIRST_MEND_S)
    assert replica.fleet.free_slots == 4 and replica.made[3].version == (1, 1) and replica.made[3].weights == -2.0
    reads = len(replica.reads)
    replica.poll(5)
    assert len(replica.reads) == reads, "nothing is read while all serve"


def test_a_version_that_cannot_be_read_leaves_a_dead_engine_dead_and_the_others_serving(replica: Replica) -> None:
    replica.poll()
    replica.fleet._bury(0, RuntimeError("device lost"))

    def unreadable(published: Published) -> Any:
        raise OSError("stale")

    replica.feed._read = unreadable
    replica.poll(FIRST_MEND_S + 1)
    assert replica.feed.version == (0, 1) and replica.fleet.free_slots == 2 and replica.made[2].is_closed
