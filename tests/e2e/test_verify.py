"""`miles verify` names the fault in each of thirteen falsified copies of a real run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_core.store.publish import digest_file
from miles_core.trajectories.schema import VersionRun
from miles_core.trajectories.shards import encode_shard, read_shard
from miles_core.verify import verify_run
from tests.e2e.tamper import Record, edit_records, flip_byte, journal_file, of_kind, read_records

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(900)]

STEPS, ORCHESTRATOR = "learner/steps", "orchestrator/journal"
MANIFEST, GRADES = "trajectories/rollout-0/manifest", "grades/grader-0"


def first_shard(root: Path) -> Path:
    return sorted((root / "trajectories/rollout-0").glob("*/*.arrow"))[0]


def version_folder(root: Path, step: int) -> Path:
    return root / "policy/000" / f"v{step:06d}-a1"


def shard_removed(root: Path) -> None:
    first_shard(root).unlink()


def group_in_two_batches(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        first, second = of_kind(records, "batch")[:2]
        second["groups"][0] = first["groups"][0]

    edit_records(journal_file(root, ORCHESTRATOR), edit)


def row_version_lowered(root: Path) -> None:
    """In the shard and in the record that announces it, digest and all."""
    name, row = trained_late(root)
    path = root / name
    rows = read_shard(path)
    lowered = tuple(VersionRun(run.start, max(run.step - 1, 0), run.attempt) for run in rows[row].versions)
    rows[row] = dataclasses.replace(rows[row], versions=lowered)
    path.write_bytes(encode_shard(rows))

    def edit(records: list[Record]) -> None:
        for record in of_kind(records, "shard"):
            if record["path"] == name:
                record["size_bytes"], record["digest"] = path.stat().st_size, digest_file(path)
                record["rows"][row]["versions"] = sorted({(run.step, run.attempt) for run in lowered})

    edit_records(journal_file(root, MANIFEST), edit)


def trained_late(root: Path) -> tuple[str, int]:
    """(shard, row) of a trained trajectory that version 1 or later sampled."""
    for record in of_kind(read_records(journal_file(root, ORCHESTRATOR)), "batch"):
        for group in record["groups"]:
            for member in group["members"]:
                if member["oldest_step"] > 0:
                    return member["ref"]["shard"], member["ref"]["row"]
    raise AssertionError("no trajectory of a later version was trained")


def grade_changed(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        entry = of_kind(records, "graded")[0]["entries"][0]
        entry["grade"]["value"] = 1.0 - entry["grade"]["value"]

    edit_records(journal_file(root, GRADES), edit)


def drop_reason_removed(root: Path) -> None:
    """Makes a group dropped without a reason."""

    def edit(records: list[Record]) -> None:
        batch = of_kind(records, "batch")[-1]
        group = batch["groups"].pop()
        records.insert(-1, {"kind": "drop", "group_id": group["group_id"], "reason": "", "detail": ""})

    edit_records(journal_file(root, ORCHESTRATOR), edit)


def step_record_removed(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        records.remove(of_kind(records, "step")[3])

    edit_records(journal_file(root, STEPS), edit)


def step_records_swapped(root: Path) -> None:
    def edit(records: list[Record]) -> None:
        first, second = of_kind(records, "step")[2:4]
        i, j = records.index(first), records.index(second)
        records[i], records[j] = second, first

    edit_records(journal_file(root, STEPS), edit)


def journal_cut_inside_a_frame(root: Path) -> None:
    path = journal_file(root, STEPS)
    path.write_bytes(path.read_bytes()[:-40])


def version_from_another_run(root: Path) -> None:
    """The whole folder comes from elsewhere, consistent in itself."""
    path = version_folder(root, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["run_id"] = "another-run"
    path.write_text(json.dumps(manifest))

    def edit(records: list[Record]) -> None:
        for record in of_kind(records, "published"):
            if record["version"][0] == 2:
                record["manifest_digest"] = digest_file(path)

    edit_records(journal_file(root, STEPS), edit)


CASES: list[tuple[str, Callable[[Path], None], str]] = [
    ("flipped byte in a shard", lambda root: flip_byte(first_shard(root)), "shard_digest"),
    ("flipped byte in a snapshot", lambda root: flip_byte(version_folder(root, 0) / "model.safetensors"), "version_digest"),
    ("flipped byte in a delta", lambda root: flip_byte(next(root.glob("policy/000/*/delta.bin"))), "version_digest"),
    ("flipped byte in a manifest", lambda root: flip_byte(journal_file(root, MANIFEST)), "journal_frame"),
    ("shard removed", shard_removed, "shard_missing"),
    ("a group in two batches", group_in_two_batches, "group_twice"),
    ("a row's version lowered", row_version_lowered, "staleness"),
    ("a grade changed", grade_changed, "grade"),
    ("a drop reason removed", drop_reason_removed, "record"),
    ("a step record removed", step_record_removed, "step_missing"),
    ("step records swapped", step_records_swapped, "step_order"),
    ("a journal cut inside a frame", journal_cut_inside_a_frame, "journal_torn"),
    ("a version from another run", version_from_another_run, "version_foreign"),
]


@pytest.mark.parametrize(("falsify", "kind"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_falsified_copy_is_named(finished_run: Path, tmp_path: Path, falsify: Callable[[Path], None], kind: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished_run, copy, symlinks=True)
    assert verify_run(copy).faults == []
    falsify(copy)
    kinds = {fault.kind for fault in verify_run(copy).faults}
    assert kind in kinds, f"found only {kinds}"
