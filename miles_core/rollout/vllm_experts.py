"""Which experts vLLM chose for each position of each session, for routing replay (sources R6).

In a worker (`ExpertCapture`): vLLM's capturer stands at every router; behind each step its rows are cut by request and
position. In the engine (`ExpertBook`): the rows of a session, each of the pass that computed the position first. A row lies,
too, where the keys and values of its position lie, so a session that takes a prefix from vLLM's cache takes the rows of what
it reads there.

Failure: routers that vLLM cannot watch are a ValueError at the start; a cached position without a row is a MilesError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_core.errors import MilesError
from miles_core.routers import Experts

Rows = tuple[str, int, Experts]
"""Request id, position of the first row, [n, layers, k] expert ids."""
BlocksOf = Callable[[str, int, int], Sequence[int]]


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

    rows: Experts
    """[room, layers, k]"""
    known: int = 0
    """Positions that have a row."""

    def write(self, start: int, rows: Experts) -> None:
        """What has a row keeps it: the cache may be too small, and vLLM computes a position anew."""
        end = start + len(rows)
        if end <= self.known:
            return
        if end > len(self.rows):
            grown = np.zeros((max(end, 2 * len(self.rows)), *rows.shape[1:]), rows.dtype)
            if self.known:
                grown[: self.known] = self.rows[: self.known]
            self.rows = grown
        self.rows[self.known : end] = rows[self.known - start :]
        self.known = end


class ExpertBook:
    """In the engine. `blocks` of `block_tokens` positions: of vLLM's KV cache; every place in it has a row, too."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._places, self._block = blocks * block_tokens, block_tokens
        self._cached: Experts | None = None
        """[places, layers, k]; pages that nobody wrote cost nothing."""
        self._is_written = np.zeros(self._places, np.bool_)
        self._sessions: dict[str, _Session] = {}

    def open(self, request_id: str) -> None:
        """A session has begun."""
        self._sessions[request_id] = _Session(np.zeros((0, 0, 0), np.uint8))

    def move(self, before: str, after: str) -> None:
        """Its request has another id."""
        self._sessions[after] = self._sessions.pop(before)

    def close(self, request_id: str) -> None:
        """It has ended."""
        del self._sessions[request_id]

    def take(self, step: Sequence[Rows], tokens: Callable[[str], int], blocks: BlocksOf) -> None:
        """Rows of the step that just ended. `tokens`: how many a session has behind it, the newest was not fed yet; `blocks`:
        the numbers of some of a session's KV blocks, [first, last). Raises MilesError."""
        mine = [(request_id, start, rows) for request_id, start, rows in step if request_id in self._sessions]
        if not mine:
            return
        given = np.concatenate([rows for _, _, rows in mine])
        if self._cached is None:
            self._cached = np.zeros((self._places, *given.shape[1:]), given.dtype)
        # First all of them: of one step, too, a prefix may be what another session computes in it.
        places = [self._places_of(blocks, request_id, start, start + len(rows)) for request_id, start, rows in mine]
        self._cached[np.concatenate(places)] = given
        self._is_written[np.concatenate(places)] = True
        for request_id, start, rows in mine:
            session = self._sessions[request_id]
            if start > session.known:
                session.write(session.known, self._read(self._places_of(blocks, request_id, session.known, start), request_id))
            session.write(start, rows)
            session.known = min(session.known, tokens(request_id) - 1)  # beyond lie guesses that were not kept

    def _read(self, places: npt.NDArray[np.int64], request_id: str) -> Experts:
        assert self._cached is not None
        if not self._is_written[places].all():
            raise MilesError(
                f"{request_id}: vLLM took tokens from its cache of which nobody saw the experts; set learner.routing_replay: "
                f"false, or engine: torch, and tell us"
            )
        return self._cached[places]

    def _places_of(self, blocks: BlocksOf, request_id: str, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Of the positions [begin, end)."""
        first = begin // self._block
        held = np.array(blocks(request_id, first, (end - 1) // self._block + 1))
        positions = np.arange(begin, end)
        places: npt.NDArray[np.int64] = held[positions // self._block - first] * self._block + positions % self._block
        return places

    def of(self, request_id: str, first: int, end: int) -> Experts:
        """A copy of the rows of [first, end). Raises MilesError where one is missing."""
        session = self._sessions[request_id]
        if end > session.known:
            raise MilesError(f"{request_id}: experts are known up to position {session.known}, asked for [{first}, {end})")
        return session.rows[first:end].copy()
