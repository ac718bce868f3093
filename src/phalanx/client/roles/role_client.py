"""The client of a role for programs without an event loop: `AsyncRoleClient`, waited for."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from phalanx.client.roles.answers import JsonObject
from phalanx.client.roles.async_role_client import AsyncRoleClient
from phalanx.client.roles.blocking_stream import BlockingRoleStream
from phalanx.client.roles.loop_thread import LoopThread
from phalanx.client.roles.settings import Mode, RoleClientSettings
from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.wire.discovery import DiscoveryDocument


class RoleClient:
    """As `AsyncRoleClient`, for any number of threads, whose requests run at the same time.

    Closed by `close` or at the end of `with`. Not for use inside a running event loop.
    """

    def __init__(
        self,
        url: str,
        *,
        mode: Mode = "direct",
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        self._loop = LoopThread("RoleClient")
        try:
            self._client = self._loop.run(_made(url, mode, api_key, settings))
        except BaseException:
            self._loop.close(_nothing)
            raise

    @property
    def snapshot(self) -> RoleSnapshot | None:
        """As `AsyncRoleClient.snapshot`."""
        return self._client.snapshot

    def generate(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> JsonObject | list[JsonObject]:
        """As `AsyncRoleClient.generate`."""
        return self._loop.run(
            self._client.generate(
                payload,
                model=model,
                route_key=route_key,
                affinity=affinity,
                timeout_s=timeout_s,
            )
        )

    def chat(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> JsonObject:
        """As `AsyncRoleClient.chat`."""
        return self._loop.run(
            self._client.chat(
                payload,
                model=model,
                route_key=route_key,
                affinity=affinity,
                timeout_s=timeout_s,
            )
        )

    def stream_generate(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> BlockingRoleStream:
        """As `AsyncRoleClient.stream_generate`, read by `for`."""
        stream = self._client.stream_generate(
            payload, model=model, route_key=route_key, affinity=affinity, timeout_s=timeout_s
        )
        return BlockingRoleStream(self._loop, stream)

    def stream_chat(
        self,
        payload: Mapping[str, object],
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity: str | None = None,
        timeout_s: float | None = None,
    ) -> BlockingRoleStream:
        """As `AsyncRoleClient.stream_chat`, read by `for`."""
        stream = self._client.stream_chat(
            payload, model=model, route_key=route_key, affinity=affinity, timeout_s=timeout_s
        )
        return BlockingRoleStream(self._loop, stream)

    def engines(self, *, timeout_s: float | None = None) -> DiscoveryDocument:
        """As `AsyncRoleClient.engines`."""
        return self._loop.run(self._client.engines(timeout_s=timeout_s))

    def health(self, *, timeout_s: float | None = None) -> JsonObject:
        """As `AsyncRoleClient.health`."""
        return self._loop.run(self._client.health(timeout_s=timeout_s))

    def wait_ready(
        self,
        model: str | None = None,
        *,
        route_key: str | None = None,
        timeout_s: float | None = None,
    ) -> RoleSnapshot:
        """As `AsyncRoleClient.wait_ready`."""
        return self._loop.run(
            self._client.wait_ready(model, route_key=route_key, timeout_s=timeout_s)
        )

    def close(self) -> None:
        """Requests that still run end with `EngineUnavailableError`. Again changes nothing."""
        self._loop.close(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _made(
    url: str, mode: Mode, api_key: str | None, settings: RoleClientSettings | None
) -> AsyncRoleClient:
    return AsyncRoleClient(url, mode=mode, api_key=api_key, settings=settings)


async def _nothing() -> None:
    """There is no client yet."""
