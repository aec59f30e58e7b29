"""Which slots hold the keys and values of which beginnings, so that a prompt's shared beginning is computed once.

The samples of a group have one prompt, and all prompts of a recipe may begin with the same solved examples. A slot's
beginning may be copied by a new session as long as all of it was computed with the weights that are loaded: an exchange of
weights makes every slot forget, and a session that was running then never lends again. A released slot lends until it is
taken. Copies are of positions and tokens that are equal, so a session's logprobs are those it would have had alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_core.rollout.slots import Ints


class HeldPrefixes:
    """`tokens` [slots, positions]: the engine's own, read only. A new session's tokens are written behind its keep()."""

    def __init__(self, tokens: Ints) -> None:
        self._tokens = tokens
        self._held = np.zeros(len(tokens), dtype=np.int64)
        """[slots] positions whose keys and values are of these tokens and of the loaded weights."""
        self._lends = np.zeros(len(tokens), dtype=bool)
        """[slots] whether all that its session has read was read with the loaded weights."""

    def keep(self, slot: int, tokens: Sequence[int]) -> int:
        """A new session takes a slot: how many of its first positions the slot holds from the session before."""
        most = min(int(self._held[slot]), len(tokens))
        differs = np.flatnonzero(self._tokens[slot, :most] != np.array(tokens[:most]))
        self._held[slot] = differs[0] if len(differs) else most
        return int(self._held[slot])

    def find(self, slot: int, totals: Ints, reading: Sequence[int]) -> tuple[int, int, int]:
        """For a session that has read nothing yet: the slot that holds most of it, how many positions, and how many of them
        one of `reading` will hold after this step. Its newest token is always its own to read; `totals` [slots] tokens each.
        """
        self._lends[slot] = True
        most = int(totals[slot]) - 1
        differs = self._tokens[:, :most] != self._tokens[slot, :most]
        same = np.where(differs.any(axis=1), differs.argmax(axis=1), most)
        held = np.minimum(same, self._held)
        source = slot if held[slot] == held.max() else int(held.argmax())
        soon = np.where(self._lends, np.minimum(same, totals), 0)[list(reading)]
        return source, int(held[source]), int(soon.max(initial=0))

    def read(self, slots: Ints, positions: Ints) -> None:
        """The keys and values of so many first positions of these slots are there now."""
        self._held[slots] = np.where(self._lends[slots], positions, 0)

    def forget(self) -> None:
        """Other weights are loaded."""
        self._held[:] = 0
        self._lends[:] = False
