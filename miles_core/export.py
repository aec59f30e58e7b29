"""A policy version of a run as a model folder in Hugging Face layout, with a card that says where it comes from.

Invariants: the weights are those of an accepted version, proved by its digests, anchor or delta alike; the folder appears
whole or not at all, and one that is there is never written to. Everything but weights and card is copied from the base
model: configuration, tokenizer, chat template. Failure: a run without that version, or a target that exists, is a
RunDirectoryError that names what there is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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

WEIGHTS, CARD, RECORD = "model.safetensors", "README.md", "miles_export.json"
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pt", ".pth")
"""Weights of the base model; its README is not ours either."""


def export_version(run: RunConfig, paths: RunPaths, target: Path, step: int | None = None) -> dict[str, Any]:
    """Writes version `step` (default: the newest) to the folder `target`; returns what RECORD holds.

    Raises RunDirectoryError, DigestMismatch, DeadlineExceeded, OSError.
    """
    if target.exists():
        raise RunDirectoryError(f"{target} is there already: an export never writes into a folder; give a name that is free")
    ledger = read_ledger(run, paths)
    published = _find(ledger, paths, step)
    tensors, manifest = read_version(paths, run.run_id, published, ledger.steps)
    record = _record(run, published, manifest)
    fs = FileSystem()
    temp = temp_path(target)
    try:
        fs.mkdir(temp)
        _copy_base(paths.base_model, temp)
        header, order = safetensors_header({name: to_raw(tensor) for name, tensor in tensors.items()})
        with (temp / WEIGHTS).open("xb") as file:
            file.write(header)
            for name in order:
                file.write(to_raw(tensors[name]).data.data)
        (temp / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        (temp / CARD).write_text(model_card(run, summarize(ledger, paths), record))
        for path in (*temp.iterdir(), temp):
            fs.sync(path)
        fs.rename(temp, target)
        fs.sync(target.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return record


def _find(ledger: Ledger, paths: RunPaths, step: int | None) -> Published:
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
    }


def _copy_base(base: Path, folder: Path) -> None:
    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name not in (CARD, RECORD):
            shutil.copyfile(path, folder / path.name)


def model_card(run: RunConfig, summary: dict[str, Any], record: dict[str, Any]) -> str:
    """The card: what it is, how it was made, what was measured, and every digest that proves it."""
    environment, evaluation, reward = run.recipe.environment, summary["eval"], summary["reward"]
    after = evaluation["greedy_after"] if record["step"] == run.recipe.steps else None
    model = run.recipe.model
    base = model.path or (f"package {model.package}" if model.package else f"made by the warm-up {model.bootstrap}")
    prompt = "the question alone" if environment.prompt is None else environment.prompt.model_dump_json()
    options = json.dumps(environment.options, sort_keys=True)
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

One run of one seed: no claim of significance. A version between the first and the last has no score of its own.

## Lineage

| | |
|---|---|
| weights (xxh3-128 over all tensors) | `{record["weights_digest"]}` |
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
