"""The kinds of traffic of the gateway benchmark: bytes that are sent, and how a response is counted."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

MODEL = "m"
KEY = "benchmark-key"
NUM_EVENTS = 64
OBSERVATION_BYTES = 3 * 224 * 224 * 3 + 148_416
ACTION_BYTES = 6400
ROLE = "rollout"
PATHS = {
    "json": "/v1/chat/completions",
    "binary": "/v1/infer",
    "sse": "/v1/completions",
    "role-json": "/v1/chat/completions",
    "role-sse": "/generate",
}
"""Of a backend; those of a role are the same below its name."""
_WS_ACTION = 6400
Scanner = Callable[[bytes], bool]


@dataclass(frozen=True)
class Kind:
    """`requests` are sent in turn; `scanner()` makes a counter that is fed what comes back, and says
    when one response is whole. `greeting` is sent first, once a connection.
    """

    name: str
    requests: tuple[bytes, ...]
    scanner: Callable[[], Scanner]
    greeting: bytes = b""


def _head(path: str, content_type: str, length: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: benchmark\r\naccept: */*\r\n"
        f"authorization: Bearer {KEY}\r\nx-phalanx-note: an ordinary field\r\n"
        f"content-type: {content_type}\r\ncontent-length: {length}\r\n"
    ).encode()


def _json(path: str, *, stream: bool) -> tuple[bytes, ...]:
    """Requests of about 1 KB that differ in length, as prompts do."""
    made = []
    for extra in range(0, 70, 10):
        words = "x" * (880 + extra)
        asked = {"prompt": words} if stream else {"messages": [{"role": "user", "content": words}]}
        body = json.dumps({"model": MODEL, "stream": stream, **asked}).encode()
        made.append(_head(path, "application/json", len(body)) + b"\r\n" + body)
    return tuple(made)


def _with_length() -> Scanner:
    """Counts responses with a `content-length`."""
    held = bytearray()
    missing = -1

    def scan(data: bytes) -> bool:
        nonlocal missing, held
        if missing < 0:
            held += data
            end = held.find(b"\r\n\r\n")
            if end < 0:
                return False
            assert held.startswith(b"HTTP/1.1 200"), f"answered {bytes(held[:200])!r}"
            head = held[:end].lower()
            start = head.find(b"content-length:") + 15
            assert start >= 15, f"no length: {bytes(head)!r}"
            missing = int(head[start:].split(b"\r\n", 1)[0]) - (len(held) - end - 4)
            held = bytearray()
        else:
            missing -= len(data)
        assert missing >= 0, "more bytes than the response has"
        if missing == 0:
            missing = -1
            return True
        return False

    return scan


def _until(mark: bytes) -> Callable[[], Scanner]:
    """Counts responses that end with `mark`, of which every other part is in one piece."""

    def make() -> Scanner:
        tail = b""
        begun = False

        def scan(data: bytes) -> bool:
            nonlocal tail, begun
            if not begun:
                begun = True
                assert data.startswith(b"HTTP/1.1 200"), f"answered {data[:200]!r}"
            tail = (tail + data)[-len(mark) :]
            if tail == mark:
                begun, tail = False, b""
                return True
            return False

        return scan

    return make


def _frames(num_bytes: int) -> Callable[[], Scanner]:
    """Counts responses of one WebSocket frame of that size on the wire."""

    def make() -> Scanner:
        seen = 0

        def scan(data: bytes) -> bool:
            nonlocal seen
            seen += len(data)
            assert seen <= num_bytes, "more bytes than one frame has"
            if seen == num_bytes:
                seen = 0
                return True
            return False

        return scan

    return make


def _masked(payload: bytes) -> bytes:
    """A client's binary frame; its mask is zero, which leaves the payload as it is."""
    return b"\x82" + bytes([0x80 | 127]) + struct.pack("!Q", len(payload)) + bytes(4) + payload


def answer_frame() -> bytes:
    """A server's binary frame with an action."""
    return b"\x82" + bytes([126]) + struct.pack("!H", _WS_ACTION) + bytes(_WS_ACTION)


def _kinds() -> dict[str, Kind]:
    observation = os.urandom(OBSERVATION_BYTES)
    key = base64.b64encode(os.urandom(16)).decode()
    greeting = (
        f"GET /v1/socket HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
        f"x-phalanx-model: {MODEL}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n"
    ).encode()
    binary_head = _head(PATHS["binary"], "application/octet-stream", len(observation))
    binary = binary_head + f"x-phalanx-model: {MODEL}\r\n\r\n".encode() + observation
    found = (
        Kind("json", _json(PATHS["json"], stream=False), _with_length),
        Kind("binary", (binary,), _with_length),
        Kind("sse", _json(PATHS["sse"], stream=True), _until(b"0\r\n\r\n")),
        Kind("role-json", _json(f"/{ROLE}{PATHS['role-json']}", stream=False), _with_length),
        Kind("role-sse", _json(f"/{ROLE}{PATHS['role-sse']}", stream=True), _until(b"0\r\n\r\n")),
        Kind("websocket", (_masked(observation),), _frames(len(answer_frame())), greeting),
    )
    return {kind.name: kind for kind in found}


KINDS = _kinds()
