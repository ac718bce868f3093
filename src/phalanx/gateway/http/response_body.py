"""How the body of a relayed response goes on to the client while it comes, and how it breaks off."""

from __future__ import annotations

from phalanx.gateway.http.event_tail import EventTail
from phalanx.gateway.http.fields import LAST_CHUNK, chunk
from phalanx.gateway.http.incoming_request import Bytes
from phalanx.gateway.http.refusal import Refusal


class ResponseBody:
    """In chunks or as it is; a stream of events is passed on in whole events."""

    def __init__(self, *, chunked: bool, is_event_stream: bool) -> None:
        self._chunked = chunked
        self._events = EventTail() if is_event_stream else None

    def next(self, parts: list[Bytes], *, complete: bool) -> list[Bytes]:
        """What goes on now of what has come."""
        events = self._events
        if events is not None:
            passed = events.passed(b"".join(parts)) if parts else b""
            if complete:
                passed += events.rest()
            parts = [passed] if passed else []
        if not self._chunked:
            return parts
        framed = chunk(parts, sum(map(len, parts))) if parts else []
        if complete:
            framed.append(LAST_CHUNK)
        return framed

    def broken_off(self, refusal: Refusal, path: str) -> list[Bytes] | None:
        """What ends a stream in good order and says that it is not whole; None where only cutting
        the connection can say so.
        """
        events = self._events
        if events is None:
            return None
        last = b"" if events.done else refusal.stream_end(path)
        if events.inside:
            last = b"\n\n" + last
        if not self._chunked:
            return [last]
        return [*chunk([last], len(last)), LAST_CHUNK] if last else [LAST_CHUNK]
