"""A whole run beside TRL's GRPOTrainer: one model, the same tasks, as many steps; completions/s, learner tokens/s, CPU-seconds.

    python benchmarks/trl_throughput.py --install DIR       # once: a venv with TRL 1.16.0 (1.6 GB with torch for CPU)
    python benchmarks/trl_throughput.py --peers DIR         # both sides, a table, benchmarks/trl_throughput.json: half an hour
    python benchmarks/trl_throughput.py --peers DIR --output /tmp/dry.json --set steps=1 --set orchestrator.prompts=4

Ours is `miles run smollm2` as a person types it, in float32, with one held-out problem before and after (TRL evaluates none);
its roles compute with one thread each. TRL is then given the tasks of our batches in their order, tokenised alike (checked),
the same optimizer, rates, clipping, normalisation, minibatches, judge and dtype, no gradient checkpointing (its default, which
is slower), and runs twice, with one thread and with two. CPU-seconds are those of all processes of a side, from /proc. `whole`
is the command from its start to its end; `working` begins with the first sampled token (of TRL with its first step), ends with
the last step. Learner tokens are all positions of the batches' rows, prompts included, over the seconds of the wall that were
spent on neither sampling nor judging; that figure alone needs an idle machine. Of ours, what rows share is computed once and
a group without signal is not computed, but its tokens count. A ratio over 1 is ours ahead of the better of TRL's two.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

PACKAGES = (
    "torch==2.13.0", "trl==1.16.0", "transformers==5.19.0", "reasoning-gym==0.1.25", "pydantic==2.14.4", "pyyaml==6.0.4",
)  # fmt: skip
REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = Path(__file__).with_suffix(".json")
THREADS = (1, 2)
"""Of TRL's runs."""
PR_SET_CHILD_SUBREAPER = 36
LAST_WORDS_S = 60.0
"""What processes of a side that outlive its command may still take."""


RECIPE = "smollm2"
SETTINGS = ("model.dtype=float32", "policy.deltas=false", "seed=0", "steps=3", "evaluation.problems=1")
"""Of our run; TRL is given what comes of them."""
MICRO_ROWS = 16
"""Rows of one forward pass of TRL's, as many as fit well in memory."""


# --- CPU-seconds of a side


