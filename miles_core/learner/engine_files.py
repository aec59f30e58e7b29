"""How DeepSpeed's checkpoint files get to disk and back.

DeepSpeed writes while its ranks wait for each other: a full disk on one of them would hang or break them all. Here saving only
collects; the files are written afterwards, when no rank waits for another, so that a refusal is an OSError that may be tried
again. Loading unpickles, so it reads nothing but the announced files, each checked on the node that reads it, right before
(I17).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from miles_core.errors import DigestMismatch
from miles_core.records import FileDigest
from miles_core.store.publish import check_file


class EngineFiles(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's interface to storage: see module."""

    def __init__(self) -> None:
        super().__init__()
        self._collected: dict[Path, Any] = {}
        self._announced: dict[Path, FileDigest] = {}

    def create(self, info: Any) -> None:
        """Nothing is kept of an earlier save that did not come to its end."""
        self._collected = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are made when the files are written."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keeps it for write(); the tensors are the engine's own, so that comes before the next step."""
        self._collected[Path(path)] = state_dict

    def write(self, folder: Path) -> tuple[str, ...]:
        """Writes what was collected and returns the names, relative to `folder`. Raises OSError."""
        for path, state in self._collected.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Through a file of ours: torch's own gives no OSError for a full disk.
            with open(path, "wb") as file:
                torch.save(state, file)
        names = tuple(str(path.relative_to(folder)) for path in self._collected)
        self._collected = {}
        return names

    def expect(self, folder: Path, files: Sequence[FileDigest]) -> None:
        """These files may be loaded from now on, and no others."""
        self._announced = {folder / file.name: file for file in files}

    def load(self, path: str, map_location: Any = None) -> Any:
        """Unpickles an announced file. Raises DigestMismatch, OSError."""
        file = self._announced.get(Path(path))
        if file is None:
            raise DigestMismatch(f"{path} is not among the announced files of its checkpoint; it is not loaded")
        check_file(Path(path), file.size_bytes, file.digest)
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Whether a checkpoint counts is said by the journal."""
        return True
