"""HTTP/2 frames: their types, flags and error codes, how they are written, and what is wrong with one."""

from __future__ import annotations

import struct
from enum import IntEnum

# Frame types. Plain numbers, since each frame is compared with them.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
MAX_WINDOW = 2**31 - 1
FIRST_WINDOW = 65_535
"""Of a connection, and of each of its streams until settings say otherwise."""
LEAST_FRAME_BYTES = 16_384
MOST_FRAME_BYTES = 2**24 - 1

_HEAD = struct.Struct(">HBBBI")
_NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_GOAWAY = struct.Struct(">II")


class ErrorCode(IntEnum):
    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class ConnectionFault(Exception):
    """The peer has broken the protocol, or asks too much: the connection ends with `code`."""

    def __init__(self, code: ErrorCode, words: str) -> None:
        super().__init__(words)
        self.code = code


class StreamFault(Exception):
    """Something is wrong with one stream, which ends with `code`."""

    def __init__(self, code: ErrorCode, words: str) -> None:
        super().__init__(words)
        self.code = code


def head(kind: int, flags: int, stream_id: int, num_bytes: int) -> bytes:
    """The head of a frame whose payload follows it."""
    return _HEAD.pack(num_bytes >> 8, num_bytes & 0xFF, kind, flags, stream_id)


def head_fields(data: bytes | bytearray | memoryview, start: int) -> tuple[int, int, int, int]:
    """The payload's length, the type, the flags and the stream of the frame that begins there."""
    high, low, kind, flags, stream_id = _HEAD.unpack_from(data, start)
    return high << 8 | low, kind, flags, stream_id & MAX_WINDOW


def headers(stream_id: int, block: bytes, max_frame_bytes: int, *, last: bool = False) -> bytes:
    """A header block in as many frames as it needs."""
    ends = END_STREAM if last else 0
    if len(block) <= max_frame_bytes:
        return head(HEADERS, END_HEADERS | ends, stream_id, len(block)) + block
    frames = [head(HEADERS, ends, stream_id, max_frame_bytes), block[:max_frame_bytes]]
    for start in range(max_frame_bytes, len(block), max_frame_bytes):
        part = block[start : start + max_frame_bytes]
        flags = END_HEADERS if start + max_frame_bytes >= len(block) else 0
        frames += [head(CONTINUATION, flags, stream_id, len(part)), part]
    return b"".join(frames)


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(*pair) for pair in values.items())
    return head(SETTINGS, 0, 0, len(payload)) + payload


SETTINGS_ACK = head(SETTINGS, ACK, 0, 0)


def ping(payload: bytes, *, answer: bool = False) -> bytes:
    return head(PING, ACK if answer else 0, 0, len(payload)) + payload


def window_update(stream_id: int, num_bytes: int) -> bytes:
    return head(WINDOW_UPDATE, 0, stream_id, 4) + _NUMBER.pack(num_bytes)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return head(RST_STREAM, 0, stream_id, 4) + _NUMBER.pack(code)


def goaway(last_id: int, code: ErrorCode, words: str = "") -> bytes:
    debug = words.encode()[:200]
    return head(GOAWAY, 0, 0, 8 + len(debug)) + _GOAWAY.pack(last_id, code) + debug


def number_in(payload: bytes) -> int:
    """The payload of a WINDOW_UPDATE or RST_STREAM, without a reserved bit."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of 4 bytes has another length")
    return int(_NUMBER.unpack(payload)[0]) & MAX_WINDOW


def settings_in(payload: bytes) -> list[tuple[int, int]]:
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of half a value")
    return list(_SETTING.iter_unpack(payload))


def goaway_in(payload: bytes) -> tuple[int, int, str]:
    """The last stream that was or may be looked at, the code, and what else is said."""
    if len(payload) < 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
    last_id, code = _GOAWAY.unpack_from(payload)
    return last_id & MAX_WINDOW, code, payload[8:208].decode("ascii", "replace")


def name_of(code: int) -> str:
    """An error code in words, whether it is one of ours or not."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code}"
