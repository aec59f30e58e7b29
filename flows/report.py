"""`miles report RUN`: reports/index.html, for a live run, too."""

from __future__ import annotations

from pathlib import Path

from miles_core.run import read_run
from miles_core.tracking.report import write_report


def build_report(root: Path) -> Path:
    """Builds the page of the run in `root` and returns its path. Raises RunDirectoryError, OSError."""
    run, paths = read_run(root)
    return write_report(run, paths)
