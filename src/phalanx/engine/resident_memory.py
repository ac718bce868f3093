"""How much of the host's memory processes hold."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path


def rss_bytes(pids: Iterable[int]) -> int:
    """The resident sets of these processes, all together; of one that has ended nothing.

    0 where the system does not tell.
    """
    return sum(map(_rss_bytes, set(pids)))


def _rss_bytes(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return int(fields[1]) * mmap.PAGESIZE if len(fields) > 1 else 0
