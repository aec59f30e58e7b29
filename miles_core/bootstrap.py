"""Makes a small base model from nothing: a tokenizer, a 3-layer Qwen3, and a warm-up on demonstrations.

The warm-up has two phases of supervised training. Clean demonstrations teach the syntax and the copying of operands and
results; a careless demonstrator then blurs the policy, so that reinforcement learning has something to gain: the skill is
there, the habit is not. Questions of the eval split never enter.

The same name, environment and source give the same bytes on one kind of machine: one thread, one seed. A cached model is
named by a digest of all three and appears whole or not at all; of two makers at once, one wins and both get its folder.

    folder = ensure_base_model("chain_sum", recipe.environment, cache)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Progress = Callable[[str, float], None]

PAD, END = "<|pad|>", "<|end|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
ROLES = ("user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, *(f"<|{role}|>" for role in ROLES), END, CALL_OPEN, CALL_CLOSE)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_VOCABULARY = 1024
"""Bound of the merges; the closed language of the demonstrations stops far below it."""

Messages = list[tuple[str, str]]
"""(role, content) of one conversation."""


@dataclass(frozen=True)
class WarmUp:
    """Size of the model and of its warm-up."""

    hidden: int = 96
    layers: int = 3
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 24
    mlp: int = 192
    init_range: float = 0.1
    """About 1/sqrt(hidden). At Hugging Face's default 0.02 a model this narrow learns to copy 2-3 times later."""
    clean_steps: int = 300
    noisy_steps: int = 100
    batch: int = 16
    lr: float = 2e-3
    ramp_steps: int = 30
    seed: int = 0
    guess: float = 0.3
    """The careless demonstrator's chance to answer with a made-up number instead of calling the calculator ..."""
    cut: float = 0.15
    """... to leave the last term out of a call ..."""
    cut_long: float = 0.6
    """... out of a long one: over 0.5, so that the greedy policy learns this bad habit too ..."""
    ignore: float = 0.35
    """... and to answer with a made-up number instead of the result."""
    long_characters: int = 10
    """Expressions with more characters are long."""


WARM_UPS: dict[str, WarmUp] = {"chain_sum": WarmUp()}


def ensure_base_model(name: str, environment: EnvironmentSpec, cache: Path, *, progress: Progress | None = None) -> Path:
    """The folder of base model `name` in the cache, made first if it is not there. Raises RecipeError."""
    target = cache / f"{name}-{bootstrap_digest(name, environment)}"
    if target.exists():
        return target
    temporary = cache / f".{target.name}.{uuid.uuid4().hex}"
    try:
        make_base_model(name, environment, temporary, progress=progress)
        _publish_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def bootstrap_digest(name: str, environment: EnvironmentSpec) -> str:
    """The cache key, 16 hex digits: settings, task family and options, and this module's own source."""
    settings = _settings(name, environment)
    key = json.dumps([name, asdict(settings), environment.family, environment.options], sort_keys=True)
    return hashlib.sha256(key.encode() + Path(__file__).read_bytes()).hexdigest()[:16]


def make_base_model(name: str, environment: EnvironmentSpec, folder: Path, *, progress: Progress | None = None) -> None:
    """Makes base model `name` and saves it in Hugging Face layout (float32); `progress` gets a stage and its share in [0, 1].

    Raises RecipeError for a name or an environment this module has no demonstrations for.
    """
    settings = _settings(name, environment)
    demonstrator = Demonstrator(settings, environment)
    tokenizer = make_tokenizer(text for messages in demonstrator.corpus(2000) for text in _texts(messages))
    model = warm_up(settings, demonstrator, tokenizer, progress or (lambda stage, share: None))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _settings(name: str, environment: EnvironmentSpec) -> WarmUp:
    if name not in WARM_UPS:
        raise RecipeError(f"model.bootstrap: no warm-up named {name!r}; there are: {', '.join(sorted(WARM_UPS))}")
    if environment.family != "chain_sum" or environment.tool != "calculator":
        raise RecipeError(
            f"model.bootstrap={name!r} demonstrates chain_sum with the calculator, not family={environment.family!r} with "
            f"tool={environment.tool!r}: set environment.family: chain_sum and tool: calculator, or give model.path"
        )
    return WARM_UPS[name]


