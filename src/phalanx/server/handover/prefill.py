"""The role prefill: prompts are computed, and answered once a decode server has what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import msgspec

from phalanx.errors import PhalanxError, RequestFailedError
from phalanx.schema.generate import GenerateOutput, Handoff
from phalanx.schema.server_config import ServerConfig
from phalanx.server.handover.base import LEFT, Arrival, needed
from phalanx.server.handover.bootstrap_server import BootstrapServer
from phalanx.server.handover.holds import Releases, ended
from phalanx.server.handover.rooms import Room, Rooms
from phalanx.server.live import LiveRequests
from phalanx.step.transfer.base import Reason
from phalanx.wire.bootstrap import Bootstrap

ROOM_TIMEOUT_S = 10.0
"""How long either side waits for the other to show at all."""


class Prefill:
    """See the module."""

    def __init__(self, rooms: Rooms, server: BootstrapServer, timeout_s: float) -> None:
        self._rooms = rooms
        self._server = server
        self._timeout_s = timeout_s
        self._live: LiveRequests
        self._cancel: Callable[[str], bool]
        self._releases = Releases()

    @classmethod
    async def listening(cls, config: ServerConfig) -> Self:
        """One whose bootstrap port answers; raises `ConfigurationError`."""
        rooms = Rooms()
        timeout_s = min(ROOM_TIMEOUT_S, config.handoff_timeout_s)
        server = await BootstrapServer.listening(
            rooms, config.host, config.bootstrap_port, timeout_s
        )
        return cls(rooms, server, config.handoff_timeout_s)

    @property
    def bootstrap_port(self) -> int:
        return self._server.port

    def bind(self, live: LiveRequests, cancel: Callable[[str], bool]) -> None:
        self._live, self._cancel = live, cancel

    async def arrive(
        self, arrivals: Sequence[Arrival], bootstraps: Sequence[Bootstrap | None]
    ) -> list[Arrival]:
        pairs = zip(arrivals, needed(bootstraps, len(arrivals), "prefill"), strict=True)
        arrived: list[Arrival] = []
        try:
            for one, bootstrap in pairs:
                arrived.append(self._arrived(one, bootstrap))
        except PhalanxError as error:
            for one in arrived:
                assert one.exchange is not None
                one.exchange.close(str(error))
            raise
        return arrived

    async def aclose(self) -> None:
        self._rooms.close()
        await self._server.aclose()
        await self._releases.aclose()

    def _arrived(self, one: Arrival, bootstrap: Bootstrap) -> Arrival:
        room = self._rooms.open(bootstrap.room, lambda: self._cancel(one.rid))
        exchange = _Offer(room, partial(self._left, one.rid, room), self._releases, self._timeout_s)
        self._live.add(one.rid, partial(self._abort, one.rid, exchange))
        request = msgspec.structs.replace(one.request, hands_over=True)
        return Arrival(rid=one.rid, request=request, exchange=exchange)

    def _abort(self, rid: str, exchange: _Offer) -> None:
        """End it in the engine, or, where that is done with it, for the other side."""
        if not self._cancel(rid):
            exchange.close("the request was aborted on the prefill server")

    def _left(self, rid: str, room: Room) -> None:
        self._rooms.forget(room)
        self._live.discard(rid)


class _Offer:
    """One request of a prefill server."""

    def __init__(
        self,
        room: Room,
        leave: Callable[[], None],
        releases: Releases,
        timeout_s: float,
    ) -> None:
        """`leave` is called once this is over."""
        self._room = room
        self._leave = leave
        self._releases = releases
        self._timeout_s = timeout_s
        self._handoff: Handoff | None = None
        self._complete = False

    async def complete(self, output: GenerateOutput) -> GenerateOutput:
        handoff = output.handoff
        if handoff is None:
            self.close("the prefill request was aborted")
            raise RequestFailedError(self._failure("the request was aborted"))
        if self._complete:
            self._releases.drop(handoff, LEFT)
            raise RequestFailedError(self._failure(LEFT))
        self._handoff = handoff
        self._room.offer(handoff)
        await self._asked()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._taken(handoff)
        except TimeoutError:
            why = f"nobody took it within {self._timeout_s:g} s"
            raise RequestFailedError(self._failure(why)) from None
        self._complete = True
        return msgspec.structs.replace(output, handoff=None)

    async def _asked(self) -> None:
        """Return when a decode server has it; one asks at once, however much it has to do."""
        patience_s = min(ROOM_TIMEOUT_S, self._timeout_s)
        try:
            async with asyncio.timeout(patience_s):
                await self._room.given()
        except TimeoutError:
            why = f"no decode server asked for it within {patience_s:g} s"
            raise RequestFailedError(self._failure(why)) from None
        except RequestFailedError as error:
            raise RequestFailedError(self._failure(str(error))) from None

    async def _taken(self, handoff: Handoff) -> None:
        """Return when the other side has read everything; raises `RequestFailedError`."""
        for handle in handoff.handles():
            ending = await ended(handle)
            if ending.reason is not Reason.TAKEN:
                raise RequestFailedError(self._failure(ending.message))

    def close(self, reason: str) -> None:
        self._leave()
        if self._complete:
            return
        self._complete = True
        self._room.fail(reason)
        if self._handoff is not None:
            self._releases.drop(self._handoff, reason)

    def _failure(self, why: str) -> str:
        why = self._room.failure or why
        return f"the computed prompt of bootstrap_room={self._room.number} was not taken: {why}"
