"""One HTTP request and its answer, with what is certain about a request that failed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import httpx

from phalanx.client.roles.answers import failure_of
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.errors import EngineUnavailableError, NoServerError

_IDLE_S = 2.0
"""Shorter than servers keep a connection, so that a request rarely meets one that is being closed."""


class NotConnectedError(NoServerError):
    """There was no connection, so that nothing was sent."""


@dataclass(frozen=True)
class HttpCall:
    """A request; `body` None is a GET. `by_gateway`: who answers it is a gateway, not an engine."""

    url: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    by_gateway: bool = True


class HttpAnswer:
    """An answer of status 2xx whose head has come. Its reader closes it."""

    def __init__(self, call: HttpCall, response: httpx.Response) -> None:
        self.where = call.url
        self._response = response

    async def read(self) -> bytes:
        """The whole body. Raises `EngineUnavailableError` where it breaks off."""
        try:
            return await self._response.aread()
        except httpx.HTTPError as error:
            raise _lost(self.where, error) from error

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises `EngineUnavailableError` where it breaks off."""
        try:
            async for part in self._response.aiter_bytes():
                yield part
        except httpx.HTTPError as error:
            raise _lost(self.where, error) from error

    async def close(self) -> None:
        """Closes the connection where the body has not come whole."""
        await self._response.aclose()


class HttpExchange:
    """Connections of one client. The caller bounds the time and may cancel: then they are closed."""

    def __init__(self, settings: RoleClientSettings) -> None:
        self._client = httpx.AsyncClient(
            verify=settings.tls(),
            timeout=httpx.Timeout(None, connect=settings.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S),
            trust_env=False,
        )

    async def open(self, call: HttpCall) -> HttpAnswer:
        """Send it; returns when the head of an answer of status 2xx has come.

        Raises `NotConnectedError` where nothing was sent, `EngineUnavailableError` where it was and
        no answer came, and what the status says for another one.
        """
        headers = {"accept-encoding": "gzip" if call.body is None else "identity", **call.headers}
        if call.body is not None:
            headers["content-type"] = "application/json"
        method = "GET" if call.body is None else "POST"
        try:
            request = self._client.build_request(
                method, call.url, content=call.body, headers=headers
            )
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NotConnectedError(
                f"{call.url} cannot be reached ({_reason(error)}); nothing was sent"
            ) from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise NotConnectedError(f"{call.url!r} is no address of a server: {error}") from error
        except httpx.HTTPError as error:
            raise _lost(call.url, error) from error
        answer = HttpAnswer(call, response)
        if not response.is_success:
            try:
                body = await answer.read()
            finally:
                await answer.close()
            raise failure_of(
                call.url, response.status_code, response.headers, body, by_gateway=call.by_gateway
            )
        return answer

    async def get(self, call: HttpCall) -> bytes:
        """The whole answer; raises as `open` does."""
        answer = await self.open(call)
        try:
            return await answer.read()
        finally:
            await answer.close()

    async def close(self) -> None:
        await self._client.aclose()


def _lost(url: str, error: httpx.HTTPError) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"{url} was lost while it had the request ({_reason(error)}); it may have run, so it is not"
        " sent again"
    )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