class Meter:
    """CPU-seconds of a command and of all processes that come of it, at any moment of its life."""

    def __init__(self, every_s: float = 0.25) -> None:
        # Whoever loses its parent becomes this process's child and is counted.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._every_s, self._over = every_s, threading.Event()
        self._before, self._seen = self._total(), list[tuple[float, float]]()
        self.began = self.ended = time.time()
        """Unix seconds."""

    def run(self, command: list[str], cwd: Path, **environment: str) -> None:
        """Runs the command to its end. Raises CalledProcessError."""
        watch = threading.Thread(target=self._watch, daemon=True)
        self._look()
        watch.start()
        try:
            subprocess.run(command, cwd=cwd, env=os.environ | environment, check=True, stdout=sys.stderr)
            self._see_off()
            self.ended = time.time()
        finally:
            self._over.set()
            watch.join()
        self._look()

    def at(self, unix_s: float) -> float:
        """CPU-seconds up to a moment of the past, interpolated."""
        import numpy as np

        times, values = zip(*self._seen, strict=True)
        return float(np.interp(unix_s, times, values))

    def _see_off(self) -> None:
        """Waits for all that is left of the command."""
        until = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < until:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.1)
            except ChildProcessError:
                return
        raise SystemExit(f"{LAST_WORDS_S:.0f} s after the end of the command processes of it still run: look with ps")

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        self._seen.append((time.time(), self._total() - self._before))

    def _total(self) -> float:
        """Of the living, with those that they have waited for; and of those that this process has waited for."""
        parents, ticks = dict[int, int](), dict[int, int]()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)], ticks[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
        below = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        used = getrusage(RUSAGE_CHILDREN)
        living = sum(ticks[pid] for pid in below - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
        return living + used.ru_utime + used.ru_stime


def span(meter: Meter, begin: float, end: float, completions: int) -> dict[str, float]:
    """What was done between two moments."""
    wall_s, cpu_s = end - begin, meter.at(end) - meter.at(begin)
    return {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "completions_per_s": round(completions / wall_s, 3),
            "completions_per_cpu_s": round(completions / cpu_s, 3)}  # fmt: skip


def side(meter: Meter, working: tuple[float, float], completions: int, more: dict[str, Any]) -> dict[str, Any]:
    """A side's figures; `working`: from when to when, in Unix seconds."""
    whole = span(meter, meter.began, meter.ended, completions)
    return {"whole": whole, "working": span(meter, *working, completions), **more}


# --- ours


def our_side(settings: list[str], root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a run, and the work that TRL is given."""
    from miles_core.recipe import load_recipe
    from miles_core.run import read_run
    from miles_core.tracking.ledger import read_ledger
    from miles_core.tracking.metrics import read_metrics
    from tasks.prepare import ensure_base_model

    ensure_base_model(load_recipe(RECIPE, tuple(settings)))
    changes = [part for setting in settings for part in ("--set", setting)]
    command, meter = [sys.executable, "-m", "flows.cli", "run", RECIPE, "--run-id", "run", *changes], Meter()
    meter.run(command, root, PYTHONPATH=str(REPOSITORY), MILES_RUNS=str(root), OMP_NUM_THREADS="1")
    run, paths = read_run(root / "run")
    ledger = read_ledger(run, paths)
    points: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for writer, point in read_metrics(paths.metrics("learner-0", 1).parent.parent):
        points[f"{writer} {point['event']}"].append(point)
    steps = points["learner-0 step"]
    first = min(point["start_s"] for point in points["rollout-0 busy"])
    work, positions = work_of(run.recipe, root / "run", [ledger.batches[step] for step in range(1, run.recipe.steps + 1)])
    return side(meter, (first, steps[-1]["unix_s"]), len(work["prompts"]) * work["samples"], {
        "learner_tokens": positions,
        "learner_tokens_per_s": round(positions / sum(point["train_s"] for point in steps)),
        "reward": [round(point["mean_reward"], 4) for point in steps],
    }), work  # fmt: skip


def work_of(recipe: Any, folder: Path, batches: list[Any]) -> tuple[dict[str, Any], int]:
    """The tasks of these batches in their order, with all settings; and the positions of their rows."""
    import numpy as np

    from miles_core.environments.registry import make_environment
    from miles_core.learner.trainer import learning_rate
    from miles_core.rollout.choice import make_renderer
    from miles_core.trajectories.shards import read_shard

    rows = {row.trajectory_id: row for path in folder.glob("trajectories/*/*/*.arrow") for row in read_shard(path)}
    environment, prompts, positions = make_environment(recipe.environment), [], 0
    for batch in batches:
        for group in batch.groups:
            members = [rows[member.ref.trajectory_id] for member in group.members]
            positions += sum(len(row.tokens) for row in members)
            seed, tokens = members[0].task_seed, members[0].tokens[: int(np.argmax(members[0].loss_mask))]
            messages = [{"role": each.role, "content": each.content} for each in environment.episode(seed, "train").opening()]
            prompts.append({"prompt": messages, "seed": seed, "prompt_ids": tokens.tolist()})
    learner, rows_a_batch = recipe.learner, recipe.orchestrator.prompts * recipe.orchestrator.samples
    return {
        "model": str(folder / "base_model"), "environment": recipe.environment.model_dump(mode="json"), "prompts": prompts,
        "steps": recipe.steps, "samples": recipe.orchestrator.samples, "batch_rows": rows_a_batch,
        "minibatches": learner.minibatches, "micro_rows": min(MICRO_ROWS, rows_a_batch // learner.minibatches),
        "rates": [learning_rate(learner, step) for step in range(1, recipe.steps + 1)], "seed": recipe.seed,
        "betas": [learner.beta1, learner.beta2], "weight_decay": learner.weight_decay, "grad_clip": learner.grad_clip,
        "clip": [learner.clip_low, learner.clip_high], "end_id": make_renderer(folder / "base_model", recipe.model.chat).end_id,
    }, positions  # fmt: skip


# --- TRL's


def trl_side(peers: Path, work: dict[str, Any], threads: int) -> dict[str, Any]:
    """TRL with so many threads, in its own venv."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(work))
        meter = Meter()
        meter.run(
            [str(peers / "bin" / "python"), __file__, "--side", folder], Path(folder),
            PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
        )  # fmt: skip
        found = json.loads((Path(folder) / "found.json").read_text())
    working_s = found["ends"][-1] - found["begin"]
    return side(meter, (found["begin"], found["ends"][-1]), len(work["prompts"]) * work["samples"], {
        "learner_tokens": found["positions"],
        "learner_tokens_per_s": round(found["positions"] / (working_s - found["elsewhere_s"])),
        "reward": [round(reward, 4) for reward in found["reward"]],
    })  # fmt: skip


def be_trl(folder: Path) -> None:
    """Run by the venv's python: trains the work in `folder` and leaves found.json there."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from miles_core.grading.rules import make_verifier
    from miles_core.recipe import EnvironmentSpec

    work = json.loads((folder / "work.json").read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    spec = EnvironmentSpec.model_validate(work["environment"])
    verifier, tokenizer = make_verifier(spec), AutoTokenizer.from_pretrained(work["model"])
    check_alike(tokenizer, work)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    values, seconds = list[float](), defaultdict[str, float](float)
    found: dict[str, Any] = {"ends": [], "positions": 0}

    def judge(completions: list[Any], seed: list[int], **_: Any) -> list[float]:
        answers = [completion[0]["content"].strip() for completion in completions]
        values.extend(verifier.value(one, {"final_answer": text}) for one, text in zip(seed, answers, strict=True))
        return values[-len(answers) :]

    @contextmanager
    def elsewhere() -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds["elsewhere"] += time.perf_counter() - began

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *args: Any, **named: Any) -> Any:
            with elsewhere():
                return super()._generate(*args, **named)

        def _calculate_rewards(self, *args: Any, **named: Any) -> Any:
            with elsewhere():
                return super()._calculate_rewards(*args, **named)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            found["positions"] += int(output["prompt_mask"].sum() + output["completion_mask"].sum())
            return output

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **named: Any) -> None:
            found["begin"] = time.time()

        def on_step_end(self, *args: Any, **named: Any) -> None:
            found["ends"].append(time.time())

    rows = [{"prompt": each["prompt"], "seed": each["seed"]} for each in work["prompts"]]
    trainer = Timed(
        model=model, reward_funcs=judge, args=config_of(work, folder, spec.max_new_tokens), processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows), optimizers=optimizer_of(model, work), callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    found |= {"elsewhere_s": seconds["elsewhere"], "reward": rewards_of(values, work)}
    (folder / "found.json").write_text(json.dumps(found))


def rewards_of(values: list[float], work: dict[str, Any]) -> list[float]:
    """The mean of each step. Refuses another number of completions than ours."""
    size, steps = work["batch_rows"], work["steps"]
    if len(values) != size * steps:
        raise SystemExit(f"TRL judged {len(values)} completions in {steps} steps of {size}: not the same work")
    return [sum(values[at : at + size]) / size for at in range(0, len(values), size)]


def config_of(work: dict[str, Any], folder: Path, max_new_tokens: int) -> Any:
    """Our settings, in TRL's words."""
    from trl import GRPOConfig

    updates = work["minibatches"]
    accumulated = work["batch_rows"] // updates // work["micro_rows"]
    return GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, seed=work["seed"],
        per_device_train_batch_size=work["micro_rows"], gradient_accumulation_steps=accumulated,
        steps_per_generation=accumulated * updates, max_steps=work["steps"] * updates, num_generations=work["samples"],
        max_completion_length=max_new_tokens, temperature=1.0, beta=0.0, epsilon=work["clip"][0],
        epsilon_high=work["clip"][1], loss_type="dapo", scale_rewards="group", max_grad_norm=work["grad_clip"],
        shuffle_dataset=False, save_strategy="no", report_to="none", logging_steps=updates, disable_tqdm=True,
    )  # fmt: skip


def optimizer_of(model: Any, work: dict[str, Any]) -> tuple[Any, Any]:
    """Ours, with the rate of each of our steps."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=tuple(work["betas"]), weight_decay=work["weight_decay"]
    )  # fmt: skip
    updates, rates = work["minibatches"], [*work["rates"], 0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rates[min(update // updates, work["steps"])])
    return optimizer, schedule


def check_alike(tokenizer: Any, work: dict[str, Any]) -> None:
    """Refuses to compare what is not the same work."""
    if tokenizer.eos_token_id != work["end_id"]:
        raise SystemExit(f"a turn ends with token {work['end_id']} here, with {tokenizer.eos_token_id} there")
    for each in work["prompts"]:
        text = tokenizer.apply_chat_template(each["prompt"], add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        if tokens != each["prompt_ids"]:
            raise SystemExit(f"task {each['seed']} is {each['prompt_ids']} here and {tokens} there")


# --- both


RATIOS: dict[str, Callable[[dict[str, Any]], float]] = {
    "completions per CPU second, whole": lambda row: row["whole"]["completions_per_cpu_s"],
    "completions per CPU second, working": lambda row: row["working"]["completions_per_cpu_s"],
    "completions per second, whole": lambda row: row["whole"]["completions_per_s"],
    "completions per second, working": lambda row: row["working"]["completions_per_s"],
    "learner tokens per second": lambda row: row["learner_tokens_per_s"],
    "reward per sample": lambda row: sum(row["reward"]) / len(row["reward"]),
}


def compare(settings: list[str], peers: Path) -> dict[str, Any]:
    """Both sides on this machine, one after the other."""
    from record import machine

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        ours, work = our_side(settings, Path(folder))
        theirs = {f"TRL 1.16.0, threads: {threads}": trl_side(peers, work, threads) for threads in THREADS}
    best = {what: max(map(figure, theirs.values())) for what, figure in RATIOS.items()}
    ratios = {what: round(figure(ours) / best[what], 2) if best[what] else None for what, figure in RATIOS.items()}
    return {"machine": machine(), "packages": PACKAGES, "recipe": RECIPE, "settings": settings,
            "batch_rows": work["batch_rows"], "load_1min": [round(load, 1), round(os.getloadavg()[0], 1)],
            "sides": {"ours": ours, **theirs}, "ours_over_trl": ratios}  # fmt: skip


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['recipe']:30} {'wall s':>8} {'CPU s':>8} {'/s':>8} {'/CPU s':>8} {'learner tokens/s':>17} {'reward':>7}")
    for who, found in row["sides"].items():
        reward = sum(found["reward"]) / len(found["reward"])
        for what in ("whole", "working"):
            figures = " ".join(f"{value:>8}" for value in found[what].values())
            print(f"{who + ', ' + what:30} {figures} {found['learner_tokens_per_s']:>17} {reward:>7.3f}")
    print("ours over TRL: " + "; ".join(f"{what} {ratio}" for what, ratio in row["ours_over_trl"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR")
    parser.add_argument("--peers", type=Path, metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a setting of our run, and so of both")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file of the result")
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        be_trl(arguments.side)
    elif arguments.install:
        subprocess.run([sys.executable, "-m", "venv", str(arguments.install)], check=True)
        subprocess.run([str(arguments.install / "bin" / "python"), "-m", "pip", "install", *PACKAGES], check=True)
    elif arguments.peers:
        sys.path.insert(0, str(REPOSITORY))
        result = compare([*SETTINGS, *arguments.set], arguments.peers)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        show(result)
    else:
        parser.error("give --install DIR or --peers DIR")


if __name__ == "__main__":
    main()
