"""A shared filesystem in memory that misbehaves on purpose, the same way for the same seed.

One `Server` holds what was written; each node sees it through a `FaultyFS` of its own. What another node wrote (names, bytes,
also part of one append) shows up to `visibility_s` later, separately for listing and for opening a name. Bytes that were synced
before their file was renamed or linked are there as soon as the new name can be opened, as with NFS close-to-open; bytes that
were not synced may come later. With `holes` a later write may show before an earlier one, which then reads as zeros.

Faults are scripted (`fail`) or random (`rate`). A writer that goes on after its cut needs no fault: a test goes on using it.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, settings

from miles_core.store.fs import FileSystem

T = TypeVar("T")

PROPERTY = settings(
    deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
"""Settings of every property test here."""


class FakeClock:
    """Seconds that pass only by `advance`, which is also its sleep."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Fault(Enum):
    """What goes wrong in one call."""

    ERROR = "nothing is done, EIO"
    STALE = "nothing is done, ESTALE"
    FULL = "nothing is done, ENOSPC"
    SHORT = "a prefix is written, then ENOSPC"
    ZEROS = "a prefix is written and zeros for the rest, then EIO"
    UNREPORTED = "done, but reported as failed (link: EEXIST)"
    HANG = "it takes hang_s, then it is done"
    STOP = "done, but the caller goes on hang_s later"


_NOTHING_DONE = {Fault.ERROR: errno.EIO, Fault.STALE: errno.ESTALE, Fault.FULL: errno.ENOSPC}
POSSIBLE: dict[str, tuple[Fault, ...]] = {
    "append": (Fault.ERROR, Fault.FULL, Fault.SHORT, Fault.ZEROS, Fault.UNREPORTED, Fault.HANG, Fault.STOP),
    "overwrite": (Fault.ERROR, Fault.SHORT, Fault.HANG, Fault.STOP),
    "read": (Fault.STALE, Fault.HANG, Fault.STOP),
    "sync": (Fault.ERROR, Fault.UNREPORTED, Fault.HANG, Fault.STOP),
    "link": (Fault.ERROR, Fault.UNREPORTED, Fault.HANG, Fault.STOP),
    "rename": (Fault.ERROR, Fault.UNREPORTED, Fault.HANG, Fault.STOP),
    "listdir": (Fault.STALE, Fault.HANG, Fault.STOP),
    "mkdir": (Fault.FULL,),
    "unlink": (Fault.STALE,),
    "is_same_file": (Fault.STALE,),
}


@dataclass
class _Event:
    """Something one node did; others see it later."""

    at_s: float
    node: str
    seen_s: dict[str, float] = field(default_factory=dict)


@dataclass
class _Write(_Event):
    offset: int = 0
    data: bytes = b""
    is_synced: bool = False
    is_public: bool = False


@dataclass
class _File:
    settled: bytearray = field(default_factory=bytearray)
    writes: list[_Write] = field(default_factory=list)
    size: int = 0


@dataclass
class _Name(_Event):
    """`leads_to` from here on; None: the name is gone."""

    leads_to: _File | None = None


