"""Does a real language model learn on two cores? SmolLM2-135M, two recipes, full and LoRA, three seeds; smollm2.json beside it.

    make record-smollm2        12 runs, the same on a Slurm cluster, one on two-digit numbers; one at a time: about three hours
    .venv/bin/python benchmarks/smollm2.py smollm2/0 smollm2_needle+lora/2@devslurm      these alone
    .venv/bin/python benchmarks/smollm2.py smollm2/0 --output /tmp/dry.json --set steps=2 --set evaluation.problems=8

The file is written behind every run, and a run that it has is not made again: who breaks off goes on there. Greedy on 512
held-out problems before and after, the reward of every step, and where the seconds went. A run must end at its goal or over
it, verified, within 15 minutes; on two-digit numbers the paired 95 % interval of the gain must lie above 0, by an evaluation
of both models of its own. A run that fails is named and leaves its directory; the others are made. Figures are of single runs,
one per seed; nothing is averaged over seeds.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import machine

from miles_core.evaluation.figures import gain_of
from miles_core.run import read_run
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.metrics import read_metrics

HERE = Path(__file__).resolve().parent
RESULT = HERE / "smollm2.json"
LORA = ("model.lora={rank: 16, alpha: 32}", "learner.lr=3e-4")
TWO_DIGITS = "environment.options={min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2}"
LIMIT_S = 900.0
GIVE_UP_S = 4 * LIMIT_S
"""A run that takes longer is cancelled: the others wait for it."""
PARTS = ("read_s", "train_s", "publish_s", "wait_s")
"""Of a learner's step; `wait_s` is what it waited for its batch."""


@dataclass(frozen=True)
class Case:
    """What is run; its name is that of CASES."""

    recipe: str
    settings: tuple[str, ...] = ()
    goal: float | None = None
    """Greedy score to reach; None: a gain whose interval lies above 0."""
    seeds: tuple[int, ...] = (0, 1, 2)


CASES = {
    "smollm2": Case("smollm2", goal=0.75),
    "smollm2+lora": Case("smollm2", LORA, goal=0.75),
    "smollm2_needle": Case("smollm2_needle", goal=0.85),
    "smollm2_needle+lora": Case("smollm2_needle", LORA, goal=0.85),
    "smollm2+two_digits": Case("smollm2", (TWO_DIGITS,), seeds=(0,)),
}


