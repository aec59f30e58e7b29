"""Records a small recipe: three seeds and a learning-rate-0 control, on this machine, into benchmarks/.

    make record                                        the quickstart, shell_puzzle: about ten minutes on 2 idle cores
    .venv/bin/python benchmarks/record.py terminal     the terminal tasks

Figures are of single runs, one per seed; nothing is averaged over seeds but what is named as such.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from miles_core.environments.sandbox_kind import sandbox_kind

HERE = Path(__file__).resolve().parent
RESULTS = {"shell_puzzle": "quickstart.json", "terminal": "terminal.json"}
"""By recipe."""
SEEDS = (0, 1, 2)


def environment(root: Path) -> dict[str, str]:
    """This code, and a cache of base models that begins empty."""
    return os.environ | {"PYTHONPATH": str(HERE.parent), "MILES_CACHE": str(root / "cache"), "MILES_RUNS": str(root / "runs")}


def base_model(recipe: str, root: Path) -> float:
    """Seconds in which the base model was made; the runs take it from the cache."""
    start = time.monotonic()
    code = f"from miles_core.recipe import load_recipe; from tasks.prepare import *; ensure_base_model(load_recipe({recipe!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment(root), check=True)
    return round(time.monotonic() - start, 1)


def run(recipe: str, name: str, root: Path, *settings: str) -> dict[str, Any]:
    """One run of the recipe; its summary with the wall time of the whole command."""
    start, load = time.monotonic(), round(os.getloadavg()[0], 2)
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--run-id", name]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, cwd=root, env=environment(root), check=True)
    wall_s = round(time.monotonic() - start, 1)
    verified = subprocess.run(
        [sys.executable, "-m", "flows.cli", "verify", name, "--json"],
        cwd=root, env=environment(root), capture_output=True, text=True, check=False,
    )  # fmt: skip
    summary: dict[str, Any] = json.loads((root / "runs" / name / "reports" / "summary.json").read_text())
    overlap = summary["seconds"]["both_busy"] / summary["seconds"]["learner_busy"]
    return {"name": name, "settings": list(settings), "load_before": load, "wall_s": wall_s,
            "verify_ok": verified.returncode == 0,
            "both_busy_over_learner_busy": round(overlap, 3), "summary": summary}  # fmt: skip


def machine() -> dict[str, Any]:
    """What it ran on."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {"cpu": models[0] if models else platform.processor(), "cores": len(os.sched_getaffinity(0)),
            "sandbox": sandbox_kind().name,
            "python": platform.python_version(), "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip


def main() -> None:
    """Runs everything and writes the file; prints a table."""
    recipe = sys.argv[1] if len(sys.argv) > 1 else "shell_puzzle"
    if recipe not in RESULTS:
        sys.exit(f"record.py: no recipe {recipe!r} is recorded here; there are: {', '.join(RESULTS)}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made_s = base_model(recipe, root)
        runs = [run(recipe, f"seed{seed}", root, f"seed={seed}") for seed in SEEDS]
        control = run(recipe, "control", root, "learner.lr=0")
    medians = {
        "reward_last5": statistics.median(item["summary"]["reward"]["last5"] for item in runs),
        "greedy_after": statistics.median(item["summary"]["eval"]["greedy_after"] for item in runs),
        "wall_s": statistics.median(item["wall_s"] for item in runs),
    }
    result = {"machine": machine(), "recipe": recipe, "base_model_s": made_s, "runs": runs, "control_lr0": control,
              "median_of_seeds": medians}  # fmt: skip
    (HERE / RESULTS[recipe]).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'run':10} {'reward first5 -> last5':24} {'greedy before -> after':24} {'both/learner':12} {'wall s':7} verify")
    for item in [*runs, control]:
        reward, evaluation = item["summary"]["reward"], item["summary"]["eval"]
        print(f"{item['name']:10} {reward['first5']:.3f} -> {reward['last5']:.3f}{'':10} "
              f"{evaluation['greedy_before']:.3f} -> {evaluation['greedy_after']:.3f}{'':10} "
              f"{item['both_busy_over_learner_busy']:<12} {item['wall_s']:<7} {item['verify_ok']}")  # fmt: skip


if __name__ == "__main__":
    main()
