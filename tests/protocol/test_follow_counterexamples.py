"""Counterexamples CE1-CE11 of the explicit-state check of the protocol (test_model.py), on the real readers and writers."""

from __future__ import annotations

import pytest

from miles_core.records import Cut
from miles_core.store.follow import (
    CopyReader,
    DecidingFollower,
    Follower,
)
from miles_core.store.journal import JournalWriter
from tests.protocol.follow_world import (
    LEASES,
    ROOT,
    VISIBILITY_S,
    Writer,
    make_server,
    note,
    poll_until_quiet,
    reading_of,
    texts,
)

# --- the counterexamples of the model --------------------------------------------------------------------------------


def test_ce1_what_a_zombie_orchestrator_writes_behind_its_cut_reaches_nobody() -> None:
    server = make_server(lag=1.0)
    old = Writer(server, "orchestrator-0", 1).open().write("batch 1: g1")
    learner, late = (Follower(reading_of(server.node(node)), old.folder, "orchestrator-0") for node in "ab")
    server.clock.advance(VISIBILITY_S)
    seen = learner.poll()
    new = Writer(server, "orchestrator-0", 2).open()
    old.write("batch 2: g2")
    new.write("batch 2: g3")
    found = poll_until_quiet(server, learner, late)
    assert texts(seen + found[0]) == texts(found[1]) == ["batch 1: g1", "batch 2: g3"]


def test_ce2_a_successor_knows_every_batch_that_a_learner_may_have_trained() -> None:
    """The learner acts at the last moment at which the newer lease may be hidden from it; the successor sees all late."""
    server = make_server()
    server.lag = {"L1": 0.0, "O2": 1.0}
    old = Writer(server, "orchestrator-0", 1).open()
    learner = Writer(server, "learner-0", 1, "L1").follower("orchestrator-0")
    learner.poll()
    server.lag["L1"] = 1.0
    new = Writer(server, "orchestrator-0", 2)
    server.lag["L1"] = 0.0
    hidden = server.names[LEASES / "orchestrator-0.a2"][-1]
    hidden.seen_s |= {"L1list": hidden.at_s + VISIBILITY_S, "L1open": hidden.at_s + VISIBILITY_S}
    server.clock.advance(VISIBILITY_S - 0.01)
    old.write("batch 1: g1")
    assert texts(learner.poll()) == ["batch 1: g1"]
    new.open()
    assert old.text_before(new.cuts.cuts[0]) == ["batch 1: g1"], "so it never drops g1"


def test_ce3_ce6_a_successor_waits_for_no_receiver_and_for_no_segment() -> None:
    """Both successors open while neither the other role nor their predecessors do anything."""
    server = make_server(lag=1.0)
    Writer(server, "orchestrator-0", 1).open()
    Writer(server, "learner-0", 1)
    new_learner = Writer(server, "learner-0", 2)
    new_orchestrator = Writer(server, "orchestrator-0", 2)
    new_learner.open().write("step 1")
    new_orchestrator.open().write("batch 1")
    server.clock.advance(VISIBILITY_S)
    assert texts(new_orchestrator.follower("learner-0").poll()) == ["step 1"]
    assert texts(new_learner.follower("orchestrator-0").poll()) == ["batch 1"]


def test_ce4_a_third_attempt_takes_over_the_cut_of_the_first_and_takes_none_of_its_own() -> None:
    server = make_server(lag=1.0)
    first = Writer(server, "orchestrator-0", 1).open().write("batch 1: g1")
    second = Writer(server, "orchestrator-0", 2).open()
    first.write("batch 2: g2")
    second.write("batch 2: g3")
    third = Writer(server, "orchestrator-0", 3).open()
    assert third.cuts.cuts[0] == second.cuts.cuts[0]
    second.write("batch 3: g2")
    third.write("batch 3: g4")
    found = poll_until_quiet(server, Follower(reading_of(server.node("a")), first.folder, "orchestrator-0"))
    assert texts(found[0]) == ["batch 1: g1", "batch 2: g3", "batch 3: g4"]


