"""The learner's ranks: who is who, how they meet, and how each notices within seconds that another one is gone.

Rank 0 is the learner to everybody else: it alone holds the lease, beats, writes and decides. Each other rank keeps one TCP
connection to it, over which commands go one way and answers the other, one JSON object a line. Nothing but the end of that
connection ends the wait for a command, which may last for hours; so the connection is also the watch: the kernel closes it
when a process dies, however it died, and a keepalive notices a host that vanished. Whoever sees it close says which rank was
lost and where, and ends its own process at once, also out of a collective that hangs; the supervisor replaces the whole role.
A process that was stopped, or hangs as a whole, keeps its connection: so each rank also sends a pulse, and one that rank 0 has
not heard for silent_s is lost, too.

Meeting: rank 0 publishes where it listens under its attempt (RunPaths.ranks), with the attempt's token and the job's id, so a
rank of another attempt, of a twin or of another run on the same host is never taken for a sibling. Ports are searched outside
the range that the kernel gives to outgoing connections and are held from then on. Ranks trust the network between the nodes, as
torch.distributed itself does; IPv4 only.

Failure: DeadlineExceeded names the ranks that did not come; RankLost the one that is gone, or that failed, and with what.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_core.errors import DeadlineExceeded, LeaseLost, MilesError, RankLost
from miles_core.learner.rank_line import Line, Message
from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.run import RunConfig
from miles_core.runtime.context import RoleContext
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from miles_core.store.publish import publish_bytes

log = logging.getLogger("miles")

WRITER = "learner-0"
JOIN_S = 300.0
"""All ranks start with one srun; beyond 2 x visibility_s they have this long to find each other."""
ANSWER_S = 1800.0
"""A command's answers come within this time of rank 0's own part; collectives have the same deadline."""
BLAME_S = 2.0
"""A collective that fails because a sibling died waits this long for the connections to say which one."""
HELLO_S, WELCOME_S = 5.0, 60.0
"""A stranger holds the door for HELLO_S at most; siblings behind it wait longer."""
ACCEPT_S = 0.2
LOOPBACK = "127.0.0.1"
FIRST_PORT = 10_000
PORT_TRIES = 100
SILENT_S = 60.0
"""A rank that is not heard for this long, or for lease_s if that is longer, stands still."""
PULSES = 8
"""A rank sends a pulse this often in that time."""
_LONG_GAP = 1 / 3
"""Of that time: after a longer pause of its own rank 0 starts its count again, as whoever judges a heartbeat (I4)."""

End = Callable[[int], object]
"""Ends the process at once, from any thread."""


@dataclass(frozen=True)
class Place:
    """Which of a job's ranks this process is."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Number among the ranks of this node."""

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Place:
        """From Slurm's own variables where the job has several ranks (MILES_RANKS). Raises MilesError if they do not agree."""
        ranks = int(env.get("MILES_RANKS", "1"))
        if ranks == 1:
            return cls()
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        seen = {name: env.get(name, "") for name in names}
        if not all(value.isdigit() for value in seen.values()) or int(seen["SLURM_NTASKS"]) != ranks:
            raise MilesError(
                f"the learner has {ranks} ranks (MILES_RANKS), but this process was started with {seen}; each rank is a task "
                f"of one srun, as in the job's script (`miles jobs`)"
            )
        return cls(int(seen["SLURM_PROCID"]), ranks, int(seen["SLURM_LOCALID"]))


class Meeting(Closed):
    """Where rank 0 of one attempt listens."""

    token: str
    """The attempt's."""
    job_id: str
    """The job's: a twin of the same attempt is another job."""
    pid: int
    hosts: tuple[str, ...]
    """Names of rank 0's node, as Slurm and as the node itself says."""
    machine: str
    """Who reads the same word here reaches it over the loopback."""
    port: int
    store_port: int
    """Where torch.distributed's store listens."""


# --- rank 0


class _Member:
    """A sibling, as rank 0 knows it."""

    def __init__(self, rank: int, where: str, line: Line) -> None:
        self.rank, self.line = rank, line
        self.name = f"rank {rank} ({where})"
        self.answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.watcher: threading.Thread | None = None
        self.heard_at = time.monotonic()


