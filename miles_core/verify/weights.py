"""The checks of what the learner made: versions, checkpoints, and the evaluations of versions (I7, I11, I17)."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from miles_core.errors import DigestMismatch, MilesError
from miles_core.policy.lineage import Lineage
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import MANIFEST_NAME, PolicyManifest, adapter_of, digest_entries
from miles_core.records import CheckpointSaved, EvaluationPoint, Published, Version, digest_record
from miles_core.store.publish import check_file, digest_file
from miles_core.verify.joined import Joined


def check_versions(joined: Joined) -> None:
    """Published versions are those of accepted steps, and their files, until they are deleted, are what was announced."""
    fault, paths = joined.files.fault, joined.files.paths
    lineage = Lineage()
    published = lineage.published
    copy = PolicyCopy(paths, joined.run.run_id, lineage)
    for attempt, record in joined.learner:
        if not isinstance(record, Published):
            continue
        published[record.version] = record
        step = joined.known.get(record.version)
        if record.version.attempt != attempt or step is None:
            fault("version_unknown", record.folder, f"version {tuple(record.version)} was published without its step record")
        elif step.weights_digest != record.weights_digest:
            fault(
                "weights_digest",
                record.folder,
                f"published {record.weights_digest}, the step record says {step.weights_digest}",
            )
        if not joined.was_deleted(record.folder, record.manifest_digest):
            _check_version_files(joined, record, paths.root / record.folder)
            _prove_weights(joined, record, copy)
    final = joined.recipe.steps
    lasting = (version for version in published if not joined.branches.has_abandoned(version))
    if joined.ended is not None and not any(version.step == final for version in lasting):
        fault("version_missing", f"version {final}", "the run ended, but its last version was not published")


def _check_version_files(joined: Joined, record: Published, folder: Path) -> None:
    fault = joined.files.fault
    try:
        raw = (folder / MANIFEST_NAME).read_bytes()
        manifest = PolicyManifest.model_validate_json(raw)
    except OSError as error:
        fault("version_missing", record.folder, f"manifest not readable: {error.strerror}")
        return
    except ValidationError as error:
        fault("version_manifest", record.folder, f"manifest not readable: {error.errors()[0]['msg']}")
        return
    if manifest.run_id != joined.run.run_id or manifest.version != record.version:
        fault("version_foreign", record.folder, f"is version {tuple(manifest.version)} of run {manifest.run_id}")
    if digest_file(folder / MANIFEST_NAME) != record.manifest_digest:
        fault("version_manifest", record.folder, "manifest.json differs from the digest in the step journal")
    if manifest.adapter != adapter_of(joined.run):
        fault("version_adapter", record.folder, f"is an adapter {manifest.adapter}, recipe and base {adapter_of(joined.run)}")
    if not manifest.weights_digest == record.weights_digest == digest_entries(manifest.tensors):
        fault("weights_digest", record.folder, "manifest, its tensors and the step journal name different weights")
    for file in manifest.files:
        try:
            check_file(folder / file.name, file.size_bytes, file.digest)
        except FileNotFoundError:
            fault("version_missing", f"{record.folder}/{file.name}", "not there")
        except DigestMismatch as error:
            fault("version_digest", f"{record.folder}/{file.name}", str(error))


def _prove_weights(joined: Joined, record: Published, copy: PolicyCopy) -> None:
    """Makes the version's tensors from its anchor and deltas, as a reader does, and compares their digests."""
    try:
        copy.reach(record)
    except (OSError, MilesError) as error:
        joined.files.fault("version_weights", record.folder, str(error))


def check_checkpoints(joined: Joined) -> None:
    """Checkpoints hold the weights of their steps, in files that did not change."""
    for attempt, record in joined.learner:
        if not isinstance(record, CheckpointSaved):
            continue
        step = joined.known.get(Version(record.step, attempt))
        if step is None or step.weights_digest != record.weights_digest:
            joined.files.fault(
                "checkpoint", record.folder, f"holds weights {record.weights_digest}, step {record.step} made others"
            )
        for file in () if joined.was_deleted(record.folder, digest_record(record)) else record.files:
            try:
                check_file(joined.files.paths.root / record.folder / file.name, file.size_bytes, file.digest)
            except FileNotFoundError:
                joined.files.fault("checkpoint", f"{record.folder}/{file.name}", "not there")
            except DigestMismatch as error:
                joined.files.fault("checkpoint", f"{record.folder}/{file.name}", str(error))


def check_evaluations(joined: Joined) -> None:
    """Points are of accepted weights and of the recipe's problems."""
    fault, wanted = joined.files.fault, joined.recipe.evaluation.problems
    branches = joined.branches
    for attempt, record in joined.accepted("evaluator-0"):
        if not isinstance(record, EvaluationPoint):
            continue
        where, step = f"version {tuple(record.version)}", joined.known.get(record.version)
        if not branches.has_abandoned(record.version):
            joined.evaluated.add(record.version.step)
        elif not branches.lived_on(record.version, branches.of("evaluator-0", attempt)):
            fault("abandoned_version", where, "evaluated after a rollback abandoned it")
        if step is None or step.weights_digest != record.weights_digest:
            fault("evaluation", where, "evaluated weights that no accepted step made")
        if record.num_problems != wanted or not 0.0 <= record.greedy_score <= 1.0:
            fault("evaluation", where, f"score {record.greedy_score} on {record.num_problems} problems, asked for {wanted}")
