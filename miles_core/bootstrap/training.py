"""The model and its supervised warm-up: AdamW on what the assistant says, one thread, one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from miles_core.bootstrap.tokenizer import Messages, encode
from miles_core.recipe import EnvironmentSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM

Progress = Callable[[str, float], None]


class Demonstrator(Protocol):
    """Shows how a task is done."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer for the language of the task."""
        ...

    def clean(self) -> Messages:
        """A whole conversation in which everything is done right."""
        ...

    def careless(self) -> Messages:
        """One with faults."""
        ...


class Habits(Protocol):
    """Names a task, and how carelessly it is demonstrated."""

    tasks: ClassVar[tuple[str, ...]]
    """Modules of miles_core/environments that decide what is demonstrated."""

    def needs(self, environment: EnvironmentSpec) -> str:
        """What an environment must be; empty if it is."""
        ...

    def demonstrator(self, seed: int, environment: EnvironmentSpec) -> Demonstrator:
        """Who demonstrates."""
        ...


@dataclass(frozen=True)
class WarmUp:
    """Size of the model and of its warm-up."""

    habits: Habits
    """What is demonstrated, and how carelessly."""
    hidden: int = 96
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 24
    mlp: int = 192
    """Width of the dense MLP of every layer ..."""
    experts: int = 0
    """... or so many experts in its place; 0 = dense."""
    experts_per_token: int = 4
    """Experts that the router chooses for a token."""
    expert_mlp: int = 64
    """Width of one expert."""
    init_range: float = 0.1
    """About 1/sqrt(hidden). At Hugging Face's default 0.02 a model this narrow learns to copy 2-3 times later."""
    clean_steps: int = 400
    careless_steps: int = 100
    batch: int = 16
    lr: float = 3e-3
    ramp_steps: int = 30
    seed: int = 0


def warm_up(settings: WarmUp, demonstrator: Demonstrator, tokenizer: PreTrainedTokenizerFast, progress: Progress) -> Model:
    """A fresh model trained on clean, then on careless demonstrations: AdamW, linear ramp, cosine to 10 %."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = _fresh_model(settings, tokenizer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
            steps = settings.clean_steps + settings.careless_steps
            for step in range(steps):
                clean = step < settings.clean_steps
                play = demonstrator.clean if clean else demonstrator.careless
                rows = [encode(tokenizer, play()) for _ in range(settings.batch)]
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * _schedule(step, steps, settings.ramp_steps)
                _update(model, optimizer, rows, tokenizer.pad_token_id)
                progress("clean demonstrations" if clean else "careless demonstrations", (step + 1) / steps)
    finally:
        torch.set_num_threads(threads)
    return model


def _fresh_model(settings: WarmUp, tokenizer: PreTrainedTokenizerFast) -> Model:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "intermediate_size": settings.mlp,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_value_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": settings.init_range,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if not settings.experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    # Experts run as grouped_mm, the library's default; batched_mm copies their weights for every token: 25 times slower here.
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **shape,
            num_experts=settings.experts,
            num_experts_per_tok=settings.experts_per_token,
            moe_intermediate_size=settings.expert_mlp,
            norm_topk_prob=True,
        )
    )


def _schedule(step: int, steps: int, ramp_steps: int) -> float:
    ramp = min(1.0, (step + 1) / ramp_steps)
    return ramp * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def _update(model: Model, optimizer: torch.optim.Optimizer, rows: Sequence[tuple[list[int], list[bool]]], pad: int) -> None:
    """One step of next-token loss on the assistant's tokens. Right padding needs no attention mask: nothing sees it."""
    import torch

    length = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    mask = torch.tensor([own + [False] * (length - len(own)) for _, own in rows])[:, 1:]
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[mask]
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), tokens[:, 1:][mask])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
