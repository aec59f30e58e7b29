"""Chat formats: how messages become token ids, for model families that are named (`model.chat`).

A format is written as pieces: control tokens, by their names, and text. Text between two control tokens is tokenised as one
run in which nothing can become a control token, whatever a user or a tool writes; that is what the whole conversation would be
tokenised to, because a control token cuts the text anyway. What follows a finished model turn does not depend on it, so a
conversation only grows (check_append_only in chat_check.py proves it for a tokenizer, or says where not).

Failure: a control token that the tokenizer has not is a RecipeError naming family and token; a role or tools that a family
has no form for are a RecipeError naming them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from miles_core.environments.base import Message
from miles_core.errors import RecipeError

Tools = tuple[str, ...]
"""The functions offered to a model, each as the JSON text of an OpenAI function: name, description, parameters."""


@dataclass(frozen=True)
class ToolCall:
    """One call that a model makes."""

    call_id: str
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True)
class ChatMessage(Message):
    """A message of an agent's conversation; the assistant's may call tools, a tool's says which call it answers."""

    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class Control(NamedTuple):
    """A control token, by its name in the tokenizer."""

    name: str


class Spoken(NamedTuple):
    """Text that a model said, or could have said: its own special tokens, such as those around a call, are what they are."""

    text: str


Piece = Control | Spoken | str


class Said(NamedTuple):
    """What a model turn says: its text, and the calls (name, arguments as JSON text) that follow it."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()


def clean_text(text: str) -> str:
    """Surrogates joined into the characters they mean; one alone becomes U+FFFD, for no tokenizer takes it."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# --- tools ---------------------------------------------------------------------------------------------------------------

_HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
_LLAMA3 = (
    "Environment: ipython\n\nYou have access to the following functions. To call a function, respond with JSON for a function "
    'call, in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. Do not use '
    "variables.\n\n{tools}"
)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def _as_call(text: str, key: str) -> tuple[str, str] | None:
    """(name, arguments) of a JSON object, or None if it is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not isinstance(found.get(key), dict):
        return None
    return found["name"], json.dumps(found[key], ensure_ascii=False)


def _hermes_calls(text: str, tools: Tools) -> Said:
    """Calls in tags; a turn with one that is no JSON call says everything as text."""
    calls = [_as_call(found, "arguments") for found in _CALL.findall(text)]
    known = [call for call in calls if call is not None]
    if not calls or len(known) < len(calls):
        return Said(text)
    return Said(text.partition("<tool_call>")[0].rstrip("\n"), tuple(known))


def _llama3_calls(text: str, tools: Tools) -> Said:
    """A turn that is one JSON object and nothing else is a call."""
    call = _as_call(text.strip().removeprefix("<|python_tag|>"), "parameters")
    return Said(text) if call is None else Said("", (call,))


def _plain_calls(text: str, tools: Tools) -> Said:
    """A turn that ends in tags calls the only tool, whose only parameter is the text in them."""
    found = re.search(r"<tool_call>((?:(?!<tool_call>).)*)</tool_call>\s*\Z", text, re.DOTALL)
    name, parameter = _only_parameter(tools)
    if found is None or not parameter:
        return Said(text)
    return Said(text[: found.start()], ((name, json.dumps({parameter: found[1]}, ensure_ascii=False)),))


def _only_parameter(tools: Tools) -> tuple[str, str]:
    """Name and parameter of the only tool; empty texts if there are several of either."""
    if len(tools) != 1:
        return "", ""
    tool = json.loads(tools[0])
    names = list(tool.get("parameters", {}).get("properties", {}))
    return (tool["name"], names[0]) if len(names) == 1 else ("", "")


def _write_hermes(message: ChatMessage) -> str:
    texts = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    return "\n".join([message.content, *texts] if message.content else texts)


def _write_llama3(message: ChatMessage) -> str:
    return message.content + "".join(
        f'{{"name": {json.dumps(call.name)}, "parameters": {call.arguments}}}' for call in message.tool_calls
    )


def _write_plain(message: ChatMessage) -> str:
    texts = [str(next(iter(json.loads(call.arguments).values()), "")) for call in message.tool_calls]
    return message.content + "".join(f"<tool_call>{text}</tool_call>" for text in texts)


# --- families ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How one family of models writes a conversation."""

    name: str
    header: Callable[[str], tuple[Piece, ...]]
    """What opens a message of a role."""
    end: str
    """The control token that ends every message, and so a model's turn."""
    behind: str
    """Text that stands behind the end token."""
    calls: Callable[[str, Tools], Said]
    """Reads a turn of a model that was offered tools."""
    write_calls: Callable[[ChatMessage], str]
    """The text of an assistant message that calls tools."""
    begin: str = ""
    """Control token in front of everything."""
    tools_text: str = ""
    """System text that offers `{tools}`; empty: the model was taught its tool, and is told nothing."""
    tool_role: str = "tool"
    """The role under which a tool's result is written ..."""
    result: str = "{}"
    """... and how; results one behind another share one message where `joins_results`."""
    joins_results: bool = False

    @property
    def control_tokens(self) -> set[str]:
        """What every conversation is made of."""
        return {piece.name for piece in self.opening((Message("user", ""),)) if isinstance(piece, Control)}

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> list[Piece]:
        """The first messages, up to the point where the model writes."""
        if tools and self.tools_text:
            messages = self._with_tools(messages, tools)
        begin: list[Piece] = [Control(self.begin)] if self.begin else []
        return [*begin, *self.messages(messages), *self.header("assistant")]

    def continuation(self, messages: Sequence[Message]) -> list[Piece]:
        """What follows the model's own end token, up to the point where it writes again."""
        return [self.behind, *self.messages(messages), *self.header("assistant")]

    def messages(self, messages: Sequence[Message]) -> list[Piece]:
        """Finished messages."""
        written: list[tuple[str, list[Piece]]] = []
        results = False
        for message in messages:
            joined = results and message.role == "tool" and self.joins_results
            results = message.role == "tool"
            if joined:
                written[-1][1].append("\n" + self.result.format(message.content))
            elif results:
                written.append((self.tool_role, [self.result.format(message.content)]))
            elif message.role == "assistant":
                calls = isinstance(message, ChatMessage) and message.tool_calls
                written.append(("assistant", [Spoken(self.write_calls(message) if calls else message.content)]))  # type: ignore[arg-type]
            else:
                written.append((message.role, [message.content]))
        return [piece for role, text in written for piece in (*self.header(role), *text, Control(self.end), self.behind)]

    def _with_tools(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        listed = "\n".join(json.dumps({"type": "function", "function": json.loads(tool)}, ensure_ascii=False) for tool in tools)
        own = [messages[0].content] if messages and messages[0].role == "system" else []
        system = Message("system", "\n\n".join([*own, self.tools_text.format(tools=listed)]))
        return [system, *messages[len(own) :]]


def _chatml_header(role: str) -> tuple[Piece, ...]:
    return Control("<|im_start|>"), f"{role}\n"


def _llama3_header(role: str) -> tuple[Piece, ...]:
    return Control("<|start_header_id|>"), role, Control("<|end_header_id|>"), "\n\n"


def _plain_header(role: str) -> tuple[Piece, ...]:
    return (Control(f"<|{role}|>"),)


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3", _chatml_header, "<|im_end|>", "\n", _hermes_calls, _write_hermes, tools_text=_HERMES, tool_role="user",
            result="<tool_response>\n{}\n</tool_response>", joins_results=True,
        ),
        Family("chatml", _chatml_header, "<|im_end|>", "\n", _hermes_calls, _write_hermes, tools_text=_HERMES),
        Family(
            "llama3", _llama3_header, "<|eot_id|>", "", _llama3_calls, _write_llama3, begin="<|begin_of_text|>",
            tools_text=_LLAMA3, tool_role="ipython",
        ),
        Family("plain", _plain_header, "<|end|>", "", _plain_calls, _write_plain),
    )
}  # fmt: skip
"""`plain` is that of the models that the warm-ups make."""
FamilyName = Literal["qwen3", "chatml", "llama3", "plain"]


