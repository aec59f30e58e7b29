"""Token-in token-out: a Session owns the tokens of one episode and only ever appends to them (sources R4).

Invariant: the tokens after turn n are a bit-exact prefix of the tokens after turn n+1; nothing sampled is rendered or
tokenised again. The opening is rendered once; a later message is tokenised alone, as the template writes it behind an
assistant message that ends. Failure: a template this cannot hold for is a RecipeError; a history that does not fit into
max_tokens raises ContextOverflow and is left as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jinja2
import numpy as np
import numpy.typing as npt

from miles_core.environments.base import Message
from miles_core.errors import RecipeError
from miles_core.records import Version
from miles_core.rollout.chat import Said, Tools, clean_text, encode_pieces, special_tokens, split_control, turn_text
from miles_core.trajectories.schema import Turn, VersionRun

if TYPE_CHECKING:
    from miles_core.routers import Experts

CHARACTERS_PER_TOKEN = 512
"""More than a token of any known vocabulary stands for."""
_SENTINEL = "SPLICE"
_PRIVATE = 0xF0000
"""First of the characters that Unicode leaves to private use."""


class ContextOverflow(Exception):
    """The messages leave no room for one sampled token within max_tokens."""


def refuse_endless(messages: Sequence[Message], room: int) -> None:
    """Raises ContextOverflow for text that fits into no `room` tokens, before it is tokenised: megabytes take seconds."""
    size = sum(len(message.content) for message in messages)
    if size > CHARACTERS_PER_TOKEN * max(room, 0):
        raise ContextOverflow(
            f"{size} characters of {[message.role for message in messages]} leave no room to answer: {room} tokens are free"
        )


class Renderer(Protocol):
    """Turns messages into token ids for one model."""

    end_id: int
    """The token by which the model ends its turn."""
    special_ids: frozenset[int]
    """All control tokens."""

    def opening(self, messages: tuple[Message, ...], tools: Tools = ()) -> tuple[int, ...]:
        """The first messages, up to the point where the model writes. Raises RecipeError for roles or tools without a form."""
        ...

    def continuation(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """What follows the model's own end token, up to the point where it writes again."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a model turn, without its end token."""
        ...

    def said(self, token_ids: Sequence[int], tools: Tools) -> Said:
        """What a model turn says, with its calls if tools were offered."""
        ...


