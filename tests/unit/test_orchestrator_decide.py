"""Tables of the orchestrator's pure decisions."""

from __future__ import annotations

from collections import Counter

import pytest

from miles_core.orchestrator.decide import Balancer, derive_seed, min_step, num_to_issue, oldest_step, staleness, unusable
from miles_core.orchestrator.state import Key, Receiver, key_of
from miles_core.records import ShardEntry, Version, number_of
from miles_core.rollbacks import Rollbacks


@pytest.mark.parametrize(
    ("open_groups", "last_batch", "trained", "capacity", "steps", "expected"),
    [
        (0, 0, -1, 3.0, 60, 48),  # empty: all of the capacity, also before the base model is loaded
        (40, 0, 0, 3.0, 60, 8),
        (48, 0, 0, 3.0, 60, 0),
        (16, 2, 0, 3.0, 60, 0),  # two batches wait for the learner and count
        (16, 2, 1, 3.0, 60, 16),
        (60, 0, 0, 3.0, 60, 0),  # over capacity: never negative
        (0, 58, 58, 3.0, 60, 32),  # two steps are left
        (32, 58, 58, 3.0, 60, 0),
        (20, 59, 58, 3.0, 60, 0),
        (0, 60, 59, 3.0, 60, 0),  # all batches exist
        (0, 4, 4, 1.0, 60, 16),  # synchronous: one batch at a time
        (1, 4, 4, 1.0, 60, 15),
        (0, 5, 4, 1.0, 60, 0),
        (0, 0, 0, 1.5, 60, 24),
    ],
)
def test_num_to_issue(open_groups: int, last_batch: int, trained: int, capacity: float, steps: int, expected: int) -> None:
    found = num_to_issue(
        open_groups=open_groups, last_batch=last_batch, trained_step=trained, prompts=16, capacity_batches=capacity, steps=steps
    )
    assert found == expected


@pytest.mark.parametrize(
    ("last_batch", "ahead", "bound", "expected"),
    [
        (0, 0, 4, 0),
        (10, 0, 4, 6),  # for batch 11, version 10 is fresh and 6 the oldest allowed
        (10, 15, 4, 6),
        (10, 16, 4, 7),
        (10, 47, 4, 8),
        (3, 0, 0, 3),  # synchronous: the newest version only
        (0, 0, 0, 0),
    ],
)
def test_min_step(last_batch: int, ahead: int, bound: int, expected: int) -> None:
    assert min_step(last_batch=last_batch, groups_ahead=ahead, prompts=16, max_staleness=bound) == expected


def test_a_minimum_version_is_never_one_that_waits_for_the_group_itself() -> None:
    """Whatever is open and batched under the capacity, the version asked for is one the learner has trained: no deadlock."""
    prompts = 4
    for bound in range(5):
        for capacity in [1.0 + quarter / 4 for quarter in range(4 * bound + 1)]:
            for batched in range(int(capacity) + 1):
                for ahead in range(int(capacity * prompts) - batched * prompts):
                    trained = 7
                    wanted = min_step(last_batch=trained + batched, groups_ahead=ahead, prompts=prompts, max_staleness=bound)
                    assert wanted <= trained, (bound, capacity, batched, ahead)


def test_staleness_counts_from_the_version_before_the_step() -> None:
    assert staleness(5, [4, 4]) == 0
    assert staleness(5, [4, 1]) == 3
    assert oldest_step([Version(3, 2), Version(1, 1), Version(2, 2)], Rollbacks()) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"status": "truncated"}, ""),
        ({"status": "failed", "failure_kind": "environment"}, "failed (environment)"),
        ({"versions": (), "num_sampled_tokens": 0}, "holds no sampled token"),
        ({"num_sampled_tokens": 0}, "holds no sampled token"),
    ],
)
def test_unusable(changes: dict[str, object], expected: str) -> None:
    entry = ShardEntry(
        trajectory_id="t", sample_id="s", group_id="g", order_id="r1.o1", row=0, status="complete", versions=(Version(0, 1),),
        num_tokens=3, num_sampled_tokens=1,
    )  # fmt: skip
    assert unusable(entry.model_copy(update=changes)) == expected


def test_seeds_are_the_same_everywhere_and_differ_by_purpose_run_and_group() -> None:
    assert derive_seed(0, "task", 1) == 9048399023564050393
    seeds = {derive_seed(run, purpose, number) for run in (0, 1) for purpose in ("task", "sampling") for number in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def people(*loads: int) -> list[tuple[Receiver, int]]:
    return [(Receiver(f"rollout-{index}", 1), load) for index, load in enumerate(loads)]


def test_the_least_loaded_receiver_is_picked_and_its_load_grows() -> None:
    balancer = Balancer(people(3, 0, 1))
    picks = [balancer.pick(2) for _ in range(4)]
    assert [pick.writer for pick in picks if pick] == ["rollout-1", "rollout-2", "rollout-1", "rollout-0"]


def test_an_avoided_receiver_is_picked_only_when_there_is_no_other() -> None:
    balancer = Balancer(people(0, 5))
    assert balancer.pick(1, avoid={"rollout-0"}) == Receiver("rollout-1", 1)
    assert balancer.pick(1, avoid={"rollout-0", "rollout-1"}) == Receiver("rollout-0", 1)
    assert balancer.pick(1) == Receiver("rollout-0", 1)


def test_a_receiver_at_its_limit_gets_no_more() -> None:
    balancer = Balancer(people(0, 3), limits={"rollout-0": 4, "rollout-1": 4})
    picks = Counter(balancer.pick(2) for _ in range(5))
    assert picks == {Receiver("rollout-0", 1): 2, Receiver("rollout-1", 1): 1, None: 2}
    assert not balancer
    assert not Balancer([])


def test_ids() -> None:
    assert number_of("g12.o3") == 12
    assert key_of("g12.o3/4") == Key("g12.o3", 4)
    assert key_of("g12.o3/4@rollout-0.a2") == Key("g12.o3", 4)
    assert key_of("nonsense") is None
    assert key_of("g1.o1/x@y") is None
    assert str(Key("g12.o3", 4)) == "g12.o3/4"
