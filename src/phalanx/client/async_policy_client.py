"""The asynchronous client of a policy, at a gateway or at a policy server."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import grpc
import grpc.aio
import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.client.failures import failure_of
from phalanx.client.observing import observe
from phalanx.client.policy_settings import PolicySettings, check_timeout, parse_address
from phalanx.clock import Clock, SystemClock
from phalanx.errors import (
    BodyTooLargeError,
    ConfigurationError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestFailedError,
)
from phalanx.routing.endpoint import Endpoint
from phalanx.schema.observation import Actions, Observation
from phalanx.wire.robot_inference import (
    CHECK_HEALTH,
    INFER,
    InferenceAnswer,
    InferenceCall,
    decode_health_response,
    decode_response,
    encode_health_request,
    encode_request,
)

Method = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
_RECONNECT_MS = 200
"""A server that comes back is asked again that soon."""


class AsyncPolicyClient:
    """Talks to `model` at `address` (HOST:PORT); "" is the only model that is served there.

    Made inside a running event loop, and closed by `close` or at the end of `async with`. Many
    requests may run at once. Each is sent once: what failed is raised, and is the caller's to send
    again. Cancelling a call cancels it at the server.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        settings: PolicySettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.settings = settings = settings or PolicySettings()
        self._endpoint = parse_address(address)
        self._clock = clock or SystemClock()
        self._ids = (f"{secrets.token_hex(8)}-{number}" for number in itertools.count(1))
        self._metadata = (
            None if settings.api_key is None else (("authorization", f"Bearer {settings.api_key}"),)
        )
        self._channel = _channel(self._endpoint, settings)
        self._infer: Method = self._channel.unary_unary(INFER)
        self._check_health: Method = self._channel.unary_unary(CHECK_HEALTH)
        self._closed = False

    async def act(
        self,
        images: Mapping[str, NDArray[np.uint8]] | None = None,
        state: ArrayLike | None = None,
        instruction: str | Sequence[str] = "",
        *,
        horizon: int | None = None,
        parameters: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """The actions of shape (horizon, action_dim), the first to be done first.

        `images` are uint8 of shape (H, W, C) by camera; `horizon` asks for that many actions at
        most. With a list of instructions it is a batch, and each array has a dimension of rows
        first. Raises as `infer` does.
        """
        observation = observe(images, state, instruction, horizon=horizon, parameters=parameters)
        return (await self.infer(observation, timeout_s=timeout_s)).values

    async def infer(self, observation: Observation, *, timeout_s: float | None = None) -> Actions:
        """The actions for `observation`; see `call`."""
        return (await self.call(observation, timeout_s=timeout_s)).actions

    async def call(
        self, observation: Observation, *, timeout_s: float | None = None
    ) -> InferenceAnswer:
        """The actions and how long the server took for them.

        Raises `InvalidRequestError` for an observation that cannot be sent or that the policy cannot
        use, `UnknownModelError`, `NoServerError` and `EngineOverloadedError` where it never started,
        `EngineUnavailableError` where the server cannot be reached or went away,
        `DeadlineExceededError` after `timeout_s`, and `RequestFailedError` for everything else.
        """
        call = InferenceCall(
            next(self._ids), self.model, observation, int(self._clock.wall_s() * 1e9)
        )
        payload = encode_request(call, jpeg_quality=self.settings.jpeg_quality)
        limit = self.settings.max_message_bytes
        if len(payload) > limit:
            raise BodyTooLargeError(
                f"the observation has {len(payload)} bytes; at most max_message_bytes={limit} are "
                "sent; send smaller images, or set jpeg_quality"
            )
        answer = await self._called(self._infer, payload, timeout_s)
        return self._read(answer, call)

    async def healthy(self, *, timeout_s: float | None = None) -> bool:
        """Whether the model can be asked now. Raises as `call` does where nobody answers."""
        payload = encode_health_request(self.model)
        answer = await self._called(self._check_health, payload, timeout_s)
        try:
            return decode_health_response(answer)
        except InvalidRequestError as error:
            raise self._unreadable(error) from error

    async def close(self) -> None:
        """Calls that still run are cancelled. Calling it again changes nothing."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _called(self, method: Method, payload: bytes, timeout_s: float | None) -> bytes:
        if self._closed:
            raise EngineUnavailableError("the client is closed; make a new one")
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        try:
            return await method(payload, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error, str(self._endpoint)) from error

    def _read(self, payload: bytes, call: InferenceCall) -> InferenceAnswer:
        try:
            answer = decode_response(payload)
        except InvalidRequestError as error:
            raise self._unreadable(error) from error
        if answer.request_id != call.request_id:
            raise RequestFailedError(
                f"{self._endpoint} answered request {answer.request_id!r:.80} instead of "
                f"{call.request_id!r}"
            )
        # A robot's program may change what it gets.
        return replace(answer, actions=replace(answer.actions, values=answer.actions.values.copy()))

    def _unreadable(self, error: InvalidRequestError) -> RequestFailedError:
        return RequestFailedError(f"{self._endpoint} answered what cannot be read: {error}")


def _channel(endpoint: Endpoint, settings: PolicySettings) -> grpc.aio.Channel:
    options = (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    )
    if not settings.tls:
        return grpc.aio.insecure_channel(endpoint.authority, options=options)
    try:
        root = None if settings.tls_root is None else settings.tls_root.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"tls_root={str(settings.tls_root)!r} cannot be read: {error.strerror}"
        ) from error
    credentials = grpc.ssl_channel_credentials(root)
    return grpc.aio.secure_channel(endpoint.authority, credentials, options=options)
