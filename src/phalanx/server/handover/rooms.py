"""The requests that a prefill server is computing for decode servers, by the router's numbers.

open -> offered -> given, or failed at any time before. A room is forgotten when its request is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.schema.generate import Handoff

MAX_LEFT = 1024
"""How many rooms are remembered that were left before they were opened."""


class Room:
    """One request. Belongs to the server's event loop."""

    def __init__(self, number: int, give_up: Callable[[], object]) -> None:
        """`give_up` ends the request, when the other side has left."""
        self.number = number
        self.failure: str | None = None
        self.asked = False
        self._give_up = give_up
        self._settled = asyncio.Event()
        self._given = asyncio.Event()
        self._handoff: Handoff | None = None

    def offer(self, handoff: Handoff) -> None:
        """The prompt is computed."""
        self._handoff = handoff
        self._settled.set()

    def fail(self, reason: str) -> None:
        """It will not be given; the first reason stays."""
        if not self._given.is_set() and self.failure is None:
            self.failure = reason
            self._settled.set()
            self._given.set()
            self._give_up()

    async def handoff(self) -> Handoff:
        """Wait for it; raises `RequestFailedError`."""
        await self._settled.wait()
        if self.failure is not None:
            raise RequestFailedError(self.failure)
        assert self._handoff is not None
        return self._handoff

    def give(self) -> None:
        """The other side has it."""
        self._given.set()

    async def given(self) -> None:
        """Wait until the other side has it; raises `RequestFailedError`."""
        await self._given.wait()
        if self.failure is not None:
            raise RequestFailedError(self.failure)


class Rooms:
    """All of one server. Belongs to its event loop."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}
        self._opened: dict[int, asyncio.Event] = {}
        self._left: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def open(self, number: int, give_up: Callable[[], object]) -> Room:
        """A room for a request that has come.

        Raises `InvalidRequestError` where there is one, and `RequestFailedError` where a decode
        server had asked for it and has left.
        """
        if number in self._left:
            del self._left[number]
            raise RequestFailedError(f"the decode server of bootstrap_room={number} gave up")
        if number in self._rooms:
            raise InvalidRequestError(
                f"bootstrap_room={number} is taken by another request; use another number",
                field="bootstrap_room",
            )
        room = self._rooms[number] = Room(number, give_up)
        opened = self._opened.get(number)
        if opened is not None:
            opened.set()
        return room

    def leave(self, number: int) -> None:
        """Who asked for a room that is not open yet does not want it any more."""
        self._left[number] = None
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def forget(self, room: Room) -> None:
        """Its request is over."""
        if self._rooms.get(room.number) is room:
            del self._rooms[room.number]

    async def enter(self, number: int, timeout_s: float) -> Room:
        """The room, which its request may have yet to open; for one asker.

        Raises `RequestFailedError`.
        """
        if number not in self._rooms:
            await self._wait(number, timeout_s)
        room = self._rooms[number]
        if room.asked:
            raise RequestFailedError(f"bootstrap_room={number} was asked for already")
        room.asked = True
        return room

    async def _wait(self, number: int, timeout_s: float) -> None:
        opened = self._opened.setdefault(number, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await opened.wait()
        except TimeoutError:
            raise RequestFailedError(
                f"bootstrap_room={number} is not known here: no prefill request of that number came "
                f"within {timeout_s:g} s"
            ) from None
        finally:
            self._opened.pop(number, None)
        if number not in self._rooms:
            raise RequestFailedError(f"the prefill request of bootstrap_room={number} has ended")

    def close(self) -> None:
        """Fail all."""
        for room in list(self._rooms.values()):
            room.fail("the prefill server ends")
