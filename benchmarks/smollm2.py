"""Does a real language model learn on two cores? SmolLM2-135M, two recipes, full and LoRA, three seeds; smollm2.json beside it.

    make record-smollm2        all 12 runs, one at a time; a run that the file already has is not made again
    .venv/bin/python benchmarks/smollm2.py smollm2/0 smollm2_needle+lora/2      these alone

Greedy on 512 held-out problems before and after, the reward of every step, and where the seconds went. A run must end at its
goal or over it, verified, within 15 minutes. Figures are of single runs, one per seed; nothing is averaged over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import machine

from miles_core.run import read_run
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.metrics import read_metrics

HERE = Path(__file__).resolve().parent
RESULT = HERE / "smollm2.json"
GOALS = {"smollm2": 0.75, "smollm2_needle": 0.85}
"""Greedy score to reach, by recipe."""
VARIANTS = {"": (), "+lora": ("model.lora={rank: 16, alpha: 32}", "learner.lr=3e-4")}
"""Settings, by what follows the recipe in a run's name."""
LIMIT_S = 900.0
SEEDS = (0, 1, 2)
PARTS = ("read_s", "train_s", "publish_s", "wait_s")
"""Of a learner's step; `wait_s` is what it waited for its batch."""


def environment(root: Path) -> dict[str, str]:
    """This code, and run directories of their own; base models come from the usual cache."""
    return os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_RUNS": str(root), "OMP_NUM_THREADS": "1"}


def miles(root: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A `miles` command with these sources; its progress is shown."""
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=root, env=environment(root), stdout=sys.stderr, text=True, check=check)


def record(recipe: str, variant: str, seed: str, more: list[str]) -> dict[str, Any]:
    """Makes a run and returns its figures; its directory is removed."""
    settings = (f"seed={seed}", *VARIANTS[variant], *more)
    root = Path(tempfile.mkdtemp(prefix="smollm2-"))
    try:
        load, began = round(os.getloadavg()[0], 2), time.monotonic()
        changes = [part for setting in settings for part in ("--set", setting)]
        miles(root, "run", recipe, "--run-id", "run", *changes)
        wall_s = round(time.monotonic() - began, 1)
        verified = miles(root, "verify", "run", check=False).returncode == 0
        figures = figures_of(root / "run")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    reached = figures["greedy"][-1] >= GOALS[recipe] and verified and wall_s <= LIMIT_S
    return {"settings": list(settings), "reached": reached, "wall_s": wall_s, "load_before": load, "verify_ok": verified,
            **figures}  # fmt: skip


def figures_of(folder: Path) -> dict[str, Any]:
    """What the run directory says of a finished run."""
    run, paths = read_run(folder)
    ledger = read_ledger(run, paths)
    summary: dict[str, Any] = json.loads(paths.summary.read_text())
    steps = [ledger.steps.steps[step] for step in sorted(ledger.steps.steps) if step > 0]
    points = [point for _, point in read_metrics(paths.metrics("learner-0", 1).parent.parent) if point["event"] == "step"]
    evaluations = [ledger.evaluations[step] for step in sorted(ledger.evaluations)]
    return {
        "steps": len(steps),
        "greedy": [point.greedy_score for point in evaluations],
        "evaluation_s": [point.seconds for point in evaluations],
        "problems": summary["eval"]["n"],
        "reward": [round(step.mean_reward, 4) for step in steps],
        "median_step_s": {part: round(statistics.median(point.get(part, 0.0) for point in points), 3) for part in PARTS},
        "seconds": summary["seconds"],
        "staleness": summary["staleness"],
        "dropped": summary["groups"]["dropped"],
        "sampled_tokens_per_s": summary["tokens_per_s"],
        "policy": summary["policy"],
    }


def load() -> dict[str, Any]:
    """The runs that are there."""
    found: dict[str, Any] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else {}
    return found


def save(runs: dict[str, Any]) -> None:
    """Whole or not at all, behind every run: who breaks off goes on there."""
    temp = RESULT.with_suffix(".tmp")
    temp.write_text(json.dumps({"machine": machine(), "goals": GOALS, "limit_s": LIMIT_S, "runs": runs}, indent=1) + "\n")
    temp.replace(RESULT)


def main() -> int:
    """Makes what is missing; prints a table. 0 if all runs reached their goals."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="recipe/seed or recipe+lora/seed; all by default")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a setting of these runs, kept with them")
    arguments = parser.parse_args()
    names = arguments.names or [f"{recipe}{variant}/{seed}" for recipe in GOALS for variant in VARIANTS for seed in SEEDS]
    parsed = {name: re.fullmatch(r"(\w+?)((?:\+lora)?)/(\d+)", name) for name in names}
    for name, parts in parsed.items():
        if parts is None or parts[1] not in GOALS:
            parser.error(f"{name!r}: write recipe/seed or recipe+lora/seed, the recipe one of {', '.join(GOALS)}")
    runs = load()
    for name, parts in parsed.items():
        if parts is not None and name not in runs:
            runs[name] = record(*parts.groups(), arguments.set)
            save(runs)
    print(f"{'run':24} {'greedy':16} {'reward last 5':14} {'wall s':8} {'learner s a step':18} verify")
    for name in names:
        row = runs[name]
        spent = sum(value for part, value in row["median_step_s"].items() if part != "wait_s")
        print(f"{name:24} {row['greedy'][0]:.3f} -> {row['greedy'][-1]:.3f}   {statistics.mean(row['reward'][-5:]):<14.3f} "
              f"{row['wall_s']:<8} {spent:<18.2f} {row['verify_ok']}")  # fmt: skip
    return 0 if all(runs[name]["reached"] for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
