"""An environment of the real `verifiers` package in a whole run: its data, loop and rubric; into verifiers_package.json.

    python benchmarks/verifiers_package.py --install DIR   # once: a venv over this one, with the package beside it
    python benchmarks/verifiers_package.py --run DIR       # three steps on this machine, verified; a minute

The environment is benchmarks/verifiers_sums.py, two tries at a sum, over the made model of chain_sum. The run completes and
proves itself; the file says what became of its episodes, how their conversations differ from a fresh rendering, and their
rewards, which the rubric gives from the facts alone: none, for that model calls a calculator that this environment has not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
OUTPUT = Path(__file__).with_suffix(".json")
RECIPE: dict[str, Any] = {
    "name": "verifiers_sums",
    "steps": 3,
    "environment": {
        "family": "verifiers",
        "options": {"environment": "verifiers-sums", "args": {"rows": 400}},
        "max_turns": 2,
        "max_new_tokens": 24,
        "max_tokens": 160,
    },
    "rollout": {"pools": [{"name": "main", "replicas": 1, "slots": 16}]},
    "orchestrator": {"prompts": 4, "samples": 8, "capacity_batches": 2, "max_staleness": 2},
    "learner": {"lr": 3.0e-4, "minibatches": 1, "checkpoint_every": 3},
    "evaluation": {"problems": 16},
}


def install(folder: Path) -> None:
    """A venv that sees this one's packages, with the same versions of what both need."""
    from miles_core.environments.verifiers_env import TRIED

    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "-p", sys.executable, str(folder)], check=True)
    freeze = [*uv, "pip", "freeze", "-q", "-p", sys.executable, "--exclude-editable"]
    frozen = subprocess.run(freeze, check=True, stdout=subprocess.PIPE)
    (folder / "constraints.txt").write_bytes(frozen.stdout)
    # It asks for older ones of these, which want an older model hub than transformers does; with these it works.
    (folder / "overrides.txt").write_text("datasets>=4.7\nregex\n")
    packages = ["-c", str(folder / "constraints.txt"), "--override", str(folder / "overrides.txt"), f"verifiers=={TRIED}"]
    subprocess.run([*uv, "pip", "install", "-p", str(folder / "bin" / "python"), *packages], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "_project.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def run(folder: Path) -> dict[str, Any]:
    """One run with that interpreter; figures."""
    from miles_core.recipe import load_recipe
    from tasks.prepare import ensure_base_model

    python = str(folder / "bin" / "python")
    model = {"path": str(ensure_base_model(load_recipe("chain_sum"))), "chat": "plain"}
    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name, "verifiers_sums.yaml")
        recipe.write_text(yaml.safe_dump({**RECIPE, "model": model}))
        path = os.pathsep.join((str(HERE.parent), str(HERE)))
        environment = os.environ | {"PYTHONPATH": path, "MILES_RUNS": str(Path(name, "runs")), "OMP_NUM_THREADS": "1"}
        miles = [python, "-m", "flows.cli"]
        subprocess.run([*miles, "run", str(recipe), "--run-id", "v"], env=environment, cwd=HERE.parent, check=True)
        subprocess.run([*miles, "verify", "v"], env=environment, cwd=HERE.parent, check=True)
        ask = [python, __file__, "--look", str(Path(name, "runs", "v"))]
        done = subprocess.run(ask, env=environment, cwd=HERE.parent, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def look(root: Path) -> dict[str, Any]:
    """What the run's files say."""
    from miles_core.environments.verifiers_env import RubricVerifier
    from miles_core.run import read_run
    from miles_core.trajectories.shards import read_shard
    from miles_core.verify import verify_run

    verifier = RubricVerifier(read_run(root)[0].recipe.environment)
    rows = [row for path in sorted((root / "trajectories").rglob("*.arrow")) for row in read_shard(path)]
    values = [verifier.value(row.task_seed, row.facts) for row in rows if row.status == "complete"]
    summary = json.loads((root / "reports" / "summary.json").read_text())
    return {
        "verified": verify_run(root).state,
        "source": verifier.source,
        "trajectories": len(rows),
        "status": Counter(f"{row.status} {row.failure_kind}" for row in rows),
        "turns": Counter(row.facts["session"]["turns"] for row in rows if "session" in row.facts),
        "mismatches": Counter(kind for row in rows for kind in row.facts.get("session", {}).get("mismatches", ())),
        "stop_conditions": Counter(str(row.facts.get("stop_condition")) for row in rows),
        "rewards": Counter(round(value, 3) for value in values),
        "mean_reward": round(sum(values) / max(1, len(values)), 4),
        "reward_of_the_run": summary["reward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR")
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        print(json.dumps(look(options.look)))
    elif options.install:
        install(options.install)
    elif options.run:
        found = run(options.run)
        print(json.dumps(found, indent=1))
        OUTPUT.write_text(json.dumps(found, indent=1) + "\n")
    else:
        parser.error("give --install DIR or --run DIR")


if __name__ == "__main__":
    main()
