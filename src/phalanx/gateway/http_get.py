"""One small GET over a connection of its own: for probes, and for following another gateway."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httptools

from phalanx.errors import MalformedRequestError

_READ_BYTES = 64 * 1024


class _Answer:
    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        self.num_bytes = 0
        self.complete = False

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)
        self.num_bytes += len(part)

    def on_message_complete(self) -> None:
        self.complete = True


async def get(
    host: str,
    port: int,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    max_body_bytes: int = 64 * 1024 * 1024,
) -> tuple[int, bytes]:
    """The status and the body. The caller bounds the time.

    Raises `OSError` where there is no connection, and `MalformedRequestError` where what comes is
    no HTTP, breaks off or is too large.
    """
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"GET {target} HTTP/1.1", f"host: {authority}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        return await _read(reader, max_body_bytes)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, max_body_bytes: int) -> tuple[int, bytes]:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    while not answer.complete:
        data = await reader.read(_READ_BYTES)
        if not data:
            # Without a length the body ends with the connection.
            if parser.get_status_code() and not parser.should_keep_alive():
                break
            raise MalformedRequestError("the answer broke off")
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise MalformedRequestError(f"the answer is not HTTP: {error}") from None
        except httptools.HttpParserUpgrade:
            raise MalformedRequestError("it answered with another protocol") from None
        if answer.num_bytes > max_body_bytes:
            raise MalformedRequestError(f"the answer has more than {max_body_bytes} bytes")
    return parser.get_status_code(), b"".join(answer.parts)
