"""Reads the manifests of all replicas and graders and takes their cuts (I5), with one listing of the leases per round (I16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from miles_core.orchestrator.state import Receiver
from miles_core.records import Cut
from miles_core.runtime.context import RoleContext
from miles_core.store.follow import DecidingFollower, Delivered, poll_together


class Event(NamedTuple):
    """A record that may be acted upon, or (None) that its attempt ended: nothing more can come of it."""

    receiver: Receiver
    record: Any


class _Manifest:
    """One writer's manifest; says, behind the last record of an attempt, that it ended."""

    def __init__(self, follower: DecidingFollower) -> None:
        self._follower = follower
        self._attempt = 1

    def pull(self) -> None:
        """Reads what is new."""
        self._follower.pull()

    def act(self) -> list[Delivered]:
        """What may be acted upon; a Delivered without a record stands for the end of its attempt."""
        delivered = self._follower.act()
        while self._attempt < self._follower.attempt:
            delivered.append(Delivered(self._attempt, 0, None))
            self._attempt += 1
        return delivered


class Intake:
    """All manifests, one round at a time."""

    def __init__(
        self,
        context: RoleContext,
        writers: Sequence[str],
        *,
        cuts: dict[str, dict[int, Cut]],
        on_cut: Callable[[Cut], None],
    ) -> None:
        """`cuts`: those that predecessors recorded. `on_cut` appends a new one to the own journal, ahead of what follows."""
        self._reading, self._writers = context.reading, writers
        self._manifests = [
            _Manifest(
                DecidingFollower(
                    context.reading, context.paths.journal(writer), writer, cuts=cuts.get(writer, {}), on_cut=on_cut
                )
            )
            for writer in writers
        ]

    def poll(self) -> list[Event]:
        """One round. A writer whose files cannot be read is left for the next one. OSError: the leases could not be listed."""
        rounds = poll_together(self._reading, self._manifests)
        return [
            Event(Receiver(writer, item.attempt), item.record)
            for writer, delivered in zip(self._writers, rounds, strict=True)
            for item in delivered
        ]