def test_ce5_two_zombies_together_add_no_second_manifest_to_a_step() -> None:
    """O1 and L1 go on behind their successors' backs and agree with each other; all others accept one step 1."""
    server = make_server(lag=0.0)
    o1, l1 = Writer(server, "orchestrator-0", 1).open(), Writer(server, "learner-0", 1).open()
    o2, l2 = Writer(server, "orchestrator-0", 2).open(), Writer(server, "learner-0", 2).open()
    o1.write("batch 1: zombie")
    l1.write("step 1: zombie")
    o2.write("batch 1: g1")
    follower = l2.follower("orchestrator-0")
    assert texts(follower.poll()) == ["batch 1: g1"]
    l2.write("step 1: g1")
    readers = [Follower(reading_of(server.node(node)), ROOT / "learner-0", "learner-0") for node in ("a", "O1", "O2")]
    assert all(texts(found) == ["step 1: g1"] for found in poll_until_quiet(server, *readers))


@pytest.mark.parametrize("late", ["O1", "O2", "L2", "a"])
def test_ce5_prime_a_node_that_sees_a_shorter_prefix_changes_no_cut(late: str) -> None:
    """One run of batch 1 by O1 and L1, both die; whoever sees things late, step 1 keeps its manifest."""
    server = make_server(lag=0.0)
    server.lag[late] = 1.0
    o1, l1 = Writer(server, "orchestrator-0", 1).open(), Writer(server, "learner-0", 1).open()
    o1.write("batch 1: g1")
    l1.write("step 1: g1")
    o2, l2 = Writer(server, "orchestrator-0", 2), Writer(server, "learner-0", 2)
    o2.open()
    l2.open()
    assert o1.text_before(o2.cuts.cuts[0]) == ["batch 1: g1"] and l1.text_before(l2.cuts.cuts[0]) == ["step 1: g1"]
    evaluator = Writer(server, "evaluator-0", 1, "a")
    found = poll_until_quiet(server, o2.follower("learner-0"), l2.follower("orchestrator-0"), evaluator.follower("learner-0"))
    assert [texts(one) for one in found] == [["step 1: g1"], ["batch 1: g1"], ["step 1: g1"]]


def test_ce8_a_copied_order_is_acted_upon_only_where_the_successor_knows_its_original() -> None:
    """O1 copies an order once before and once after its successor's read. Journal first, then the copy (I6)."""
    for hidden_s in (0.0, VISIBILITY_S):
        server = make_server(lag=0.0)
        o1 = Writer(server, "orchestrator-0", 1).open()
        copies = JournalWriter(
            o1.fs, ROOT / "orders", run_id="r", writer="orchestrator-0", attempt=1, token="t", clock=o1.fs.clock
        )
        replica = CopyReader(reading_of(server.node("R1")), ROOT / "orders", "orchestrator-0")
        assert replica.poll() == []
        o2 = Writer(server, "orchestrator-0", 2)
        lease = server.names[LEASES / "orchestrator-0.a2"][-1]
        lease.seen_s |= {"R1list": lease.at_s + hidden_s, "R1open": lease.at_s + hidden_s}
        o1.write("order 1")
        copies.write(note("order 1"))
        acted = texts(replica.poll())
        o2.open()
        o1.write("order 2")
        copies.write(note("order 2"))
        acted += texts(replica.poll())
        assert acted == (["order 1"] if hidden_s else [])
        assert o1.text_before(o2.cuts.cuts[0]) == ["order 1"]


def test_ce11_a_retired_replica_is_cut_though_no_successor_ever_comes() -> None:
    server = make_server(lag=0.0)
    replica = Writer(server, "rollout-0", 1).write("x1")
    cuts: list[Cut] = []
    reader = DecidingFollower(reading_of(server.node("a")), replica.folder, "rollout-0", cuts={}, on_cut=cuts.append)
    reader.poll()
    assert Writer(server, "supervisor-0", 1).reading.leases.tombstone("rollout-0", 2, "t")
    poll_until_quiet(server, reader)
    assert reader.is_cut(1) and cuts[0].bytes == replica.journal.bytes
    back = Writer(server, "rollout-0", 3).write("z1")
    assert texts(poll_until_quiet(server, reader)[0]) == ["z1"] and back.attempt == reader.attempt
