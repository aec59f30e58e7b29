"""A whole run in one process: the real orchestrator against simulated roles, over the real store, by one seed.

Real: run directory, leases, heartbeats, journals, followers, cuts, records, the orchestrator's loop and, with `real_files`,
shards, versions and the collector. Invented: time (one clock, moved by the cluster), what is sampled and graded, and the
supervisor, which replaces whom the test tells it to. Every role is a generator that is stepped in an order drawn from the
seed, so a seed is a schedule and a failure can be run again. A process can be killed in the middle of any write, be frozen
and go on as a zombie after its successor started, or be replaced while it works. Names and bytes become visible to other
nodes late, by less than visibility_s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from cluster.collector import Collector
from cluster.rollback import roll_back
from miles_core.errors import LeaseLost
from miles_core.orchestrator.loop import Orchestrator
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe, Timing
from miles_core.records import Deletion, Done, Intent, JobEnded, Rollback, RunClosed, Submitted, split_writer
from miles_core.rollbacks import Rollbacks
from miles_core.run import RunConfig, all_writers
from miles_core.runtime.context import RoleContext
from miles_core.runtime.succession import open_journal
from miles_core.store.fs import FileSystem
from miles_core.store.journal import JournalWriter
from miles_core.store.publish import publish_bytes

RUN_ID = "simulated-1"
TIMING = Timing(visibility_s=1.0, lease_s=8.0, poll_s=0.1, sync_s=0.05, stall_s=60.0)


class Killed(BaseException):
    """kill -9 in the middle of a write."""


def simulated_recipe(**changes: object) -> Recipe:
    """A small recipe; `changes` are dotted keys of its sections, with __ for the dot (orchestrator__prompts=2)."""
    sections: dict[str, dict[str, object]] = {
        "rollout": {"pools": ({"name": "main", "replicas": 2, "slots": 4},), "shard_rows": 4, "shard_age_s": 0.5},
        "grader": {"replicas": 2},
        "orchestrator": {"prompts": 3, "samples": 2, "capacity_batches": 2.0, "max_staleness": 3, "version_wait_s": 20.0},
        "learner": {"minibatches": 1, "checkpoint_every": 2},
        "evaluation": {"problems": 4},
        "retention": {},
    }
    top: dict[str, object] = {"name": "simulated", "steps": 4}
    for key, value in changes.items():
        section, dot, name = key.partition("__")
        (sections[section] if dot else top)[name or section] = value
    return Recipe.model_validate({**top, "model": {"path": "none"}, "environment": {"family": "chain_sum"}, **sections})


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Moves on; also what a role's sleep does."""
        self.now_s += seconds


