"""What the reward scaler costs: microseconds a grade with the documented windows, full, over a million grades.

    python benchmarks/reward_scaler.py [--grades 1000000]

Also the time until a learner that starts again has the windows of a run of that many grades: batches of 128, as it reads them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from miles_core.grading.scaler import RewardScaler
from miles_core.recipe import RewardScalerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grades", type=int, default=1_000_000)
    count = parser.parse_args().grades
    spec = RewardScalerSpec()
    values = np.random.default_rng(0).random(count + spec.long).tolist()
    scaler = RewardScaler(spec)
    for value in values[: spec.long]:
        scaler.add(value)
    slowest = 0.0
    began = time.perf_counter()
    for value in values[spec.long :]:
        started = time.perf_counter()
        scaler.add(value)
        slowest = max(slowest, time.perf_counter() - started)
    seconds = time.perf_counter() - began
    batch = np.array(values[:128]).reshape(16, 8)
    started = time.perf_counter()
    for _ in range(1000):
        scaler.scale(batch)
    scaled_us = (time.perf_counter() - started) * 1e3
    print(f"add: {seconds / count * 1e6:.2f} us a grade, slowest {slowest * 1e3:.1f} ms (once in {spec.long} grades)")
    print(f"scale: {scaled_us:.0f} us a batch of 128 = {scaled_us / 128:.2f} us a grade")
    print(f"after a restart: {seconds:.2f} s for {count} grades")


if __name__ == "__main__":
    main()
