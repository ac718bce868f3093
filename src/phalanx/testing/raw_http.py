"""Requests of HTTP/1.1 as bytes: one a connection, read whole, passed on as they came."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

MAX_BYTES = 1 << 30
_HOP_BY_HOP = frozenset({b"connection", b"expect", b"transfer-encoding", b"content-length"})


@dataclass(frozen=True)
class RawRequest:
    """`headers` are without those that belong to the connection."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query))

    def json(self) -> object:
        """The body; None where it is none."""
        try:
            return json.loads(self.body or b"null")
        except ValueError:
            return None

    def encoded(self) -> bytes:
        """As the only request of a connection."""
        lines = [f"{self.method} {self.target} HTTP/1.1".encode()]
        lines += [name + b": " + value for name, value in self.headers]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: " + str(len(self.body)).encode())
        return b"\r\n".join([*lines, b"connection: close", b"", self.body])


async def read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> RawRequest | None:
    """The next request; None where the client has left. Raises `ValueError` for what is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ", 2)
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    named = dict(headers)
    if named.get(b"expect", b"").lower() == b"100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if b"chunked" in named.get(b"transfer-encoding", b"").lower():
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(named.get(b"content-length", b"0")))
    kept = tuple((name, value) for name, value in headers if name not in _HOP_BY_HOP)
    return RawRequest(method, target, kept, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    whole = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        whole += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return bytes(whole)


def answer(status: int, content: object) -> bytes:
    """A whole answer of JSON, the last one of its connection."""
    body = json.dumps(content).encode()
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    ).encode() + body