def miles(root: Path, *arguments: str, check: bool = True, timeout: float | None = None) -> int:
    """A `miles` command with these sources and run directories of its own below `root`; its output is shown. The exit code."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_RUNS": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=root, env=environment, stdout=sys.stderr, check=check, timeout=timeout).returncode


@contextmanager
def folder_of_a_run() -> Iterator[Path]:
    """A folder that goes with its run, unless that failed; then its jobs are cancelled and the folder stays."""
    root = Path(tempfile.mkdtemp(prefix="smollm2-"))
    try:
        yield root
    except BaseException:
        if (root / "run" / "run.json").exists():
            miles(root, "cancel", "run", check=False)
        print(f"what there is of it: {root}", file=sys.stderr)
        raise
    shutil.rmtree(root, ignore_errors=True)


def record(case: Case, cluster: str, settings: list[str]) -> dict[str, Any]:
    """Makes a run and returns its figures. Raises CalledProcessError, TimeoutExpired."""
    with folder_of_a_run() as root:
        load, began = round(os.getloadavg()[0], 2), time.monotonic()
        miles(root, "run", case.recipe, "--run-id", "run", "--cluster", cluster, *options(settings), timeout=GIVE_UP_S)
        wall_s = round(time.monotonic() - began, 1)
        verified = miles(root, "verify", "run", check=False) == 0
        figures = figures_of(root / "run")
        if case.goal is None:
            figures["gain"] = gain(root, case, settings, figures["problems"])
    risen = figures["greedy"][-1] >= case.goal if case.goal is not None else figures["gain"]["low"] > 0
    return {"settings": settings, "cluster": cluster, "reached": risen and verified and wall_s <= LIMIT_S, "wall_s": wall_s,
            "load_before": load, "load_after": round(os.getloadavg()[0], 2), "verify_ok": verified, "machine": machine(),
            **figures}  # fmt: skip


def options(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def gain(root: Path, case: Case, settings: list[str], problems: int) -> dict[str, Any]:
    """What the problems gained from the base model to the last version, by pairs; both are asked again, greedily."""
    tasks = [setting for setting in settings if setting.startswith("environment.")]
    asked = ["--problems", str(problems), "--dtype", read_run(root / "run")[0].recipe.rollout_dtype]
    miles(root, "evaluate", str(root / "run" / "base_model"), "--recipe", case.recipe, *asked, *options(tasks))
    miles(root, "evaluate", "run", *asked)
    values: dict[bool, list[float]] = {}
    for path in (root / "evaluations").glob("*/result.json"):
        result = json.loads(path.read_text())
        values[result["question"]["model"]["step"] is not None] = result["greedy"]
    figure = gain_of(values[False], values[True])
    return {name: value if isinstance(value, str) else round(value, 4) for name, value in figure.model_dump().items()}


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
        "code_digest": run.code_digest,
    }


def save(output: Path, runs: dict[str, Any]) -> None:
    """Whole or not at all."""
    temp = output.with_suffix(".tmp")
    goals = {name: case.goal for name, case in CASES.items()}
    temp.write_text(json.dumps({"goals": goals, "limit_s": LIMIT_S, "runs": runs}, indent=1) + "\n")
    temp.replace(output)


def all_runs() -> Iterator[str]:
    """Every case and seed, and those that have a goal once more on a Slurm cluster."""
    for name, case in CASES.items():
        yield from (f"{name}/{seed}" for seed in case.seeds)
        if case.goal is not None:
            yield from (f"{name}/{seed}@devslurm" for seed in case.seeds)


def wanted(parser: argparse.ArgumentParser, names: list[str], more: list[str]) -> dict[str, tuple[Case, str, list[str]]]:
    """What each name stands for: its case, cluster and settings."""
    found = {}
    for name in names or all_runs():
        parts = re.fullmatch(r"(.+)/(\d+)(?:@(\w+))?", name)
        if parts is None or parts[1] not in CASES:
            parser.error(f"{name!r}: write case/seed or case/seed@cluster, the case one of {', '.join(CASES)}")
        case = CASES[parts[1]]
        found[name] = case, parts[3] or "local", [f"seed={parts[2]}", *case.settings, *more]
    return found


def show(name: str, row: dict[str, Any]) -> None:
    spent = sum(value for part, value in row["median_step_s"].items() if part != "wait_s")
    last = statistics.mean(row["reward"][-5:])
    print(f"{name:30} {row['greedy'][0]:.3f} -> {row['greedy'][-1]:.3f}   {last:<14.3f} {row['wall_s']:<8} {spent:<18.2f} "
          f"{row['verify_ok']!s:7} {row.get('gain', '')}")  # fmt: skip


def main() -> int:
    """Makes what is missing; prints a table. 0 if all runs reached their goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="case/seed or case/seed@cluster; all by default")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="a setting of these runs, kept with them")
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the results, read and written")
    arguments = parser.parse_args()
    output: Path = arguments.output
    asked = wanted(parser, arguments.names, arguments.set)
    runs: dict[str, Any] = json.loads(output.read_text())["runs"] if output.exists() else {}
    for name, (_, _, settings) in asked.items():
        if name in runs and runs[name]["settings"] != settings:
            parser.error(f"{output} has {name} with {runs[name]['settings']}, asked is {settings}; name another --output")
    for name, (case, cluster, settings) in asked.items():
        if name in runs:
            continue
        try:
            runs[name] = record(case, cluster, settings)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        save(output, runs)
    print(f"{'run':30} {'greedy':16} {'reward last 5':14} {'wall s':8} {'learner s a step':18} {'verify':7} gain")
    for name in filter(runs.__contains__, asked):
        show(name, runs[name])
    return 0 if all(name in runs and runs[name]["reached"] for name in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
