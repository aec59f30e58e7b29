"""What the planner does with one event at a time, and that a rebuilt state is the running one."""

from __future__ import annotations

import random

import pytest

from miles_core.errors import JournalCorrupt
from miles_core.orchestrator.state import Key, Receiver, State
from miles_core.records import (
    Batch,
    Drop,
    GradeOrder,
    GradesChosen,
    GroupIssued,
    Leaving,
    Order,
    RunEnded,
    ShardSealed,
    Version,
)
from tests.protocol.orchestrator_table import Table, row, snapshot
from tests.protocol.simulation import simulated_recipe

R0, R1, G0, G1 = Receiver("rollout-0", 1), Receiver("rollout-1", 1), Receiver("grader-0", 1), Receiver("grader-1", 1)


def of(table: Table, kind: type) -> list:
    return [record for record in table.own if isinstance(record, kind)]


def first_round(**changes: object) -> Table:
    """A table on which the first groups are issued."""
    table = Table(simulated_recipe(**changes))
    table.decide()
    return table


def settle(table: Table, rounds: int = 3) -> None:
    for _ in range(rounds):
        table.work()
        table.decide()


def test_groups_are_issued_up_to_capacity_and_shared_out_evenly() -> None:
    table = first_round()
    orders = of(table, Order)
    assert [order.group_id for order in orders] == [f"g{number}.o1" for number in range(1, 7)]
    assert [order.receiver for order in orders] == ["rollout-0", "rollout-1"] * 3
    assert all(order.samples == (0, 1) and order.receiver_attempt == 1 for order in orders)
    assert [order.min_step for order in orders] == [0] * 6
    issued = of(table, GroupIssued)
    assert len({group.task_seed for group in issued}) == 6 and {group.bucket for group in issued} == {"chain_sum"}
    table.decide()
    assert len(of(table, Order)) == 6


def test_a_replica_gets_no_more_than_its_slots_and_one_group() -> None:
    table = Table(simulated_recipe(orchestrator__capacity_batches=4.0))
    table.rollouts = [R0]
    table.decide()
    assert table.state.load(R0) == 6
    table.rollouts = [R0, R1]
    table.decide()
    assert (table.state.load(R0), table.state.load(R1)) == (6, 6)


def test_without_a_replica_nothing_is_issued() -> None:
    table = Table(simulated_recipe())
    table.rollouts = []
    table.decide()
    assert table.own == []


def test_one_that_says_it_leaves_gets_no_more_work_and_keeps_what_it_has() -> None:
    table = first_round()
    load = table.state.load(R0)
    table.say(R0, Leaving())
    assert table.state.load(R0) == load > 0 and not table.state.lost
    settle(table)
    table.train()
    settle(table)
    later = of(table, Order)[6:]
    assert later and {order.receiver for order in later} == {"rollout-1"}
    assert table.cut(R0) not in table.state.leaving and R0 not in table.state.leaving


def test_a_batch_is_the_first_ready_groups_in_issue_order() -> None:
    table = first_round()
    orders = of(table, Order)
    for order in reversed(orders):
        table.list_samples(Receiver(order.receiver, 1), order)
    table.todo.clear()
    settle(table)
    first, second = of(table, Batch)
    assert [group.group_id for group in first.groups] == ["g1.o1", "g2.o1", "g3.o1"]
    assert (first.batch_id, first.staleness) == ("b1.o1", 0)
    assert second.staleness == 1
    assert [member.ref.trajectory_id for member in first.groups[0].members] == ["g1.o1/0@rollout-0.a1", "g1.o1/1@rollout-0.a1"]
    assert table.state.groups == {}


def test_groups_of_equal_rewards_are_batched_too() -> None:
    table = first_round()
    settle(table)
    assert {member.reward for batch in of(table, Batch) for group in batch.groups for member in group.members} == {0.5}


