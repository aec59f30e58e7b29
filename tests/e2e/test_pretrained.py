"""A pretrained language model learns through the whole system: SmolLM2-135M out of its package, in as few steps as show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import miles, start_miles, summary_of

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(1500)]

DEADLINE_S = 1200.0
STEPS, PROBLEMS = 10, 64
SETTINGS = (
    f"steps={STEPS}", f"evaluation.problems={PROBLEMS}", "orchestrator.prompts=16", "orchestrator.max_staleness=1",
    "orchestrator.capacity_batches=2", "learner.minibatches=1", "learner.lr=4e-5", "learner.decay_steps=0",
)  # fmt: skip
FAST = ("model.dtype=bfloat16", "policy.deltas=true")
"""As the recipe says, where the CPU has instructions for it."""


def settings() -> list[str]:
    """For this machine."""
    has_bfloat16 = any(flag in Path("/proc/cpuinfo").read_text() for flag in ("avx512_bf16", "amx_bf16"))
    return [part for setting in (*SETTINGS, *(FAST if has_bfloat16 else ())) for part in ("--set", setting)]


def test_a_pretrained_model_learns_to_answer(tmp_path: Path) -> None:
    process = start_miles(tmp_path, "run", "smollm2", "--run-id", "smol", *settings())
    assert process.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
    summary = summary_of(tmp_path / "runs" / "smol")
    assert summary["state"] == "COMPLETED" and summary["steps"] == STEPS and summary["groups"]["open"] == 0
    assert summary["reward"]["last5"] - summary["reward"]["first5"] >= 0.1, "twice 640 samples: five standard errors"
    before, after = summary["eval"]["greedy_before"], summary["eval"]["greedy_after"]
    assert summary["eval"]["n"] == PROBLEMS and after - before >= 0.1, summary
    verified = miles(tmp_path, "verify", "smol", "--json")
    assert verified.returncode == 0, json.loads(verified.stdout)["faults"]
