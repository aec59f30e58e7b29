"""What vLLM loads into each of its workers (EngineArgs.worker_extension_cls): the exchange of a model's weights in place, and
the record of its experts. And how weights come to workers that are other processes of this node: in files of memory, which
end with who made them.

The exchange is vLLM's own reload, which undoes and redoes what its kernels did to the weights. On a CPU it forgets two of its
packings, silently and several nats wrong: that of a tied output head, which keeps the old embedding, and that of experts,
whose packed place gets them unpacked. Both are done here again; the probe of each version would see it if they were not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file, save

from miles_core.rollout.vllm_experts import ExpertCapture, Rows

SHARD_BYTES = 1 << 30
"""Of weights in one file; a larger tensor has one of its own. In memory are the weights, the files, and twice one of them."""


class MilesWorker:
    """Methods that vLLM adds to its worker."""

    model_config: Any
    model_runner: Any
    reload_weights: Any
    vllm_config: Any
    _miles_capture: ExpertCapture

    def exchange_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes all weights, under the names of a checkpoint."""
        from vllm.platforms import current_platform

        self.reload_weights(weights_iterator=iter(tensors))
        if current_platform.is_cpu():
            _pack_again(self.model_runner.get_model(), is_tied=self.model_config.hf_config.tie_word_embeddings)

    def exchange_weights_from(self, paths: list[str]) -> None:
        """The same from `files_of_memory`: tensors sent to another process would be pickled."""
        self.exchange_weights(pair for path in paths for pair in load_file(path).items())

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zeroes KV blocks of a CPU: its attention reads a block whole, and what is masked weighs 0, but 0 times NaN is NaN."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            self.model_runner._zero_block_ids(block_ids)

    def seed_session(self, request_id: str, seed: int, temperature: float) -> None:
        """Before a later turn: vLLM would draw on with the generator of the first one, or with none if that was greedy."""
        generator = torch.Generator(self.model_runner.device).manual_seed(seed) if temperature > 0 else None
        self.model_runner.requests[request_id].generator = generator

    def begin_capture(self, prefix: str) -> None:
        """Keeps from now on which experts are chosen for requests with ids that begin so. Raises ValueError."""
        self._miles_capture = ExpertCapture(self.model_runner, self.vllm_config, prefix)

    def take_experts(self) -> list[Rows]:
        """What was kept since the last call; only the first rank has it."""
        return self._miles_capture.take()


@contextmanager
def files_of_memory(tensors: dict[str, torch.Tensor], shard_bytes: int = SHARD_BYTES) -> Iterator[list[str]]:
    """Paths of safetensors files that processes of this user on this node can read, inside. On no file system: a process that
    is killed here leaves nothing."""
    with ExitStack() as stack:
        paths = []
        for shard in _shards(tensors, shard_bytes):
            file = stack.enter_context(os.fdopen(os.memfd_create("miles-weights"), "wb"))
            file.write(save(shard))
            file.flush()
            paths.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield paths


def _shards(tensors: dict[str, torch.Tensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _pack_again(model: Any, *, is_tied: bool) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if is_tied and hasattr(model, "lm_head"):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
