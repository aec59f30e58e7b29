"""The request to drain a run: all its jobs leave with their work saved, nobody is started, and the run goes on later.

It is a file beside the request to cancel, so it outlives whoever made it and whoever supervises: each supervisor obeys it
until it is lifted. Two deadlines bound the wait (I15): jobs that have not left after `leave_s` are named, and those still there
`drain_s` of the cluster profile later are cancelled.
"""

from __future__ import annotations

import logging

from pydantic import Field, ValidationError

from miles_core.errors import RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.recipe import Closed
from miles_core.store.fs import FileSystem
from miles_core.store.publish import publish_bytes

log = logging.getLogger("miles")

LEAVE_S = 300.0
"""A learner writes a checkpoint, a replica ends its episodes."""


class DrainRequest(Closed):
    """Content of the request."""

    leave_s: float = Field(default=LEAVE_S, gt=0)
    """Jobs that have not left by themselves after this long are named."""


def request_drain(paths: RunPaths, request: DrainRequest) -> None:
    """Asks the run's supervisor, this or the next one; a newer request replaces the older."""
    publish_bytes(FileSystem(), paths.drain_request, request.model_dump_json().encode())


def read_drain_request(fs: FileSystem, paths: RunPaths) -> DrainRequest | None:
    """The request, if there is one. Raises OSError; a file that says nothing sensible is a request all the same."""
    try:
        data = fs.read(paths.drain_request)
    except FileNotFoundError:
        return None
    try:
        return DrainRequest.model_validate_json(data)
    except ValidationError:
        return DrainRequest()


def drain_mark(paths: RunPaths) -> tuple[int, int] | None:
    """Tells a request from a newer one; None without any. Raises OSError."""
    try:
        found = paths.drain_request.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def lift_drain(paths: RunPaths, mark: tuple[int, int] | None) -> bool:
    """Takes the request of this mark back; True if it was there. A newer one stays. Raises RunDirectoryError, OSError."""
    if mark is None or drain_mark(paths) != mark:
        return False
    try:
        paths.drain_request.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunDirectoryError(
            f"{paths.drain_request}: {error.strerror}; while it is there every supervisor drains the run: remove it"
        ) from error
    log.warning("%s goes on after a request to drain it", paths.root)
    return True
