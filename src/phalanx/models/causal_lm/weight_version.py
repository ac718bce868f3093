"""Which version of the weights computed which tokens."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.schema.generate import VersionSpan

INITIAL_VERSION = "default"


class ServedVersion:
    """The version of the weights that a service computes with.

    `serial` grows with every update, also with one whose caller gave it no name.
    """

    def __init__(self) -> None:
        self.name = INITIAL_VERSION
        self.serial = 0

    def update(self, name: str | None) -> None:
        """Other weights are served from now on, or the same by another name."""
        self.serial += 1
        if name is not None:
            self.name = name


class VersionRecord:
    """The versions that computed the tokens of one sequence, in order.

    `before` are those of tokens that another engine has computed.
    """

    def __init__(self, served: ServedVersion, before: tuple[VersionSpan, ...] = ()) -> None:
        self._served = served
        self._serial: int | None = None
        self._starts: list[tuple[str, int]] = []
        """Each version, and the first token that it computed."""
        first = 0
        for name, count in before:
            self._starts.append((name, first))
            first += count

    def note(self, index: int) -> None:
        """What is served now has computed token `index`."""
        served = self._served
        if served.serial == self._serial:
            return
        elsewhere = self._serial is None and bool(self._starts)
        self._serial = served.serial
        if not (elsewhere and self._starts[-1][0] == served.name):
            self._starts.append((served.name, index))

    def spans(self, first: int, end: int) -> tuple[VersionSpan, ...]:
        """Who computed the tokens from `first` to `end`."""
        if first == end or not self._starts:
            return ()
        name, start = self._starts[-1]
        if start <= first:  # as nearly always: it is asked for what is new
            return ((name, end - first),)
        return tuple(self._spans(first, end))

    @property
    def newest(self) -> str:
        """The version of the last token; without one, that which is served."""
        return self._starts[-1][0] if self._starts else self._served.name

    def _spans(self, first: int, end: int) -> Iterator[VersionSpan]:
        stops = [*[start for _, start in self._starts[1:]], end]
        for (name, start), stop in zip(self._starts, stops, strict=False):
            count = min(stop, end) - max(start, first)
            if count > 0:
                yield name, count
