"""Tells a gateway that this server is there, and keeps telling it.

The gateway gives a lease that heartbeats renew. A gateway that has been started anew does not know
the server, which then registers again; one that cannot be reached is asked again and again.
"""

from __future__ import annotations

import asyncio
import logging

import grpc
import grpc.aio

from phalanx.errors import MalformedRequestError
from phalanx.wire.robot_inference import (
    HEARTBEAT,
    REGISTER,
    Registration,
    RegistrationAnswer,
    decode_heartbeat_answer,
    decode_registration_answer,
    encode_heartbeat,
    encode_registration,
)

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to reach the gateway, which may be starting."""
TIMEOUT_S = 5.0
OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


class SelfRegistration:
    """Registers `registration` at `gateway` (HOST:PORT) until it is cancelled."""

    def __init__(
        self,
        gateway: str,
        registration: Registration,
        *,
        key: str | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        """`key` is the gateway's own, sent as a bearer token."""
        self._gateway = gateway
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._registration = registration
        self._retry_s = retry_s
        self._trouble = ""

    async def run(self) -> None:
        """Register, send heartbeats, and begin again where they are not known any more."""
        async with grpc.aio.insecure_channel(self._gateway, options=OPTIONS) as channel:
            while True:
                try:
                    answer = await self._register(channel)
                    if answer.accepted:
                        await self._keep_alive(channel, answer)
                        continue
                    self._say(f"it answered: {answer.message or 'not accepted'}")
                except grpc.aio.AioRpcError as error:
                    self._say(f"{error.code().name}: {error.details()}")
                except MalformedRequestError as error:
                    self._say(f"it does not speak robot.inference.v1: {error}")
                await asyncio.sleep(self._retry_s)

    async def _register(self, channel: grpc.aio.Channel) -> RegistrationAnswer:
        data = encode_registration(self._registration)
        answer = decode_registration_answer(await self._call(channel, REGISTER, data))
        if answer.accepted:
            self._trouble = ""
            logger.info(
                "registered at %s as %s for model %r",
                self._gateway,
                self._registration.endpoint,
                self._registration.model_name,
            )
        return answer

    async def _keep_alive(self, channel: grpc.aio.Channel, answer: RegistrationAnswer) -> None:
        """Heartbeats, until the gateway says that it does not know the server.

        One that does not arrive may be followed by one that does, before the lease ends. When the
        connection is lost the next one is sent at once: the gateway may have been started anew.
        """
        beat = encode_heartbeat(answer.server_id)
        lost = _lost(channel)
        try:
            while True:
                await asyncio.wait((lost,), timeout=answer.heartbeat_interval_s)
                try:
                    known = decode_heartbeat_answer(await self._call(channel, HEARTBEAT, beat))
                except grpc.aio.AioRpcError as error:
                    self._say(f"{error.code().name}: {error.details()}")
                    await asyncio.sleep(self._retry_s)
                    continue
                self._trouble = ""
                if not known.registered:
                    logger.info("%s does not know this server any more", self._gateway)
                    return
                if lost.done():
                    lost = _lost(channel)
        finally:
            lost.cancel()
            await asyncio.wait((lost,))

    def _say(self, trouble: str) -> None:
        """Once for the same trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("cannot register at %s, trying on: %s", self._gateway, trouble)

    async def _call(self, channel: grpc.aio.Channel, path: str, data: bytes) -> bytes:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
        return await call(data, timeout=TIMEOUT_S, metadata=self._metadata)


def _lost(channel: grpc.aio.Channel) -> asyncio.Task[None]:
    """Ends when the channel is not connected (any more)."""
    return asyncio.create_task(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
