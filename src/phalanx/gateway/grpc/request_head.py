"""The head of a gRPC call, read from the header fields that open its stream."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.gateway.grpc.metadata import timeout_s
from phalanx.gateway.http2.frames import ErrorCode, StreamFault
from phalanx.gateway.http2.header_blocks import Headers

_NEEDED = frozenset({b":method", b":scheme", b":path"})
_PSEUDO = _NEEDED | {b":authority"}
_OF_CONNECTIONS = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)


@dataclass(frozen=True)
class RequestHead:
    """`refusal` is the HTTP status of what is no gRPC call. `encoding` is how messages may be
    compressed; `timeout_s` is None where the caller waits for ever.
    """

    path: str
    authority: str
    authorization: bytes
    encoding: bytes
    timeout_s: float | None
    headers: Headers
    refusal: int | None = None


def read_head(headers: Headers) -> RequestHead:
    """Raises `StreamFault` where the fields are not those of a request (RFC 9113, 8.2 and 8.3)."""
    pseudo: dict[bytes, bytes] = {}
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name.startswith(b":"):
            if fields or name in pseudo or name not in _PSEUDO:
                raise _fault(name, "is unknown, repeated, or after others")
            pseudo[name] = value
        else:
            _check_field(name, value)
            fields[name] = value
    if not pseudo.keys() >= _NEEDED or not pseudo[b":path"]:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "the request has no method, scheme or path")
    authority = pseudo.get(b":authority") or fields.get(b"host", b"")
    return RequestHead(
        path=pseudo[b":path"].decode("ascii", "replace"),
        authority=authority.decode("ascii", "replace").lower(),
        authorization=fields.get(b"authorization", b""),
        encoding=fields.get(b"grpc-encoding", b"identity"),
        timeout_s=timeout_s(fields.get(b"grpc-timeout", b"")),
        headers=headers,
        refusal=_refusal(pseudo[b":method"], fields.get(b"content-type", b"")),
    )


def _check_field(name: bytes, value: bytes) -> None:
    if not name or name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise _fault(name, "is not for HTTP/2")
    if name != name.lower() or any(byte <= 0x20 or byte >= 0x7F or byte == 0x3A for byte in name):
        raise _fault(name, "is no name")
    if any(byte in value for byte in b"\0\r\n") or value != value.strip(b" \t"):
        raise _fault(name, "has a value that may not be")


def _refusal(method: bytes, content_type: bytes) -> int | None:
    if method != b"POST":
        return 405
    kind = content_type.partition(b";")[0]
    if kind != b"application/grpc" and not kind.startswith(b"application/grpc+"):
        return 415
    return None


def _fault(name: bytes, words: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, f"the field {name[:80]!r} {words}")
