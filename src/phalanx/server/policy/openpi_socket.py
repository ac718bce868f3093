"""openpi's WebSocket protocol: metadata first, then an answer to each observation of a connection.

A request that fails is answered by a text, which openpi's client raises as an error; the connection
stays, so that a robot can go on with its next observation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx.errors import MalformedRequestError, PhalanxError
from phalanx.schema.observation import Actions, Observation
from phalanx.server.policy.service import Encode, PolicyService, Times
from phalanx.wire.openpi import decode_observation, encode_metadata, encode_result

logger = logging.getLogger("phalanx.server.access")


class OpenpiSocket:
    """Serves the connections of one server."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service

    async def __call__(self, websocket: WebSocket) -> None:
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            await _Connection(self._service, websocket).serve()


class _Connection:
    def __init__(self, service: PolicyService, websocket: WebSocket) -> None:
        self._service = service
        self._websocket = websocket
        self._next: asyncio.Task[Any] | None = None
        self._previous_ms: float | None = None

    async def serve(self) -> None:
        metadata = {"model_name": self._service.name, **asdict(self._service.info)}
        metadata["cameras"] = list(self._service.info.cameras)
        await self._websocket.send_bytes(encode_metadata(metadata))
        try:
            while (frame := await self._frame()) is not None:
                await self._answer(frame)
        finally:
            if self._next is not None:
                self._next.cancel()
                await asyncio.wait((self._next,))

    async def _frame(self) -> bytes | str | None:
        """The next one; None where the client is gone."""
        message = await self._receiving()
        self._next = None
        if message["type"] == "websocket.disconnect":
            return None
        data: bytes | None = message.get("bytes")
        return message.get("text", "") if data is None else data

    def _receiving(self) -> asyncio.Task[Any]:
        if self._next is None:
            self._next = asyncio.create_task(self._websocket.receive())
        return self._next

    async def _answer(self, frame: bytes | str) -> None:
        """Answer, or stop where the client goes away first."""
        answering = asyncio.create_task(self._service.answer(partial(self._read, frame)))
        receiving = self._receiving()
        try:
            await asyncio.wait((answering, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and receiving.result()["type"] == "websocket.disconnect":
                return
            answer = await answering
        except PhalanxError as error:
            logger.info(
                "openpi client=%s why=%s", self._websocket.client, " ".join(str(error).split())
            )
            await self._websocket.send_text(str(error))
        else:
            await self._websocket.send_bytes(answer)
        finally:
            answering.cancel()
            await asyncio.wait((answering,))
            if not answering.cancelled():
                answering.exception()

    def _read(self, frame: bytes | str) -> tuple[Observation, Encode[bytes]]:
        if isinstance(frame, str):
            raise MalformedRequestError("the frame is a text; send MessagePack as a binary frame")
        return decode_observation(frame), self._encode

    def _encode(self, actions: Actions, times: Times) -> bytes:
        server_ms = times.total_s * 1000.0
        previous_ms, self._previous_ms = self._previous_ms, server_ms
        return encode_result(
            actions,
            infer_ms=times.compute_s * 1000.0,
            server_ms=server_ms,
            previous_ms=previous_ms,
        )