class ChatRenderer:
    """A Renderer over a Hugging Face tokenizer and its own chat template. Raises RecipeError.

    A control token that a user or a tool spells out in its text is text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self.special_ids = frozenset(self._special.values())
        self.end_id = self._behind_reply(())[0]
        if self.end_id not in tokenizer.all_special_ids and self.end_id not in tokenizer.added_tokens_decoder:
            raise RecipeError(
                f"model: the chat template of {self._name} ends an assistant message with the ordinary token {self.end_id} "
                f"({tokenizer.decode([self.end_id])!r}); a model's turn must end in a special token"
            )
        self.opening = functools.lru_cache(maxsize=4096)(self._opening)
        self.continuation = functools.lru_cache(maxsize=4096)(self._continuation)

    @property
    def _name(self) -> str:
        return str(self._tokenizer.name_or_path or type(self._tokenizer).__name__)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a model turn, special tokens included, its end token left out."""
        return turn_text(self._tokenizer, token_ids, self.end_id)

    def said(self, token_ids: Sequence[int], tools: Tools) -> Said:
        """What a model turn says; a template does not say how calls are written, so there are none."""
        return Said(self.text(token_ids))

    def _opening(self, messages: tuple[Message, ...], tools: Tools = ()) -> tuple[int, ...]:
        if tools:
            raise RecipeError(
                f"model.chat is not set, and the chat template of {self._name} does not say how its model calls tools; set "
                f"model.chat to its family"
            )
        return self._encode(*self._render(messages, generate=True))

    def _continuation(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._behind_reply(messages)[1:]

    def _behind_reply(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Ids that follow the text of a reply: its end token, what the template writes behind that, then `messages`.

        The end token is special, so the tokenizer cuts there and the ids behind it do not depend on what came before.
        """
        exchange = (Message("user", "question"), Message("assistant", _SENTINEL))
        rendered, spelled = self._render(exchange + messages, generate=bool(messages))
        _, found, behind = rendered.partition(_SENTINEL)
        ids = self._encode(behind, spelled)
        if not found or not ids:
            raise RecipeError(
                f"model: the chat template of {self._name} does not write an assistant message followed by an end token "
                f"(it wrote {rendered!r}); give a tokenizer whose template closes every message"
            )
        return ids

    def _render(self, messages: tuple[Message, ...], *, generate: bool) -> tuple[str, dict[str, str]]:
        """The template's text, and what stands in it for control tokens that were spelled out."""
        spelled = self._spelled(messages)
        conversation = [{"role": message.role, "content": self._covered(message, spelled)} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate)
        except (jinja2.TemplateError, ValueError) as error:
            roles = [message.role for message in messages]
            raise RecipeError(f"model: the chat template of {self._name} refuses the roles {roles}: {error}") from error
        return str(text), spelled

    def _spelled(self, messages: tuple[Message, ...]) -> dict[str, str]:
        """For each control token in the text of others than the model: a private character that no text has."""
        text = "".join(message.content for message in messages)
        found = [name for name in self._special if name in text]
        free = (char for char in map(chr, range(_PRIVATE, _PRIVATE + 0xFFFE)) if char not in text)
        return dict(zip(found, free, strict=False))

    @staticmethod
    def _covered(message: Message, spelled: dict[str, str]) -> str:
        content = clean_text(message.content)
        if message.role != "assistant":
            for name in sorted(spelled, key=len, reverse=True):
                content = content.replace(name, spelled[name])
        return content

    def _encode(self, text: str, spelled: dict[str, str]) -> tuple[int, ...]:
        if not spelled:
            return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
        pieces = split_control(text, self._special)
        for name, char in spelled.items():
            pieces = [piece.replace(char, name) if isinstance(piece, str) else piece for piece in pieces]
        return encode_pieces(self._tokenizer, pieces, self._special.__getitem__)


class Session:
    """The history of one episode: ids in the order the model saw them, and what sampled each of them."""

    def __init__(self, renderer: Renderer, opening: tuple[Message, ...], max_tokens: int) -> None:
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._sampled_last = False
        self.tokens: list[int] = []
        self.turns: list[Turn] = []
        self._logprobs: list[float] = []
        self._mask: list[int] = []
        self._runs: list[VersionRun] = []
        self._experts: list[Experts] = []
        refuse_endless(opening, max_tokens)
        self._extend(opening, renderer.opening(opening))

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._max_tokens - len(self.tokens)

    def append(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Adds messages behind a finished model turn and returns their ids. Raises ContextOverflow and changes nothing."""
        if not self._sampled_last or self.tokens[-1] != self._renderer.end_id:
            raise ValueError(f"messages may follow only a model turn that ended; {len(self.tokens)} tokens, turns {self.turns}")
        refuse_endless(messages, self.room)
        ids = self._renderer.continuation(messages)
        self._extend(messages, ids)
        return ids

    def _extend(self, messages: tuple[Message, ...], ids: tuple[int, ...]) -> None:
        if len(ids) >= self.room:
            raise ContextOverflow(
                f"{len(ids)} tokens of {[message.role for message in messages]} leave no room to answer: "
                f"{len(self.tokens)} of max_tokens={self._max_tokens} are used"
            )
        start = len(self.tokens)
        self.tokens.extend(ids)
        self._mask.extend([0] * len(ids))
        self._logprobs.extend([0.0] * len(ids))
        # One block, up to and with the words that ask for the next turn; it bears the role of its last message.
        self.turns.append(Turn(messages[-1].role, start, len(self.tokens)))
        self._sampled_last = False

    def record(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[Version],
        experts: Experts | None = None,
    ) -> str:
        """Adds one sampled turn, exactly as sampled, and returns its text.

        `experts`: of every position that no earlier turn computed, but the newest (see Finished). Raises ValueError for
        what is no turn, and for experts that are not one row to each of these positions.
        """
        if self._sampled_last or not len(token_ids) == len(logprobs) == len(versions) > 0 or len(token_ids) > self.room:
            raise ValueError(
                f"not a turn: {len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions, room for "
                f"{self.room}, follows a model turn: {self._sampled_last}"
            )
        start = len(self.tokens)
        if experts is not None:
            self._record_experts(experts, start + len(token_ids) - 1)
        self.tokens.extend(int(token) for token in token_ids)
        self._mask.extend([1] * len(token_ids))
        self._logprobs.extend(float(value) for value in logprobs)
        for offset, version in enumerate(versions):
            if not self._runs or self._runs[-1][1:] != version:
                self._runs.append(VersionRun(start + offset, *version))
        self.turns.append(Turn("assistant", start, len(self.tokens)))
        self._sampled_last = True
        return self._renderer.text(token_ids)

    def _record_experts(self, experts: Experts, computed: int) -> None:
        known = sum(map(len, self._experts))
        if known + len(experts) != computed:
            raise ValueError(
                f"experts of {len(experts)} positions behind {known} known ones, but the model has computed {computed}; they "
                f"would be replayed at the wrong tokens"
            )
        self._experts.append(experts)

    @property
    def ended(self) -> bool:
        """Whether the last model turn ended by itself; False if it was cut."""
        return self._sampled_last and self.tokens[-1] == self._renderer.end_id

    def columns(self) -> dict[str, Any]:
        """The token columns of a Trajectory: tokens, loss_mask, logprobs, versions, turns, experts.

        Experts are None where none were recorded, and where the last tokens were never fed to the model: the episode ended
        within a turn of the environment or of the model, so it failed and nobody trains it.
        """
        whole = self._experts and sum(map(len, self._experts)) == len(self.tokens) - 1
        return {
            **_arrays(self.tokens, self._mask, self._logprobs),
            "versions": tuple(self._runs),
            "turns": tuple(self.turns),
            "experts": np.concatenate(self._experts) if whole else None,
        }


def empty_columns() -> dict[str, Any]:
    """The token columns of an episode that never began."""
    return {**_arrays([], [], []), "versions": (), "turns": ()}


def _arrays(tokens: list[int], mask: list[int], logprobs: list[float]) -> dict[str, npt.NDArray[Any]]:
    return {
        "tokens": np.array(tokens, dtype=np.int32),
        "loss_mask": np.array(mask, dtype=np.uint8),
        "logprobs": np.array(logprobs, dtype=np.float32),
    }
