"""`miles logs`: the log files of all attempts, merged by line as they grow."""

from __future__ import annotations

import time
from pathlib import Path

from cluster.epoch import read_closed
from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.run import RunConfig, all_writers

_POLL_S = 0.5


def print_logs(run: RunConfig, paths: RunPaths, *, follow: bool, role: str | None) -> None:
    """Prints what there is; with `follow` until the run is closed. Raises RunDirectoryError for an unknown role."""
    writers = [writer for writer in all_writers(run.recipe) if role in (None, writer, writer.rpartition("-")[0])]
    if not writers:
        names = ", ".join(all_writers(run.recipe))
        raise RunDirectoryError(f"--role {role!r}: no such role in run {run.run_id}; there are {names}")
    offsets: dict[Path, int] = {}
    while True:
        closed = read_closed(run, paths) is not None
        for writer in writers:
            for path in sorted(paths.logs(writer, 0).parent.glob("attempt_*/*.out")):
                offsets[path] = _print_new(path, offsets.get(path, 0), f"{writer} {path.parent.name.removeprefix('attempt_')}")
        if not follow or closed:
            return
        time.sleep(_POLL_S)


def _print_new(path: Path, offset: int, label: str) -> int:
    """Prints whole new lines; returns the position behind them."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    for line in data[:whole].decode(errors="replace").splitlines():
        print(f"{label}| {line}", flush=True)
    return offset + whole
