"""The Engine protocol: a fixed number of slots, one sampled token per running slot and step.

A session takes a slot with its first turn and keeps it, with its KV cache, until it is released: a later turn feeds only
what was appended. Between steps, weights may be exchanged; the KV of running sessions stays, and each token names the
version that sampled it (sources R7). An engine never talks to the store.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from miles_core.records import Version

if TYPE_CHECKING:
    import torch

    from miles_core.routers import Experts


@dataclass(frozen=True)
class Request:
    """One turn to sample: the first of a new session, or the next of a session that waits."""

    session_key: str
    tokens: tuple[int, ...]
    """What to append to the session's tokens before sampling; never empty."""
    max_new_tokens: int
    temperature: float
    """0 is greedy; its logprobs are those of temperature 1."""
    seed: int
    """Of the sample. With the token's position it decides the draw, whatever else is in the batch."""


@dataclass(frozen=True)
class Finished:
    """One sampled turn. n = number of its tokens, the end token included."""

    session_key: str
    tokens: npt.NDArray[np.int32]
    """[n]"""
    logprobs: npt.NDArray[np.float32]
    """[n] log softmax(logits / temperature) in float32 of each token."""
    versions: tuple[Version, ...]
    """[n] what sampled each token."""
    reason: Literal["end", "length", "broken"]
    """`end`: the end token was sampled; `length`: cut by max_new_tokens or by the context; `broken`: its engine died and no
    other goes on with it, the session has failed (only where a replica has several engines: router.py)."""
    experts: Experts | None = None
    """[m, layers, k] experts of the m positions that this turn computed: from the first that no earlier turn computed to the
    one before the newest token. All turns of a session, one behind another, give a row to each token but the newest. None:
    not recorded."""


@dataclass(frozen=True)
class Counts:
    """What an engine has done since it was made."""

    prompt_tokens: int = 0
    """Tokens that turns began with: all that the session had by then."""
    reused_tokens: int = 0
    """Of these, tokens whose keys and values were there and were not computed for this turn."""
    drafted_tokens: int = 0
    """Tokens guessed by speculation."""
    accepted_tokens: int = 0
    """Of these, tokens that were kept."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Engine(Protocol):
    """Samples many sessions at once. Not safe to share between threads."""

    @property
    def version(self) -> Version:
        """Of the weights now loaded."""
        ...

    @property
    def counts(self) -> Counts:
        """What it has done so far."""
        ...

    @property
    def free_slots(self) -> int:
        """Sessions that may be added."""
        ...

    @property
    def running(self) -> int:
        """Turns now being sampled."""
        ...

    def add(self, request: Request) -> None:
        """Starts a turn. Raises ValueError without a free slot, room in the context, or while the session still samples."""
        ...

    def step(self) -> list[Finished]:
        """Samples one token for the running turns and returns those that finished; their slots stay taken."""
        ...

    def release(self, session_key: str) -> None:
        """Frees a session's slot at once, also in the middle of a turn. Raises KeyError if it has none."""
        ...

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        """Exchanges all weights, or raises ValueError with the names at fault and exchanges none."""
        ...

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """[len - 1] each: log softmax(logits / temperature) of every next token, by a full forward pass without cache."""
        ...


class Member(Engine, Protocol):
    """An Engine that may stand beside others in one replica (router.py)."""

    def so_far(self, session_key: str) -> Finished:
        """What the session's newest turn has sampled, possibly nothing; `broken` where it had not ended. Asked of an engine
        whose step raised, and of one that samples. Raises KeyError for a session without a slot."""
        ...

    def close(self) -> None:
        """Lets go of memory and processes. Nothing is asked of it afterwards."""
        ...
