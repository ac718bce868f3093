"""The client of a role for programs without an event loop: `AsyncRoleClient`, waited for."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.client.roles.answers import JsonObject
from phalanx.client.roles.async_role_client import AsyncRoleClient
from phalanx.client.roles.blocking_client import BlockingClient
from phalanx.client.roles.blocking_stream import BlockingRoleStream
from phalanx.client.roles.settings import Mode, RoleClientSettings
from phalanx.routing.roles.snapshot import RoleSnapshot
from phalanx.wire.discovery import DiscoveryDocument


class RoleClient(BlockingClient[AsyncRoleClient]):
    """As `AsyncRoleClient`; see `BlockingClient`."""

    def __init__(
        self,
        url: str,
        *,
        mode: Mode = "direct",
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        super().__init__(
            "RoleClient",
            lambda: AsyncRoleClient(url, mode=mode, api_key=api_key, settings=settings),
        )

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
