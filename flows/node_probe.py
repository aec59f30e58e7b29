"""One of two ranks that show each other files: `srun python -I -S node_probe.py FOLDER ROUNDS SECONDS`. Standard library only.

Rank 0 makes a name, rank 1 answers with another one; then the same with a line appended to a file, as journals grow. Each
round is timed by rank 0's own monotonic clock, there and back, so no two clocks are compared. result.json holds the times.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.005


def node_name() -> str:
    """As Slurm calls this node; virtual ones share a host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Late(Exception):
    """The other one was not seen in time."""


def wait_until(look: Callable[[], bool], deadline: float, what: str) -> None:
    while not look():
        if time.monotonic() > deadline:
            raise Late(what)
        time.sleep(POLL_S)


def publish(path: Path, text: str) -> None:
    """Whole or not at all."""
    temp = path.with_name(f".{path.name}")
    temp.write_text(text)
    temp.rename(path)


def append_line(path: Path) -> None:
    """As a journal: open, append, sync, close."""
    with open(path, "a") as file:
        file.write("x\n")
        file.flush()
        os.fsync(file.fileno())


def lines_in(path: Path) -> int:
    """As a reader of a journal: open, read, close."""
    try:
        return path.read_text().count("\n")
    except FileNotFoundError:
        return 0


def lead(folder: Path, rounds: int, deadline: float) -> dict[str, object]:
    """Rank 0."""
    result: dict[str, object] = {"nodes": [node_name()], "names_s": [], "lines_s": [], "clock_s": [], "error": ""}
    names, lines, clocks = [], [], []
    try:
        wait_until(lambda: "hello" in os.listdir(folder), deadline, "the other rank")
        result["nodes"] = [node_name(), (folder / "hello").read_text()]
        for number in range(1, rounds + 1):
            start, began = time.monotonic(), time.time()
            publish(folder / f"ask-{number}", "")
            wait_until(lambda n=number: f"answer-{n}" in os.listdir(folder), deadline, f"the answer to name {number}")  # type: ignore[misc]
            names.append(time.monotonic() - start)
            clocks.append(float((folder / f"answer-{number}").read_text()) - (began + time.time()) / 2)
            start = time.monotonic()
            append_line(folder / "journal-0")
            wait_until(lambda n=number: lines_in(folder / "journal-1") >= n, deadline, f"the answer to line {number}")  # type: ignore[misc]
            lines.append(time.monotonic() - start)
    except Late as late:
        result["error"] = f"{late} was not seen in time"
    return {**result, "names_s": names, "lines_s": lines, "clock_s": clocks}


def follow(folder: Path, rounds: int, deadline: float) -> None:
    """Rank 1."""
    publish(folder / "hello", node_name())
    for number in range(1, rounds + 1):
        wait_until(lambda n=number: f"ask-{n}" in os.listdir(folder), deadline, f"name {number}")  # type: ignore[misc]
        publish(folder / f"answer-{number}", repr(time.time()))
        wait_until(lambda n=number: lines_in(folder / "journal-0") >= n, deadline, f"line {number}")  # type: ignore[misc]
        append_line(folder / "journal-1")


def main() -> None:
    folder, rounds, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    deadline = time.monotonic() + seconds
    if os.environ.get("SLURM_PROCID", "0") == "0":
        publish(folder / "result.json", json.dumps(lead(folder, rounds, deadline)))
        return
    try:
        follow(folder, rounds, deadline)
    except Late as late:
        print(f"{late} was not seen in time", flush=True)


if __name__ == "__main__":
    main()
