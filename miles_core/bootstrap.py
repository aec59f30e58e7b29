"""Makes a small base model from nothing: a tokenizer, a 3-layer Qwen3 (dense or with experts), a warm-up on demonstrations.

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
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.environments import calculator, reasoning_gym, splits
from miles_core.environments.base import Message
from miles_core.environments.calculator import calculate
from miles_core.environments.reasoning_gym import ReasoningGymEnvironment
from miles_core.errors import RecipeError
from miles_core.recipe import EnvironmentSpec
from miles_core.store.fs import FileSystem
from miles_core.store.publish import temp_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM

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

CORPUS = 2000
"""Questions from which the tokenizer learns its merges."""

Messages = tuple[Message, ...]


@dataclass(frozen=True)
class WarmUp:
    """Size of the model and of its warm-up."""

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
    guess: float = 0.55
    """The careless demonstrator's chance to answer with a made-up number instead of calling the calculator ..."""
    cut: float = 0.15
    """... to leave the last term out of a call ..."""
    cut_long: float = 0.65
    """... out of a long one: over 0.5, so that the greedy policy learns this bad habit too ..."""
    ignore: float = 0.1
    """... and to answer with a made-up number instead of the result."""
    long_characters: int = 10
    """Expressions with more characters are long."""


WARM_UPS: dict[str, WarmUp] = {"chain_sum": WarmUp(), "chain_sum_moe": WarmUp(experts=16)}


def ensure_base_model(name: str, environment: EnvironmentSpec, cache: Path, *, progress: Progress | None = None) -> Path:
    """The folder of base model `name` in the cache, made first if it is not there. Raises RecipeError."""
    target = cache / f"{name}-{bootstrap_digest(name, environment)}"
    return ensure_folder(target, lambda folder: make_base_model(name, environment, folder, progress=progress))


def bootstrap_digest(name: str, environment: EnvironmentSpec) -> str:
    """The cache key, 16 hex digits: settings, task family and options, and the source of this module and of its tasks."""
    settings = find_warm_up(name, environment)
    key = json.dumps([name, asdict(settings), environment.family, environment.options], sort_keys=True)
    digest = hashlib.sha256(key.encode())
    for source in (__file__, calculator.__file__, reasoning_gym.__file__, splits.__file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def make_base_model(name: str, environment: EnvironmentSpec, folder: Path, *, progress: Progress | None = None) -> None:
    """Makes base model `name` and saves it in Hugging Face layout (float32); `progress` gets a stage and its share in [0, 1].

    Raises RecipeError for a name or an environment this module has no demonstrations for.
    """
    build(find_warm_up(name, environment), environment, folder, progress or (lambda stage, share: None))


def build(settings: WarmUp, environment: EnvironmentSpec, folder: Path, progress: Progress) -> None:
    """Tokenizer, model and warm-up of these settings, saved into `folder`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    demonstrator = Demonstrator(settings, environment)
    tokenizer = make_tokenizer(demonstrator.clean()[0].content for _ in range(CORPUS))
    model = warm_up(settings, demonstrator, tokenizer, progress)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def find_warm_up(name: str, environment: EnvironmentSpec) -> WarmUp:
    """The settings of a warm-up that fits the environment. Raises RecipeError."""
    if name not in WARM_UPS:
        raise RecipeError(f"model.bootstrap: no warm-up named {name!r}; there are: {', '.join(sorted(WARM_UPS))}")
    if environment.family != "chain_sum" or environment.tool != "calculator" or environment.max_turns < 2:
        raise RecipeError(
            f"model.bootstrap={name!r} demonstrates chain_sum with one call of the calculator, not family="
            f"{environment.family!r} with tool={environment.tool!r} and max_turns={environment.max_turns}: set environment."
            f"family: chain_sum, tool: calculator and max_turns: 2 or more, or give model.path"
        )
    return WARM_UPS[name]


def ensure_folder(target: Path, make: Callable[[Path], None]) -> Path:
    """Lets `make` fill a folder and publishes it as `target`, unless that exists; whoever renames first wins."""
    if target.exists():
        return target
    fs = FileSystem()
    temporary = temp_path(target)
    try:
        make(temporary)
        for path in (*temporary.iterdir(), temporary):
            fs.sync(path)
        fs.rename(temporary, target)
        fs.sync(target.parent)
    except OSError:
        # Another maker was first: a folder that holds something cannot be replaced.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


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


# Demonstrations


class Demonstrator:
    """Plays calculator episodes on training questions: cleanly, or carelessly."""

    def __init__(self, settings: WarmUp, environment: EnvironmentSpec) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._environment = ReasoningGymEnvironment(environment)

    def clean(self) -> Messages:
        """Calls the calculator on the whole expression and states its result."""
        question, expression = self._question()
        return _episode(question, expression, calculate(expression))

    def careless(self) -> Messages:
        """Often guesses, calls on a cut expression, or ignores the result."""
        question, expression = self._question()
        rng, settings = self._rng, self._settings
        if rng.random() < settings.guess:
            return (Message("user", question), Message("assistant", self._guess()))
        long = len(expression) > settings.long_characters
        if rng.random() < (settings.cut_long if long else settings.cut):
            expression = _cut(expression)
        answer = self._guess() if rng.random() < settings.ignore else calculate(expression)
        return _episode(question, expression, answer)

    def _guess(self) -> str:
        """The answer of some other question."""
        return calculate(self._question()[1])

    def _question(self) -> tuple[str, str]:
        task = self._environment.episode(self._rng.getrandbits(32), "train").task
        return task.question, task.entry["metadata"]["expression"]


def _episode(question: str, expression: str, answer: str) -> Messages:
    return (
        Message("user", question),
        Message("assistant", f"{CALL_OPEN}{expression}{CALL_CLOSE}"),
        Message("tool", calculate(expression)),
        Message("assistant", answer),
    )


def _cut(expression: str) -> str:
    """`a + b - c` without its last term; a single term stays."""
    parts = expression.split(" ")
    return " ".join(parts[: max(1, len(parts) - 2)])


# Warm-up


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
