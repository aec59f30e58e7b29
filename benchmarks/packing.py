"""What shared positions save: the learner's tokens/s with every row by itself and with rows that share, and its memory.

    python benchmarks/packing.py                     # all: about half an hour on one idle core
    python benchmarks/packing.py --only chain_sum    # one case

Writes benchmarks/packing.json. A case is the real trainer, one thread, float32; in each round one step either way, in turns, so
that the machine's load is the same for both; the first round warms up and does not count. Tokens are all positions of the rows
up to their last sampled token, each row's prompt counted with it, so both ways have the same number. Seconds of CPU stand
beside those of the wall, since others may use the machine. Cases: rows that the recipes' own base models sample in a short
real run, half of a batch a minibatch as the recipe has it; and a Llama of 135M parameters (30 layers, hidden 576, vocabulary
49152) with random weights on 4 prompts of 100 tokens x 8 samples of 8 to 32. Memory is the peak of a process that takes one
step of that, beside what it has before the step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from miles_core.learner.packing import context_length  # noqa: E402
from miles_core.learner.trainer import Trainer  # noqa: E402
from miles_core.recipe import LearnerSpec, load_recipe  # noqa: E402
from miles_core.runtime.machine import read_machine  # noqa: E402
from miles_core.trajectories.schema import Trajectory  # noqa: E402
from miles_core.trajectories.shards import read_shard  # noqa: E402

OUTPUT = Path(__file__).with_suffix(".json")
RECIPES: dict[str, tuple[str, ...]] = {
    "shell_puzzle": (), "chain_sum": (), "chain_sum_moe": (), "smollm2": ("learner.microbatch_tokens=2048",),
}  # fmt: skip
"""With what is changed: rows by themselves in microbatches of the default size would take 11 GB of the pretrained model."""
PROMPTS, SAMPLES, PROMPT_TOKENS = 4, 8, 100
ROUNDS = {"llama_135m": 3, **dict.fromkeys(RECIPES, 15), "smollm2": 2}
MEMORY_WAYS = {
    "by themselves": (False, {}),
    "sharing": (True, {}),
    "sharing, gradient checkpointing": (True, {"gradient_checkpointing": True}),
    "sharing, gradient checkpointing, microbatch_tokens 512": (
        True,
        {"gradient_checkpointing": True, "microbatch_tokens": 512},
    ),
}


def sampled_rows(recipe: str, root: Path) -> tuple[Path, list[Trajectory]]:
    """Base model and first batch of a run of two steps."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_RUNS": str(root)}
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--run-id", recipe, "--set", "steps=2"]
    subprocess.run(
        [*command, "--set", "evaluation.problems=8"], cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    shards = sorted((root / recipe / "trajectories").rglob("*.arrow"))
    groups: dict[str, list[Trajectory]] = {}
    for row in (row for shard in shards for row in read_shard(shard)):
        groups.setdefault(row.group_id, []).append(row)
    wanted = load_recipe(recipe).orchestrator
    whole = [rows for rows in groups.values() if len(rows) == wanted.samples][: wanted.prompts]
    return root / recipe / "base_model", [row for rows in whole for row in rows]


def llama_rows() -> list[Trajectory]:
    """PROMPTS x SAMPLES rows of random tokens."""
    draw, rows = np.random.default_rng(0), []
    for group in range(PROMPTS):
        prompt = draw.integers(0, 49152, PROMPT_TOKENS)
        for sample in range(SAMPLES):
            answer = draw.integers(0, 49152, draw.integers(8, 33))
            mask = np.array([0] * PROMPT_TOKENS + [1] * len(answer), dtype=np.uint8)
            rows.append(
                Trajectory(
                    trajectory_id=f"g{group}/{sample}",
                    sample_id=f"g{group}/{sample}",
                    group_id=f"g{group}",
                    order_id="w1",
                    producer="rollout-0",
                    producer_attempt=1,
                    task_seed=0,
                    tokens=np.concatenate([prompt, answer]).astype(np.int32),
                    loss_mask=mask,
                    logprobs=(-10.8 * mask).astype(np.float32),
                    versions=(),
                    turns=(),
                    temperature=1.0,
                    status="complete",
                )
            )
    return rows


def save_llama(folder: Path) -> Path:
    """The shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def advantages_of(rows: list[Trajectory]) -> Any:
    """None of them 0, so that every row is trained."""
    return np.where(np.arange(len(rows)) % 2 == 0, 1.0, -1.0)


def set_sharing(trainer: Trainer, shares: bool, pairs_per_token: float | None) -> None:
    trainer._pairs = pairs_per_token if shares else None


def measure(model: Path, rows: list[Trajectory], spec: LearnerSpec, rounds: int) -> dict[str, Any]:
    """Medians over the rounds."""
    trainer = Trainer(model, spec, "float32")
    pairs, seconds, fracs = trainer._pairs, dict[str, list[float]](), dict[str, float]()
    for step in range(1, rounds + 2):
        for shares in (True, False) if step % 2 else (False, True):
            set_sharing(trainer, shares, pairs)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            # Step 2 and not the round's own: of a mixture some steps measure more than others.
            metrics = trainer.train(rows, advantages_of(rows), 2)
            way = "sharing" if shares else "by themselves"
            fracs[way] = round(metrics["computed_frac"], 3)
            for kind, value in (("wall", time.perf_counter() - wall_s), ("cpu", time.process_time() - cpu_s)):
                seconds.setdefault(f"{kind} {way}", []).append(value)
    counted = {name: values[1:] for name, values in seconds.items()}
    tokens = sum(context_length(row) for row in rows)
    ratios = [plain / packed for plain, packed in zip(counted["cpu by themselves"], counted["cpu sharing"], strict=True)]
    return {
        "rows": len(rows), "tokens": tokens, "sampled_tokens": sum(row.num_sampled for row in rows), "rounds": rounds,
        **{f"tokens_per_s {name}": round(tokens / statistics.median(values)) for name, values in counted.items()},
        **{f"computed_frac {name}": value for name, value in fracs.items()},
        "speedup_cpu": round(statistics.median(ratios), 2), "speedup_cpu_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }  # fmt: skip


def memory(model: Path) -> dict[str, Any]:
    """Peak of resident memory in GiB, of a process each."""
    found = {}
    for way in MEMORY_WAYS:
        command = [sys.executable, __file__, "--memory-of", way, "--model", str(model)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[way] = json.loads(answer.splitlines()[-1])
        print(f"memory, {way}: {found[way]}", flush=True)
    return found


def take_one_step(model: Path, way: str) -> None:
    shares, changes = MEMORY_WAYS[way]
    trainer, rows = Trainer(model, LearnerSpec(minibatches=1, **changes), "float32"), llama_rows()  # type: ignore[arg-type]
    set_sharing(trainer, shares, trainer._pairs)
    before = _peak_gib()
    trainer.train(rows, advantages_of(rows), 2)
    print(json.dumps({"before_gib": before, "peak_gib": _peak_gib()}))


def _peak_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def about() -> dict[str, Any]:
    """This machine."""
    machine = read_machine()
    return {"cpu": machine.cpu, "cpus": machine.cpus, "gpus": list(machine.gpus), "torch": torch.__version__, "threads": 1}


def run_case(name: str, root: Path) -> dict[str, Any]:
    load = os.getloadavg()[0]
    if name == "llama_135m":
        spec = LearnerSpec(minibatches=1)
        found = measure(save_llama(root / "llama"), llama_rows(), spec, ROUNDS[name])
        found["memory"] = memory(root / "llama")
    else:
        model, rows = sampled_rows(name, root)
        found = measure(model, rows, load_recipe(name, RECIPES[name]).learner, ROUNDS[name])
    return about() | found | {"load_1min": [round(load, 1), round(os.getloadavg()[0], 1)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROUNDS)
    parser.add_argument("--memory-of", choices=MEMORY_WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        take_one_step(arguments.model, arguments.memory_of)
        return
    known = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {"cases": {}}
    for name in [arguments.only] if arguments.only else ROUNDS:
        with tempfile.TemporaryDirectory() as root:
            known["cases"][name] = run_case(name, Path(root))
        OUTPUT.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({name: known["cases"][name]}, indent=1), flush=True)


if __name__ == "__main__":
    main()
