"""What answers one request of a client's connection, and what it may ask of that connection."""

from __future__ import annotations

import asyncio
from typing import Protocol

from phalanx.gateway.http.message import HttpResponse
from phalanx.gateway.http.refusal import Refusal


class Work(Protocol):
    """A handler, a WebSocket or a relayed exchange, as the connection sees it."""

    @property
    def begun(self) -> bool:
        """Whether some of the response was written."""
        ...

    def start(self) -> None:
        """Begin; it may end at once."""
        ...

    def arrived(self) -> None:
        """There is more of the request's body."""
        ...

    def cancel(self) -> None:
        """The client has gone, or has to."""
        ...

    def leave(self) -> None:
        """The gateway stops: end soon."""
        ...

    def pause_response(self) -> None: ...
    def resume_response(self) -> None: ...


class Caller(Protocol):
    """The client's connection, as the work sees it."""

    transport: asyncio.Transport

    @property
    def stays(self) -> bool:
        """Whether the connection can be kept for another request."""
        ...

    def answered(self, status: int, *, keeps: bool) -> None:
        """The whole response was written."""
        ...

    def refuse(self, refusal: Refusal) -> None:
        """Nothing was written: answer with this."""
        ...

    def cut(self, status: int) -> None:
        """Half a response was written: let the client see that it is not whole."""
        ...

    def hold_upload(self, *, held: bool) -> None:
        """Whether the client is not read from until there is room for more of the body."""
        ...

    def switch(self) -> bytes:
        """The response was a change of protocol: someone else reads from the transport from now on,
        whose `connection_lost` calls `ended`. Returns what the client has sent already.
        """
        ...

    def ended(self) -> None: ...


class Answerer(Caller, Protocol):
    """A connection that can also write a whole response."""

    @property
    def peer(self) -> str:
        """The client's `HOST:PORT`."""
        ...

    def respond(self, response: HttpResponse) -> None: ...
