"""Two small tokenizers with one plain chat template: byte-level BPE for numbers, a closed list of words for a closed language.

Both have tokens for any text. The list of words loses how words are separated, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from miles_core.environments.base import Message
from miles_core.environments.tool_call import CALL_CLOSE, CALL_OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, *(f"<|{role}|>" for role in ROLES), END, CALL_OPEN, CALL_CLOSE)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_VOCABULARY = 1024
"""Bound of the merges; the closed language of the demonstrations stops far below it."""
MAX_WORD_CHARACTERS = 1 << 20

Messages = tuple[Message, ...]


def learned_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from a corpus, with every digit and every special token alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        # All 256 bytes: any text has tokens, also text that no demonstration shows.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return _wrapped(backend)


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for every word of a list, whatever stands before it; other text in pieces, down to bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{word}" for word in words)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    # The longest piece first: a word of the list is found whole, and no text is unknown, for every byte is a piece.
    backend = Tokenizer(
        models.WordPiece(
            vocabulary, unk_token=PAD, max_input_chars_per_word=MAX_WORD_CHARACTERS, continuing_subword_prefix=""
        )
    )  # fmt: skip
    words_apart = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words_apart])
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend)


def _wrapped(backend: object) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation in the chat template, and which of them the assistant said (its end token too)."""
    text = tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in messages], tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    opens, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.convert_tokens_to_ids(END)
    own, speaking = [], False
    for token in ids:
        own.append(speaking)
        speaking = token == opens or (speaking and token != end)
    return ids, own
