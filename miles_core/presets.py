"""The learner's objectives by name: which pieces each of them is made of. Data only, so that a recipe needs no torch.

docs/objectives.md has the formula and the source of each. The recipe's explicit fields override a preset's; `resolve` fills
in the others, and the result is what run.json shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Objective = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]
Advantage = Literal["group_std", "group_mean", "leave_one_out", "batch_whitened", "gae"]
Ratio = Literal["token", "sequence"]
Surrogate = Literal["clip", "weight"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
FlatGroups = Literal["counted", "left_out"]
Correction = Literal["none", "tis", "mis_token", "mis_sequence", "mis_geometric"]


class Pieces(NamedTuple):
    """What a preset stands for: fields of LearnerSpec, by the same names."""

    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    clip_low: float
    clip_high: float
    aggregation: Aggregation
    flat_groups: FlatGroups = "counted"


PRESETS: dict[Objective, Pieces] = {
    "grpo": Pieces("group_std", "token", "clip", 0.2, 0.28, "token_mean"),
    "dr_grpo": Pieces("group_mean", "token", "clip", 0.2, 0.2, "constant"),
    "dapo": Pieces("group_std", "token", "clip", 0.2, 0.28, "token_mean", "left_out"),
    "gspo": Pieces("group_std", "sequence", "clip", 3e-4, 4e-4, "sequence_mean"),
    "cispo": Pieces("group_std", "token", "weight", 1.0, 4.0, "token_mean"),
    "rloo": Pieces("leave_one_out", "token", "clip", 0.2, 0.2, "constant"),
    "reinforce_pp": Pieces("batch_whitened", "token", "clip", 0.2, 0.2, "token_mean"),
    "ppo": Pieces("gae", "token", "clip", 0.2, 0.2, "token_mean"),
}

GROUP_ADVANTAGES: tuple[Advantage, ...] = ("group_std", "group_mean", "leave_one_out")
"""Those that compare a sample with the others of its group."""

DAPO_REPLACEMENT = 3
"""orchestrator.replace_flat of `dapo` where the recipe gives none: at most four times the samples of a batch."""

MIS_BOUNDS: dict[Correction, tuple[float, float]] = {
    "mis_token": (0.5, 5.0),
    "mis_sequence": (0.5, 2.0),
    "mis_geometric": (0.99, 1.01),
}
"""(mis_low, mis_high) where the recipe gives none."""


def resolve(fields: Mapping[str, Any]) -> dict[str, Any]:
    """LearnerSpec's input with the pieces it does not give filled in. Names that do not exist are left to the validation."""
    defaults: dict[str, Any] = {}
    objective, correction = fields.get("objective", "grpo"), fields.get("correction", "tis")
    if isinstance(objective, str) and objective in PRESETS:
        defaults |= PRESETS[objective]._asdict()
    if isinstance(correction, str) and correction in MIS_BOUNDS:
        defaults |= dict(zip(("mis_low", "mis_high"), MIS_BOUNDS[correction], strict=True))
    found = defaults | {name: value for name, value in fields.items() if value is not None or name not in defaults}
    if found.get("advantage") == "gae" and found.get("critic") is None:
        found["critic"] = {}
    return found
