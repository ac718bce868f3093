"""Finds or prepares a model's directory, with a progress bar on stderr while it is prepared."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.checkpoints import checkpoint_dir


class _Bar:
    """A progress bar that appears with the first report."""

    def __init__(self, text: str, screen: ExitStack) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(text, total=None)
        self._screen = screen
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if not self._shown:
            self._screen.enter_context(self._progress)
            self._shown = True
        self._progress.update(self._task, completed=done, total=total or None)


def prepared_checkpoint(model: str) -> Path:
    """The directory of `model`, a directory or a known name; a bar shows only if there is work."""
    with ExitStack() as screen:
        return checkpoint_dir(model, _Bar(f"Preparing {model} (once)", screen))
