"""How the requests of some paths find their server: what a relayed exchange asks for."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Protocol, TypeVar

from phalanx.errors import PhalanxError
from phalanx.gateway.http.incoming_request import Bytes, IncomingRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.routing.load import Countable, Ticket

NOBODY: frozenset[str] = frozenset()
WishT = TypeVar("WishT", contravariant=True)
ServerT = TypeVar("ServerT", bound=Countable)


@dataclass(frozen=True)
class Place:
    """Where connections to a server go; `key` is equal where they can be shared. `title` is what
    callers are told of it: which it is, not where, for addresses are for operators.
    """

    key: str
    host: str
    port: int
    title: str
    tls: ssl.SSLContext | None = None


class Way(Protocol[WishT, ServerT]):
    """`WishT` is what one request says of where it wants to go, `ServerT` what it is sent to."""

    def acquire(self, wish: WishT, tried: frozenset[str]) -> Ticket[ServerT]:
        """Choose and count in one step. Raises `UnknownModelError` or `NoServerError`."""
        ...

    def key(self, server: ServerT) -> str:
        """That of its place."""
        ...

    def place(self, server: ServerT) -> Place: ...

    def unreachable(self, server: ServerT, why: str) -> None:
        """It does not listen: it gets nothing until it answers again."""
        ...

    def message(
        self, wish: WishT, request: IncomingRequest, request_id: bytes, server: ServerT
    ) -> list[Bytes]:
        """What the server is sent: the head, and what there is of the body. Raises
        `InvalidRequestError` for what cannot be sent on.
        """
        ...

    def answer_fields(self, wish: WishT) -> bytes:
        """What the head of the answer gets before its id, begun with a line's end."""
        ...

    def refusal(self, wish: WishT, error: PhalanxError) -> Refusal:
        """The words in which the request is not sent on."""
        ...
