"""Texts and times, in the form in which all commands show them."""

from __future__ import annotations

from pathlib import Path


def on_one_line(text: str) -> str:
    """The first line, and of more, such as the end of a log, the last one too."""
    first, *more = text.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more else first


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> str:
    """What is said of a file that is not there, or is no text."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot read {path}: {why}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
