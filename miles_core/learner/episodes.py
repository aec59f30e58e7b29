"""A batch's rows as episodes, and from their grades each row's advantage.

One episode may give several rows (siblings: the leaves of a branching history share its `sample_id`). They share its reward,
and it counts once in the statistics of its group and of the batch. Advantage of an episode: of its reward by advantages.py,
moved among the passing answers of its group where there is a ranking grader (redistribution.py), times the weight of its grade
(grading/weights.py). All its rows have it.

Failure: siblings of different rewards, and groups of different size, are a protocol fault (MilesError).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from miles_core.errors import MilesError
from miles_core.recipe import Recipe
from miles_core.records import Batch, BatchMember
from miles_core.trajectories.lines import lines
from miles_core.trajectories.schema import Trajectory

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """A batch in the trainer's form: N trajectories, group by group, of G groups x n episodes."""

    trajectories: list[Trajectory]
    episodes: npt.NDArray[np.int64]
    """[N] the row's episode, counted through all groups."""
    rewards: Array
    """[G, n]"""
    weights: Array
    """[G, n] of the grades."""
    qualities: Array
    """[G, n] by which passing answers are ranked; nan: none."""

    def as_lines(self) -> Rows:
        """The same with a row for each conversation of a branching episode (trajectories/lines.py)."""
        parts = [lines(row) for row in self.trajectories]
        episodes = np.repeat(self.episodes, [len(part) for part in parts])
        return replace(self, trajectories=[line for part in parts for line in part], episodes=episodes)

    @property
    def mean_reward(self) -> float:
        """Over all episodes."""
        return float(self.rewards.mean())

    def by_row(self, values: Array) -> Array:
        """[G, n] to [N]."""
        found: Array = values.reshape(-1)[self.episodes]
        return found

    def total(self, values: Sequence[float]) -> Array:
        """[N] to [G, n]: sums over an episode's rows."""
        sums = np.zeros(self.rewards.size)
        np.add.at(sums, self.episodes, values)
        return sums.reshape(self.rewards.shape)


def make_rows(batch: Batch, trajectories: list[Trajectory]) -> Rows:
    """`trajectories` in the order of the batch's members. Raises MilesError."""
    members = [member for group in batch.groups for member in group.members]
    first: dict[tuple[str, str], int] = {}
    episodes, graded = [], list[BatchMember]()
    for member, row in zip(members, trajectories, strict=True):
        episode = first.setdefault((row.group_id, row.sample_id), len(first))
        if episode == len(graded):
            graded.append(member)
        elif graded[episode].reward != member.reward:
            other = graded[episode]
            raise MilesError(
                f"batch {batch.step} ({batch.batch_id}): siblings of episode {row.sample_id} have rewards {other.reward} "
                f"({other.ref.trajectory_id}) and {member.reward} ({member.ref.trajectory_id}); an episode has one"
            )
        episodes.append(episode)
    sizes = [len({row for row in first if row[0] == group.group_id}) for group in batch.groups]
    if len(set(sizes)) != 1:
        raise MilesError(
            f"batch {batch.step} ({batch.batch_id}): its groups have {sizes} episodes; they must have equally many"
        )
    columns = [(each.reward, each.weight, np.nan if each.quality is None else each.quality) for each in graded]
    rewards, weights, qualities = np.array(columns, dtype=np.float64).T.reshape(3, len(batch.groups), sizes[0])
    return Rows(trajectories, np.array(episodes), rewards, weights, qualities)


def row_advantages(rows: Rows, rewards: Array, recipe: Recipe) -> tuple[npt.NDArray[np.float32], dict[str, float]]:
    """[N] in the order of the batch, and metrics. `rewards` [G, n]: the batch's, or scaled ones. With a critic: rewards."""
    import torch

    from miles_core.learner.advantages import advantages
    from miles_core.learner.redistribution import redistribute

    num_sampled = torch.from_numpy(rows.total([row.num_sampled for row in rows.trajectories]))
    found = advantages(torch.from_numpy(rewards), num_sampled, recipe.learner.advantage).numpy()
    metrics: dict[str, float] = {}
    if recipe.grader.ranking is not None:
        found, metrics = redistribute(found, rows.qualities)
    if recipe.grader.weights is not None:
        found = found * rows.weights
        metrics["grade_weight_mean"] = float(rows.weights.mean())
    return rows.by_row(found).astype(np.float32), metrics