def _publish_folder(temporary: Path, target: Path) -> None:
    """Syncs every file, then renames; a folder that another maker put there first stays."""
    for path in (*temporary.iterdir(), temporary):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    try:
        temporary.rename(target)
    except OSError:
        if not target.exists():
            raise


# Tokenizer


def make_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with every digit and every special token alone, and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _texts(messages: Messages) -> Iterator[str]:
    for _, content in messages:
        yield content.replace(CALL_OPEN, "").replace(CALL_CLOSE, "")


# Demonstrations


class Demonstrator:
    """Plays calculator episodes on training questions: cleanly, or carelessly."""

    def __init__(self, settings: WarmUp, environment: EnvironmentSpec) -> None:
        import reasoning_gym

        self._settings = settings
        self._rng = random.Random(f"demonstrator {settings.seed}")
        self._dataset = reasoning_gym.create_dataset(
            environment.family, seed=DEMONSTRATION_SEED, size=DEMONSTRATION_SIZE, **environment.options
        )

    def corpus(self, count: int) -> list[Messages]:
        """Clean episodes for the tokenizer's merges."""
        return [self.clean() for _ in range(count)]

    def clean(self) -> Messages:
        """Calls the calculator on the whole expression and states its result."""
        question, expression = self._question()
        return _episode(question, expression, _value(expression))

    def careless(self) -> Messages:
        """Often guesses, calls on a cut expression, or ignores the result."""
        question, expression = self._question()
        rng, settings = self._rng, self._settings
        if rng.random() < settings.guess:
            return [("user", question), ("assistant", self._guess())]
        long = len(expression) > settings.long_characters
        if rng.random() < (settings.cut_long if long else settings.cut):
            expression = _cut(expression)
        answer = self._guess() if rng.random() < settings.ignore else _value(expression)
        return _episode(question, expression, answer)

    def _guess(self) -> str:
        return str(self._rng.randint(0, 99))

    def _question(self) -> tuple[str, str]:
        while True:
            entry = self._dataset[self._rng.randrange(DEMONSTRATION_SIZE)]
            if not _is_eval(entry["question"]):
                return entry["question"], entry["metadata"]["expression"]


DEMONSTRATION_SEED = 1_000_000_007
DEMONSTRATION_SIZE = 1_000_000


def _episode(question: str, expression: str, answer: str) -> Messages:
    return [
        ("user", question),
        ("assistant", f"{CALL_OPEN}{expression}{CALL_CLOSE}"),
        ("tool", _value(expression)),
        ("assistant", answer),
    ]


def _cut(expression: str) -> str:
    """The expression without its last term."""
    return " ".join(expression.split(" ")[:-2])


def _value(expression: str) -> str:
    """The value of `a + b - c ...`."""
    parts = expression.split(" ")
    signs = {"+": 1, "-": -1}
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return str(int(parts[0]) + sum(signs[sign] * int(term) for sign, term in pairs))


def _is_eval(question: str) -> bool:
    return int(hashlib.md5(question.encode()).hexdigest(), 16) % 4 == 0


# Warm-up


def warm_up(
    settings: WarmUp, demonstrator: Demonstrator, tokenizer: PreTrainedTokenizerFast, progress: Progress
) -> Qwen3ForCausalLM:
    """A fresh model trained on clean, then on careless demonstrations: AdamW, linear ramp, cosine to 10 %."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = _fresh_model(settings, tokenizer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
            steps = settings.clean_steps + settings.noisy_steps
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


def _fresh_model(settings: WarmUp, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden,
            intermediate_size=settings.mlp,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.key_value_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=settings.init_range,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )


def _schedule(step: int, steps: int, ramp_steps: int) -> float:
    ramp = min(1.0, (step + 1) / ramp_steps)
    return ramp * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def _update(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rows: Sequence[tuple[list[int], list[bool]]], pad: int
) -> None:
    """One step of next-token loss on the demonstrator's own tokens. Right padding needs no attention mask: nothing looks back at it."""
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


def encode(tokenizer: PreTrainedTokenizerFast, messages: Messages) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation in the chat template's form, and which of them the assistant said (its end token too)."""
    ids: list[int] = []
    own: list[bool] = []
    end = tokenizer.convert_tokens_to_ids(END)
    for role, content in messages:
        said = [*tokenizer.encode(content, add_special_tokens=False), end]
        ids += [tokenizer.convert_tokens_to_ids(f"<|{role}|>"), *said]
        own += [False, *([role == "assistant"] * len(said))]
    return ids, own
