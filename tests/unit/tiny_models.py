"""Builders of tiny models and of a tiny tokenizer, for tests. Everything is made on the spot from a seed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

torch.set_num_threads(1)  # on a busy machine a second thread makes matrices this small many times slower

Kind = Literal["qwen3", "qwen3_moe", "llama", "olmoe", "mixtral"]
MIXTURES: tuple[Kind, ...] = ("qwen3_moe", "olmoe", "mixtral")
_MAKERS: dict[Kind, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>")
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "State the final answer to the following arithmetic problem: 12 + 7 - 3 =",
    "error: not an expression",
    "error: expression too long",
    "question system You help.",
)


def _train(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@functools.lru_cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Digits isolated, ByteLevel BPE, `<|role|>content<|end|>`; the same shape as the tokenizer of a warm-up."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(SPECIAL),
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL[1:4] + SPECIAL[5:]),
        chat_template=PLAIN_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def special_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """One with these control tokens, the last of which ends a turn, and no chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(special),
        eos_token=special[-1],
        additional_special_tokens=list(special[:-1]),
        clean_up_tokenization_spaces=False,
    )


@functools.lru_cache
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML: a newline follows every end token, a default system message comes first, contents are trimmed."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_train(("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(kind: Kind, **changes: Any) -> Any:
    """A config of a few ten thousand parameters, with grouped query heads; a fresh object each time."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind != "llama",
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": tiny_tokenizer().eos_token_id,
    }
    if kind == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    elif kind == "olmoe":
        del sizes["head_dim"]
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2}
    elif kind == "mixtral":
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return _MAKERS[kind][0](**(sizes | changes))


def tiny_model(kind: Kind = "qwen3", seed: int = 0, **changes: Any) -> Any:
    """A randomly initialised causal language model in float32, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _MAKERS[kind][1](tiny_config(kind, **changes)).eval()


def save_tiny_model(folder: Path, kind: Kind = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A model folder in Hugging Face layout: config, weights, tokenizer with its template."""
    tiny_model(kind, seed, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