class Disk:
    """What all nodes share: when which bytes and names were written, and what fails where."""

    def __init__(self, clock: Clock, hidden_s: float, root: Path) -> None:
        self.clock, self._hidden_s, self._root = clock, hidden_s, str(root)
        self._sizes: dict[str, list[tuple[float, int]]] = {}
        self._created: dict[str, float] = {}
        self._writer: dict[str, str] = {}
        self.deaths: dict[str, tuple[int, float]] = {}
        """Writes that a node may still do, and the share of the last one that gets through."""
        self.writes: dict[str, int] = {}
        """Writes that a node did."""
        self.failing_until: dict[str, float] = {}
        """OSError on a node until then; node `` is all of them but the supervisor's, which only tells the tale."""

    def check(self, node: str) -> None:
        """Raises what the node's next call shall raise."""
        everywhere = 0.0 if node.startswith("supervisor") else self.failing_until.get("", 0.0)
        if self.clock() < max(self.failing_until.get(node, 0.0), everywhere):
            raise OSError(5, "simulated input/output error")

    def share_written(self, node: str) -> float:
        """The share of a write that gets through before the process dies; more than 1: it lives."""
        self.writes[node] = self.writes.get(node, 0) + 1
        left, share = self.deaths.get(node, (1 << 60, 1.0))
        self.deaths[node] = (left - 1, share)
        return 2.0 if left > 0 else share

    def wrote(self, node: str, path: str, size: int) -> None:
        """Bytes up to `size` are there from now on."""
        self.named(node, path)
        self._sizes.setdefault(path, []).append((self.clock(), size))

    def named(self, node: str, path: str) -> None:
        """The name is there from now on."""
        if path not in self._writer:
            self._created[path] = self.clock()
        self._writer[path] = node

    def shows(self, node: str, path: str) -> bool:
        """Whether the node sees the name."""
        created = self._created.get(path)
        if created is None or self._writer[path] == node:
            return True
        if created < self.clock() - self._hidden_s:
            del self._created[path]  # All nodes see it from here on.
            return True
        return created <= self._horizon(node, path)

    def visible_size(self, node: str, path: str, size: int) -> int:
        """How many of `size` bytes the node sees."""
        marks = self._sizes.get(path)
        if not marks or self._writer[path] == node:
            return size
        while len(marks) > 1 and marks[1][0] < self.clock() - self._hidden_s:
            marks.pop(0)
        return max((mark for when, mark in marks if when <= self._horizon(node, path)), default=0)

    def _horizon(self, node: str, path: str) -> float:
        share = (xxhash.xxh3_64_intdigest(f"{node} {path.removeprefix(self._root)}".encode()) % 1000) / 1000
        return self.clock() - share * self._hidden_s


class NodeFS(FileSystem):
    """The filesystem as one process sees it. Nothing is synced: a simulated crash loses no page cache."""

    def __init__(self, disk: Disk, node: str) -> None:
        self._disk, self._node = disk, node

    def append(self, path: Path, data: bytes) -> None:
        self._disk.check(self._node)
        share = self._disk.share_written(self._node)
        if share > 0:
            super().append(path, data[: int(len(data) * min(share, 1.0))])
            self._disk.wrote(self._node, str(path), path.stat().st_size)
        self._die_after(share)

    def overwrite(self, path: Path, data: bytes) -> None:
        self._disk.check(self._node)
        super().overwrite(path, data)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        self._disk.check(self._node)
        if not self._disk.shows(self._node, str(path)):
            raise FileNotFoundError(2, "not visible yet", str(path))
        data = super().read(path, offset, limit)
        return data[: max(0, self._disk.visible_size(self._node, str(path), offset + len(data)) - offset)]

    def sync(self, path: Path) -> None:
        self._disk.check(self._node)

    def link(self, source: Path, target: Path) -> None:
        self._disk.check(self._node)
        super().link(source, target)
        self._disk.named(self._node, str(target))

    def rename(self, source: Path, target: Path) -> None:
        self._disk.check(self._node)
        share, existed = self._disk.share_written(self._node), target.exists()
        if share > 0.5:
            super().rename(source, target)
            if not existed:
                self._disk.named(self._node, str(target))
        self._die_after(share)

    def listdir(self, path: Path) -> list[str]:
        self._disk.check(self._node)
        folder = f"{path}/"
        return [name for name in super().listdir(path) if self._disk.shows(self._node, folder + name)]

    def _die_after(self, share: float) -> None:
        if share <= 1.0:
            raise Killed(self._node)


Steps = Iterator[None]
RoleSteps = Callable[["Process"], Steps]


