"""A policy version of a run as a model folder in Hugging Face layout, with a card that says where it comes from.

Invariants: the weights are those of an accepted version, proved by its digests, anchor or delta alike; the folder appears
whole or not at all, and one that is there is never written to. Everything but weights and card is copied from the base
model: configuration, tokenizer, chat template; the configuration names the dtype that was trained, for loaders go by it. The
version of an adapter's run is merged into its base model, or goes out alone as a folder that PEFT and vLLM add to it.
Failure: a run without that version, or a target that exists, is a RunDirectoryError that names what there is; an adapter
whose base model is another one now is a DigestMismatch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.base_model import check_base_model
from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.policy.local_copy import read_version
from miles_core.policy.manifest import PolicyManifest
from miles_core.policy.tensors import safetensors_header, to_raw
from miles_core.records import Published
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.publish import temp_path
from miles_core.tracking.ledger import Ledger, read_ledger
from miles_core.tracking.summary import summarize

if TYPE_CHECKING:
    import torch

WEIGHTS, CARD, RECORD = "model.safetensors", "README.md", "miles_export.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth")
"""Weights of the base model; its README is not ours either."""


def export_version(
    run: RunConfig, paths: RunPaths, target: Path, step: int | None = None, *, adapter: bool = False
) -> dict[str, Any]:
    """Writes version `step` (default: the newest) to the folder `target`; returns what RECORD holds.

    `adapter`: only the adapter, in PEFT's layout.
    Raises RunDirectoryError, DigestMismatch, DeadlineExceeded, OSError.
    """
    if target.exists():
        raise RunDirectoryError(f"{target} is there already: an export never writes into a folder; give a name that is free")
    lora = run.recipe.model.lora
    if adapter and lora is None:
        raise RunDirectoryError(f"{paths.root} trains all weights (model.lora is null), so it has no adapter to export")
    ledger = read_ledger(run, paths)
    published = find_version(ledger, paths, step)
    tensors, manifest = read_version(paths, run.run_id, published, ledger.steps)
    record = _record(run, published, manifest)
    if lora is not None:
        check_base_model(run, paths)
        tensors = _adapter_only(tensors) if adapter else _merged(run, paths, tensors)
    fs = FileSystem()
    temp = temp_path(target)
    try:
        fs.mkdir(temp)
        if lora is not None and adapter:
            _write_adapter_config(run, paths, temp, tensors)
        else:
            _copy_base(paths.base_model, temp, run.recipe.model.dtype)
        _write_tensors(temp / (ADAPTER_WEIGHTS if adapter else WEIGHTS), tensors)
        (temp / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        (temp / CARD).write_text(model_card(run, summarize(ledger, paths), record))
        for path in (*temp.iterdir(), temp):
            fs.sync(path)
        fs.rename(temp, target)
        fs.sync(target.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return record


def find_version(ledger: Ledger, paths: RunPaths, step: int | None) -> Published:
    """The published version of a step (None: the newest) that is still there. Raises RunDirectoryError."""
    found = ledger.steps.newest_published if step is None else ledger.steps.published_at(step)
    if found is None or found.folder in ledger.deleted:
        kept = [record for record in ledger.steps.published.values() if record.folder not in ledger.deleted]
        there = ", ".join(map(str, sorted({record.version.step for record in kept})))
        wanted = "a version" if step is None else f"version {step}"
        what = f"has not published {wanted}" if found is None else f"has deleted {wanted} (retention.versions in its recipe)"
        raise RunDirectoryError(f"{paths.root} {what}; " + (f"there are: {there}" if there else "there is none"))
    return found


def _record(run: RunConfig, published: Published, manifest: PolicyManifest) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "recipe": run.recipe.name,
        "step": published.version.step,
        "learner_attempt": published.version.attempt,
        "weights_digest": manifest.weights_digest,
        "dtype": run.recipe.model.dtype,
        "base_model_digest": run.base_model_digest,
        "code_digest": run.code_digest,
        "adapter": None if manifest.adapter is None else manifest.adapter.model_dump(),
    }


def _merged(run: RunConfig, paths: RunPaths, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from miles_core.adapters import merged_model

    model = run.recipe.model
    assert model.lora is not None
    return merged_model(paths.base_model, model.lora, model.dtype, tensors)


def _adapter_only(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from miles_core.adapters import peft_tensors

    return peft_tensors(tensors)


def _write_adapter_config(run: RunConfig, paths: RunPaths, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from miles_core.adapters import peft_config

    assert run.recipe.model.lora is not None
    (folder / "adapter_config.json").write_text(peft_config(run.recipe.model.lora, tensors, str(paths.base_model.resolve())))


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, order = safetensors_header({name: to_raw(tensor) for name, tensor in tensors.items()})
    with path.open("xb") as file:
        file.write(header)
        for name in order:
            file.write(to_raw(tensors[name]).data.data)


def _copy_base(base: Path, folder: Path, dtype: str) -> None:
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name not in (CARD, RECORD):
            shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    said: dict[str, Any] = json.loads(config.read_text())
    said["dtype"] = dtype
    if "torch_dtype" in said:  # its older name, which some loaders read first
        said["torch_dtype"] = dtype
    config.write_text(json.dumps(said, indent=2) + "\n")


def model_card(run: RunConfig, summary: dict[str, Any], record: dict[str, Any]) -> str:
    """The card: what it is, how it was made, what was measured, and every digest that proves it."""
    environment, evaluation, reward = run.recipe.environment, summary["eval"], summary["reward"]
    after = next((point["greedy"] for point in evaluation["points"] if point["step"] == record["step"]), None)
    model = run.recipe.model
    base = model.path or (f"package {model.package}" if model.package else f"made by the warm-up {model.bootstrap}")
    prompt = "the question alone" if environment.prompt is None else environment.prompt.model_dump_json()
    options = json.dumps(environment.options, sort_keys=True)
    what = "weights" if record["adapter"] is None else "adapter of the base model"
    return f"""---
tags: [reinforcement-learning]
---
# {run.run_id}, step {record["step"]}

Trained by reinforcement learning from verifiable rewards, {record["step"]} of {run.recipe.steps} steps.
State of the run when exported: {summary["state"]}.

| | |
|---|---|
| base model | {base} |
| tasks | {environment.family} {options}, tool {environment.tool}, at most {environment.max_turns} turns |
| prompt | {prompt} |
| greedy score, base model | {_show(evaluation["greedy_before"])} on {evaluation["n"]} held-out tasks |
| greedy score, these weights | {_show(after)} on the same tasks |
| sampled reward | {_show(reward["first5"])} (first 5 steps) to {_show(reward["last5"])} (last 5 steps of the run) |
| seed | {run.recipe.seed} |

One run of one seed: no claim of significance; of two equal scores `miles evaluate` on more tasks tells more.

## Lineage

| | |
|---|---|
| {what} (xxh3-128 over all tensors) | `{record["weights_digest"]}` |
| learner attempt | {record["learner_attempt"]} |
| base model | `{record["base_model_digest"]}` |
| code | `{record["code_digest"]}` |

## Recipe

```json
{run.recipe.model_dump_json(indent=2)}
```
"""


def _show(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