def test_only_as_many_groups_are_made_as_the_steps_need() -> None:
    table = first_round(steps=2, orchestrator__capacity_batches=4.0)
    settle(table)
    while table.train():
        settle(table)
    assert len(of(table, GroupIssued)) == 6
    assert [batch.step for batch in of(table, Batch)] == [1, 2]


def test_a_failed_sample_is_made_again_elsewhere_with_the_same_draw_then_its_group_is_dropped() -> None:
    table = first_round()
    first = of(table, Order)[0]
    table.list_samples(R0, first, status="failed")
    table.decide()
    again = of(table, Order)[-1]
    assert (again.receiver, again.group_id, again.samples, again.seed) == ("rollout-1", "g1.o1", (0, 1), first.seed)
    table.list_samples(R1, again, status="failed")
    table.decide()
    third = of(table, Order)[-1]
    table.list_samples(Receiver(third.receiver, 1), third, status="failed")
    table.decide()
    (drop,) = of(table, Drop)
    assert (drop.group_id, drop.reason) == ("g1.o1", "incomplete")
    assert "3 attempts" in drop.detail and "failed (infrastructure)" in drop.detail
    assert len(table.state.groups) == 6 and of(table, GroupIssued)[-1].group_id == "g7.o1"


def test_a_sample_without_a_sampled_token_is_not_trained() -> None:
    table = first_round()
    order = of(table, Order)[0]
    rows = [row(R0, order, index, index, status="complete", version=Version(0, 1)) for index in order.samples]
    rows[1] = rows[1].model_copy(update={"versions": (), "num_sampled_tokens": 0})
    table.say(R0, ShardSealed(path="p", size_bytes=1, digest="d", rows=tuple(rows)))
    table.decide()
    assert of(table, Order)[-1].samples == (1,)


def test_what_a_replica_returns_costs_no_attempt_and_it_gets_nothing_more() -> None:
    table = first_round(rollout__sample_attempts=1)
    order = of(table, Order)[0]
    table.give_back(R0, order)
    table.decide()
    again = of(table, Order)[-1]
    assert (again.group_id, again.receiver) == ("g1.o1", "rollout-1")
    assert of(table, Drop) == []
    assert table.state.leaving == {R0}
    table.cut(R0)
    assert table.state.leaving == set()


def test_samples_move_only_when_their_owner_is_cut() -> None:
    table = first_round()
    table.rollouts = [R1]  # rollout-0 is not seen alive any more
    for _ in range(5):
        table.decide()
    assert [order.receiver for order in of(table, Order)].count("rollout-1") == 3
    table.cut(R0)
    table.decide()
    moved = of(table, Order)[6:]
    assert {(order.receiver, order.group_id) for order in moved} == {
        ("rollout-1", name) for name in ("g1.o1", "g3.o1", "g5.o1")
    }


def test_a_listing_counts_only_for_the_receiver_and_order_that_own_the_sample() -> None:
    """CE8, CE9: a ghost's order, another attempt's order, a second listing."""
    table = first_round()
    order = of(table, Order)[0]
    table.list_samples(Receiver("rollout-0", 3), order)
    table.list_samples(R1, order)
    table.list_samples(R0, order.model_copy(update={"order_id": "r1.o9"}))
    table.list_samples(R0, order.model_copy(update={"group_id": "g99.o1"}))
    assert table.state.groups["g1.o1"].num_listed == 0 and table.state.ignored == 8
    table.list_samples(R0, order)
    table.list_samples(R0, order)
    assert table.state.groups["g1.o1"].num_listed == 2 and table.state.ignored == 10