class Process:
    """One attempt of one role: a context, its steps, its heartbeat."""

    def __init__(self, cluster: SimCluster, writer: str, attempt: int, steps: RoleSteps) -> None:
        self.cluster, self.writer, self.attempt = cluster, writer, attempt
        self.node = f"{writer}.a{attempt}"
        self.rng = random.Random(f"{cluster.seed}/{self.node}")
        self.sleep: Callable[[float], None] = cluster.clock.advance
        """What its code does to sleep."""
        self.context = RoleContext(
            cluster.run, cluster.paths, writer, attempt, token=cluster.token(writer, attempt), job_id=f"job-{self.node}",
            fs=NodeFS(cluster.disk, self.node), clock=cluster.clock, sleep=self._sleep,
        )  # fmt: skip
        self.end = ""
        """`` while it lives; else killed, lost (its lease), failed, left or done."""
        self.has_started = False
        """Set by the role once an OSError is no longer a reason to end."""
        self.frozen_until = 0.0
        self.orchestrator: Orchestrator | None = None
        self._steps = self._run(steps)
        self._next_beat = self._next_look = 0.0

    @property
    def lives(self) -> bool:
        """It may be stepped."""
        return not self.end

    def _sleep(self, seconds: float) -> None:
        self.sleep(seconds)

    def step(self) -> None:
        """One step and the heartbeat of that time, unless it is frozen."""
        now = self.cluster.clock()
        if not self.lives or now < self.frozen_until:
            return
        try:
            self._beat(now)
            next(self._steps)
        except StopIteration:
            self.end = "done" if self.cluster.is_done(self.writer) else "left"
        except LeaseLost:
            self.end = "lost"
        except Killed:
            self.end = "killed"
        except OSError:
            if self.has_started:
                raise
            self.end = "failed"
        if self.end:
            self.context.metrics.close()

    def _run(self, steps: RoleSteps) -> Steps:
        self.context.take_lease()
        self.context.paths.heartbeats.mkdir(parents=True, exist_ok=True)
        self._next_beat = self.cluster.clock()
        self._next_look = self.cluster.clock() + self.context.timing.lease_s
        yield
        yield from steps(self)

    def _beat(self, now: float) -> None:
        """What the heartbeat thread of a real role does."""
        if self._next_beat and now >= self._next_beat:
            self._next_beat = now + self.context.timing.lease_s / 8
            try:
                self.context.beat()
                if now >= self._next_look:
                    self._next_look = now + self.context.timing.lease_s
                    self.context.leases_check_in_background()
            except OSError:
                return


def token(writer: str, attempt: int) -> str:
    """The token that the supervisor's intent gives an attempt."""
    return f"token-{writer}-{attempt}"


@dataclass(order=True)
class _Start:
    at_s: float
    writer: str
    attempt: int = field(compare=False)


