"""A few trajectories of a run and their tokens as text, for the report and for W&B. Nothing decides by them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import DigestMismatch, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.records import Batch, BatchMember
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import read_rows

log = logging.getLogger("miles")

_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Sample:
    """One trained trajectory: the step that trained it and the reward that counted."""

    step: int
    reward: float
    row: Trajectory


def choose(batch: Batch, count: int) -> list[tuple[int, BatchMember]]:
    """`count` members of a batch, the best and the worst in turn, the stalest of equals first; each with its step."""
    members = [member for group in batch.groups for member in group.members]
    order = sorted(members, key=lambda member: (-member.reward, member.oldest_step))
    chosen = []
    for index in range(min(count, len(order))):
        chosen.append(order[index // 2] if index % 2 == 0 else order[-1 - index // 2])
    return [(batch.step, member) for member in chosen]


def read_samples(paths: RunPaths, members: Iterable[tuple[int, BatchMember]]) -> list[Sample]:
    """The trajectories of batch members; those whose shard is retired or damaged are left out."""
    samples = []
    for step, member in members:
        try:
            rows = read_rows(paths.resolve(member.ref.shard), [member.ref.row], digest=member.ref.shard_digest)
        except (OSError, DigestMismatch, RunDirectoryError) as error:
            log.info("no sample from %s: %s", member.ref.shard, error)
            continue
        samples.append(Sample(step, member.reward, rows[0]))
    return samples


class Tokens:
    """Token ids as text; without a tokenizer, as numbers."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @property
    def is_text(self) -> bool:
        """False where ids are shown."""
        return self._tokenizer is not None

    def text(self, ids: Sequence[int]) -> str:
        """All tokens in one string, special ones included."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds; empty for a token in the middle of a character."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        pieces = []
        for index in range(len(ids)):
            start = max(0, index - _CONTEXT_TOKENS)
            before = self.text(ids[start:index]).rstrip(_REPLACEMENT)
            after = self.text(ids[start : index + 1])
            piece = after[len(before) :] if after.startswith(before) else self.text([ids[index]])
            pieces.append(piece.rstrip(_REPLACEMENT))
        return pieces


def load_tokens(model_folder: Path) -> Tokens:
    """The tokenizer of a model folder, if it has one that can be read."""
    path = model_folder / "tokenizer.json"
    if not path.is_file():
        return Tokens(None)
    from tokenizers import Tokenizer

    try:
        return Tokens(Tokenizer.from_file(str(path)))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        log.warning("%s is not a tokenizer, showing token ids: %s", path, error)
        return Tokens(None)
