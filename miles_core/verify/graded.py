"""What grades decide: which groups are replaced for having no spread, and how much each trained sample counts."""

from __future__ import annotations

from collections import defaultdict

from miles_core.grading.weights import grade_weights
from miles_core.orchestrator.decide import most_replaced
from miles_core.records import Batch, Drop
from miles_core.verify.joined import Joined


def check_replaced(joined: Joined) -> None:
    """Every `no_spread` drop against the grades that count, and their number against the recipe's bound."""
    fault, most = joined.files.fault, most_replaced(joined.recipe)
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory, chosen in joined.chosen.items():
        values[trajectory.partition("@")[0].rpartition("/")[0]].append(chosen.grade.value)
    since_batch = 0
    for _, record in joined.orchestrator:
        if isinstance(record, Batch):
            since_batch = 0
        elif isinstance(record, Drop) and record.reason == "no_spread":
            since_batch += 1
            if since_batch > most:
                fault(
                    "no_spread",
                    record.group_id,
                    f"replaced as number {since_batch} since a batch, the recipe's bound is {most}",
                )
            issued, found = joined.groups.get(record.group_id), values[record.group_id]
            if issued is not None and (len(found) != issued.num_samples or set(found) != {record.reward}):
                fault(
                    "no_spread", record.group_id,
                    f"replaced as {issued.num_samples} samples of reward {record.reward}, but its grades are {sorted(found)}",
                )  # fmt: skip


def check_weights(joined: Joined) -> None:
    """Weights and qualities of every batch, from the grades that count. A member without one is a fault of check_batches."""
    for batch in joined.batches.values():
        members = [member for group in batch.groups for member in group.members]
        if any(member.ref.trajectory_id not in joined.chosen for member in members):
            continue
        grades = [joined.chosen[member.ref.trajectory_id].grade for member in members]
        for member, grade, weight in zip(members, grades, grade_weights(grades, joined.recipe.grader.weights), strict=True):
            if (member.weight, member.quality) != (weight, grade.quality):
                joined.files.fault(
                    "weight", f"batch {batch.step}, {member.ref.trajectory_id}",
                    f"weight {member.weight} and quality {member.quality}, by its grade {weight} and {grade.quality}",
                )  # fmt: skip
