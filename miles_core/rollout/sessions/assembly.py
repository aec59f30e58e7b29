"""From a tree of sampled turns to the rows that are trained: one row per leaf that is kept.

Invariants: every sampled turn of a kept row enters the loss in exactly one row, that of the leaf that was committed first;
nothing else enters it; a row is whole turns and fits into max_tokens; a try that was followed by another at the same place
is dropped. The same tree gives the same rows in the same order, longest line first. Failure: turns that do not fit together
are AssemblyFailed, which names the turn.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.rollout.session import empty_columns
from miles_core.rollout.sessions.errors import AssemblyFailed
from miles_core.rollout.sessions.history import Checkpoint, History
from miles_core.trajectories.schema import Segment, Turn, VersionRun

if TYPE_CHECKING:
    from miles_core.routers import Experts


@dataclass(frozen=True)
class Row:
    """One line of the tree. T = its tokens."""

    path: tuple[Checkpoint, ...]
    owned: frozenset[int]
    """`seq` of the turns that are trained here."""
    is_cut: bool
    """Its last turn was cut by a limit, or turns behind it did not fit."""

    def columns(self) -> dict[str, Any]:
        """The token columns of a Trajectory: tokens, loss_mask, logprobs, versions, turns, experts. Raises AssemblyFailed."""
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        runs: list[VersionRun] = []
        turns: list[Turn] = []
        for node in self.path:
            _check(node, len(tokens))
            tokens += (*node.prompt, *node.sampled.tokens)
            is_own = node.seq in self.owned
            mask += [0] * len(node.prompt) + [int(is_own)] * len(node.sampled.tokens)
            logprobs += [0.0] * len(node.prompt)
            logprobs += node.sampled.logprobs if is_own else [0.0] * len(node.sampled.tokens)
            for at, version in enumerate(node.sampled.versions if is_own else (), node.sampled_at):
                if not runs or runs[-1][1:] != version:
                    runs.append(VersionRun(at, *version))
            turns += [Turn(node.messages[-1].role, node.start, node.sampled_at), Turn("assistant", node.sampled_at, node.end)]
        return {
            "tokens": np.array(tokens, dtype=np.int32),
            "loss_mask": np.array(mask, dtype=np.uint8),
            "logprobs": np.array(logprobs, dtype=np.float32),
            "versions": tuple(runs),
            "turns": tuple(turns),
            "experts": _experts(self.path),
        }


def episode_columns(history: History, max_tokens: int) -> dict[str, Any]:
    """The token columns of a session's Trajectory; a branching one has every turn once, and `segments` say what follows what.

    trajectories/lines.py makes the rows of `assemble` of it. Raises AssemblyFailed.
    """
    rows = assemble(history, max_tokens)
    if len(rows) < 2:
        return rows[0].columns() if rows else empty_columns()
    nodes = sorted({node.seq: node for row in rows for node in row.path}.values(), key=lambda node: node.seq)
    place = {node.seq: index for index, node in enumerate(nodes)}
    parts = [Row((_alone(node),), frozenset({node.seq}), is_cut=False).columns() for node in nodes]
    starts = np.cumsum([0, *(len(part["tokens"]) for part in parts)]).tolist()
    return {
        **{name: np.concatenate([part[name] for part in parts]) for name in ("tokens", "loss_mask", "logprobs")},
        "versions": tuple(
            run._replace(start=run.start + at) for part, at in zip(parts, starts, strict=False) for run in part["versions"]
        ),
        "turns": tuple(
            Turn(turn.role, turn.start + at, turn.end + at)
            for part, at in zip(parts, starts, strict=False)
            for turn in part["turns"]
        ),
        "segments": tuple(
            Segment(start, end, -1 if node.parent is None else place[node.parent.seq])
            for node, (start, end) in zip(nodes, itertools.pairwise(starts), strict=True)
        ),
        "experts": None,
    }


def assemble(history: History, max_tokens: int) -> list[Row]:
    """The rows of a session; none if no turn was sampled, or none fits."""
    kept = kept_leaves(history)
    lines = [line for line in (_fitting(leaf, max_tokens) for leaf in kept) if line]
    inner = {node.parent.seq for line in lines for node in line if node.parent is not None}
    # What did not fit may have cut a line to what another goes on from, or two to the same.
    by_tip = {line[-1].seq: line for line in lines if line[-1].seq not in inner}
    owner: dict[int, int] = {}
    for tip in sorted(by_tip):
        for node in by_tip[tip]:
            owner.setdefault(node.seq, tip)
    whole = {leaf.seq for leaf in kept if leaf.sampled.ended}
    rows = [
        Row(line, frozenset(node.seq for node in line if owner[node.seq] == tip), is_cut=tip not in whole)
        for tip, line in by_tip.items()
    ]
    return sorted(rows, key=lambda row: (-row.path[-1].depth, -row.path[-1].seq))


def _alone(node: Checkpoint) -> Checkpoint:
    """A turn as if nothing stood before it, and without experts: their record is that of one line."""
    return dataclasses.replace(node, parent=None, start=0, sampled=dataclasses.replace(node.sampled, experts=None))


def kept_leaves(history: History) -> list[Checkpoint]:
    """Leaves without those that were tried again with the same messages; longest line first, then the newest."""
    newest: dict[tuple[int | None, Any], int] = {}
    for node in history.checkpoints:
        newest[_place(node)] = node.seq
    kept = [leaf for leaf in history.leaves() if newest[_place(leaf)] == leaf.seq]
    return sorted(kept, key=lambda leaf: (-leaf.depth, -leaf.seq))


def _place(node: Checkpoint) -> tuple[int | None, Any]:
    return None if node.parent is None else node.parent.seq, node.messages


def _fitting(leaf: Checkpoint, max_tokens: int) -> tuple[Checkpoint, ...]:
    return tuple(node for node in leaf.path() if node.end <= max_tokens)


def _check(node: Checkpoint, at: int) -> None:
    sampled = node.sampled
    if node.start != at:
        raise AssemblyFailed(f"turn {node.depth} begins at token {node.start}, but its conversation has {at} tokens there")
    if not len(sampled.tokens) == len(sampled.logprobs) == len(sampled.versions) > 0:
        raise AssemblyFailed(
            f"turn {node.depth} has {len(sampled.tokens)} tokens, {len(sampled.logprobs)} logprobs and "
            f"{len(sampled.versions)} versions"
        )


def _experts(path: tuple[Checkpoint, ...]) -> Experts | None:
    """[T-1, layers, k] of the line, each position's from when it was first computed; None where a turn has no record.

    A turn computed the positions behind its parent's, or, where the engine read the conversation anew, all of them.
    """
    parts: list[Experts] = []
    known = 0
    for node in path:
        found, wanted = node.sampled.experts, node.end - 1 - known
        if found is None:
            return None
        if len(found) not in (wanted, node.end - 1):
            raise AssemblyFailed(
                f"turn {node.depth}: experts of {len(found)} positions behind {known} known ones, but the engine has computed "
                f"{node.end - 1}; they would be replayed at the wrong tokens"
            )
        parts.append(found[len(found) - wanted :])
        known = node.end - 1
    return np.concatenate(parts)
