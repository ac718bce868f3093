"""Ids of the requests that this server has given to its engine and that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LiveRequests:
    """Finds requests by the beginning of an id of theirs; `cancel` ends one in the engine."""

    def __init__(self, cancel: Callable[[str], bool]) -> None:
        self._cancel = cancel
        self._names: dict[str, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, rid: str) -> None:
        self._names[rid] = (rid,)

    def name_completions(self, rid: str, ids: Iterable[str]) -> None:
        """Let the request be found by the ids that its answer gives its completions, too."""
        if rid in self._names:
            self._names[rid] = (rid, *ids)

    def discard(self, rid: str) -> None:
        self._names.pop(rid, None)

    def abort(self, prefix: str) -> int:
        """Cancel every request with an id that begins with `prefix`; how many there were."""
        found = [
            rid
            for rid, names in self._names.items()
            if any(name.startswith(prefix) for name in names)
        ]
        return sum(self._cancel(rid) for rid in found)
