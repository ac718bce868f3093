"""The asynchronous client of a role, at its gateway and at its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from phalanx.client.roles.answers import JsonObject, json_object, json_value
from phalanx.client.roles.request import Kind, RoleRequest
from phalanx.client.roles.role_stream import RoleStream
from phalanx.client.roles.role_url import RoleUrl
from phalanx.client.roles.routed_calls import RoutedCalls
from phalanx.client.roles.running_calls import RunningCalls
from phalanx.client.roles.settings import (
    Mode,
    RoleClientSettings,
    check_key,
    check_mode,
    check_positive,
)
from phalanx.clock import Clock, SystemClock
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    RoleNotReadyError,
)
from phalanx.routing.roles.resolver import RoleSelector, choose_model, resolve
from phalanx.routing.roles.snapshot import ReplicaState, RoleSnapshot
from phalanx.wire.discovery import DiscoveryDocument


class AsyncRoleClient:
    """Talks to the role at `url` (http://GATEWAY:PORT/ROLE), or to the one engine at `url`
    (http://ENGINE:PORT); either may end in `/generate`.

    `mode` says where requests go. `direct`: to engines that discovery shows. `gateway`: to the
    gateway. `auto`: to engines, and to the gateway where none can be had before a byte was sent.
    Many requests may run at once; each is sent once, and cancelling a call cancels it at the
    engine. Made inside a running event loop, closed by `close` or at the end of `async with`.
    """

    def __init__(
        self,
        url: str,
        *,
        mode: Mode = "direct",
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_mode(mode)
        check_key("api_key", api_key)
        asyncio.get_running_loop()
        self.settings = settings or RoleClientSettings()
        self.mode = mode
        self._url = RoleUrl.parse(url)
        self._running = RunningCalls()
        self._calls = RoutedCalls(self._url, mode, api_key, self.settings, clock or SystemClock())

    @property
    def snapshot(self) -> RoleSnapshot | None:
        """What is known of the role, without asking; None before the first answer."""
        follower = self._calls.follower
        return follower.mirror.snapshot if follower.heard else None

    @property
    def is_engine(self) -> bool:
        """Whether the URL is that of one engine, which has no discovery."""
        return self._url.is_engine

    async def generate(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> JsonObject | list[JsonObject]:
        """The answer to `payload`, a request of SGLang's `/generate`, as it came.

        The model is the one that is named, else that of `route_key`, else the role's default; both
        may stand in the payload. `affinity` is a key whose requests go to the same replica, where
        the role's policy is that.

        Raises `InvalidRequestError` (`UnknownModelError` for a model or route key) for a request that
        is refused, `NoServerError` (`RoleNotReadyError`) where it never started,
        `EngineUnavailableError` where it was lost, `DeadlineExceededError` after `timeout_s`,
        `ConfigurationError` where a key is refused, and `RequestFailedError` for the rest.
        """
        request = RoleRequest.of(Kind.GENERATE, payload, model, route_key, affinity).whole()
        return json_value(self._what(request), await self._whole(request, timeout_s))

    async def chat(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """The answer to `payload`, a request of OpenAI's chat completions. As `generate`."""
        request = RoleRequest.of(Kind.CHAT, payload, model, route_key, affinity).whole()
        return json_object(self._what(request), await self._whole(request, timeout_s))

    def stream_generate(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> RoleStream:
        """The events of the answer, without the last `[DONE]`; `timeout_s` is for all of them."""
        return self._stream(
            RoleRequest.of(Kind.GENERATE, payload, model, route_key, affinity), timeout_s
        )

    def stream_chat(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> RoleStream:
        """As `stream_generate`, for a chat."""
        return self._stream(
            RoleRequest.of(Kind.CHAT, payload, model, route_key, affinity), timeout_s
        )

    async def engines(self, *, timeout_s: float | None = None) -> DiscoveryDocument:
        """The role's discovery document, asked for now."""
        self._refuse_engine("engines")
        async with self._running.call(self._end_s(timeout_s), "engines"):
            return await self._calls.follower.ask()

    async def health(self, *, timeout_s: float | None = None) -> JsonObject:
        """What the gateway says of itself and of each model, as it came; of an engine, its own
        answer. Raises `EngineUnavailableError` for an engine that is not well.
        """
        async with self._running.call(self._end_s(timeout_s), "health"):
            body = await self._calls.get("/health")
        return json_object(f"{self._url.base}/health", body) if body.strip() else {}

    async def wait_ready(
        self,
        model: str | None = None,
        *,
        route_key: str | None = None,
        timeout_s: float | None = None,
    ) -> RoleSnapshot:
        """The first snapshot in which the model takes requests of this client.

        It follows discovery, also where the gateway is not there yet. Raises `UnknownModelError`,
        and `DeadlineExceededError` after `timeout_s`, saying what was missing.
        """
        self._refuse_engine("wait_ready")
        selector = RoleSelector(model, route_key)
        follower = self._calls.follower
        what = f"waiting for {self._url.base}"
        missing = "it has not answered yet"
        try:
            async with self._running.call(self._end_s(timeout_s), what):
                try:
                    await follower.current()
                except EngineUnavailableError as error:
                    missing = str(error)  # it goes on asking
                while True:
                    snapshot = follower.mirror.snapshot
                    if follower.heard:
                        missing = self._missing(snapshot, selector)
                        if not missing:
                            return snapshot
                    await follower.mirror.wait(snapshot.revision, None, snapshot.epoch)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"{self._url.base} was not ready within {self._timeout_s(timeout_s):g} s:"
                f" {follower.lost or missing}"
            ) from error

    async def close(self) -> None:
        """Requests that still run end with `EngineUnavailableError`. Again changes nothing."""
        await self._running.close()
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _whole(self, request: RoleRequest, timeout_s: float | None) -> bytes:
        async with self._running.call(self._end_s(timeout_s), self._what(request)):
            started = await self._calls.start(request)
            try:
                return await started.read()
            finally:
                await started.close()

    def _stream(self, request: RoleRequest, timeout_s: float | None) -> RoleStream:
        streaming = request.streaming()
        limit_s = self._timeout_s(timeout_s)
        return RoleStream(
            lambda: self._calls.start(streaming), self._running, limit_s, self._what(request)
        )

    def _missing(self, snapshot: RoleSnapshot, selector: RoleSelector) -> str:
        """Why the model takes no requests of this client; empty where it does."""
        try:
            if self.mode == "gateway":
                # The gateway knows engines that are not shown to its clients.
                model = choose_model(snapshot, selector)
                ready = model.state is ReplicaState.READY
                return "" if ready else f"{model.name!r} is {model.state}"
            resolve(snapshot, selector, direct=True)
        except RoleNotReadyError as error:
            return str(error)
        return ""

    def _what(self, request: RoleRequest) -> str:
        return f"{self._url.base}{request.path}"

    def _timeout_s(self, timeout_s: float | None) -> float:
        timeout_s = self.settings.timeout_s if timeout_s is None else timeout_s
        check_positive("timeout_s", timeout_s)
        return timeout_s

    def _end_s(self, timeout_s: float | None) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s(timeout_s)

    def _refuse_engine(self, method: str) -> None:
        if self._url.is_engine:
            raise ConfigurationError(
                f"{method} needs a role's discovery, and {self._url.base} is one engine; give"
                " http://GATEWAY:PORT/ROLE"
            )