class Lead:
    """Rank 0's end of all connections. With one rank it does nothing."""

    def __init__(self, place: Place, *, silent_s: float = SILENT_S, end: End = os._exit) -> None:
        """`silent_s`: a rank that is not heard for so long stands still."""
        self.place, self._silent_s, self._end = place, silent_s, end
        self._members: dict[int, _Member] = {}
        self._lock, self._is_closing = threading.Lock(), False
        self._pending = ""
        """The command whose answers are not all here: the ranks are not in step."""
        self._store: socket.socket | None = None
        """Listens for torch.distributed's store."""

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.place.ranks == 1

    def gather(self, context: RoleContext) -> bool:
        """Waits until all ranks have joined; False when asked to leave before. Raises DeadlineExceeded."""
        if self.is_alone:
            return True
        self._store = open_port()
        with open_port() as listener:
            ports = (int(listener.getsockname()[1]), int(self._store.getsockname()[1]))
            meeting = self._meeting(context, ports)
            publish_bytes(context.fs, context.paths.ranks(context.attempt), meeting.model_dump_json().encode())
            until = context.clock() + JOIN_S + 2 * context.timing.visibility_s
            listener.settimeout(ACCEPT_S)
            while missing := [rank for rank in range(1, self.place.ranks) if rank not in self._members]:
                context.state = f"waiting: ranks {missing} to join"
                if context.leave.is_set():
                    return False
                if context.clock() > until:
                    raise DeadlineExceeded(
                        f"ranks {missing} of {self.place.ranks} have not joined {meeting.hosts} port {meeting.port} within "
                        f"{JOIN_S:.0f} s; their logs beside this one say what they saw (must the nodes' firewall let it pass?)"
                    )
                self._accept(listener, meeting)
        threading.Thread(target=self._listen_for_pulses, name="pulses", daemon=True).start()
        return True

    def _meeting(self, context: RoleContext, ports: tuple[int, int]) -> Meeting:
        names = dict.fromkeys((os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()))
        return Meeting(
            token=context.token, job_id=context.job_id, pid=os.getpid(), hosts=tuple(name for name in names if name),
            machine=this_machine(), port=ports[0], store_port=ports[1],
        )  # fmt: skip

    def _accept(self, listener: socket.socket, meeting: Meeting) -> None:
        try:
            connection, address = listener.accept()
        except OSError:
            return  # Nobody came, or was gone again.
        line = Line(connection)
        hello = line.receive_within(HELLO_S) or {}
        rank = hello.get("rank", 0)
        is_ours = (hello.get("token"), hello.get("job_id")) == (meeting.token, meeting.job_id)
        if not is_ours or rank in self._members or rank not in range(1, self.place.ranks):
            log.warning("a stranger at %s knocked at the ranks' port: %.200s", address, hello)
            line.close()
            return
        member = _Member(rank, str(hello.get("where")), line)
        self._members[member.rank] = member
        line.send(do="welcome", pulse_s=self._silent_s / PULSES)
        log.info("joined: %s", member.name)
        member.watcher = threading.Thread(target=self._watch, args=(member,), name=f"rank {rank}", daemon=True)
        member.watcher.start()

    def _watch(self, member: _Member) -> None:
        while (message := member.line.receive()) is not None:
            member.heard_at = time.monotonic()
            if "failed" in message:
                self._lose(member, f"failed: {message['failed']}")
            if "pulse" not in message:
                member.answers.put(message)
        self._lose(member, "is gone: its connection closed")

    def _listen_for_pulses(self) -> None:
        """Until one of the ranks stands still, or all leave."""
        looked_at = counts_from = time.monotonic()
        while not self._is_closing:
            time.sleep(self._silent_s / PULSES)
            now = time.monotonic()
            if now - looked_at > self._silent_s * _LONG_GAP:
                counts_from = now
            looked_at = now
            for member in list(self._members.values()):
                silent_s = now - max(member.heard_at, counts_from)
                if silent_s >= self._silent_s:
                    doing = f", in the middle of {self._pending!r}" if self._pending else ""
                    self._lose(member, f"stands still: not heard for {silent_s:.0f} s though its connection is open{doing}")

    def _lose(self, member: _Member, how: str) -> None:
        """The first loss is the cause of all others, so only that one is told."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        why = f"{member.name} {how}"
        log.error("%s; the ranks of an attempt end together", why)
        for other in list(self._members.values()):
            other.line.send(do="lost", why=why)
        self._end(RankLost.exit_code)

    def give_store(self) -> tuple[int, int]:
        """Port and descriptor of the socket for torch.distributed's store, which is the taker's from now on."""
        if self._store is None:
            raise RuntimeError("the ranks have not gathered")
        port = int(self._store.getsockname()[1])
        return port, self._store.detach()

    @property
    def address(self) -> str:
        """By which the other ranks reach this node; the loopback if they are all on it."""
        addresses = [member.line.own_address for member in self._members.values()]
        return next((address for address in addresses if not address.startswith("127.")), LOOPBACK)

    def tell(self, do: str, **what: Any) -> None:
        """A command to all other ranks. Rank 0 does its own part next, then takes their answers."""
        self._pending = do
        for member in self._members.values():
            member.line.send(do=do, **what)

    def answers(self) -> list[Message]:
        """What the others say to the command, in rank order. Raises RankLost for one that says nothing."""
        until = time.monotonic() + ANSWER_S
        found = []
        for _, member in sorted(self._members.items()):
            try:
                found.append(member.answers.get(timeout=max(0.0, until - time.monotonic())))
            except queue.Empty:
                raise RankLost(f"{member.name} has not answered {self._pending!r} within {ANSWER_S:.0f} s") from None
        self._pending = ""
        return found

    def close(self) -> None:
        """The others leave, too. In the middle of a command they end as after a death: they may hang in a collective."""
        if self._pending:
            # If a sibling's death broke the command off, its connection says so and ends this process.
            time.sleep(BLAME_S)
        with self._lock:
            self._is_closing = True
        broken = {"do": "lost", "why": f"rank 0 left in the middle of {self._pending!r}"}
        for member in self._members.values():
            member.line.send(**(broken if self._pending else {"do": "leave"}))
        until = time.monotonic() + BLAME_S
        for member in self._members.values():
            if member.watcher is not None:
                member.watcher.join(timeout=max(0.0, until - time.monotonic()))
            member.line.close()


# --- the other ranks


class Link:
    """Another rank's end of its connection to rank 0."""

    def __init__(self, line: Line, lead: str, meeting: Meeting, *, pulse_s: float, end: End = os._exit) -> None:
        self._line, self._lead, self._pulse_s, self._end = line, lead, pulse_s, end
        self.meeting = meeting
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="rank 0", daemon=True).start()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    @property
    def peer_address(self) -> str:
        """Rank 0's address, as this rank reached it."""
        return self._line.peer_address

    @property
    def own_address(self) -> str:
        """This node's address, as rank 0 sees it."""
        return self._line.own_address

    def command(self) -> Message:
        """The next command; rank 0 may have none for hours."""
        return self._commands.get()

    def answer(self, **answer: Any) -> None:
        """What this rank says to the command."""
        self._line.send(**answer)

    def fail(self, error: BaseException) -> None:
        """Tells why this rank ends. Later than rank 0 would say so itself, and unless a sibling's death explains it."""
        time.sleep(2 * BLAME_S)
        self._line.send(failed=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Rank 0 notices."""
        self._line.close()

    def _read(self) -> None:
        while (message := self._line.receive()) is not None:
            if message["do"] == "lost":
                self._die(message["why"])
            self._commands.put(message)
            if message["do"] == "leave":
                return
        self._die(f"{self._lead} is gone: its connection closed")

    def _beat(self) -> None:
        """As long as this process gets on; a pulse that cannot be sent is noticed by `_read`."""
        while self._line.send(pulse=True):
            time.sleep(self._pulse_s)

    def _die(self, why: str) -> None:
        log.error("%s; the ranks of an attempt end together", why)
        self._end(RankLost.exit_code)


@dataclass(frozen=True)
class Sibling:
    """What a rank other than 0 knows before it has joined."""

    place: Place
    run: RunConfig
    paths: RunPaths
    attempt: int
    token: str
    job_id: str

    def join(self, *, end: End = os._exit) -> Link:
        """Waits for rank 0 and connects. Raises LeaseLost (this job is a twin or superseded), DeadlineExceeded."""
        leases = LeaseFolder(FileSystem(), self.paths.leases, self.run.run_id)
        until = time.monotonic() + JOIN_S + 2 * self.run.timing.visibility_s
        told = ""
        while True:
            try:
                meeting = self._read_meeting()
                return self._connect(meeting, end)
            except OSError as error:
                trouble = str(error)
            self._check_leases(leases)
            if trouble != told:
                log.info("not joined yet: %s", trouble)
                told = trouble
            if time.monotonic() > until:
                raise DeadlineExceeded(f"rank {self.place.rank} has not reached rank 0 within {JOIN_S:.0f} s: {trouble}")
            time.sleep(self.run.timing.poll_s)

    def _read_meeting(self) -> Meeting:
        path = self.paths.ranks(self.attempt)
        try:
            meeting = Meeting.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise OSError(f"{path} is not whole: {error}") from error
        if (meeting.token, meeting.job_id) != (self.token, self.job_id):
            raise OSError(f"{path} is of job {meeting.job_id}, this is job {self.job_id}")
        return meeting

    def _connect(self, meeting: Meeting, end: End) -> Link:
        """OSError: not reached by any name."""
        near = (LOOPBACK,) if meeting.machine == this_machine() else ()
        troubles = []
        for host in (*near, *meeting.hosts):
            try:
                line = Line(socket.create_connection((host, meeting.port), timeout=HELLO_S))
                line.set_timeout(WELCOME_S)
            except OSError as error:
                troubles.append(f"{host} port {meeting.port}: {error}")
                continue
            where = f"pid {os.getpid()} on {node_name()}"
            line.send(token=self.token, job_id=self.job_id, rank=self.place.rank, where=where)
            welcome = line.receive() or {}
            if welcome.get("do") == "welcome":
                line.set_timeout(None)
                lead = f"rank 0 (pid {meeting.pid} on {meeting.hosts[0]})"
                log.info("joined %s at %s port %d", lead, host, meeting.port)
                return Link(line, lead, meeting, pulse_s=float(welcome["pulse_s"]), end=end)
            line.close()
            troubles.append(f"{host} port {meeting.port}: no welcome")
        raise OSError("; ".join(troubles))

    def _check_leases(self, leases: LeaseFolder) -> None:
        try:
            leases.check(WRITER, self.attempt)
            if leases.newest(WRITER) == self.attempt and leases.read(WRITER, self.attempt).job_id != self.job_id:
                raise LeaseLost(f"{WRITER} attempt {self.attempt} is held by another job: leaving", why="twin")
        except OSError as error:
            log.warning("leases not read: %s", error)


# --- this machine


def node_name() -> str:
    """As Slurm calls it, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def this_machine() -> str:
    """One word for all processes that share a kernel and a network namespace, whatever their nodes are called."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/net').st_ino}"


def ephemeral_ports() -> tuple[int, int]:
    """Lowest and highest port that the kernel gives to outgoing connections by itself."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)


def open_port() -> socket.socket:
    """Listens on a free port outside the ephemeral range, on all interfaces. Raises MilesError.

    A port inside could be some outgoing connection's at any time. Where the range leaves none, any port is taken.
    """
    low, high = ephemeral_ports()
    every = range(FIRST_PORT, 1 << 16)
    outside = [port for port in every if not low <= port <= high] or list(every)
    for port in random.sample(outside, min(PORT_TRIES, len(outside))):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(("", port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            log.debug("port %d is not free: %s", port, error)
            listener.close()
            continue
        return listener
    raise MilesError(f"no free TCP port on {node_name()} in {PORT_TRIES} tries between {outside[0]} and {outside[-1]}")
