"""One HTTP request and its answer, with what is certain about a request that failed."""

from __future__ import annotations

import ssl
import zlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpcore

from phalanx.client.roles.answers import failure_of
from phalanx.client.roles.kept_connections import KeptConnections
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.errors import (
    ConfigurationError,
    EngineUnavailableError,
    NoServerError,
    RequestFailedError,
)
from phalanx.wire.discovery import MAX_DOCUMENT_BYTES

_GZIP = 31
"""Window bits of zlib for gzip's format."""
_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.ConnectionNotAvailable,
)


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
    """An answer whose head has come. Its reader closes it."""

    def __init__(
        self,
        where: str,
        response: httpcore.Response,
        url: httpcore.URL,
        connection: httpcore.AsyncHTTPConnection,
        connections: KeptConnections,
    ) -> None:
        self.status = response.status
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in response.headers
        }
        self._where = where
        self._response = response
        self._url = url
        self._connection = connection
        self._connections = connections

    async def read(self) -> bytes:
        """The whole body. Raises `EngineUnavailableError` where it breaks off."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises `EngineUnavailableError` where it breaks off."""
        try:
            async for part in self._response.aiter_stream():
                yield part
        except _FAILURES as error:
            raise _lost(self._where, error) from error

    async def close(self) -> None:
        """Closes the connection where the body has not come whole. Any number of times."""
        try:
            await self._response.aclose()
        finally:
            await self._connections.put_back(self._url, self._connection)


class HttpExchange:
    """Requests of one client. The caller bounds the time and may cancel: then the connection is
    closed.
    """

    def __init__(self, settings: RoleClientSettings) -> None:
        self._connections = KeptConnections(settings.tls())
        self._timeouts = {"timeout": {"connect": settings.connect_timeout_s}}
        self._answered: set[str] = set()

    async def open(self, call: HttpCall) -> HttpAnswer:
        """Send it; returns when the head of an answer of status 2xx has come.

        Raises `NotConnectedError` where nothing was sent (`ConfigurationError` for a certificate that
        is not trusted), `EngineUnavailableError` where it was and no answer came, and what the
        status says for another one.
        """
        url = _parsed(call.url)
        request = httpcore.Request(
            "GET" if call.body is None else "POST",
            url,
            headers=_headers(call, url),
            content=call.body,
            extensions=self._timeouts,
        )
        connection = await self._connections.take(url)
        try:
            response = await connection.handle_async_request(request)
        except BaseException as error:
            await self._connections.put_back(url, connection)
            if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
                raise _not_connected(call.url, error) from error
            if isinstance(error, _FAILURES):
                is_new = url.scheme == b"http" and str(url.origin) not in self._answered
                hint = "; where it serves TLS, its address begins with https://" if is_new else ""
                raise _lost(call.url, error, hint) from error
            raise
        self._answered.add(str(url.origin))
        answer = HttpAnswer(call.url, response, url, connection, self._connections)
        if 200 <= answer.status < 300:
            return answer
        try:
            body = await answer.read()
        finally:
            await answer.close()
        raise failure_of(call.url, answer.status, answer.headers, body, by_gateway=call.by_gateway)

    async def get(self, call: HttpCall) -> bytes:
        """The whole answer; raises as `open` does."""
        answer = await self.open(call)
        try:
            body = await answer.read()
        finally:
            await answer.close()
        if answer.headers.get("content-encoding", "identity") == "identity":
            return body
        return _unpacked(call.url, body)

    async def close(self) -> None:
        await self._connections.close()


def _parsed(text: str) -> httpcore.URL:
    try:
        parts = urlsplit(text)
        is_usable = text.isascii() and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if is_usable and parts.scheme in ("http", "https"):
        return httpcore.URL(text)
    raise NotConnectedError(f"{text[:300]!r} is no address of a server; nothing was sent")


def _headers(call: HttpCall, url: httpcore.URL) -> list[tuple[bytes, bytes]]:
    host = b"[%b]" % url.host if b":" in url.host else url.host
    authority = host if url.port is None else b"%b:%d" % (host, url.port)
    headers = [(b"host", authority), (b"accept", b"*/*")]
    if call.body is None:
        headers.append((b"accept-encoding", b"gzip"))
    else:
        headers += [
            (b"accept-encoding", b"identity"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(call.body)),
        ]
    given = call.headers.items()
    return headers + [(name.encode(), value.encode("latin-1")) for name, value in given]


def _unpacked(where: str, body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP)
    try:
        unpacked = unpacking.decompress(body, MAX_DOCUMENT_BYTES)
    except zlib.error as error:
        raise RequestFailedError(f"{where} answered what cannot be unpacked: {error}") from error
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise RequestFailedError(
            f"{where} answered what is cut off, or has more than {MAX_DOCUMENT_BYTES} bytes"
        )
    return unpacked


def _not_connected(url: str, error: BaseException) -> NotConnectedError | ConfigurationError:
    tls = error
    while not isinstance(tls, ssl.SSLError):
        cause = tls.__cause__ or tls.__context__
        if cause is None:
            return NotConnectedError(
                f"{url} cannot be reached ({_reason(error)}); nothing was sent"
            )
        tls = cause
    if isinstance(tls, ssl.SSLCertVerificationError):
        return ConfigurationError(
            f"{url} shows a certificate that is not trusted ({_reason(error)}); nothing was sent."
            " Give the file with the certificate to trust as tls_root in RoleClientSettings, and a"
            " host name that it is for"
        )
    return NotConnectedError(
        f"{url} cannot be reached by TLS ({_reason(error)}); nothing was sent. Where it does not"
        " serve TLS, its address begins with http://"
    )


def _lost(url: str, error: BaseException, hint: str = "") -> EngineUnavailableError:
    return EngineUnavailableError(
        f"{url} was lost while it had the request ({_reason(error)}); it may have run, so it is not"
        f" sent again{hint}"
    )


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
