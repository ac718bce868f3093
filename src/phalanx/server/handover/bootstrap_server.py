"""Answers decode servers on a prefill server's bootstrap port."""

from __future__ import annotations

import asyncio
from typing import Self

import msgspec

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.server.handover.messages import (
    MAX_ASK_BYTES,
    Ask,
    Given,
    Refused,
    receive,
    send,
)
from phalanx.server.handover.rooms import Room, Rooms

ASK_TIMEOUT_S = 10.0
"""How long a connection may take to say what it wants."""
SEND_TIMEOUT_S = 30.0
_ASKS = msgspec.msgpack.Decoder(Ask)


class BootstrapServer:
    """Listens until `aclose`. One question a connection; who leaves before its answer gives up."""

    def __init__(self, rooms: Rooms, room_timeout_s: float) -> None:
        self._rooms = rooms
        self._room_timeout_s = room_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @classmethod
    async def listening(cls, rooms: Rooms, host: str, port: int, room_timeout_s: float) -> Self:
        """One that listens; raises `ConfigurationError` where the port is taken."""
        one = cls(rooms, room_timeout_s)
        try:
            one._server = await asyncio.start_server(one._connected, host, port)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on bootstrap_port={port} of {host!r}: {error.strerror or error}; "
                "choose another port"
            ) from error
        return one

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def aclose(self) -> None:
        """Take no more questions; those that wait have been answered when their rooms failed."""
        self._server.close()
        if self._tasks:
            _, waiting = await asyncio.wait(self._tasks, timeout=1.0)
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, ValueError):
            pass  # nobody is there, or no decode server
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            ask = await receive(reader, _ASKS, MAX_ASK_BYTES)
        left = asyncio.create_task(reader.read(1))
        entering = asyncio.create_task(self._rooms.enter(ask.room, self._room_timeout_s))
        try:
            await asyncio.wait((left, entering), return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                self._rooms.leave(ask.room)
                return
            if entering.exception() is not None:
                await self._send(writer, Refused(str(entering.exception())))
                return
            await self._serve(entering.result(), left, writer)
        finally:
            for task in (left, entering):
                task.cancel()
            await asyncio.wait((left, entering))

    async def _serve(
        self, room: Room, left: asyncio.Task[bytes], writer: asyncio.StreamWriter
    ) -> None:
        """Answer who has entered `room`."""
        waiting = asyncio.create_task(room.handoff())
        try:
            await asyncio.wait((left, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                room.fail("the decode server gave up before the prompt was computed")
                return
            error = waiting.exception()
            if error is None:
                await self._send(writer, Given(waiting.result()))
                room.give()
            elif isinstance(error, RequestFailedError):
                await self._send(writer, Refused(str(error)))
        except (OSError, TimeoutError):
            room.fail("the decode server left before it had the computed prompt")
            raise
        finally:
            waiting.cancel()
            await asyncio.wait((waiting,))

    async def _send(self, writer: asyncio.StreamWriter, message: Given | Refused) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(writer, message)
