"""A trajectory: one episode's tokens, what sampled each of them, and the facts its environment reports.

The in-memory form is numpy arrays; on disk it is one row of an Arrow shard (shards.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Status = Literal["complete", "truncated", "failed"]
FailureKind = Literal["none", "infrastructure", "environment", "model"]


class VersionRun(NamedTuple):
    """From position `start` (index into tokens) on, sampled tokens came from version (step, attempt)."""

    start: int
    step: int
    attempt: int


class Turn(NamedTuple):
    """One message: `role` and the half-open span [start, end) of its tokens."""

    role: str
    start: int
    end: int


class Segment(NamedTuple):
    """A part of a branching episode: the half-open span [start, end) of its tokens, and what it goes on from."""

    start: int
    end: int
    parent: int
    """Index of an earlier segment; -1: it begins a conversation."""


@dataclass(frozen=True)
class Trajectory:
    """One finished episode. T = number of tokens."""

    trajectory_id: str
    """`<sample_id>@<producer>.a<attempt>`: unique over all attempts."""
    sample_id: str
    """`<group_id>/<index>`."""
    group_id: str
    order_id: str
    producer: str
    """Writer id, for example `rollout-0`."""
    producer_attempt: int
    task_seed: int
    tokens: npt.NDArray[np.int32]
    """[T] prompt, samples and tool results in the order the model saw them; of a branching episode see `segments`."""
    loss_mask: npt.NDArray[np.uint8]
    """[T] 1 on sampled tokens, 0 elsewhere."""
    logprobs: npt.NDArray[np.float32]
    """[T] log softmax(logits / temperature) in float32 of each sampled token; 0 where not sampled."""
    versions: tuple[VersionRun, ...]
    """Runs over the sampled tokens, by start; empty only if nothing was sampled."""
    turns: tuple[Turn, ...]
    temperature: float
    status: Status
    failure_kind: FailureKind = "none"
    facts: dict[str, Any] = field(default_factory=dict)
    """What happened, as the environment reports it (JSON); it does not judge."""
    source: str = "policy"
    """`policy`, or the declared other policy that sampled it."""
    created_s: float = 0.0
    """Unix seconds: order read."""
    started_s: float = 0.0
    """Unix seconds: first token requested."""
    finished_s: float = 0.0
    """Unix seconds: episode ended."""
    experts: npt.NDArray[np.uint8 | np.uint16] | None = None
    """[T-1, layers, k] ids of the experts that position t went to when it was first computed, in layers with experts, by
    depth; uint8 with up to 256 experts, else uint16: layers x k (x 2) bytes a token. None: dense, or not recorded."""

    segments: tuple[Segment, ...] = ()
    """Of a branching episode: all tokens of its tree, each once; lines.py makes the conversations of it. Empty: one line."""

    @property
    def num_sampled(self) -> int:
        """Tokens that enter the loss."""
        return int(self.loss_mask.sum())

    @property
    def oldest_step(self) -> int | None:
        """Smallest step of any version that sampled a token; None if nothing was sampled."""
        return min((run.step for run in self.versions), default=None)
