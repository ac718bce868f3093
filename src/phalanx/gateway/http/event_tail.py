"""Lets whole server-sent events pass and holds the beginning of the next one back.

So a stream that breaks ends between two events, where one more can say so. What passes is byte for
byte what came; a comment (a sign of life) passes at once.
"""

from __future__ import annotations

from phalanx.wire.sse import DONE

MAX_HELD = 64 * 1024
"""An event that is longer passes in pieces."""
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class EventTail:
    """`done`: the last event that passed was `[DONE]`; `inside`: it was only begun."""

    __slots__ = ("_held", "done", "inside")

    def __init__(self) -> None:
        self._held = b""
        self.done = False
        self.inside = False

    def passed(self, data: bytes) -> bytes:
        """What of the held bytes and `data` goes on now."""
        if self._held:
            data = self._held + data
            self._held = b""
        if data.endswith(_ENDS):
            self.done = data.endswith(DONE)
            self.inside = False
            return data
        end = (
            max(data.rfind(mark) + len(mark) for mark in _ENDS if mark in data) if _has(data) else 0
        )
        rest = data[end:]
        if len(rest) > MAX_HELD or rest.startswith(b":") or (self.inside and not end):
            self.inside = True
            self.done = False
            return data
        self._held = rest
        if end:
            self.done = data[:end].endswith(DONE)
            self.inside = False
        return data[:end]

    def rest(self) -> bytes:
        """What is still held when the stream has come to its own end."""
        held, self._held = self._held, b""
        return held


def _has(data: bytes) -> bool:
    return any(mark in data for mark in _ENDS)
