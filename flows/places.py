"""Where runs are: the RUN argument of every command, the runs folder, and what run `resume`, `cancel` and `drain` are about."""

from __future__ import annotations

import os
from pathlib import Path

from miles_core.errors import RunDirectoryError

RUN_FILE = "run.json"


def runs_folder() -> Path:
    """MILES_RUNS, else ./runs."""
    return Path(os.environ.get("MILES_RUNS") or "runs")


def run_ids() -> list[str]:
    """Ids of the runs below the runs folder, the newest first; none where it cannot be read."""
    try:
        found = [(path.stat().st_mtime, path.parent.name) for path in runs_folder().glob(f"*/{RUN_FILE}")]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]


def find_run(name: str) -> Path:
    """The run directory of a RUN argument: a path, or an id below the runs folder. Raises RunDirectoryError."""
    folder = runs_folder()
    try:
        as_path = Path(name).expanduser()
        candidates = [as_path, folder / name] if name.strip() else []
        for candidate in candidates:
            if (candidate / RUN_FILE).exists():
                return candidate.resolve()
        if candidates and as_path.exists():
            return as_path.resolve()
        where = folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        # A name that is too long or holds a zero byte, a folder that may not be entered, `~nobody`.
        raise RunDirectoryError(f"RUN {name!r} cannot be looked for: {error}; `miles runs` lists the runs there are") from error
    raise RunDirectoryError(
        f"no run {name!r}: neither a run directory nor an id below {where}. Give a path, or run this where the runs folder is "
        f"(or set MILES_RUNS)"
    )
