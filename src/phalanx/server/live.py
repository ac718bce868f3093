"""Ids of the requests that this server has given to its engine and that have not ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class LiveRequests:
    """Finds requests by the beginning of an id of theirs; `cancel` ends one in the engine."""

    def __init__(self, cancel: Callable[[str], bool]) -> None:
        self._cancel = cancel
        self._names: dict[str, tuple[str, ...]] = {}
        self._cancels: dict[str, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, rid: str, cancel: Callable[[], object] | None = None) -> None:
        """`cancel` ends it where the engine alone cannot."""
        self._names.setdefault(rid, (rid,))
        if cancel is not None:
            self._cancels[rid] = cancel

    def name_completions(self, rid: str, ids: Iterable[str]) -> None:
        """Let the request be found by the ids that its answer gives its completions, too."""
        if rid in self._names:
            self._names[rid] = (rid, *ids)

    def discard(self, rid: str) -> None:
        self._names.pop(rid, None)
        self._cancels.pop(rid, None)

    def abort(self, prefix: str) -> int:
        """Cancel every request with an id that begins with `prefix`; how many there were."""
        found = [
            rid
            for rid, names in self._names.items()
            if any(name.startswith(prefix) for name in names)
        ]
        return sum(self._ended(rid) for rid in found)

    def _ended(self, rid: str) -> bool:
        cancel = self._cancels.get(rid)
        if cancel is None:
            return self._cancel(rid)
        cancel()
        return True