def test_no_grade_is_tried_elsewhere_and_never_becomes_a_zero() -> None:
    table = first_round()
    table.list_samples(R0, of(table, Order)[0])
    table.decide()
    orders = of(table, GradeOrder)
    assert [(order.receiver, len(order.items)) for order in orders] == [("grader-0", 1), ("grader-1", 1)]
    table.grade(G0, orders[0], fails=True)
    table.grade(G1, orders[1])
    table.decide()
    assert [ref.trajectory_id for ref in of(table, GradesChosen)[0].grades] == ["g1.o1/1@rollout-0.a1"]
    again = of(table, GradeOrder)[-1]
    assert again.receiver == "grader-1"
    table.grade(G1, again, fails=True)
    table.decide()
    third = of(table, GradeOrder)[-1]
    table.grade(Receiver(third.receiver, 1), third, fails=True)
    table.decide()
    (drop,) = of(table, Drop)
    assert (drop.group_id, drop.reason) == ("g1.o1", "ungraded")
    assert "gave no grade: no" in drop.detail


def test_a_cut_graders_work_goes_to_another() -> None:
    table = first_round()
    table.list_samples(R0, of(table, Order)[0])
    table.graders = [G0]
    table.decide()
    table.cut(G0)
    table.graders = [G1]
    table.decide()
    assert [(order.receiver, len(order.items)) for order in of(table, GradeOrder)] == [("grader-0", 2), ("grader-1", 2)]


def test_a_second_answer_changes_nothing() -> None:
    table = first_round()
    table.list_samples(R0, of(table, Order)[0])
    table.decide()
    for order in of(table, GradeOrder):
        table.grade(Receiver(order.receiver, 1), order)
        table.grade(Receiver(order.receiver, 1), order)
        table.grade(Receiver(order.receiver, 9), order)
    table.decide()
    table.decide()
    assert sum(len(record.grades) for record in of(table, GradesChosen)) == 2
    assert table.state.groups["g1.o1"].num_graded == 2


def test_a_version_not_yet_known_is_waited_for_then_the_group_is_dropped() -> None:
    table = first_round()
    orders = of(table, Order)
    table.list_samples(R0, orders[0], version=Version(1, 1))
    table.list_samples(R1, orders[1], version=Version(1, 2))
    table.todo.clear()
    settle(table)
    assert table.planner.waiting == ["g1.o1", "g2.o1"]
    table.known.add(Version(1, 1))
    table.decide()
    assert table.planner.waiting == ["g2.o1"]
    table.now_s += 21
    table.decide()
    (drop,) = of(table, Drop)
    assert (drop.group_id, drop.reason, drop.detail) == ("g2.o1", "unknown_version", "no accepted step made version (1, 2)")
    assert table.planner.num_ready == 1


def test_a_group_too_old_for_the_next_batch_is_dropped_when_that_batch_is_next() -> None:
    table = first_round(orchestrator__max_staleness=1, steps=9)
    slow, *others = of(table, Order)
    table.todo.clear()
    for order in others:
        table.list_samples(Receiver(order.receiver, 1), order, version=Version(0, 1))
    settle(table)
    for _ in range(3):
        table.train()
        settle(table)
    assert table.state.last_batch >= 2 and "g1.o1" in table.state.groups
    table.list_samples(R0, slow, version=Version(0, 1))
    settle(table)
    drops = {drop.group_id: drop for drop in of(table, Drop)}
    assert drops["g1.o1"].reason == "stale" and "bound 1" in drops["g1.o1"].detail
    assert all(batch.staleness <= 1 for batch in of(table, Batch))


def test_ready_groups_that_the_next_batch_makes_too_old_are_dropped() -> None:
    table = first_round(orchestrator__max_staleness=0, orchestrator__capacity_batches=1.0)
    orders = of(table, Order)
    extra = [
        order.model_copy(update={"order_id": f"r{90 + n}.o1", "group_id": f"g{90 + n}.o1"}) for n, order in enumerate(orders)
    ]
    for order in extra:  # a predecessor issued more than one batch
        table.emit(GroupIssued(group_id=order.group_id, task_seed=1, num_samples=2))
        table.emit(order)
    table.work()
    table.decide()
    table.work()
    table.decide()
    assert [batch.step for batch in of(table, Batch)] == [1]
    assert {(drop.group_id, drop.reason) for drop in of(table, Drop)} == {(order.group_id, "stale") for order in extra}


# --- groups without spread


