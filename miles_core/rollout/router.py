"""Several engines of one replica, used like one: a RoutedEngine is an Engine, so whoever drives it knows nothing of them.

Routing: a new session goes to the engine that samples the fewest turns and has a free slot (the lowest of equals), its later
turns to the same one, where its keys and values are. Nothing is weighed again meanwhile: what a session has read there costs
more to read again than an uneven load does.

Death: an engine that raises, or in which weights are wrong that are right in another, is closed and takes no further part.
What its turns had sampled stays, with logprobs and versions; a session that it held is read anew by another engine as soon as
one has a free slot, and its turn goes on where it was, with the same seed. A slot that it needs does not count as free, so
nobody new comes between. Where `hands_on` is off, or more than HAND_ONS engines died under it, its turn ends with the reason
`broken`. When no engine is left MilesError is raised: the replica ends, and the supervisor replaces it.

Return: a dead engine is made again, later after every death, and serves when its weights have been verified (`mend`). Where
engines step in threads it is made in one, too, and the others go on; the weights are loaded and verified between two steps.
An engine that refuses (ValueError) is not dead. No token is told twice: a turn is told once, when it has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from miles_core.errors import DigestMismatch, MilesError, RunDirectoryError
from miles_core.records import Version
from miles_core.rollout.engine import Counts, Engine, Finished, Member, Request

if TYPE_CHECKING:
    import torch

HAND_ONS = 2
"""A session is handed on so often; one that brings down engines does not bring down four or more."""
FIRST_MEND_S = 10.0
LONGEST_MEND_S = 600.0
"""A dead engine is made again after FIRST_MEND_S, twice as long after each further death or failure, but at most this."""

LONGEST_MAKING_S = 1800.0
"""An engine that takes longer to start will not."""

log = logging.getLogger("miles")


@dataclass
class _Session:
    """What is known of a session that holds a slot, or waits for one."""

    place: int | None = None
    """The engine that holds it; None: no engine does."""
    tokens: list[int] = field(default_factory=list)
    """All that it has, but what its engine samples now."""
    turn: Request | None = None
    """What is being sampled, or waits for a slot."""
    is_sampled: bool = False
    """Whether its engine has the turn."""
    parts: list[Finished] = field(default_factory=list)
    """What engines that died have sampled of the turn."""
    known: int = 0
    """Positions whose experts were told, or are in `parts`."""
    first: int = 0
    """Position at which the experts begin that its engine tells next."""
    deaths: int = 0
    """Engines that died under it."""
    is_lost: bool = False

    @property
    def waits(self) -> bool:
        """Whether it has a right to a slot and none."""
        return self.place is None and not self.is_lost

    def rest(self) -> Request:
        """What another engine is asked for."""
        assert self.turn is not None
        left = self.turn.max_new_tokens - sum(len(part.tokens) for part in self.parts)
        return dataclasses.replace(self.turn, tokens=tuple(self.tokens), max_new_tokens=left)

    def take(self, part: Finished) -> None:
        """Keeps what an engine has sampled of the turn, and of its experts those that are new."""
        self.tokens += part.tokens.tolist()
        if part.experts is not None:
            new = part.experts[self.known - self.first :]
            part = dataclasses.replace(part, experts=new)
            self.known = self.first = self.known + len(new)
        self.parts.append(part)

    def end(self) -> Finished:
        """The turn as one, of all that sampled it."""
        parts, self.parts, self.turn, self.is_sampled = self.parts, [], None, False
        if len(parts) == 1:
            return parts[0]
        experts = [part.experts for part in parts if part.experts is not None]
        return dataclasses.replace(
            parts[-1],
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=tuple(version for part in parts for version in part.versions),
            experts=np.concatenate(experts) if experts else None,
        )


class RoutedEngine:
    """See module. `make(i)` gives engine i of `engines`, whose weights nobody has verified yet.

    `hands_on`: see module. `is_parallel`: engines may step at the same time, each in a thread. `affinity` off: a later turn is
    routed like a new session (what a benchmark compares with). `clock`: monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[[int], Member],
        engines: int,
        *,
        hands_on: bool = True,
        is_parallel: bool = False,
        affinity: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make, self._clock = make, clock
        self._hands_on, self._affinity = hands_on, affinity
        self._engines: list[Member | None] = [make(index) for index in range(engines)]
        self._threads = ThreadPoolExecutor(engines, "engine") if is_parallel else None
        self._sessions: dict[str, _Session] = {}
        self._done: list[Finished] = []
        """Turns that ended and were not told yet."""
        self._counts_of_dead = Counts()
        self._deaths = self._handed_on = self._setbacks = 0
        self._mend_at = 0.0
        self._made_again: tuple[int, float, Future[Member]] | None = None
        """Place of the engine that is being made in a thread, since when, and itself."""
        self.version = self._living[0][1].version

    @property
    def _living(self) -> list[tuple[int, Member]]:
        return [(index, engine) for index, engine in enumerate(self._engines) if engine is not None]

    @property
    def counts(self) -> Counts:
        """The sum of all engines', dead ones included."""
        return sum((engine.counts for _, engine in self._living), self._counts_of_dead)

    @property
    def free_slots(self) -> int:
        """Sessions that may be added; those that wait for another engine come first."""
        free = sum(engine.free_slots for _, engine in self._living)
        return max(0, free - sum(session.waits for session in self._sessions.values()))

    @property
    def running(self) -> int:
        """Turns now being sampled, and those whose end the next step tells."""
        return sum(engine.running for _, engine in self._living) + len(self._done)

    def add(self, request: Request) -> None:
        """Starts a turn. Raises ValueError without a free slot, room in the context, or while the session still samples."""
        key = request.session_key
        known = self._sessions.get(key)
        if known is None and not self.free_slots:
            raise ValueError(f"session {key}: all {len(self._sessions)} slots are taken; release one first")
        if known is not None and known.turn is not None:
            raise ValueError(f"session {key}: its turn is still being sampled")
        session = known or _Session()
        used = len(session.tokens)
        session.turn = request
        session.tokens += request.tokens
        self._sessions[key] = session
        try:
            self._ask(key, session)
        except ValueError:
            session.turn = None
            del session.tokens[used:]
            if known is None:
                del self._sessions[key]
            raise

    def _ask(self, key: str, session: _Session) -> None:
        """Gives the session's turn to its engine, or to one that has room; where none has, it waits. ValueError: refused."""
        if session.place is not None and not self._affinity:
            self._leave_for_another(key, session)
        while session.turn is not None and not session.is_lost:
            is_new = session.place is None
            index = self._choose(session)
            if index is None:
                return
            request = session.rest() if is_new else session.turn
            session.place = index
            try:
                self._engine(index).add(request)
            except ValueError:
                session.place = None if is_new else index
                raise
            except Exception as error:  # noqa: BLE001 - whatever an engine raises is its death
                self._bury(index, error)
                continue
            if is_new:
                session.first = 0
                self._handed_on += session.deaths > 0
            session.is_sampled = True
            return
        self._give_up(key, session)

    def _choose(self, session: _Session) -> int | None:
        """The session's engine; else, of those with a free slot, the one that samples the fewest turns."""
        if session.place is not None:
            return session.place
        free = [(engine.running, index) for index, engine in self._living if engine.free_slots]
        return min(free)[1] if free else None

    def _leave_for_another(self, key: str, session: _Session) -> None:
        """Has it routed anew, where another engine samples fewer turns than its own."""
        other = self._choose(_Session())
        if other is not None and self._engine(other).running < self._engine(session.place).running:
            place, session.place = session.place, None
            self._release(place, key)

    def _engine(self, index: int | None) -> Member:
        engine = None if index is None else self._engines[index]
        assert engine is not None
        return engine

    def step(self) -> list[Finished]:
        """One step of every engine that has work. Returns the turns that finished; their slots stay taken."""
        self._place_waiting()
        busy = [(index, engine) for index, engine in self._living if engine.running]
        for (index, _), outcome in zip(busy, self._step_each([engine for _, engine in busy]), strict=True):
            if isinstance(outcome, Exception):
                self._bury(index, outcome)
                continue
            for turn in outcome:
                self._sessions[turn.session_key].take(turn)
                self._done.append(self._sessions[turn.session_key].end())
        self._place_waiting()
        done, self._done = self._done, []
        return done

    def _step_each(self, engines: Sequence[Member]) -> list[list[Finished] | Exception]:
        if self._threads is None or len(engines) < 2:
            return [_try_step(engine) for engine in engines]
        return list(self._threads.map(_try_step, engines))

    def _place_waiting(self) -> None:
        """Gives slots to turns that have none, the session that came first before the others."""
        for key, session in list(self._sessions.items()):
            if session.turn is not None and session.waits:
                try:
                    self._ask(key, session)
                except ValueError as error:
                    log.error("session=%s lost, the engine that takes it over refuses: %s", key, error)
                    session.is_lost = True
                    self._give_up(key, session)

    def release(self, session_key: str) -> None:
        """Frees a session's slot at once, also in the middle of a turn. Raises KeyError if it has none."""
        session = self._sessions.pop(session_key)
        self._done = [turn for turn in self._done if turn.session_key != session_key]
        if session.place is not None:
            self._release(session.place, session_key)

    def _release(self, index: int | None, session_key: str) -> None:
        assert index is not None
        try:
            self._engine(index).release(session_key)
        except Exception as error:  # noqa: BLE001 - as above
            self._bury(index, error)

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        """Exchanges the weights of all engines, or raises ValueError with the names at fault and exchanges none.

        One that refuses what another has taken is dead.
        """
        is_taken = False
        for index, engine in self._living:
            try:
                engine.load_weights(tensors, version)
                is_taken = True
            except Exception as error:
                if isinstance(error, ValueError) and not is_taken:
                    raise
                self._bury(index, error)
        self.version = Version(*version)

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """As Engine, of the first engine that lives."""
        while True:
            index, engine = self._living[0]
            try:
                return engine.logprobs(token_lists, temperature)
            except ValueError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._bury(index, error)

    def prove(self, check: Callable[[Engine], float]) -> float:
        """The largest gap that `check` finds: none may sample with new weights before they are right in all.

        An engine in which they are wrong (DigestMismatch) while they are right in another has died; what is wrong in all is
        raised.
        """
        gaps, wrong = list[float](), list[tuple[int, DigestMismatch]]()
        for index, engine in self._living:
            try:
                gaps.append(check(engine))
            except DigestMismatch as error:
                wrong.append((index, error))
            except ValueError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._bury(index, error)
        if not gaps:
            raise wrong[0][1]
        for index, mismatch in wrong:
            self._bury(index, mismatch)
        return max(gaps)

    # --- death and return --------------------------------------------------------------------------------------------

    def _bury(self, index: int, error: Exception) -> None:
        """The engine died of `error`. Raises MilesError if it was the last one."""
        engine = self._engine(index)
        self._engines[index] = None
        self._counts_of_dead += engine.counts
        self._deaths += 1
        self._wait_to_mend()
        held = [(key, session) for key, session in self._sessions.items() if session.place == index]
        log.error("engine=%d died with sessions=%d", index, len(held), exc_info=error)
        for key, session in held:
            self._take_over(key, session, engine)
        _close(engine)
        if not self._living:
            raise MilesError(
                f"all {len(self._engines)} engines of this replica have died, the last one, engine {index}, of "
                f"{type(error).__name__}: {error}. The replica ends and is replaced; the log names what the others died of"
            ) from error

    def _take_over(self, key: str, session: _Session, engine: Member) -> None:
        """A session of a dead engine: keeps what its turn has sampled, and decides whether it goes on."""
        was_sampled, session.is_sampled, session.place = session.is_sampled, False, None
        session.deaths += 1
        if was_sampled:
            try:
                part = engine.so_far(key)
            except Exception as error:  # noqa: BLE001 - nothing of the turn was told yet: it may be sampled again
                log.warning("session=%s: its turn is sampled again, the dead engine does not tell it: %s", key, error)
            else:
                if len(part.tokens):
                    session.take(part)
                if part.reason != "broken":
                    self._done.append(session.end())
        session.is_lost = not self._hands_on or session.deaths > HAND_ONS
        if session.is_lost:
            self._give_up(key, session)

    def _give_up(self, key: str, session: _Session) -> None:
        """Ends the turn of a session that is lost, if it has one."""
        if session.turn is not None:
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            session.parts = [Finished(key, *nothing, versions=(), reason="broken")]
            self._done.append(session.end())

    def _wait_to_mend(self) -> None:
        self._mend_at = self._clock() + min(FIRST_MEND_S * 2 ** min(self._setbacks, 16), LONGEST_MEND_S)
        self._setbacks += 1

    @property
    def is_mendable(self) -> bool:
        """Whether `mend` has something to do now."""
        if self._made_again is not None:
            _, since, future = self._made_again
            return future.done() or self._clock() - since > LONGEST_MAKING_S
        return None in self._engines and self._clock() >= self._mend_at

    def mend(self, verify: Callable[[Engine], None]) -> None:
        """Makes a dead engine again, or begins to. `verify` gives it the weights that the others have and raises unless they
        prove right.

        It serves from then on; if anything fails it is tried again later. All others stand still meanwhile, but for what is
        done in a thread; one that is not made within LONGEST_MAKING_S is a MilesError.
        """
        index, make = self._engines.index(None), self._make
        if self._threads is not None and self._made_again is None:
            self._made_again = index, self._clock(), _in_thread(lambda: make(index))
            return
        if self._made_again is not None:
            index, since, future = self._made_again
            if not future.done():
                raise MilesError(
                    f"engine {index} was not made again within {self._clock() - since:.0f} s: its GPU, its driver or the "
                    f"filesystem hangs. The replica ends and is replaced"
                )
            self._made_again, make = None, lambda _: future.result()
        made: Member | None = None
        try:
            made = make(index)
            verify(made)
            if made.version != self.version:
                raise MilesError(f"it has version {tuple(made.version)}, the others have {tuple(self.version)}")
        except RunDirectoryError:
            raise
        except Exception as error:
            self._wait_to_mend()
            log.warning("engine=%d could not be made again", index, exc_info=error)
            if made is not None:
                _close(made)
            return
        self._engines[index] = made
        log.info("engine=%d serves again version=%s", index, tuple(self.version))

    def figures(self) -> dict[str, Any]:
        """Of each engine, None for a dead one: turns that it samples, and sessions that hold a slot of it and wait."""
        held = [session.place for session in self._sessions.values()]
        active = [None if engine is None else engine.running for engine in self._engines]
        waiting = [None if count is None else held.count(index) - count for index, count in enumerate(active)]
        return {
            "engine_active": active, "engine_waiting": waiting, "engine_deaths": self._deaths, "handed_on": self._handed_on,
        }  # fmt: skip


def _in_thread(make: Callable[[], Member]) -> Future[Member]:
    """Of a thread that nobody waits for: a replica that ends meanwhile ends at once."""
    future: Future[Member] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised by result() in the loop's thread
            future.set_exception(error)

    threading.Thread(target=work, name="engine-made-again", daemon=True).start()
    return future


def _try_step(engine: Member) -> list[Finished] | Exception:
    try:
        return engine.step()
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is its death
        return error


def _close(engine: Member) -> None:
    try:
        engine.close()
    except Exception as error:  # noqa: BLE001 - it is dead already
        log.warning("a dead engine did not close: %s", error)