class Server:
    """What was written, by whom and when."""

    def __init__(
        self, clock: FakeClock, visibility_s: float, *, seed: int = 0, holes: bool = False, hang_s: float | None = None
    ) -> None:
        self.clock, self.visibility_s, self.holes = clock, visibility_s, holes
        self.hang_s = visibility_s if hang_s is None else hang_s
        self.meanwhile: Callable[[float], None] = clock.advance
        """What all others do while a call hangs; at least time passes."""
        self.random = random.Random(seed)
        self.lag: dict[str, float] = {}
        """Share of visibility_s by which a node sees everything late; others differ from event to event."""
        self.names: dict[Path, list[_Name]] = {}
        self.listings: dict[Path, set[Path]] = defaultdict(set)

    def node(self, name: str, *, rate: float = 0.0) -> FaultyFS:
        """The filesystem as node `name` sees it."""
        return FaultyFS(self, name, rate=rate)

    def delay_s(self, node: str) -> float:
        """How late `node` sees one event of another node."""
        share = self.random.choice((0.0, self.random.random(), 1.0))
        return self.lag.get(node, share) * self.visibility_s

    def seen_s(self, event: _Event, node: str, kind: str = "") -> float:
        """When `node` sees an event."""
        if node == event.node:
            return event.at_s
        return event.seen_s.setdefault(node + kind, event.at_s + self.delay_s(node))

    def current(self, path: Path) -> _File | None:
        """What a name leads to on the server."""
        return self.names[path][-1].leads_to if path in self.names else None

    def view(self, path: Path, node: str, kind: str) -> _File | None:
        """What a name leads to as `node` sees it when it lists (kind `list`) or opens (`open`)."""
        found = None
        for entry in self.names.get(path, []):
            if self.seen_s(entry, node, kind) > self.clock():
                break
            found = entry.leads_to
        return found

    def set_name(self, path: Path, node: str, leads_to: _File | None) -> None:
        """Makes, moves or removes a name."""
        self.names.setdefault(path, []).append(_Name(self.clock(), node, leads_to=leads_to))
        self.listings[path.parent].add(path)

    def write(self, file: _File, node: str, offset: int, data: bytes) -> None:
        """Adds bytes, in two parts that may show at different times."""
        middle = self.random.randint(0, len(data))
        for start, part in ((0, data[:middle]), (middle, data[middle:])):
            if part:
                file.writes.append(_Write(self.clock(), node, offset=offset + start, data=part))
        file.size = max(file.size, offset + len(data))

    def content(self, file: _File, node: str) -> bytes:
        """A file's bytes as `node` sees them."""
        self._settle(file)
        data = bytearray(file.settled)
        for write in file.writes:
            if not write.is_public and self.seen_s(write, node) > self.clock():
                if self.holes:
                    continue
                break
            _put(data, write.offset, write.data)
        return bytes(data)

    def _settle(self, file: _File) -> None:
        """Keeps reads cheap: what all nodes must see by now needs no bookkeeping."""
        while file.writes and file.writes[0].at_s + self.visibility_s <= self.clock():
            write = file.writes.pop(0)
            _put(file.settled, write.offset, write.data)


def _put(data: bytearray, offset: int, new: bytes) -> None:
    data.extend(bytes(max(0, offset + len(new) - len(data))))
    data[offset : offset + len(new)] = new


