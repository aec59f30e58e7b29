"""The engines that hold the contract (test_engine_contract.py), over one tiny model of each kind.

vLLM is not in the project's own environment: there the contract runs on the torch engine and on two of them behind the
router, and tests/e2e/test_vllm.py runs it again with the interpreter that has it. A vLLM engine takes seconds to start, so
one of each kind is made and used again: nothing runs in it and it has its first weights again when a test gets it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from miles_core.records import Version
from miles_core.rollout.engine import Engine
from miles_core.rollout.router import RoutedEngine
from miles_core.rollout.torch_engine import TorchEngine
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model, tiny_tokenizer

ENGINES = ("torch", "vllm") if importlib.util.find_spec("vllm") else ("torch", "routed")
SLOTS, MAX_TOKENS = 4, 96
END = tiny_tokenizer().eos_token_id
V0, V1, V2 = Version(0, 0), Version(1, 1), Version(2, 1)


def contract_model(kind: Kind, seed: int = 0) -> Any:
    """A tiny model of a shape that vLLM's kernels take."""
    return tiny_model(kind, seed, **_shape(kind))


def _shape(kind: Kind) -> dict[str, Any]:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
    if kind == "olmoe":  # its head size is what its heads share; vLLM's has no tied output head
        return shape | {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return shape | {"head_dim": 32} | ({"moe_intermediate_size": 32} if kind == "qwen3_moe" else {})


def make_engine(name: str, folder: Path, kind: Kind = "qwen3", *, end_id: int = END, dtype: str = "float32") -> Engine:
    """An engine with SLOTS slots and MAX_TOKENS positions, on the weights of seed 0 as version V0; weights come as float32. It
    records the experts of a mixture.

    `folder`: where a model may be saved.
    """
    if name == "vllm":
        return _vllm_engine(folder, kind, end_id, dtype)
    if name == "routed":
        return RoutedEngine(lambda index: _torch_engine(kind, end_id, dtype, SLOTS // 2), 2, is_parallel=True)
    return _torch_engine(kind, end_id, dtype, SLOTS)


def _torch_engine(kind: Kind, end_id: int, dtype: str, slots: int) -> TorchEngine:
    return TorchEngine(
        contract_model(kind).to(getattr(torch, dtype)), end_id=end_id, slots=slots, max_tokens=MAX_TOKENS, version=V0,
        weights_dtype="float32", record_experts=True,
    )  # fmt: skip


_made: dict[tuple[Kind, str], Any] = {}


def _vllm_engine(folder: Path, kind: Kind, end_id: int, dtype: str) -> Engine:
    from miles_core.rollout import vllm_start
    from miles_core.rollout.vllm_engine import VllmEngine

    vllm_start.CPU_STEP_TOKENS = 0  # so that few prompts fit into a step
    if (kind, dtype) not in _made:
        _made[kind, dtype] = VllmEngine(
            save_tiny_model(folder / f"{kind}-{dtype}", kind, **_shape(kind)), dtype=dtype, weights_dtype="float32",
            end_id=end_id, slots=SLOTS, max_tokens=MAX_TOKENS, version=V0, record_experts=True,
        )  # fmt: skip
    engine = _made[kind, dtype]
    for session_key in list(engine._sessions):
        engine.release(session_key)
    engine._end_id = end_id
    engine.load_weights(contract_model(kind).state_dict(), V0)
    return engine