def check_family(folder: Path, name: str) -> None:
    """Without loading a tokenizer: the model folder has the family's control tokens, if it says what it has.

    Raises RecipeError.
    """
    try:
        listed = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    except (OSError, ValueError, KeyError):
        return
    family, special = FAMILIES[name], {token["content"] for token in listed if token.get("special")}
    for needed in sorted(family.control_tokens - special):
        raise _not_there(name, needed, str(folder), special)


def _not_there(family: str, name: str, where: str, special: Iterable[str]) -> RecipeError:
    return RecipeError(
        f"model.chat: {family!r} needs the special token {name!r}, which the tokenizer of {where} has not; it has "
        f"{', '.join(sorted(special)[:12])}"
    )


class FamilyRenderer:
    """A Renderer (session.py) of one family over a Hugging Face tokenizer. Raises RecipeError."""

    def __init__(self, tokenizer: Any, family: Family) -> None:
        self._tokenizer, self._family = tokenizer, family
        self._special = special_tokens(tokenizer)
        self.special_ids = frozenset(self._special.values())
        for name in sorted(family.control_tokens):
            self._control(name)
        self.end_id = self._control(family.end)
        self._own = self._special.keys() - family.control_tokens
        self.opening = functools.lru_cache(maxsize=1024)(self._opening)
        self.continuation = functools.lru_cache(maxsize=1024)(self._continuation)

    def _opening(self, messages: tuple[Message, ...], tools: Tools = ()) -> tuple[int, ...]:
        return self._encode(self._family.opening(messages, tools))

    def _continuation(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encode(self._family.continuation(messages))

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a model turn, special tokens included, its end token left out."""
        return turn_text(self._tokenizer, token_ids, self.end_id)

    def said(self, token_ids: Sequence[int], tools: Tools) -> Said:
        """What a model turn says, with its calls if tools were offered."""
        text = self.text(token_ids)
        return self._family.calls(text, tools) if tools else Said(text)

    def _control(self, name: str) -> int:
        if name not in self._special:
            raise _not_there(self._family.name, name, self._tokenizer.name_or_path or "this model", self._special)
        return self._special[name]

    def _encode(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        flat: list[Control | str] = []
        for piece in pieces:
            flat += split_control(piece.text, self._own) if isinstance(piece, Spoken) else [piece]
        return encode_pieces(self._tokenizer, flat, self._control)


def split_control(text: str, names: Iterable[str]) -> list[Control | str]:
    """Text cut at every control token of these names."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return [text]
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return [Control(part) if number % 2 else part for number, part in enumerate(parts)]


def encode_pieces(tokenizer: Any, pieces: Sequence[Control | str], control: Callable[[str], int]) -> tuple[int, ...]:
    """Ids of pieces: text between two control tokens is one run, and holds no control token."""
    ids: list[int] = []
    run = ""
    for piece in (*pieces, None):
        if isinstance(piece, str):
            run += piece
            continue
        if run:
            ids += tokenizer(clean_text(run), add_special_tokens=False, split_special_tokens=True).input_ids
            run = ""
        if piece is not None:
            ids.append(control(piece.name))
    return tuple(ids)


def turn_text(tokenizer: Any, token_ids: Sequence[int], end_id: int) -> str:
    """The text of a model turn, special tokens included, its end token left out."""
    ids = list(token_ids)
    if ids and ids[-1] == end_id:
        ids.pop()
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The control tokens of a tokenizer: ids by name."""
    found = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return found | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
