"""Ids of the requests that this server has given to its engine and that have not ended."""

from __future__ import annotations

from collections.abc import Callable


class LiveRequests:
    """Finds requests by the beginning of their id; `cancel` ends one of them in the engine."""

    def __init__(self, cancel: Callable[[str], bool]) -> None:
        self._cancel = cancel
        self._rids: set[str] = set()

    def __len__(self) -> int:
        return len(self._rids)

    def add(self, rid: str) -> None:
        self._rids.add(rid)

    def discard(self, rid: str) -> None:
        self._rids.discard(rid)

    def abort(self, prefix: str) -> int:
        """Cancel every request whose id begins with `prefix`; how many there were."""
        found = [rid for rid in self._rids if rid.startswith(prefix)]
        return sum(self._cancel(rid) for rid in found)
