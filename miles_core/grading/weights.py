"""How much a graded sample counts: less the older and the less certain its grade is (sources G3, G4).

weight = exp(-per_s x age) / (1 + (std / std_scale)^2). The age of a grade is counted from the newest grade of its batch, by the
graders' own clocks: so it needs no other clock, is fixed by the batch's record, and `miles verify` computes it again. The form
for `std` is ours: a half where it reaches the threshold beyond which the source would grade again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_core.grading.base import Grade
from miles_core.recipe import GradeWeightsSpec


def grade_weights(grades: Sequence[Grade], spec: GradeWeightsSpec | None) -> list[float]:
    """Weights in (0, 1] of one batch's grades; 1 without a spec."""
    if spec is None:
        return [1.0] * len(grades)
    newest = max((grade.timestamp for grade in grades), default=0.0)
    return [math.exp(-spec.per_s * (newest - grade.timestamp)) / (1 + (grade.std / spec.std_scale) ** 2) for grade in grades]
