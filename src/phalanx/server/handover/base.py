"""What a server's role adds to a request: something before the engine takes it, and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.server.live import LiveRequests
from phalanx.wire.bootstrap import Bootstrap

LEFT = "the request ended, or its client left"
"""Told to the other side where nothing more is known."""


class Exchange(Protocol):
    """One request's part in a hand-over."""

    async def complete(self, output: GenerateOutput) -> GenerateOutput:
        """What the client gets of the engine's output, once the other side has its part.

        Raises `RequestFailedError` where it does not get it.
        """
        ...

    def close(self, reason: str) -> None:
        """The request is over. If it was not completed the other side is told why."""
        ...


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it comes to a role, and as it goes on to the engine."""

    rid: str
    request: GenerateRequest
    exchange: Exchange | None = None


class Role(Protocol):
    """One server's part."""

    async def arrive(
        self, arrivals: Sequence[Arrival], bootstraps: Sequence[Bootstrap | None]
    ) -> list[Arrival]:
        """Do what comes before the engine, for all requests of a call or for none.

        Raises `InvalidRequestError` for requests that are not for this role, and
        `RequestFailedError` where the other side fails. Whoever gets the arrivals closes their
        exchanges.
        """
        ...

    def bind(self, live: LiveRequests, cancel: Callable[[str], bool]) -> None:
        """Where requests are listed that wait for the other side, and how the engine ends one that
        the other side gave up. Called once, before any request.
        """
        ...

    async def aclose(self) -> None:
        """End everything that still waits."""
        ...


class Both:
    """A server that answers alone."""

    async def arrive(
        self, arrivals: Sequence[Arrival], bootstraps: Sequence[Bootstrap | None]
    ) -> list[Arrival]:
        if any(one is not None for one in bootstraps):
            raise InvalidRequestError(
                "bootstrap_room is for servers that share the work; run this one with the role "
                "prefill or decode, or leave the field out",
                field="bootstrap_room",
            )
        return list(arrivals)

    def bind(self, live: LiveRequests, cancel: Callable[[str], bool]) -> None:
        pass

    async def aclose(self) -> None:
        pass


def needed(bootstraps: Sequence[Bootstrap | None], count: int, role: str) -> list[Bootstrap]:
    """All of them, of requests to a server that needs them."""
    given = [one for one in bootstraps if one is not None]
    if len(given) != count:
        raise InvalidRequestError(
            f"this server has the role {role}: it answers requests that a router has paired, with "
            "bootstrap_host, bootstrap_port and bootstrap_room",
            field="bootstrap_room",
        )
    return given
