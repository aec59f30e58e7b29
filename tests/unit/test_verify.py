"""verify on simulated runs: it passes whatever was replaced, and no check of it is empty.

The forger here repairs what he knows of: frame checksums, and the final hashes of the completion records. Falsified copies of
real runs are in tests/e2e.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from miles_core.paths import RunPaths
from miles_core.records import Batch, CheckpointSaved, digest_record
from miles_core.store.publish import digest_file
from miles_core.trajectories.shards import encode_shard, read_shard
from miles_core.verify import Fault, checks, verify_run
from tests.e2e.tamper import Record, edit_records, of_kind, read_records
from tests.protocol.simulation import KILLS, finished_run, simulated_recipe

HURT = (
    ("rollout-0:kill", "grader-1:freeze"),
    ("learner-0:kill", "learner-0:ghost"),
    ("orchestrator-0:freeze", "rollout-1:ghost"),
    ("evaluator-0:drain", "orchestrator-0:kill", "learner-0:freeze"),
    ("rollout-0:drain", "rollout-0:kill", "grader-0:ghost", "grader-0:kill"),
    tuple(
        f"{writer}:{how}"
        for writer, how in zip(("orchestrator-0", "learner-0", "rollout-1", "evaluator-0"), KILLS, strict=True)
    ),
)


@pytest.mark.parametrize("seed", range(len(HURT)))
def test_a_run_whose_roles_were_replaced_is_proved(tmp_path: Path, seed: int) -> None:
    root = finished_run(tmp_path / "run", seed=seed, kills=HURT[seed])
    result = verify_run(root)
    assert result.faults == [] and result.state == "COMPLETED"
    assert result.facts["groups_open"] == 0 and max(result.facts["attempts"].values()) > 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("verify") / "run")


def journal_of(root: Path, writer: str) -> Path:
    (path,) = RunPaths(root).journal(writer).glob("a0001-*.journal")
    return path


def forge(root: Path, writer: str, edit: Callable[[list[Record]], None]) -> None:
    """Changes records of a journal, and the final position and hash in the completion record with them."""
    path = journal_of(root, writer)
    edit_records(path, edit)
    stream = path.read_bytes()
    stream = stream[stream.index(b"\n") + 1 :]
    done = RunPaths(root).done(writer)
    if done.exists():
        record = json.loads(done.read_bytes())
        record |= {"journal_bytes": len(stream), "journal_hash": xxhash.xxh3_128_hexdigest(stream)}
        done.write_text(json.dumps(record))


def learner_journal_absent(root: Path) -> None:
    shutil.rmtree(RunPaths(root).journal("learner-0"))


def completion_records_absent(root: Path) -> None:
    shutil.rmtree(root / "done")


def supervisor_journal_absent(root: Path) -> None:
    shutil.rmtree(RunPaths(root).journal("supervisor-0"))


def lease_removed(root: Path) -> None:
    (root / "leases" / "learner-0.a1").unlink()


def lease_of_somebody_else(root: Path) -> None:
    path = root / "leases" / "grader-0.a1"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"token": "stolen"}))


def lease_without_an_intent(root: Path) -> None:
    text = (root / "leases" / "grader-0.a1").read_text()
    (root / "leases" / "grader-0.a2").write_text(text.replace('"attempt":1', '"attempt":2'))


def row_rewritten(root: Path) -> None:
    """A trajectory holds other tokens than those that were trained. The manifest is made to fit."""

    def edit(records: list[Record]) -> None:
        record = of_kind(records, "shard")[0]
        path = root / record["path"]
        rows = read_shard(path)
        rows[0] = dataclasses.replace(rows[0], tokens=rows[0].tokens[::-1].copy())
        path.write_bytes(encode_shard(rows))
        record["size_bytes"], record["digest"] = path.stat().st_size, digest_file(path)

    forge(root, "rollout-0", edit)


def grades_swapped(root: Path) -> None:
    """Two answers of one grader change places."""

    def edit(records: list[Record]) -> None:
        graded = [entry for record in of_kind(records, "graded") for entry in record["entries"] if entry["grade"]]
        graded[0]["grade"], graded[1]["grade"] = graded[1]["grade"], graded[0]["grade"]

    forge(root, "grader-0", edit)


def graders_swapped(root: Path) -> None:
    """A grade that counts is said to be another grader's."""

    def edit(records: list[Record]) -> None:
        reference = of_kind(records, "grades_chosen")[0]["grades"][0]
        reference["grader"] = "grader-1" if reference["grader"] == "grader-0" else "grader-0"

    forge(root, "orchestrator-0", edit)


def forged_point(**changes: object) -> Callable[[Path], None]:
    def falsify(root: Path) -> None:
        forge(root, "evaluator-0", lambda records: of_kind(records, "evaluation")[-1].update(changes))

    return falsify


