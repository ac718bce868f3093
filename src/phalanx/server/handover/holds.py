"""Following, from an event loop, what an engine holds for others; and letting go of it."""

from __future__ import annotations

import asyncio
import logging
import socket

from phalanx.errors import RequestFailedError
from phalanx.schema.generate import Handoff
from phalanx.schema.handoff import Handle
from phalanx.step.transfer import client, frames
from phalanx.step.transfer.base import Ending, Reason
from phalanx.step.transfer.channels import channel_of

logger = logging.getLogger(__name__)


async def ended(handle: Handle) -> Ending:
    """Wait until a hold has ended; raises `RequestFailedError` where its engine is gone."""
    try:
        reader, writer = await _connected(handle)
    except OSError as error:
        raise RequestFailedError(
            f"{client.place(handle.source)} does not answer: {error}"
        ) from error
    source = handle.source
    try:
        writer.write(frames.encoded(frames.Watch(source.token, handle.hold)))
        await writer.drain()
        size = frames.answer_bytes(await reader.readexactly(frames.LENGTH_BYTES))
        answer = frames.decoded_answer(await reader.readexactly(size))
    except (OSError, asyncio.IncompleteReadError, frames.FrameError) as error:
        raise RequestFailedError(f"the engine at {client.place(source)} ended: {error}") from error
    finally:
        writer.close()
    if not isinstance(answer, frames.Ended):
        raise RequestFailedError(f"{client.place(source)} refused a call: {answer}")
    return answer.ending


async def _connected(handle: Handle) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = await asyncio.to_thread(channel_of(handle.source).connect, handle.source)
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return await asyncio.open_unix_connection(sock=connection)
    return await asyncio.open_connection(sock=connection)


class Releases:
    """Lets go of hand-overs in the background; owns what it began until `aclose`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def drop(self, handoff: Handoff, reason: str) -> None:
        """Tell its holder that nobody takes it."""
        for handle in handoff.handles():
            task = asyncio.create_task(_dropped(handle, Ending(Reason.DROPPED, reason)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _dropped(handle: Handle, ending: Ending) -> None:
    try:
        await asyncio.to_thread(client.release, handle, ending)
    except RequestFailedError as error:
        logger.debug("the holder frees it when its time is over: %s", error)
