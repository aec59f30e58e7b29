"""What vLLM loads into each of its workers: the exchange of a model's weights in place (EngineArgs.worker_extension_cls).

The exchange is vLLM's own reload, which undoes and redoes what its kernels did to the weights. On a CPU it forgets two of its
packings, silently and several nats wrong: that of a tied output head, which keeps the old embedding, and that of experts,
whose packed place gets them unpacked. Both are done here again; the probe of each version would see it if they were not.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file


class WeightExchange:
    """Methods that vLLM adds to its worker."""

    model_config: Any
    model_runner: Any
    reload_weights: Any

    def exchange_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes all weights, under the names of a checkpoint."""
        from vllm.platforms import current_platform

        self.reload_weights(weights_iterator=iter(tensors.items()))
        if current_platform.is_cpu():
            _pack_again(self.model_runner.get_model(), is_tied=self.model_config.hf_config.tie_word_embeddings)

    def exchange_weights_from(self, path: str) -> None:
        """The same from a file that all workers of this node see: tensors sent to another process would be pickled."""
        self.exchange_weights(load_file(path))

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zeroes KV blocks of a CPU: its attention reads a block whole, and what is masked weighs 0, but 0 times NaN is NaN."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            self.model_runner._zero_block_ids(block_ids)

    def seed_session(self, request_id: str, seed: int, temperature: float) -> None:
        """Before a later turn: vLLM would draw on with the generator of the first one, or with none if that was greedy."""
        generator = torch.Generator(self.model_runner.device).manual_seed(seed) if temperature > 0 else None
        self.model_runner.requests[request_id].generator = generator


def _pack_again(model: Any, *, is_tied: bool) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    if is_tied and hasattr(model, "lm_head"):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
