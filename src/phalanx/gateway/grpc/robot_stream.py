"""`robot.inference.v1.RobotInference` of the gateway: a robot's open stream to one model.

While a request runs, only the newest of what the robot has sent is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from phalanx.gateway.grpc.service import Context, Service
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.workers import SMALL_BYTES, Workers
from phalanx.wire.robot_inference import (
    ROBOT_INFERENCE,
    ActionCommand,
    InferenceCall,
    decode_sensor_data,
    encode_action_command,
    encode_request,
)


class RobotStream:
    """`model` is the one that every robot's data goes to; None: the only one there is."""

    def __init__(
        self, caller: PolicyCaller, workers: Workers, model: str | None, ids: RequestIds
    ) -> None:
        self._caller = caller
        self._workers = workers
        self._model = model
        self._ids = ids

    def service(self) -> Service:
        return Service(ROBOT_INFERENCE, stream={"Communicate": self._communicate})

    async def _communicate(self, requests: AsyncIterator[bytes], context: Context) -> None:
        newest = Newest()
        reader = asyncio.create_task(newest.read(requests))
        try:
            while (data := await newest.take()) is not None:
                await context.write(await self._command(data, context.time_remaining()))
            await reader
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _command(self, data: bytes, timeout_s: float | None) -> bytes:
        request_id = self._ids.of(None).decode()

        def read() -> tuple[InferenceCall, bytes]:
            sensors = decode_sensor_data(data)
            call = InferenceCall(
                request_id, self._model or "", sensors.observation, sensors.timestamp_ns
            )
            return call, encode_request(call)

        # An image of few bytes may be a large one.
        call, payload = await self._workers.run(read, max(len(data), SMALL_BYTES))
        answer = await self._caller.answer(call, timeout_s, payload=payload)
        return encode_action_command(ActionCommand(call.timestamp_ns, answer.actions.values))


class Newest:
    """What arrived last and was not taken yet."""

    def __init__(self) -> None:
        self._data: bytes | None = None
        self._ended = False
        self._changed = asyncio.Event()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                self._data = data
                self._changed.set()
        finally:
            self._ended = True
            self._changed.set()

    async def take(self) -> bytes | None:
        """The newest; None when no more will come."""
        while self._data is None and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data, self._data = self._data, None
        return data
