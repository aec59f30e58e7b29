"""The conversations of an episode: a linear one is one; of a branching one each line from a root to a leaf is one.

Every sampled token enters the loss in exactly one of them, that of the leaf that was sampled first; in the others it is
context. All of them bear the episode's ids, facts and times, and their own number behind `#`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from miles_core.trajectories.schema import Segment, Trajectory, Turn, VersionRun


def lines(row: Trajectory) -> list[Trajectory]:
    """The conversations of an episode, in the order of their leaves."""
    if not row.segments:
        return [row]
    seen: set[int] = set()
    found = []
    for number, leaf in enumerate(_leaves(row.segments)):
        path = _path(row.segments, leaf)
        found.append(_line(row, number, path, [index for index in path if index not in seen]))
        seen |= set(path)
    return found


def _leaves(segments: Sequence[Segment]) -> list[int]:
    parents = {segment.parent for segment in segments}
    return [index for index in range(len(segments)) if index not in parents]


def _path(segments: Sequence[Segment], leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = segments[leaf].parent
    return path[::-1]


def _line(row: Trajectory, number: int, path: Sequence[int], own: Sequence[int]) -> Trajectory:
    spans = [row.segments[index] for index in path]
    where = np.concatenate([np.arange(span.start, span.end) for span in spans])
    is_own = np.concatenate([np.full(span.end - span.start, index in own) for index, span in zip(path, spans, strict=True)])
    mask = row.loss_mask[where] * is_own.astype(np.uint8)
    turns: list[Turn] = []
    runs: list[VersionRun] = []
    at = 0
    for index, span in zip(path, spans, strict=True):
        shift = at - span.start
        turns += [Turn(turn.role, turn.start + shift, turn.end + shift) for turn in row.turns if _within(turn, span)]
        if index in own:
            _add_runs(runs, row, span, at)
        at += span.end - span.start
    return dataclasses.replace(
        row,
        trajectory_id=f"{row.trajectory_id}#{number}",
        tokens=row.tokens[where],
        loss_mask=mask,
        logprobs=np.where(mask == 1, row.logprobs[where], np.float32(0)),
        versions=tuple(runs),
        turns=tuple(turns),
        segments=(),
    )


def _within(turn: Turn, span: Segment) -> bool:
    return span.start <= turn.start and turn.end <= span.end


def _add_runs(runs: list[VersionRun], row: Trajectory, span: Segment, at: int) -> None:
    """Adds the versions of a segment's sampled tokens to those of a line in which it starts at `at`."""
    starts = np.array([run.start for run in row.versions])
    for position in np.flatnonzero(row.loss_mask[span.start : span.end]) + span.start:
        run = row.versions[int(np.searchsorted(starts, position, side="right")) - 1]
        if not runs or runs[-1][1:] != run[1:]:
            runs.append(run._replace(start=int(position) - span.start + at))