def settle_all(table: Table, flat: set[int]) -> None:
    """Works until nothing moves; of groups with a number in `flat` all samples get 1, of others one gets 1 and one 0."""
    for _ in range(60):
        for number in range(1, table.state.next_group):
            rewards = (1.0, 1.0) if number in flat else (0.0, 1.0)
            table.rewards |= {f"g{number}.o1/{index}": reward for index, reward in enumerate(rewards)}
        before = len(table.own)
        table.work()
        table.decide()
        if len(table.own) == before and not table.train():
            return


def test_groups_without_spread_are_replaced_up_to_the_bound_and_capacity_holds() -> None:
    table = first_round(steps=3, orchestrator__replace_flat=1, orchestrator__max_staleness=1)
    assert len(table.state.groups) == 6
    flat = {1, 2, 3, 4, 5, 7}
    settle_all(table, flat)
    drops, batches = of(table, Drop), of(table, Batch)
    assert [batch.step for batch in batches] == [1, 2, 3] and all(batch.staleness <= 1 for batch in batches)
    assert {drop.reason for drop in drops} == {"no_spread"} and all(drop.reward == 1.0 for drop in drops)
    order = [record for record in table.own if isinstance(record, Drop | Batch)]
    counts, since = [], 0
    for record in order:
        since = 0 if isinstance(record, Batch) else since + 1
        counts.append(since)
    assert max(counts) == 3, "at most replace_flat x prompts between two batches"
    assert "replacement 1 of at most 3 for batch 1" in drops[0].detail
    trained = {group.group_id for batch in batches for group in batch.groups}
    assert len(trained) == 9 and len(of(table, GroupIssued)) == 9 + len(drops)
    open_now = most = 0
    for record in table.own:
        open_now += isinstance(record, GroupIssued)
        open_now -= len(record.groups) if isinstance(record, Batch) else isinstance(record, Drop)
        most = max(most, open_now)
    assert most <= 6, "capacity"


def test_all_groups_without_spread_are_trained_in_the_end() -> None:
    """The bound keeps a run going whose rewards are all alike."""
    table = first_round(steps=2, orchestrator__replace_flat=2)
    settle_all(table, set(range(1, 100)))
    assert [batch.step for batch in of(table, Batch)] == [1, 2]
    assert len(of(table, Drop)) == 2 * 6 and table.state.replaced == []


def test_without_the_setting_no_group_is_replaced() -> None:
    table = first_round(steps=2)
    settle_all(table, {1, 2, 3, 4})
    assert of(table, Drop) == [] and table.recipe.orchestrator.replace_flat == 0


def test_a_successor_goes_on_counting_where_its_predecessor_was() -> None:
    table = first_round(orchestrator__replace_flat=1, orchestrator__capacity_batches=1.0)
    table.rewards |= {f"g{number}.o1/{index}": 1.0 for number in (1, 2) for index in range(2)}
    table.rewards |= {f"g3.o1/{index}": float(index) for index in range(2)}
    settle(table, rounds=2)
    assert table.state.replaced == [1.0, 1.0] and snapshot(table.rebuilt()) == snapshot(table.state)
    table.state.roll_back(Batch(step=1, batch_id="b1.o1", groups=(), staleness=0))
    assert table.state.replaced == []


def test_synchronous_mode_waits_for_each_step() -> None:
    table = first_round(steps=3, orchestrator__max_staleness=0, orchestrator__capacity_batches=1.0)
    for step in range(1, 4):
        settle(table)
        assert [batch.step for batch in of(table, Batch)] == list(range(1, step + 1))
        assert table.state.groups == {}
        table.train()
        table.decide()
    assert [batch.staleness for batch in of(table, Batch)] == [0, 0, 0]
    assert [order.min_step for order in of(table, Order)] == [0] * 3 + [1] * 3 + [2] * 3