class FaultyFS(FileSystem):
    """One node's view of a Server."""

    def __init__(self, server: Server, node: str, *, rate: float = 0.0) -> None:
        self.server, self.name = server, node
        self.rate = rate
        """Share of calls that fail at random."""
        self.calls: Counter[str] = Counter()
        self._offset_s = server.random.uniform(-1e5, 1e5)
        self._script: dict[str, deque[Fault | None]] = defaultdict(deque)

    def clock(self) -> float:
        """This node's own monotonic clock; it agrees with no other node's."""
        return self.server.clock() + self._offset_s

    def fail(self, operation: str, *faults: Fault | None) -> None:
        """The next calls of `operation` fail so; None: that call does not."""
        self._script[operation].extend(faults)

    def heal(self) -> None:
        """No faults any more; late visibility stays."""
        self._script.clear()
        self.rate = 0.0

    def append(self, path: Path, data: bytes) -> None:
        self._write("append", path, data)

    def overwrite(self, path: Path, data: bytes) -> None:
        self._write("overwrite", path, data)

    def read(self, path: Path, offset: int = 0, limit: int = -1) -> bytes:
        def perform() -> bytes:
            file = self.server.view(path, self.name, "open")
            if file is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            data = self.server.content(file, self.name)[offset:]
            return data if limit < 0 else data[:limit]

        return self._do("read", path, perform)

    def sync(self, path: Path) -> None:
        def perform() -> None:
            file = self.server.current(path)
            for write in file.writes if file is not None else []:
                write.is_synced = True

        self._do("sync", path, perform)

    def link(self, source: Path, target: Path) -> None:
        def perform() -> None:
            if self.server.current(target) is not None:
                raise FileExistsError(errno.EEXIST, "exists", str(target))
            self._name_again(source, target)

        self._do("link", target, perform)

    def rename(self, source: Path, target: Path) -> None:
        def perform() -> None:
            self._name_again(source, target)
            self.server.set_name(source, self.name, None)

        self._do("rename", target, perform)

    def listdir(self, path: Path) -> list[str]:
        def perform() -> list[str]:
            if self.server.view(path, self.name, "list") is None:
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
            inside = sorted(self.server.listings[path])
            return [name.name for name in inside if self.server.view(name, self.name, "list") is not None]

        return self._do("listdir", path, perform)

    def mkdir(self, path: Path) -> None:
        def perform() -> None:
            for folder in (*reversed(path.parents), path):
                if self.server.current(folder) is None:
                    self.server.set_name(folder, self.name, _File())
                # The answer "exists" tells a node of a folder that it did not see before.
                made = self.server.names[folder][-1]
                made.seen_s |= {self.name + "list": made.at_s, self.name + "open": made.at_s}

        self._do("mkdir", path, perform)

    def unlink(self, path: Path) -> None:
        def perform() -> None:
            if self.server.current(path) is not None:
                self.server.set_name(path, self.name, None)

        self._do("unlink", path, perform)

    def is_same_file(self, first: Path, second: Path) -> bool:
        def perform() -> bool:
            found = self.server.current(first)
            return found is not None and found is self.server.current(second)

        return self._do("is_same_file", first, perform)

    def _name_again(self, source: Path, target: Path) -> None:
        file = self.server.current(source)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(source))
        for write in file.writes:
            write.is_public = write.is_synced
        self.server.set_name(target, self.name, file)

    def _write(self, operation: str, path: Path, data: bytes) -> None:
        def perform(part: bytes = data) -> None:
            if self.server.current(path.parent) is None:
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
            file = self.server.current(path)
            if file is None:
                file = _File()
                self.server.set_name(path, self.name, file)
            self.server.write(file, self.name, file.size if operation == "append" else 0, part)

        def part_of_it(fault: Fault) -> None:
            # What another node saw of it stays so; the rest never comes.
            kept = data[: self.server.random.randint(0, max(0, len(data) - 1))]
            perform(kept if fault is Fault.SHORT else kept + bytes(len(data) - len(kept)))
            raise OSError(errno.ENOSPC if fault is Fault.SHORT else errno.EIO, fault.value, str(path))

        self._do(operation, path, perform, part_of_it)

    def _do(self, operation: str, path: Path, perform: Callable[[], T], part_of_it: Callable[[Fault], T] | None = None) -> T:
        self.calls[operation] += 1
        fault = self._next_fault(operation)
        if fault in _NOTHING_DONE:
            raise OSError(_NOTHING_DONE[fault], fault.value, str(path))
        if fault in (Fault.SHORT, Fault.ZEROS) and part_of_it is not None:
            return part_of_it(fault)
        if fault is Fault.HANG:
            self.server.meanwhile(self.server.hang_s)
        result = perform()
        if fault is Fault.STOP:
            self.server.meanwhile(self.server.hang_s)
        if fault is Fault.UNREPORTED:
            raise OSError(errno.EEXIST if operation == "link" else errno.EIO, fault.value, str(path))
        return result

    def _next_fault(self, operation: str) -> Fault | None:
        if self._script[operation]:
            return self._script[operation].popleft()
        if self.rate and self.server.random.random() < self.rate:
            return self.server.random.choice(POSSIBLE[operation])
        return None
