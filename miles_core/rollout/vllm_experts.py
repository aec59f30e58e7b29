"""Which experts vLLM chose for each position of each session, for routing replay (sources R6).

In a worker (`ExpertCapture`): vLLM's capturer stands at every router; behind each step its rows are cut by request and
position. In the engine (`ExpertBook`): the rows of a session, each of the pass that computed the position first. Those of a
prefix that a new session takes from vLLM's cache are rows of the session that has computed it, found by what the prefix is:
the book keeps the full blocks of all sessions begun since the last exchange of weights, as long as vLLM's cache may give them.

Failure: routers that vLLM cannot watch are a ValueError at the start; a position that nobody saw computed is a MilesError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from miles_core.errors import MilesError
from miles_core.routers import Experts

Rows = tuple[str, int, Experts]
"""Request id, position of the first row, [n, layers, k] expert ids."""


class ExpertCapture:
    """In a worker. `prefix`: of the ids of the requests that are kept."""

    def __init__(self, runner: Any, config: Any, prefix: str) -> None:
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capture
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        model = runner.get_model()
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        self._capturer = vllm_capture.RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        vllm_capture.bind_routed_experts_capturer(model, self._capturer)
        self._runner, self._prefix = runner, prefix
        self._taken: list[Rows] = []
        if get_tp_group().is_first_rank:
            self._execute, runner.execute_model = runner.execute_model, self._execute_and_keep

    def _execute_and_keep(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        answer = self._execute(scheduled, *arguments, **named)
        if scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        return answer

    def _keep(self, scheduled: Any) -> None:
        again = scheduled.scheduled_cached_reqs
        starts = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        starts |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        chosen = self._capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens)[:, self._layers].cpu().numpy()
        at = 0
        for request_id in self._runner.input_batch.req_ids:  # in the order of the pass
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            if count and request_id.startswith(self._prefix):
                self._taken.append((request_id, starts[request_id], chosen[at : at + count]))
            at += count

    def take(self) -> list[Rows]:
        """What was kept since the last call."""
        taken, self._taken = self._taken, []
        return taken


@dataclass
class _Session:
    """Rows of one session, by position."""

    shares: bool
    """Its full blocks may be found by new sessions."""
    rows: Experts
    """[room, layers, k]"""
    known: int = 0
    """Positions that have a row."""
    keys: list[bytes] = field(default_factory=list)
    """Of its full blocks: each says what lies in it and in all before it."""
    hasher: Any = field(default_factory=xxhash.xxh3_128)


class ExpertBook:
    """In the engine. `block_tokens`: of a block of vLLM's prefix cache."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._sessions: dict[str, _Session] = {}
        self._blocks: dict[bytes, Experts] = {}

    def open(self, request_id: str) -> None:
        """A session has begun."""
        self._sessions[request_id] = _Session(shares=True, rows=np.zeros((0, 0, 0), np.uint8))

    def close(self, request_id: str) -> None:
        """It has ended; its blocks can still be found."""
        del self._sessions[request_id]

    def exchange(self) -> None:
        """Weights have changed: no new session is given what was computed before."""
        self._blocks.clear()
        for session in self._sessions.values():
            session.shares = False

    def take(self, step: Sequence[Rows], tokens: dict[str, Sequence[int]]) -> None:
        """Rows of one step; `tokens`: all that each session has behind it, the newest was not fed yet. Raises MilesError."""
        # Of one step, too, a prefix may be another's: whoever has it begins further in front.
        for request_id, start, rows in sorted(step, key=lambda row: row[1]):
            session = self._sessions.get(request_id)
            if session is None:  # released meanwhile
                continue
            if start > session.known:
                self._borrow(request_id, session, tokens[request_id], start)
            self._write(session, start, rows)
            session.known = min(session.known, len(tokens[request_id]) - 1)  # beyond lie guesses that were not kept
            self._share(session, tokens[request_id])

    def _borrow(self, request_id: str, session: _Session, tokens: Sequence[int], end: int) -> None:
        self._name_blocks(session, tokens, end)
        for number in range(session.known // self._block, -(-end // self._block)):
            block = self._blocks.get(session.keys[number]) if number < len(session.keys) else None
            if block is None:
                raise MilesError(
                    f"{request_id}: vLLM computed it from position {end} on, and nobody saw which experts it chose for those "
                    f"from {session.known} on; set learner.routing_replay: false, or engine: torch, and tell us"
                )
            self._write(session, number * self._block, block)

    def _write(self, session: _Session, start: int, rows: Experts) -> None:
        """What has a row keeps it: the cache may be too small, and vLLM computes a position anew."""
        end = start + len(rows)
        if end <= session.known:
            return
        if end > len(session.rows):
            grown = np.zeros((max(end, 2 * len(session.rows)), *rows.shape[1:]), rows.dtype)
            if session.known:
                grown[: session.known] = session.rows[: session.known]
            session.rows = grown
        session.rows[session.known : end] = rows[session.known - start :]
        session.known = end

    def _share(self, session: _Session, tokens: Sequence[int]) -> None:
        if not session.shares:
            return
        first = len(session.keys)
        self._name_blocks(session, tokens, session.known)
        for number in range(first, len(session.keys)):
            span = slice(number * self._block, (number + 1) * self._block)
            self._blocks.setdefault(session.keys[number], session.rows[span].copy())

    def _name_blocks(self, session: _Session, tokens: Sequence[int], end: int) -> None:
        for begin in range(len(session.keys) * self._block, end - self._block + 1, self._block):
            session.hasher.update(np.array(tokens[begin : begin + self._block], dtype=np.int64).tobytes())
            session.keys.append(session.hasher.digest())

    def of(self, request_id: str, first: int, end: int) -> Experts:
        """A copy of the rows of [first, end). Raises MilesError where one is missing."""
        session = self._sessions[request_id]
        if end > session.known:
            raise MilesError(f"{request_id}: experts are known up to position {session.known}, asked for [{first}, {end})")
        return session.rows[first:end].copy()
