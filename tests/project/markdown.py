"""Code blocks of the documentation."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The blocks of these languages on all pages, in order."""
    found = []
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        start = None
        for number, line in enumerate(lines, 1):
            if not line.startswith("```"):
                continue
            if start is None:
                start = number
                continue
            language = lines[start - 1].removeprefix("```").strip()
            if language in languages:
                found.append(Block(page, start, language, "\n".join(lines[start : number - 1])))
            start = None
        assert start is None, f"{page.name}: a block is not closed"
    return found


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block as words, which may go on in the next line after a backslash; a
    quoted argument may span lines as well.
    """
    found: list[list[str]] = []
    pending = ""
    for line in block.text.splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending.replace("\\\n", ""), comments=True)
        except ValueError:
            continue
        if words:
            found.append(words)
        pending = ""
    assert not pending, f"{block}: an argument is not closed"
    return found
