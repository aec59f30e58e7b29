"""The ends of a forward pass: a microbatch into the model, and its hidden states to logprobs of the tokens that count.

The logits of all positions at once would be the largest tensor of a step: vocabulary x tokens. They are made for some
positions at a time, and made again in the backward pass; what is kept is a number a token. One piece is enough for a small
batch, and then nothing is made twice. All ranks make equally many pieces: where ZeRO parts the head's weight, each piece
gathers it anew, on all ranks together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from miles_core.errors import MilesError
from miles_core.learner.batching import Microbatch

Head = Callable[[torch.Tensor], torch.Tensor]


def hidden_states(model: Any, batch: Microbatch) -> torch.Tensor:
    """[M, H] of the positions in `batch.where`; `model` is the part under the head."""
    output = model(input_ids=batch.tokens, attention_mask=batch.attention_mask, position_ids=batch.depths, use_cache=False)
    chosen: torch.Tensor = output.last_hidden_state.flatten(0, 1).index_select(0, batch.where)
    return chosen


def checkpoint_layers(model: Any) -> None:
    """The layers that the library marks for it compute their activations again in the backward pass. MilesError: it marks none.

    Not by the library's own switch, which works in training mode alone, that is, with dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise MilesError(
            f"learner.gradient_checkpointing: the model's family {model.config.model_type} has no layers that can be computed "
            f"again; set it to false"
        )
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def score(head: Head, hidden: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [M, H] of the positions in `batch.where` to [N] float32 log softmax(logits / temperature) of the targets,
    and [N] the entropy of that softmax (no gradient)."""
    if batch.pieces == 1:
        return _score(head, hidden, batch.temperatures, batch.slots, batch.targets)
    bounds = torch.tensor([len(hidden) * number // batch.pieces for number in range(batch.pieces + 1)])
    first_tokens = torch.searchsorted(batch.slots, bounds.to(batch.slots.device)).tolist()
    pieces = []
    for (begin, end), (low, high) in zip(itertools.pairwise(bounds.tolist()), itertools.pairwise(first_tokens), strict=True):
        arguments = (hidden[begin:end], batch.temperatures[begin:end], batch.slots[low:high] - begin, batch.targets[low:high])
        pieces.append(checkpoint(_score, head, *arguments, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    head: Head, hidden: torch.Tensor, temperatures: torch.Tensor, slots: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(head(hidden).float() / temperatures[:, None], dim=-1)
    detached = logprobs.detach()
    entropy = -(detached.exp() * detached).sum(dim=-1)
    return logprobs[slots, targets], entropy[slots]