def point_removed(root: Path) -> None:
    forge(root, "evaluator-0", lambda records: records.remove(of_kind(records, "evaluation")[0]))


def reward_polished(root: Path) -> None:
    forge(root, "learner-0", lambda records: of_kind(records, "step")[-1].update(mean_reward=0.99))


def staleness_polished(root: Path) -> None:
    forge(root, "learner-0", lambda records: of_kind(records, "step")[-1].update(staleness=99))


def order_for_somebody_else(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        for record in of_kind(records, "order"):
            record["receiver"] = "rollout-7"

    forge(root, "orchestrator-0", edit)


def order_for_other_samples(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        for record in of_kind(records, "order"):
            record["samples"] = [index + 100 for index in record["samples"]]

    forge(root, "orchestrator-0", edit)


def batch_made_smaller(root: Path) -> None:
    """A group is taken out of the last batch and dropped instead; the step record is made to fit."""
    digest = ""

    def edit(records: list[Record]) -> None:
        nonlocal digest
        batch = of_kind(records, "batch")[-1]
        group = batch["groups"].pop()
        records.insert(-1, {"kind": "drop", "group_id": group["group_id"], "reason": "stale", "detail": ""})
        payload = Batch.model_validate(batch).model_dump_json().encode()
        digest = xxhash.xxh3_128_hexdigest(payload)

    forge(root, "orchestrator-0", edit)
    forge(root, "learner-0", lambda records: of_kind(records, "step")[-1].update(manifest_digest=digest))


def group_replaced(reward: float) -> Callable[[Path], None]:
    """A dropped group is said to have been without spread; the recipe replaces none."""

    def group_replaced(root: Path) -> None:
        def edit(records: list[Record]) -> None:
            batch = of_kind(records, "batch")[-1]
            group = batch["groups"].pop()
            drop = {"kind": "drop", "group_id": group["group_id"], "reason": "no_spread", "detail": "", "reward": reward}
            records.insert(-1, drop)

        forge(root, "orchestrator-0", edit)

    return group_replaced


def lease_unreadable(root: Path) -> None:
    (root / "leases" / "grader-0.a1").write_text("[]")


def deletion_record_removed(root: Path) -> None:
    """What is gone then has no record."""
    forge(root, "supervisor-0", lambda records: records.remove(of_kind(records, "deletion")[0]))


def deletion_of_another_digest(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        of_kind(records, "deletion")[0]["items"][0]["digest"] = "0" * 32

    forge(root, "supervisor-0", edit)


def deleted_with_a_record(what: str, name: str, size_bytes: int, digest: str) -> Callable[[Path], None]:
    """Somebody removes what is still needed, and also writes the record that the collector would have written."""

    def falsify(root: Path) -> None:
        item = {"what": what, "name": name, "size_bytes": size_bytes, "digest": digest}

        def edit(records: list[Record]) -> None:
            records.insert(-1, {"kind": "deletion", "items": [item]})

        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        forge(root, "supervisor-0", edit)

    return falsify


def newest_version_deleted(root: Path) -> None:
    record = of_kind(read_records(journal_of(root, "learner-0")), "published")[-1]
    deleted_with_a_record("version", record["folder"], record["size_bytes"], record["manifest_digest"])(root)


def newest_checkpoint_deleted(root: Path) -> None:
    record = of_kind(read_records(journal_of(root, "learner-0")), "checkpoint")[-1]
    digest = digest_record(CheckpointSaved.model_validate(record))
    deleted_with_a_record("checkpoint", record["folder"], sum(file["size_bytes"] for file in record["files"]), digest)(root)


def shard_deleted_though_all_stay(root: Path) -> None:
    record = of_kind(read_records(journal_of(root, "rollout-0")), "shard")[0]
    deleted_with_a_record("shard", record["path"], record["size_bytes"], record["digest"])(root)


CASES: list[tuple[Callable[[Path], None], str]] = [
    (learner_journal_absent, "step_missing"),
    (completion_records_absent, "completion_record"),
    (supervisor_journal_absent, "lease"),
    (lease_removed, "lease"),
    (lease_of_somebody_else, "lease"),
    (lease_without_an_intent, "lease"),
    (lease_unreadable, "lease"),
    (row_rewritten, "batch_shard"),
    (grades_swapped, "grade"),
    (graders_swapped, "grade"),
    (forged_point(weights_digest="0" * 32), "evaluation"),
    (forged_point(greedy_score=1.5), "evaluation"),
    (forged_point(num_problems=1), "evaluation"),
    (point_removed, "evaluation_missing"),
    (reward_polished, "reward"),
    (staleness_polished, "staleness"),
    (order_for_somebody_else, "order"),
    (order_for_other_samples, "order"),
    (batch_made_smaller, "batch_size"),
    (group_replaced(0.5), "no_spread"),
    (deletion_record_removed, "version_missing"),
    (deletion_of_another_digest, "version_missing"),
    (deletion_of_another_digest, "deletion"),
    (newest_version_deleted, "deletion"),
    (newest_checkpoint_deleted, "deletion"),
    (shard_deleted_though_all_stay, "deletion"),
]


@pytest.mark.parametrize(("falsify", "kind"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES])
def test_a_forgery_with_repaired_hashes_is_named(
    finished: Path, tmp_path: Path, falsify: Callable[[Path], None], kind: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    falsify(copy)
    found = {fault.kind for fault in verify_run(copy).faults}
    assert kind in found, f"found only {found}"


def test_a_run_with_replaced_groups_is_proved_and_its_replacements_are_checked(tmp_path: Path) -> None:
    root = finished_run(tmp_path / "run", kills=("orchestrator-0:kill",), recipe=simulated_recipe(orchestrator__replace_flat=2))
    result = verify_run(root)
    assert result.faults == [] and result.state == "COMPLETED" and result.facts["groups_dropped"]["no_spread"] > 0
    forged = 0

    def edit(records: list[Record]) -> None:
        nonlocal forged
        for record in of_kind(records, "drop"):
            forged += record["reason"] == "no_spread"
            record["reward"] = 0.123

    for path in sorted(RunPaths(root).journal("orchestrator-0").glob("a*.journal")):
        edit_records(path, edit)
    faults = [fault for fault in verify_run(root).faults if fault.kind == "no_spread"]
    assert len(faults) == forged > 0 and "of reward 0.123, but its grades are" in faults[0].detail


@pytest.mark.parametrize("kills", [(), ("learner-0", "orchestrator-0:ghost", "learner-0:freeze")], ids=["quiet", "kills"])
def test_a_run_whose_settled_shards_were_deleted_is_proved(tmp_path: Path, kills: tuple[str, ...]) -> None:
    """Also over recoveries, which need shards behind the checkpoints only."""
    recipe = simulated_recipe(steps=9, retention__trajectories="after_two_checkpoints")
    root = finished_run(tmp_path / "run", kills=kills, recipe=recipe)
    result = verify_run(root)
    assert result.faults == [] and result.state == "COMPLETED"
    assert result.facts["deleted"]["shard"] > 0 and result.facts["deleted"]["checkpoint"] > 0
    shard = next(iter(sorted(root.glob("trajectories/rollout-0/*/*.arrow"))))
    shard.unlink()
    assert {fault.kind for fault in verify_run(root).faults} == {"shard_missing"}


@pytest.mark.parametrize("writer", ["learner-0", "orchestrator-0", "evaluator-0", "rollout-0", "grader-0"])
def test_any_change_of_a_finished_journal_is_noticed(finished: Path, tmp_path: Path, writer: str) -> None:
    """Also of what no check looks into, such as the score of an evaluation: the completion record has its hash."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    path = journal_of(copy, writer)
    records = read_records(path)
    edit_records(path, lambda edited: edited.append(records[-1]))
    assert {"journal_long", "journal_changed"} & {fault.kind for fault in verify_run(copy).faults}


def test_what_only_one_reading_of_a_live_run_finds_is_no_fault(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves while it is read: a batch may name what another journal did not say a moment before."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "done" / "orchestrator-0.json").unlink()
    edit_records(journal_of(copy, "orchestrator-0"), lambda records: records.remove(of_kind(records, "run_ended")[0]))
    edit_records(journal_of(copy, "supervisor-0"), lambda records: records.remove(of_kind(records, "run_closed")[0]))
    assert verify_run(copy).state == "RUNNING" and verify_run(copy).faults == []
    readings = iter([[Fault("x", "here", "passing"), Fault("x", "here", "lasting")], [Fault("x", "here", "lasting")]])
    monkeypatch.setattr(checks, "_check_end", lambda joined: joined.files.faults.extend(next(readings)) or "RUNNING")
    assert [fault.detail for fault in verify_run(copy).faults] == ["lasting"]


def test_a_run_whose_last_point_is_still_to_come_is_running(finished: Path, tmp_path: Path) -> None:
    """The orchestrator has ended it, the evaluator looks at the last version."""
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "done" / "evaluator-0.json").unlink()
    edit_records(journal_of(copy, "supervisor-0"), lambda records: records.remove(of_kind(records, "run_closed")[0]))
    edit_records(journal_of(copy, "evaluator-0"), lambda records: records.remove(of_kind(records, "evaluation")[-1]))
    assert verify_run(copy).state == "RUNNING" and verify_run(copy).faults == []
