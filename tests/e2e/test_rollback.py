"""A shard of a trained but not checkpointed batch is gone while the learner is dead: exit 6, rollback, COMPLETED."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster.rollback import request_rollback
from miles_core.records import Batch
from miles_core.tracking.ledger import Ledger
from tests.e2e.runs import ledger_of, miles, process_of, short_run_arguments, start_miles, summary_of, wait_for, wait_for_step

pytestmark = [pytest.mark.timeout(900)]


def shards_of_one_batch(ledger: Ledger, step: int) -> set[str]:
    """Shards with rows of a batch."""
    batch: Batch = ledger.batches[step]
    return {member.ref.shard for group in batch.groups for member in group.members}


def test_a_lost_shard_ends_the_run_and_a_rollback_completes_it(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "lost"
    arguments = short_run_arguments("lost", "steps=12", "learner.checkpoint_every=4")
    first = start_miles(tmp_path, *arguments, MILES_CRASH_AT="learner:after_step_record:6")
    wait_for_step(root, 1)
    # A supervisor that stands still replaces nobody until the shard is gone.
    first.send_signal(signal.SIGSTOP)
    wait_for_step(root, 6)
    learner = process_of(root, "learner-0")
    wait_for("the learner to be dead", lambda: not Path(f"/proc/{learner}/cmdline").exists(), 60)
    ledger = ledger_of(root)[2]
    shard = sorted(shards_of_one_batch(ledger, 6))[-1]
    # Its successor trains batch 5 again and saves that before it gives up, unless that batch has rows of the shard, too.
    kept = 4 if shard in shards_of_one_batch(ledger, 5) else 5
    (root / shard).unlink()
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=240) == 6, (tmp_path / "output").read_text()
    assert shard in (tmp_path / "output").read_text()
    again = miles(tmp_path, *arguments)
    assert again.returncode == 6 and shard in again.stderr

    rollback = request_rollback(ledger_of(root)[1])
    assert (rollback.step, rollback.last_step) == (kept, 6) and shard in rollback.missing and shard in rollback.lost
    second = miles(tmp_path, *arguments)
    assert second.returncode == 0, second.stdout + second.stderr
    assert miles(tmp_path, "verify", str(root)).returncode == 0
    summary = summary_of(root)
    (told,) = summary["rollbacks"]
    assert summary["state"] == "COMPLETED" and summary["steps"] == 12
    assert (told["step"], told["last_step"], told["groups"]) == (kept, 6, rollback.groups)
    assert summary["groups"]["dropped"]["rolled_back"] >= rollback.groups >= 4
    assert summary["groups"]["trained"] == 48 and summary["groups"]["open"] == 0
