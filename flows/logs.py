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
        is_last = not follow or read_closed(run, paths) is not None
        for writer in writers:
            for attempt, path in _log_files(paths, writer):
                offsets[path] = _print_new(path, offsets.get(path, 0), f"{writer} {attempt}", is_last=is_last)
        if is_last:
            return
        time.sleep(_POLL_S)


def _log_files(paths: RunPaths, writer: str) -> list[tuple[int, Path]]:
    """(attempt, file), ascending."""
    found = paths.logs(writer, 0).parent.glob("attempt_*/*.out")
    return sorted((int(path.parent.name.removeprefix("attempt_")), path) for path in found)


def _print_new(path: Path, offset: int, label: str, *, is_last: bool) -> int:
    """Prints whole new lines, at the end also a broken one; returns the position behind them."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n") and not is_last:
                    break
                offset += len(line)
                print(f"{label}| {line.decode(errors='replace').rstrip()}", flush=True)
    except (FileNotFoundError, PermissionError) as error:
        print(f"{label}| ({path} is not readable: {error.strerror})", flush=True)
    return offset
