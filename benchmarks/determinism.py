"""What exact resume costs and whether it holds: the learner's tokens/s with and without deterministic algorithms; two ranks
killed at every place of tests/protocol/test_exact_resume.py.

    python benchmarks/determinism.py            # speed, some minutes
    python benchmarks/determinism.py --exact    # two ranks, 27 runs, some minutes

Each writes its part of benchmarks/determinism.json. Speed: the real trainer on synthetic rows; in each round one step with
torch.use_deterministic_algorithms as the learner asks for it, and one without, in turns, so that the machine's load is the
same for both; the first rounds warm up and do not count. Tokens are all tokens of the rows; seconds of CPU stand beside those
of the wall, since others may use the machine. What else makes a step exact is not switched off, for it is how the trainer works
(one order of rows and of ranks, no dropout). CUBLAS_WORKSPACE_CONFIG concerns GPUs alone; none was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from miles_core.learner.trainer import Trainer  # noqa: E402
from miles_core.recipe import LearnerSpec  # noqa: E402
from miles_core.runtime.machine import read_machine  # noqa: E402
from miles_core.trajectories.schema import Trajectory  # noqa: E402
from tests.protocol.test_exact_resume import CRASHES, OF_TWO_RANKS, exact, learn  # noqa: E402
from tests.unit.tiny_models import save_tiny_model  # noqa: E402

OUTPUT = Path(__file__).with_suffix(".json")
GROUPS, SAMPLES, TOKENS = 4, 4, 128
WARM_UP, ROUNDS = 3, 40
MODELS: dict[str, dict[str, Any]] = {
    "0.3M parameters": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 24},
    "4M parameters": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5, "head_dim": 64},
}


def make_rows() -> list[Trajectory]:
    """GROUPS x SAMPLES rows of TOKENS tokens, of which three quarters are sampled."""
    draw = np.random.default_rng(0)
    mask = (np.arange(TOKENS) >= TOKENS // 4).astype(np.uint8)
    return [
        Trajectory(
            trajectory_id=f"g{row // SAMPLES}/{row}", sample_id=f"g{row // SAMPLES}/{row}", group_id=f"g{row // SAMPLES}",
            order_id="w1", producer="rollout-0", producer_attempt=1, task_seed=0,
            tokens=draw.integers(0, 300, TOKENS).astype(np.int32), loss_mask=mask,
            logprobs=(draw.normal(-5.5, 0.5, TOKENS) * mask).astype(np.float32), versions=(), turns=(), temperature=1.0,
            status="complete",
        )
        for row in range(GROUPS * SAMPLES)
    ]  # fmt: skip


def measure(**sizes: Any) -> dict[str, Any]:
    """Median tokens/s by wall and by CPU time, with and without; of the rounds' shares of CPU time the median and quartiles."""
    with tempfile.TemporaryDirectory() as folder:
        spec = LearnerSpec(minibatches=2, microbatch_tokens=1024)
        trainer = Trainer(save_tiny_model(Path(folder) / "model", **sizes), spec, "float32")
    rows, advantages = make_rows(), np.tile(np.linspace(-1, 1, SAMPLES), GROUPS)
    rates: dict[str, list[float]] = {}
    for step in range(1, WARM_UP + ROUNDS + 1):
        for mode in (True, False) if step % 2 else (False, True):
            torch.use_deterministic_algorithms(mode, warn_only=True)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            trainer.train(rows, advantages, step)
            seconds = {"wall": time.perf_counter() - wall_s, "cpu": time.process_time() - cpu_s}
            for kind, value in seconds.items():
                rates.setdefault(f"{kind} {'with' if mode else 'without'}", []).append(len(rows) * TOKENS / value)
    counted = {name: values[WARM_UP:] for name, values in rates.items()}
    ratios = [1 - ours / free for ours, free in zip(counted["cpu with"], counted["cpu without"], strict=True)]
    return {
        **{f"tokens_per_s {name}": round(statistics.median(values)) for name, values in counted.items()},
        "cost_share": round(statistics.median(ratios), 4),
        "cost_share_quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
    }


def cost() -> dict[str, Any]:
    """Of all models."""
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found = {name: measure(**sizes) for name, sizes in MODELS.items()}
    return {
        **about(), "threads": 1, "warm_up_rounds": WARM_UP, "rounds": ROUNDS, "rows": [GROUPS * SAMPLES, TOKENS],
        "load_1min": [round(before, 1), round(os.getloadavg()[0], 1)], "models": found,
    }  # fmt: skip


def count_exact() -> dict[str, Any]:
    """How many crashed runs of two ranks end in the bytes of the one that did not crash."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temp:
        base_model = save_tiny_model(Path(temp) / "model")
        expected = exact(*learn(Path(temp) / "uncrashed", base_model, 2))
        runs = list(dict.fromkeys([*CRASHES, *OF_TWO_RANKS]))
        differ = []
        for number, crashes in enumerate(runs):
            if exact(*learn(Path(temp) / str(number), base_model, 2, *crashes)) != expected:
                differ.append(crashes)
            print(f"{number + 1}/{len(runs)} {'+'.join(crashes)}", flush=True)
    return {
        **about(), "ranks": 2, "zero_stage": 3, "runs": len(runs), "crashes": sum(map(len, runs)), "differ": differ,
        "load_1min": [round(load, 1), round(os.getloadavg()[0], 1)], "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def about() -> dict[str, Any]:
    """This machine."""
    machine = read_machine()
    return {"cpu": machine.cpu, "cpus": machine.cpus, "gpus": list(machine.gpus), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="two ranks, killed everywhere, instead of the speed")
    part = {"exact": count_exact()} if parser.parse_args().exact else {"cost": cost()}
    known = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    OUTPUT.write_text(json.dumps(known | part, indent=1) + "\n")
    print(json.dumps(part, indent=1))


if __name__ == "__main__":
    main()
