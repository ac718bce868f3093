"""Splits a stream of server-sent events into the data of each."""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"[DONE]"


class EventLines:
    """Takes bytes as they come. A JSON text has no line feed, so that a line is an event's data."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of every line that is whole now."""
        self._rest += part
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())