def test_the_end_closes_every_group_and_is_said_once() -> None:
    table = first_round()
    table.planner.end_run()
    table.planner.end_run()
    assert [drop.reason for drop in of(table, Drop)] == ["run_ended"] * 6
    assert isinstance(table.own[-1], RunEnded) and len(of(table, RunEnded)) == 1
    successor = Table(table.recipe, state=table.rebuilt(), attempt=2)
    successor.planner.end_run()
    assert successor.own == []


def test_a_group_whose_order_was_torn_off_gets_one_from_the_successor() -> None:
    table = Table(simulated_recipe())
    table.emit(GroupIssued(group_id="g1.o1", task_seed=5, num_samples=2, bucket="b"))
    successor = Table(table.recipe, state=table.rebuilt(), attempt=2)
    successor.decide()
    order = of(successor, Order)[0]
    assert (order.order_id, order.group_id, order.samples, order.task_seed) == ("r1.o2", "g1.o1", (0, 1), 5)
    assert of(successor, GroupIssued)[0].group_id == "g2.o2"


def test_a_successor_goes_on_counting_and_its_ids_are_its_own() -> None:
    table = first_round()
    settle(table)
    successor = Table(table.recipe, state=table.rebuilt(), attempt=3)
    assert successor.state.last_batch == 2
    successor.state.trained_step = 2
    successor.decide()
    assert of(successor, GroupIssued)[0].group_id == "g7.o3"
    highest = max(int(record.order_id[1:-3]) for record in table.own if isinstance(record, (Order, GradeOrder)))
    assert of(successor, Order)[0].order_id == f"r{highest + 1}.o3"


def test_open_orders_are_those_that_somebody_still_has_to_answer() -> None:
    table = first_round()
    orders = of(table, Order)
    assert sorted(order.order_id for order in table.state.open_orders()) == [order.order_id for order in orders]
    table.list_samples(R0, orders[0])
    table.decide()
    pending = {order.order_id for order in table.state.open_orders()}
    assert pending == {order.order_id for order in orders[1:]} | {order.order_id for order in of(table, GradeOrder)}


def test_a_group_closed_twice_is_a_corrupt_journal() -> None:
    state = State()
    with pytest.raises(JournalCorrupt, match=r"g1\.o1, which is not open"):
        state.apply(Drop(group_id="g1.o1", reason="stale"))


def stir(table: Table, draw: random.Random) -> None:
    """One random event."""
    what = draw.randrange(8)
    rollout, grader = draw.choice(table.rollouts), draw.choice(table.graders)
    if what < 2 and table.todo[rollout]:
        order = table.todo[rollout].pop(draw.randrange(len(table.todo[rollout])))
        table.list_samples(rollout, order, status=draw.choice(["complete", "complete", "truncated", "failed"]))
    elif what < 4 and table.to_grade[grader]:
        table.grade(grader, table.to_grade[grader].pop(0), fails=draw.random() < 0.2)
    elif what == 4 and table.todo[rollout] and draw.random() < 0.3:
        order = table.todo[rollout].pop(0)
        table.give_back(rollout, order, order.samples[: draw.randrange(1, 3)])
    elif what == 5 and draw.random() < 0.3:
        table.cut(draw.choice([rollout, grader]))
    elif what == 6:
        table.train()
    else:
        table.decide()


@pytest.mark.parametrize("seed", range(40))
def test_a_rebuilt_state_is_the_running_one(seed: int) -> None:
    draw = random.Random(seed)
    table = Table(simulated_recipe(steps=30, rollout__sample_attempts=4), seed=seed)
    for _ in range(150):
        stir(table, draw)
        if draw.random() < 0.1:
            assert snapshot(table.rebuilt()) == snapshot(table.state)
    assert snapshot(table.rebuilt()) == snapshot(table.state)
    assert table.state.last_batch > 0


def test_the_rebuild_check_would_notice_one_sample() -> None:
    table = first_round()
    other = table.rebuilt()
    other.lost[Key("g1.o1", 0)] = None
    assert snapshot(other) != snapshot(table.state)
