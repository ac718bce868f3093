"""Finds or prepares a model's directory, with a progress bar on stderr while it is prepared."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.checkpoints import checkpoint_dir


def prepared_checkpoint(model: str) -> Path:
    """The directory of `model`, a directory or a known name; a bar shows only if there is work."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(f"Preparing {model} (once)", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total or None)

    try:
        return checkpoint_dir(model, show)
    finally:
        bar.stop()
