"""An exported version loads where people use models, with the weights that its digests prove."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.export import CARD, RECORD, export_version
from miles_core.paths import RunPaths
from miles_core.policy.manifest import WEIGHTS_NAME, Probe, tensor_entries, weights_digest
from miles_core.policy.publisher import Publisher
from miles_core.records import Cuts, Deleted, Deletion, StepDone, Version
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.lease import LeaseFolder
from tests.protocol.learner_run import make_run
from tests.unit.tiny_models import save_tiny_model, tiny_model

PROBE = Probe(prompts=((1, 2),), logprobs=((-1.0,),), dtype="float32", tolerance=1e-3)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """The learner's tensors after `step` steps: one row of one matrix moves, tied weights are named once."""
    tensors = {name: tensor.clone() for name, tensor in tiny_model().state_dict().items() if name != "lm_head.weight"}
    tensors["model.embed_tokens.weight"][7] += step
    return tensors


def published_run(root: Path, steps: int = 2) -> tuple[RunConfig, RunPaths]:
    """A run whose learner published version 0 as an anchor and `steps` deltas."""
    run, paths = make_run(root)
    save_tiny_model(paths.base_model)
    fs = FileSystem()
    LeaseFolder(fs, paths.leases, run.run_id).acquire("learner-0", 1, "token")
    journal = JournalWriter(fs, paths.journal("learner-0"), run_id=run.run_id, writer="learner-0", attempt=1, token="token")
    publisher = Publisher(fs, paths, run.recipe.policy, run_id=run.run_id, learner_token="token")
    journal.write(Cuts())
    for step in range(steps + 1):
        tensors = weights_of(step)
        digest = weights_digest(tensors)
        step_done = StepDone(
            step=step, batch_id=f"b{step}", manifest_digest="m", weights_digest=digest, staleness=0, mean_reward=0.5
        )
        journal.write(step_done)
        journal.write(publisher.write(publisher.prepare(Version(step, 1), tensors, tensor_entries(tensors), PROBE)))
    journal.flush()
    return run, paths


def test_an_export_loads_as_the_version_it_names(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    record = export_version(run, paths, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = tiny_model()
    expected.load_state_dict(weights_of(2), strict=False)
    tokens = torch.tensor([[1, 7, 3]])
    assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert record["step"] == 2 and record["weights_digest"] == weights_digest(weights_of(2))
    assert json.loads((tmp_path / "model" / RECORD).read_text()) == record
    base = AutoTokenizer.from_pretrained(paths.base_model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == base.chat_template and tokenizer("12 + 7").input_ids == base("12 + 7").input_ids


def test_an_export_loads_in_the_dtype_that_was_trained_also_from_a_base_model_of_another(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    config = paths.base_model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    export_version(run, paths, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32 and torch.equal(
        model.state_dict()["model.norm.weight"], weights_of(2)["model.norm.weight"]
    )
    assert torch.equal(model.get_input_embeddings().weight, weights_of(2)["model.embed_tokens.weight"])


def test_an_older_version_can_be_exported_and_its_card_claims_no_score_of_another(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    record = export_version(run, paths, tmp_path / "model", step=0)
    card = (tmp_path / "model" / CARD).read_text()
    assert record["weights_digest"] == weights_digest(weights_of(0))
    assert "these weights | not measured" in card and record["weights_digest"] in card and '"name": "tiny"' in card


def test_a_version_that_the_collector_took_is_named_as_deleted(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    fs, writer = FileSystem(), "supervisor-0"
    folder = paths.relative(paths.version(0, 1))
    journal = JournalWriter(fs, paths.journal(writer), run_id=run.run_id, writer=writer, attempt=1, token="token")
    journal.write(Deletion(items=(Deleted(what="version", name=folder, size_bytes=1, digest="m"),)))
    with pytest.raises(RunDirectoryError, match=r"has deleted version 0 \(retention.*there are: 1, 2"):
        export_version(run, paths, tmp_path / "model", step=0)


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    run, paths = published_run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="has not published version 9; there are: 0, 1, 2"):
        export_version(run, paths, tmp_path / "model", step=9)
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunDirectoryError, match="never writes into a folder"):
        export_version(run, paths, tmp_path / "taken")
    anchor = paths.version(0, 1) / WEIGHTS_NAME
    anchor.write_bytes(anchor.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestMismatch):
        export_version(run, paths, tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]
