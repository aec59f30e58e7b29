"""The rollout replica: takes orders, samples them with the newest policy version that proved itself, announces shards.

Invariants: only samples of orders for this attempt are made, each once per order (I6); a version samples only after its
bytes and its probe were checked (I11) and is exchanged between decode steps; a shard is announced after it is on disk.
A replica that is asked to leave says so in its journal, returns what it never started (I10), also what was on its way, and
finishes the rest within episode_deadline_s; one that is told to stop gives up what runs. Failure: while the filesystem
refuses, sampling pauses and what is finished stays in memory; a version that cannot be loaded within a deadline ends the
replica with an error naming it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from miles_core.errors import DeadlineExceeded, DigestMismatch
from miles_core.policy.lineage import StepLog
from miles_core.policy.local_copy import PolicyCopy
from miles_core.policy.manifest import PolicyManifest
from miles_core.policy.reader import check_probe
from miles_core.records import Leaving, Order, Published, Returned, Version, sample_id
from miles_core.rollout.engine import Engine
from miles_core.rollout.sampler import SampleRequest
from miles_core.rollout.session import empty_columns
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import crash_point
from miles_core.runtime.receiver import FIRST_RETRY_S, LONGEST_RETRY_S, Inbox, OrphanWatch, Patience
from miles_core.store.journal import JournalWriter
from miles_core.tracking.metrics import BusyMeter
from miles_core.trajectories.schema import Trajectory
from miles_core.trajectories.shards import ShardWriter

if TYPE_CHECKING:
    from miles_core.rollout.router import RoutedEngine

REPORT_S = 1.0
STAY_S = 5.0
"""One that leaves stays at least 2 x visibility_s, but not longer than this, for orders that were on their way."""

log = logging.getLogger("miles")
ReadVersion = Callable[[Published], tuple[dict[str, Any], PolicyManifest]]


class Episodes(Protocol):
    """The part of Sampler that a replica drives."""

    @property
    def free_slots(self) -> int:
        """Samples that may be submitted now."""
        ...

    def submit(self, request: SampleRequest) -> None:
        """Starts a sample."""
        ...

    async def tick(self) -> list[Trajectory]:
        """One decode step; the trajectories that finished."""
        ...

    async def cancel_all(self) -> None:
        """Gives up what runs."""
        ...


def sampling_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sample `index` of an order with `seed`, the same on every machine."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{index}".encode())


class PolicyFeed:
    """Keeps the engine on the newest published version that was read, verified and probed.

    A version that cannot be read leaves the one in use alone. One whose probe fails is in the engine but must not sample:
    then `version` is None until a version passes. Of several engines (`fleet`: what `engine` stands for) one whose
    probe alone fails has died; one that died and was made again gets the version in use, and serves when its probe holds.
    """

    def __init__(
        self, context: RoleContext, engine: Engine, read: ReadVersion | None = None, fleet: RoutedEngine | None = None
    ) -> None:
        self._engine, self._clock, self._timing, self._context = engine, context.clock, context.timing, context
        self._fleet = fleet
        self._steps = StepLog(context.follow("learner-0"), context.rollbacks)
        self._read = read or PolicyCopy(context.paths, context.run.run_id, self._steps, fs=context.fs).read
        self._failing_since: float | None = None
        self._retry_at = 0.0
        self._delay_s = FIRST_RETRY_S
        self.version: Version | None = None
        """What the engine may sample with."""
        self.waiting = "waiting: first policy version"
        """Why `version` is None."""

    def poll(self) -> None:
        """Looks for a newer version and exchanges it. OSError: the learner's journal was not readable, poll again.

        Raises DigestMismatch or DeadlineExceeded, naming the version, when it could not be loaded for too long, and
        RunDirectoryError at once for another run's copy.
        """
        self._steps.poll()
        newest = self._steps.newest_published
        if newest is None or self._clock() < self._retry_at:
            return
        if newest.version == self.version:
            if self._fleet is not None and self._fleet.is_mendable:
                self._fleet.mend(lambda engine: self._verify(engine, newest))
            return
        try:
            self._load(newest)
        except (OSError, DeadlineExceeded) as error:
            self._failed(newest, error, self._patience_s(newest))
        except DigestMismatch as error:
            self._failed(newest, error, max(10.0, 4 * self._timing.visibility_s))

    def _fetch(self, published: Published) -> tuple[dict[str, Any], PolicyManifest]:
        self._context.reads = published.version
        try:
            return self._read(published)
        finally:
            self._context.reads = None

    def _verify(self, engine: Engine, published: Published) -> None:
        """Gives the version in use to an engine that was made again. Raises where it cannot be read, or its probe fails."""
        tensors, manifest = self._fetch(published)
        engine.load_weights(tensors, published.version)
        check_probe(manifest, engine.logprobs([list(prompt) for prompt in manifest.probe.prompts]))

    def _load(self, published: Published) -> None:
        tensors, manifest = self._fetch(published)
        try:
            self._engine.load_weights(tensors, published.version)
        except ValueError as error:
            raise DigestMismatch(f"{tuple(published.version)} does not fit the engine's model: {error}") from error
        self.version = None
        prompts = [list(prompt) for prompt in manifest.probe.prompts]

        def check(engine: Engine) -> float:
            return check_probe(manifest, engine.logprobs(prompts))

        gap = check(self._engine) if self._fleet is None else self._fleet.prove(check)
        self.version = published.version
        self._failing_since, self._retry_at, self._delay_s = None, 0.0, FIRST_RETRY_S
        log.info("serving version=%s probe_gap=%.2g", tuple(published.version), gap)

    def _patience_s(self, published: Published) -> float:
        """What was published before a rollback may have been collected since; the learner, which may queue, publishes anew."""
        is_old = not self._context.rollbacks.precede("learner-0", published.version.attempt)
        return math.inf if is_old else self._timing.stall_s

    def _failed(self, published: Published, error: Exception, deadline_s: float) -> None:
        """Sets the next try, or ends the wait: the bytes of a good version become visible within the deadline."""
        now = self._clock()
        since = self._failing_since = now if self._failing_since is None else self._failing_since
        name = f"policy version {tuple(published.version)}"
        log.warning("%s not loaded, tried again in %.1f s: %s", name, self._delay_s, error)
        self.waiting = f"waiting: {name} ({error})"[:200]
        if now - since > deadline_s:
            kind = DigestMismatch if isinstance(error, DigestMismatch) else DeadlineExceeded
            raise kind(f"{name} ({published.folder}) could not be loaded for {now - since:.0f} s, last: {error}") from error
        self._retry_at = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_RETRY_S)


@dataclass(frozen=True)
class _Waiting:
    """A sample that was not started."""

    order: Order
    index: int
    created_s: float

    @property
    def sample_id(self) -> str:
        return sample_id(self.order.group_id, self.index)


class RolloutWorker:
    """See module. `run` ends without an error after a drain or a stop; whatever else ends it is raised."""

    def __init__(
        self,
        context: RoleContext,
        journal: JournalWriter,
        engine: Engine,
        episodes: Episodes,
        *,
        read: ReadVersion | None = None,
        fleet: RoutedEngine | None = None,
        figures: Callable[[], dict[str, Any]] = dict,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`fleet`: the several engines that `engine` stands for. `figures`: what a metric point says of it (meter.py)."""
        recipe = context.recipe
        self._figures = figures
        self._context, self._journal, self._engine, self._episodes = context, journal, engine, episodes
        self._clock, self._unix_time = context.clock, unix_time
        self._feed = PolicyFeed(context, engine, read, fleet)
        self._inbox = Inbox(context)
        self._orphans = OrphanWatch(context)
        self._reads, self._writes = Patience(context, "reading orders"), Patience(context, "writing shards and their journal")
        self._shards = ShardWriter(
            context.fs, context.paths, context.writer, context.attempt,
            rows=recipe.rollout.shard_rows, age_s=recipe.rollout.shard_age_s, clock=context.clock,
        )  # fmt: skip
        self._busy = BusyMeter(context.metrics)
        self._queue: deque[_Waiting] = deque()
        self._running: dict[str, SampleRequest] = {}
        self._queued: set[str] = set()
        self._drain_until: float | None = None
        self._stays_until = 0.0
        self._next_poll = self._next_report = context.clock()
        self._announced = 0
        self._sampled_tokens = 0

    async def run(self) -> None:
        """Works until a stop, a drain or an error. Raises LeaseLost, DeadlineExceeded, DigestMismatch, JournalCorrupt."""
        try:
            while not self._is_over():
                if not await self.step():
                    self._context.pause()
                    await asyncio.sleep(0)
        finally:
            await self._episodes.cancel_all()
        self._close()

    async def step(self) -> bool:
        """One round; True if it sampled."""
        if self._clock() >= self._next_poll:
            self._next_poll = self._clock() + self._context.timing.poll_s
            self._reads.attempt(self._poll)
        sampled = await self._sample()
        self._writes.attempt(self._publish_due)
        self._report()
        return sampled

    def _is_over(self) -> bool:
        if self._inbox.stop is not None:
            return True
        if not self._context.leave.is_set():
            return False
        if self._drain_until is None:
            self._drain_until = self._clock() + self._context.recipe.environment.episode_deadline_s
            self._stays_until = self._clock() + min(2 * self._context.timing.visibility_s, STAY_S)
            self._journal.append(Leaving())
            self._return_unstarted()
            self._writes.attempt(self._journal.flush)
        is_idle = not self._running and self._clock() >= self._stays_until
        return is_idle or self._feed.version is None or self._clock() >= self._drain_until

    # --- in ----------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        for order in self._inbox.poll():
            if isinstance(order, Order):
                self._take(order)
        if self._drain_until is not None:
            self._return_unstarted()
        self._orphans.look()
        self._feed.poll()

    def _take(self, order: Order) -> None:
        """Queues the samples that are not in work here. A finished one is made again: a new order for it is a retry."""
        now_s = self._unix_time()
        for waiting in (_Waiting(order, index, now_s) for index in order.samples):
            if waiting.sample_id not in self._queued and waiting.sample_id not in self._running:
                self._queue.append(waiting)
                self._queued.add(waiting.sample_id)

    def _return_unstarted(self) -> None:
        unstarted: dict[str, list[int]] = {}
        for waiting in self._queue:
            unstarted.setdefault(waiting.order.order_id, []).append(waiting.index)
        self._queue.clear()
        self._queued.clear()
        for order_id, indices in unstarted.items():
            self._journal.append(Returned(order_id=order_id, samples=tuple(indices)))

    # --- work --------------------------------------------------------------------------------------------------------

    async def _sample(self) -> bool:
        """Fills free slots and takes one decode step, unless no version may serve or finished work cannot be written."""
        if self._feed.version is None or self._writes.blocked:
            return False
        self._start_samples(self._feed.version.step)
        if not self._running:
            return False
        decodes, start_s = self._engine.running > 0, self._unix_time()
        finished = await self._episodes.tick()
        if decodes:
            self._busy.add(start_s, self._unix_time())
        for trajectory in finished:
            self._finish(trajectory)
        return True

    def _start_samples(self, step: int) -> None:
        """First in, first out among the samples that this version may sample; the others keep their places."""
        held: list[_Waiting] = []
        while self._queue and self._episodes.free_slots > 0:
            waiting = self._queue.popleft()
            if waiting.order.min_step > step:
                held.append(waiting)
            else:
                self._start(waiting)
        self._queue.extendleft(reversed(held))

    def _start(self, waiting: _Waiting) -> None:
        order = waiting.order
        request = SampleRequest(
            sample_id=waiting.sample_id, group_id=order.group_id, order_id=order.order_id, task_seed=order.task_seed,
            split="train", seed=sampling_seed(order.seed, waiting.index), temperature=order.temperature,
            created_s=waiting.created_s,
        )  # fmt: skip
        self._queued.discard(waiting.sample_id)
        self._running[waiting.sample_id] = request
        self._episodes.submit(request)

    def _finish(self, trajectory: Trajectory) -> None:
        del self._running[trajectory.sample_id]
        self._context.progress += 1
        self._sampled_tokens += trajectory.num_sampled
        try:
            self._shards.add(trajectory)
        except ValueError as error:
            log.error("listed as failed, without its tokens: %s", error)
            self._shards.add(_without_tokens(trajectory, str(error)))

    # --- out ---------------------------------------------------------------------------------------------------------

    def _publish_due(self) -> None:
        while self._shards.due():
            self._seal()
        self._journal.flush_when_due()
        self._note_announced()

    def _publish_all(self) -> None:
        while self._shards.num_waiting:
            self._seal()
        self._journal.flush()
        self._note_announced()

    def _seal(self) -> None:
        self._context.before_write()
        crash_point("rollout", "before_shard", self._shards.sealed + 1, self._context.attempt)
        sealed = self._shards.seal()
        if sealed is not None:
            crash_point("rollout", "after_shard", self._shards.sealed, self._context.attempt)
            self._journal.append(sealed)

    def _note_announced(self) -> None:
        while self._announced < self._shards.sealed and self._journal.synced_bytes == self._journal.bytes:
            self._announced += 1
            crash_point("rollout", "after_manifest", self._announced, self._context.attempt)

    def _close(self) -> None:
        """Writes what is finished, and the completion record after a stop. What still ran is the orchestrator's to give out."""
        stop = self._inbox.stop
        self._context.state, self._context.load = "leaving", 0
        self._busy.close()
        if self._running:
            log.warning("gave up samples=%d: %s", len(self._running), "stop" if stop else "drain deadline")
        deadline = self._clock() + self._context.timing.stall_s
        while not self._writes.attempt(lambda: self._leave_behind(stop.reason if stop else None)):
            if self._clock() > deadline:
                raise DeadlineExceeded(
                    f"{self._shards.num_waiting} finished trajectories could not be written to "
                    f"{self._context.paths.root} before leaving: {self._writes.blocked}"
                )
            self._context.pause()

    def _leave_behind(self, stop_reason: str | None) -> None:
        self._publish_all()
        if stop_reason is not None:
            self._context.finish(self._journal, "completed", stop_reason)

    def _report(self) -> None:
        """What the heartbeat says, and one metric point a second."""
        context, version = self._context, self._feed.version
        context.version, context.load = version, len(self._queue) + len(self._running)
        serving = "leaving" if self._drain_until is not None else self._serving()
        context.say(self._writes.blocked or self._reads.blocked or (serving if version else self._feed.waiting))
        if self._clock() >= self._next_report:
            self._next_report = self._clock() + REPORT_S
            context.metrics.log(
                "rollout", tokens=self._sampled_tokens, trajectories=context.progress, active=len(self._running),
                version=None if version is None else version.step, waiting=len(self._queue), **self._figures(),
            )  # fmt: skip

    def _serving(self) -> str:
        """Says why it samples nothing although it has orders: the versions that may sample them are yet to come."""
        if self._running or not self._queue or self._feed.version is None:
            return "serving"
        needed = min(waiting.order.min_step for waiting in self._queue)
        return f"serving, waiting: version {needed}" if needed > self._feed.version.step else "serving"


def _without_tokens(trajectory: Trajectory, error: str) -> Trajectory:
    """The same episode as a failure of ours: nothing of it can be trained."""
    return dataclasses.replace(
        trajectory, **empty_columns(), experts=None, status="failed", failure_kind="infrastructure", facts={"error": error}
    )
