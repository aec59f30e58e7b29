"""How far the engine's logprobs are from the learner's: torch and vLLM, float32 and bfloat16; engine_gap.json beside it.

    .venv/bin/python benchmarks/engine_gap.py     (after `make vllm`; about ten minutes)

Runs of chain_sum_vllm with two replicas and a learner in float32. Absolute differences of the logprobs of sampled tokens in
nats, as the learner says them at every step: their mean and the largest. At step 1 its weights are those that sampled, so the
gap is that of the two computations alone; later steps are off-policy, up to `max_staleness` versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import machine

from miles_core.run import read_run
from miles_core.tracking.metrics import read_metrics

HERE = Path(__file__).resolve().parent
RESULT = HERE / "engine_gap.json"
SETTINGS = (
    "steps=5", "evaluation.problems=32", "orchestrator.max_staleness=1", "orchestrator.capacity_batches=2", "seed=0",
    "learner.minibatches=1",
)  # fmt: skip
ASKED = [(engine, dtype) for engine in ("torch", "vllm") for dtype in ("float32", "bfloat16")]


def measure(root: Path, engine: str, dtype: str) -> dict[str, Any]:
    """The gaps of every step of one run."""
    name = f"{engine}-{dtype}"
    pool = f"rollout.pools=[{{name: main, replicas: 2, slots: 64, engine: {engine}}}]"
    command = [sys.executable, "-m", "flows.cli", "run", "chain_sum_vllm", "--run-id", name]
    for setting in (*SETTINGS, pool, f"rollout.dtype={dtype}"):
        command += ["--set", setting]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_RUNS": str(root), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(command, cwd=root, env=environment, check=True, stdout=sys.stderr, timeout=1200)
    except BaseException:
        cancel = [sys.executable, "-m", "flows.cli", "cancel", name]
        subprocess.run(cancel, cwd=root, env=environment, check=False, stdout=sys.stderr)
        raise
    _, paths = read_run(root / name)
    points = [point for _, point in read_metrics(paths.metrics("learner-0", 1).parent.parent) if point["event"] == "step"]
    columns = ("logprob_gap_mean", "logprob_gap_max", "k3", "staleness", "tokens")
    return {
        "engine": engine,
        "dtype": dtype,
        "steps": [{"step": point["step"]} | {c: point.get(c) for c in columns} for point in points],
    }


def main() -> None:
    """All four, one at a time; prints a table."""
    with tempfile.TemporaryDirectory(prefix="gap-") as folder:
        rows = [measure(Path(folder), engine, dtype) for engine, dtype in ASKED]
    RESULT.write_text(json.dumps({"machine": machine(), "settings": SETTINGS, "runs": rows}, indent=1) + "\n")
    print(f"{'engine':8} {'dtype':10} {'mean, step 1':>13} {'max, step 1':>12}   mean of each step")
    for row in rows:
        first, means = row["steps"][0], " ".join(f"{step['logprob_gap_mean']:.2g}" for step in row["steps"])
        print(
            f"{row['engine']:8} {row['dtype']:10} {first['logprob_gap_mean']:13.2g} {first['logprob_gap_max']:12.2g}   {means}"
        )


if __name__ == "__main__":
    main()
