"""Starts vLLM's engine core in this process, with the settings that the engine (vllm_engine.py) is made for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from miles_core.errors import RecipeError
from miles_core.recipe import VllmSpec
from miles_core.rollout.model_limits import check_kernels, head_size

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU, the smallest that its kernels like."""
CPU_STEP_TOKENS = 2048
"""Tokens that a step reads on a CPU, and more where a whole context is longer. A prompt is not read in parts there: vLLM 0.32
would take back the draw of each part but the last, which a generator of a CPU cannot do, and dies."""
PROBES = 16
"""Sequences of `logprobs` computed at once, beside all slots."""
_GIB = 1 << 30

log = logging.getLogger("miles")


@contextmanager
def only_these(gpus: tuple[str, ...]) -> Iterator[None]:
    """Inside, workers that vLLM starts see these GPUs alone."""
    if not gpus:
        yield
        return
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def start_core(
    folder: Path, config: Any, dtype: str, slots: int, max_tokens: int, spec: VllmSpec, *, has_workers: bool, has_record: bool
) -> Any:
    """vLLM's engine core in this process. Raises RecipeError with its words where it refuses model or settings."""
    _set_environment()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor.abstract import Executor

    is_cpu = current_platform.is_cpu()
    kv_bytes = None if spec.kv_cache_gib is None else int(spec.kv_cache_gib * _GIB)
    if is_cpu:
        check_kernels(config, spec)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiler takes longer than a short run
        kv_bytes = kv_bytes or _bytes_of_all_slots(config, dtype, slots, max_tokens)
    elif has_record:
        log.warning(
            "learner.routing_replay: vLLM runs without CUDA graphs, which would not see who records its experts; sampling is "
            "slower for it"
        )
    longest = min(max_tokens + 1, config.max_position_embeddings)
    try:
        settings = EngineArgs(
            model=str(folder), dtype=dtype, skip_tokenizer_init=True, seed=0, generation_config="vllm",
            max_model_len=longest, max_num_seqs=slots + PROBES,
            enable_chunked_prefill=False if is_cpu else None,
            max_num_batched_tokens=max(CPU_STEP_TOKENS, longest) + slots + PROBES if is_cpu else None,
            block_size=CPU_BLOCK_TOKENS if is_cpu else None, enable_prefix_caching=True,
            enforce_eager=is_cpu or has_record,  # a recorded graph would not see who watches its routers
            gpu_memory_utilization=spec.memory_fraction, kv_cache_memory_bytes=kv_bytes,
            tensor_parallel_size=spec.tensor_parallel, distributed_executor_backend="mp" if has_workers else None,
            async_scheduling=False, logprobs_mode="processed_logprobs",
            worker_extension_cls="miles_core.rollout.vllm_worker.MilesWorker",
            speculative_config=_speculation(spec),
        ).create_engine_config(UsageContext.ENGINE_CONTEXT)  # fmt: skip
        return EngineCoreClient.make_client(
            multiprocess_mode=False, asyncio_mode=False, vllm_config=settings, executor_class=Executor.get_class(settings),
            log_stats=True,  # what was guessed and kept is told there alone
        )  # fmt: skip
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise RecipeError(f"engine vllm does not start with {folder}, {slots} slots and {spec}: {error}") from error


def _speculation(spec: VllmSpec) -> dict[str, Any] | None:
    if spec.draft is not None:
        return {"method": "draft_model", "model": spec.draft.model, "num_speculative_tokens": spec.draft.tokens}
    if spec.ngram is not None:
        return {
            "method": "ngram", "num_speculative_tokens": spec.ngram.tokens,
            "prompt_lookup_min": spec.ngram.match_min, "prompt_lookup_max": spec.ngram.match_max,
        }  # fmt: skip
    return None


def _set_environment() -> None:
    """Before the first import of vLLM, which reads it. No report to anybody; the scheduler runs in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )  # fmt: skip
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would overrule kv_cache_gib


def _bytes_of_all_slots(config: Any, dtype: str, slots: int, max_tokens: int) -> int:
    """KV cache in which no session ever has to wait, with room for probes."""
    width = getattr(torch, dtype).itemsize
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * width
    blocks = (slots + PROBES) * (-(-(max_tokens + 1) // CPU_BLOCK_TOKENS) + 1) + 1
    return int(blocks * CPU_BLOCK_TOKENS * token)