class SimCluster:
    """Run directory, processes, and a supervisor that does what it is told."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        recipe: Recipe | None = None,
        timing: Timing = TIMING,
        hidden_s: float | None = None,
        real_files: bool = False,
        roles: dict[str, RoleSteps] | None = None,
    ) -> None:
        """`hidden_s`: how late other nodes see a write, at most (default: nearly visibility_s). `roles`: by role name."""
        from tests.protocol.simulation_roles import ROLES

        self.seed, self.rng, self.real_files = seed, random.Random(seed), real_files
        self.clock = Clock()
        self.disk = Disk(self.clock, 0.9 * timing.visibility_s if hidden_s is None else hidden_s, folder)
        self.paths = RunPaths(folder)
        self.recipe = recipe or simulated_recipe()
        self.run = RunConfig(
            run_id=RUN_ID, recipe=self.recipe, timing=timing, cluster={}, code_digest="code", base_model_digest="base",
            created_s=0.0,
        )  # fmt: skip
        folder.mkdir(mode=0o755, exist_ok=True)
        for part in (self.paths.leases, self.paths.heartbeats, self.paths.done("x").parent):
            part.mkdir(exist_ok=True)
        publish_bytes(FileSystem(), self.paths.run_file, self.run.model_dump_json().encode())
        self._roles = {**ROLES, **(roles or {})}
        self.processes: list[Process] = []
        self.attempts: dict[str, int] = {}
        self._starts: list[_Start] = []
        self.ticks = 0
        self.rollbacks = Rollbacks()
        self.epoch = 0
        self._supervisor = self._open_supervisor()

    # --- the supervisor ----------------------------------------------------------------------------------------------

    def token(self, writer: str, attempt: int) -> str:
        """What its intent gives an attempt."""
        return token(writer, attempt)

    def start(self, *writers: str) -> None:
        """First attempts; of all roles when none is named."""
        for writer in writers or tuple(all_writers(self.recipe)):
            self._begin(writer, 1)

    def replace(self, writer: str, after_s: float = 0.0) -> int:
        """Retires the newest attempt and starts another; a worker's work moves by a tombstone at once. Returns its number."""
        attempt = self.attempts[writer] + 1
        if split_writer(writer)[0] in ("rollout", "grader"):
            self._leases.tombstone(writer, attempt, "grave")
            attempt += 1
        self.attempts[writer] = attempt
        self._starts.append(_Start(self.clock() + after_s, writer, attempt))
        return attempt

    def newest(self, writer: str) -> Process:
        """The process of the highest attempt that was started."""
        return max((process for process in self.processes if process.writer == writer), key=lambda process: process.attempt)

    def close(self) -> None:
        """The supervisor's last record and completion of all metrics."""
        self._supervisor.write(RunClosed(state="COMPLETED", unix_s=self.clock()))
        for process in self.processes:
            process.context.metrics.close()

    def roll_back(self) -> Rollback:
        """A rollback in an epoch of its own; then a supervisor that starts everybody again."""
        rollback = roll_back(self.take_epoch())
        self._supervisor = self._open_supervisor()
        self.rollbacks = self.supervisor_context.rollbacks
        for writer in all_writers(self.recipe):
            self.attempts[writer] = rollback.attempts[writer] + 1
            self._starts.append(_Start(self.clock() + self.rng.uniform(0, 6), writer, self.attempts[writer]))
        return rollback

    def end_jobs(self, why: str, zombies: tuple[str, ...]) -> None:
        """All jobs end, but for zombies, which stand still for a while; every writer is retired and the run closed."""
        for process in filter(lambda process: process.lives, self.processes):
            if process.writer in zombies:
                process.frozen_until = self.clock() + self.rng.uniform(2, 25)
            else:
                process.end = "killed"
        for writer in all_writers(self.recipe):
            if not self.is_done(writer) and self.newest(writer).attempt == self.attempts[writer]:
                self._leases.tombstone(writer, self.attempts[writer] + 1, "grave")
        self._starts.clear()
        self._supervisor.write(RunClosed(state="NEEDS_ROLLBACK", detail=why, unix_s=self.clock()))

    def take_epoch(self) -> RoleContext:
        """The next epoch's context, with its lease."""
        self.epoch += 1
        context = RoleContext(
            self.run, self.paths, "supervisor-0", self.epoch, token=token("supervisor-0", self.epoch),
            fs=NodeFS(self.disk, f"supervisor-0.a{self.epoch}"), clock=self.clock, sleep=self.clock.advance,
        )  # fmt: skip
        context.leases.acquire("supervisor-0", self.epoch, context.token)
        return context

    def _open_supervisor(self) -> JournalWriter:
        context = self.supervisor_context = self.take_epoch()
        self._leases = context.leases
        journal, accepted = open_journal(context)
        self._collector = Collector(context, journal.write)
        for item in accepted:
            if isinstance(item.record, Deletion):
                self._collector.fold(item.record)
        return journal

    def _begin(self, writer: str, attempt: int) -> None:
        self.attempts[writer] = max(attempt, self.attempts.get(writer, 0))
        if attempt > 1:
            old = self.newest(writer)
            self._supervisor.append(
                JobEnded(writer=writer, attempt=old.attempt, job_id=old.context.job_id, cause="unknown", state=old.end or "?")
            )
        self._supervisor.append(Intent(writer=writer, attempt=attempt, token=token(writer, attempt), reason="simulated"))
        self._supervisor.write(Submitted(writer=writer, attempt=attempt, job_id=f"job-{writer}.a{attempt}"))
        self.processes.append(Process(self, writer, attempt, self._roles[split_writer(writer)[0]]))

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """A little time passes; some processes take a step, in a drawn order."""
        self.ticks += 1
        self.clock.advance(self.rng.uniform(0.1, 0.6))
        for due in sorted(start for start in self._starts if start.at_s <= self.clock()):
            self._starts.remove(due)
            if self.attempts[due.writer] == due.attempt:
                self._begin(due.writer, due.attempt)
        self._replace_ended()
        living = [process for process in self.processes if process.lives]
        for process in self.rng.sample(living, len(living)):
            if self.rng.random() < 0.8:
                process.step()
        if self.real_files:
            self._collector.tick()

    def _replace_ended(self) -> None:
        """Whatever ended without a completion record is started again."""
        for writer, attempt in list(self.attempts.items()):
            process = self.newest(writer)
            if process.attempt == attempt and not process.lives and not self.is_done(writer):
                self.replace(writer, after_s=self.rng.uniform(0, 6))

    def run_until(self, condition: Callable[[], bool], most_ticks: int = 20_000) -> None:
        """Ticks until the condition holds; AssertionError, with every role's state, when that takes too many."""
        last = self.ticks + most_ticks
        while not condition():
            assert self.ticks < last, f"seed {self.seed}: no end after {self.ticks} ticks: {self.describe()}"
            self.tick()

    def run_to_the_end(self, most_ticks: int = 20_000) -> None:
        """Until every role's newest attempt wrote its completion record."""
        self.run_until(self.is_over, most_ticks)

    def is_over(self) -> bool:
        """Every role of the recipe is done."""
        return all(self.is_done(writer) for writer in all_writers(self.recipe))

    def read_done(self, writer: str) -> Done | None:
        """The completion record that counts."""
        path = self.paths.done(writer)
        done = Done.model_validate_json(path.read_bytes()) if path.exists() else None
        return done if done is not None and self.rollbacks.precede(writer, done.attempt) else None

    def is_done(self, writer: str) -> bool:
        """The role's completion record is there and counts."""
        return self.read_done(writer) is not None

    def describe(self) -> str:
        """Every process in a few words."""
        return "; ".join(f"{process.node} {process.end or process.context.state}" for process in self.processes)


