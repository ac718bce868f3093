"""The contract of the `phalanx.checkpoints` entry-point group: named models that are prepared from
an installed package the first time they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """Told now and then how much of the work is done; `total` may be 0 while it is unknown."""

    def __call__(self, done: int, total: int) -> None: ...


class CheckpointSource(Protocol):
    """Makes a named model's Hugging Face directory under `cache_dir`, or finds it made.

    Safe to call from several processes at once; a call that is killed leaves nothing that a later
    one could take for complete. Raises `MissingDependencyError` or `CheckpointError`.
    """

    def __call__(self, cache_dir: Path, progress: Progress) -> Path: ...