KILLS = ("kill", "freeze", "ghost", "drain")


def hurt(cluster: SimCluster, writer: str, how: str) -> None:
    """Something befalls the newest attempt of a role, and the supervisor replaces it a while later.

    kill: it dies in one of its next writes. freeze: it stands still and goes on after its successor started.
    ghost: it is replaced though it works. drain: it is asked to leave.
    """
    process, rng = cluster.newest(writer), cluster.rng
    if how == "kill":
        cluster.disk.deaths[process.node] = (rng.randrange(6), rng.random())
        return  # It is replaced once it is dead.
    if how == "freeze":
        process.frozen_until = cluster.clock() + rng.uniform(2, 25)
    elif how == "drain":
        process.context.leave.set()
    cluster.replace(writer, after_s=rng.uniform(0, 6))


def stall(cluster: SimCluster, seconds: float, node: str = "") -> None:
    """The filesystem refuses everything, on one node or on all."""
    cluster.disk.failing_until[node] = cluster.clock() + seconds


def finished_run(
    folder: Path, *, steps: int = 4, seed: int = 0, kills: tuple[str, ...] = (), recipe: Recipe | None = None
) -> Path:
    """A run directory of a run that ended, with real shards and versions.

    `kills`: `writer` or `writer:how`, one every 6 simulated seconds.
    """
    cluster = SimCluster(folder, seed=seed, recipe=recipe or simulated_recipe(steps=steps), real_files=True)
    cluster.start()
    for kill in kills:
        due_s = cluster.clock() + 6
        cluster.run_until(lambda due_s=due_s: cluster.clock() >= due_s or cluster.is_over())  # type: ignore[misc]
        writer, _, how = kill.partition(":")
        hurt(cluster, writer, how or "kill")
    cluster.run_to_the_end()
    cluster.close()
    return folder
