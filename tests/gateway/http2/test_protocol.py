"""What a peer may not send, and what it is told: RFC 9113, frame by frame."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from hpack import Decoder, Encoder

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Setting,
)
from phalanx.gateway.http2.header_blocks import written
from tests.gateway.http2.echo import calling, client, echo
from tests.gateway.http2.peer import FIELDS, Peer, message
from tests.gateway.policy_servers import HOST, run

Code = ErrorCode


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    return frames.head(kind, flags, stream_id, len(payload)) + payload


def number(value: int) -> bytes:
    return struct.pack(">I", value)


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, struct.pack(">HI", key, value))


BLOCK = written(FIELDS)
OPENED = frame(HEADERS, BLOCK, END_HEADERS, 1)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(DATA, b"x", stream_id=0), Code.PROTOCOL_ERROR),
        (frame(DATA, b"x", stream_id=1), Code.PROTOCOL_ERROR),
        (frame(DATA, b"x", stream_id=2), Code.PROTOCOL_ERROR),
        (OPENED + frame(DATA, b"\x05abc", PADDED, 1), Code.PROTOCOL_ERROR),
        (OPENED + frame(DATA, b"", PADDED, 1), Code.FRAME_SIZE_ERROR),
        (OPENED + frames.head(DATA, 0, 1, 1 << 21), Code.FRAME_SIZE_ERROR),
        (frame(HEADERS, BLOCK, END_HEADERS, 0), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK, END_HEADERS, 2), Code.PROTOCOL_ERROR),
        (frame(HEADERS, b"\xff\xff\xff\xff\xff\xff\xff", END_HEADERS, 1), Code.COMPRESSION_ERROR),
        (frame(HEADERS, b"\x80", END_HEADERS, 1), Code.COMPRESSION_ERROR),
        (frame(HEADERS, b"\x00", END_HEADERS, 1), Code.COMPRESSION_ERROR),
        (frame(HEADERS, b"\x3f\xff\xff\x7f" + BLOCK, END_HEADERS, 1), Code.COMPRESSION_ERROR),
        (frame(HEADERS, b"\xff" + BLOCK, END_HEADERS | PADDED, 1), Code.PROTOCOL_ERROR),
        (frame(HEADERS, b"", END_HEADERS | PADDED, 1), Code.FRAME_SIZE_ERROR),
        (frame(HEADERS, b"abc", END_HEADERS | HAS_PRIORITY, 1), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(PING, bytes(8)), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(SETTINGS), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(SETTINGS, flags=ACK), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(DATA, b"", 0, 1), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(77), Code.PROTOCOL_ERROR),
        (frame(HEADERS, BLOCK[:9], 0, 1) + frame(CONTINUATION, b"", 4, 3), Code.PROTOCOL_ERROR),
        (frame(CONTINUATION, BLOCK, END_HEADERS, 1), Code.PROTOCOL_ERROR),
        (frame(CONTINUATION, BLOCK, END_HEADERS, 0), Code.PROTOCOL_ERROR),
        (frame(PRIORITY, b"abcd", stream_id=1), Code.FRAME_SIZE_ERROR),
        (frame(PRIORITY, b"abcde", stream_id=0), Code.PROTOCOL_ERROR),
        (frame(RST_STREAM, number(8), stream_id=0), Code.PROTOCOL_ERROR),
        (frame(RST_STREAM, number(8), stream_id=1), Code.PROTOCOL_ERROR),
        (OPENED + frame(RST_STREAM, b"abc", stream_id=1), Code.FRAME_SIZE_ERROR),
        (frame(SETTINGS, stream_id=1), Code.PROTOCOL_ERROR),
        (frame(SETTINGS, b"abc"), Code.FRAME_SIZE_ERROR),
        (frame(SETTINGS, b"abcdef", ACK), Code.FRAME_SIZE_ERROR),
        (setting(Setting.ENABLE_PUSH, 2), Code.PROTOCOL_ERROR),
        (setting(Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW + 1), Code.FLOW_CONTROL_ERROR),
        (setting(Setting.MAX_FRAME_SIZE, 16_383), Code.PROTOCOL_ERROR),
        (setting(Setting.MAX_FRAME_SIZE, 1 << 24), Code.PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, number(2) + BLOCK, END_HEADERS, 1), Code.PROTOCOL_ERROR),
        (frame(PING, bytes(8), stream_id=1), Code.PROTOCOL_ERROR),
        (frame(PING, bytes(7)), Code.FRAME_SIZE_ERROR),
        (frame(GOAWAY, bytes(8), stream_id=1), Code.PROTOCOL_ERROR),
        (frame(GOAWAY, bytes(7)), Code.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, number(0)), Code.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, number(MAX_WINDOW)), Code.FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, number(1), stream_id=1), Code.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, b"abc"), Code.FRAME_SIZE_ERROR),
        (frames.head(GOAWAY, 0, 0, 1 << 20), Code.FRAME_SIZE_ERROR),
    ],
)
def test_a_frame_that_may_not_be_ends_the_connection(sent, code):
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(sent)
            assert (await peer.goodbye()).code == code

    run(scenario())


@pytest.mark.parametrize("between", [frame(PING, bytes(8)), frame(77), frame(DATA, b"", 0, 1)])
def test_nothing_comes_between_the_parts_of_a_header_block(between):
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(frame(HEADERS, BLOCK[:9], 0, 1) + between)
            assert (await peer.goodbye()).words == "a header block was not ended"

    run(scenario())


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
        frames.PREFACE + frame(PING, bytes(8)),
        frames.PREFACE + frame(SETTINGS, flags=ACK),
        frames.PREFACE + OPENED,
        frames.PREFACE + frame(DATA, b"x", stream_id=1),
    ],
)
def test_a_client_that_begins_otherwise_is_turned_away(hello):
    async def scenario():
        async with echo() as served:
            peer = Peer(*await asyncio.open_connection("127.0.0.1", served.port))
            peer.send(hello)
            assert (await peer.goodbye()).code == Code.PROTOCOL_ERROR
            await peer.close()

    run(scenario())


HOLD = frame(HEADERS, written(calling("Hold")), END_HEADERS, 1)
WHOLE = frame(DATA, message(b"x"), END_STREAM, 1)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (HOLD + WHOLE + frame(DATA, b"x", 0, 1), Code.STREAM_CLOSED),
        (HOLD + WHOLE + frame(HEADERS, BLOCK, END_HEADERS, 1), Code.STREAM_CLOSED),
        (HOLD + frame(HEADERS, written(((b"a", b"b"),)), END_HEADERS, 1), Code.PROTOCOL_ERROR),
        (HOLD + frame(WINDOW_UPDATE, number(0), stream_id=1), Code.PROTOCOL_ERROR),
        (HOLD + frame(WINDOW_UPDATE, number(MAX_WINDOW), stream_id=1), Code.FLOW_CONTROL_ERROR),
    ],
)
def test_a_fault_of_one_stream_ends_that_stream_alone(sent, code):
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(sent)
            assert await peer.reset_of(1) == code
            peer.call(3, b"still here")
            assert (await peer.answered(3))[1] == message(b"still here")

    run(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        FIELDS[1:],
        (FIELDS[0], FIELDS[2]),
        (*FIELDS[:2], *FIELDS[3:]),
        (*FIELDS[:2], (b":path", b""), *FIELDS[3:]),
        (*FIELDS, (b":path", b"/x")),
        (*FIELDS[:4], FIELDS[2], *FIELDS[4:]),
        (*FIELDS[:4], (b":status", b"200"), *FIELDS[4:]),
        (*FIELDS, (b"connection", b"close")),
        (*FIELDS, (b"transfer-encoding", b"chunked")),
        (*FIELDS, (b"te", b"gzip")),
        (*FIELDS, (b"Upper", b"case")),
        (*FIELDS, (b"with space", b"x")),
        (*FIELDS, (b"with:colon", b"x")),
        (*FIELDS, (b"", b"x")),
        (*FIELDS, (b"x", b"line\nbreak")),
        (*FIELDS, (b"x", b"nul\0")),
        (*FIELDS, (b"x", b" space")),
    ],
)
def test_fields_that_are_no_request_end_their_stream(fields):
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, fields=fields)
            assert await peer.reset_of(1) == Code.PROTOCOL_ERROR
            peer.call(3, b"x")
            assert (await peer.answered(3))[1] == message(b"x")

    run(scenario())


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b":method", b"GET", b"405"),
        (b"content-type", b"application/json", b"415"),
        (b"content-type", b"application/grpcx", b"415"),
    ],
)
def test_what_is_http_and_not_grpc_is_told_so(name, value, status):
    async def scenario():
        async with echo() as served, client(served) as peer:
            fields = tuple((key, value if key == name else old) for key, old in FIELDS)
            peer.call(1, fields=fields)
            assert (await peer.answered(1))[0][b":status"] == status

    run(scenario())


def test_unknown_frames_settings_and_flags_mean_nothing():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(frame(99, b"whatever", 0xFF, 7) + setting(0xABCD, 5))
            peer.send(frame(PRIORITY, bytes(5), stream_id=3))
            peer.send(frame(HEADERS, BLOCK, END_HEADERS | 0x40, 1))
            peer.data(1, message(b"x"), last=True)
            assert (await peer.answered(1))[1] == message(b"x")

    run(scenario())


def test_padding_priorities_and_parts_of_header_blocks_are_read():
    async def scenario():
        async with echo() as served, client(served) as peer:
            block = b"\x03" + bytes(5) + BLOCK[:20] + bytes(3)
            peer.send(frame(HEADERS, block, PADDED | HAS_PRIORITY, 1))
            peer.send(frame(CONTINUATION, BLOCK[20:30], 0, 1))
            peer.send(frame(CONTINUATION, b"", 0, 1))
            peer.send(frame(CONTINUATION, BLOCK[30:], END_HEADERS, 1))
            whole = message(b"padded")
            peer.send(frame(DATA, b"\x04" + whole[:3] + bytes(4), PADDED, 1))
            peer.send(frame(DATA, b"\x00" + whole[3:], PADDED, 1))
            peer.send(frame(DATA, b"\x02\0\0", PADDED | END_STREAM, 1))
            assert (await peer.answered(1))[1] == whole

    run(scenario())


def test_a_ping_is_answered_with_what_it_said():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.send(frame(PING, b"whatever", ACK) + frame(PING, b"12345678"))
            got = await peer.next(PING)
            assert (got.flags, got.payload) == (ACK, b"12345678")

    run(scenario())


def test_header_blocks_that_use_a_table_are_read_until_the_peer_has_agreed_to_none():
    """A client that has not heard yet what the gateway takes may use a table of 4096 bytes."""

    async def scenario():
        async with echo() as served, client(served) as peer:
            encoder = Encoder()
            for number_, stream_id in enumerate((1, 3)):
                block = encoder.encode(FIELDS, huffman=True)
                assert number_ == 0 or len(block) < 10, "the second block leans on the first"
                peer.send(frame(HEADERS, block, END_HEADERS, stream_id))
                peer.data(stream_id, message(b"%d" % stream_id), last=True)
            for stream_id in (1, 3):
                assert (await peer.answered(stream_id))[1] == message(b"%d" % stream_id)
            # Has acknowledged the settings by now, and uses the table all the same.
            peer.send(frame(HEADERS, encoder.encode(FIELDS), END_HEADERS, 5))
            assert (await peer.goodbye()).code == Code.COMPRESSION_ERROR

    run(scenario())


def test_what_is_read_in_single_bytes_is_the_same():
    async def scenario():
        async with echo() as served, client(served) as peer:
            whole = OPENED + frame(DATA, b"\x01" + message(b"xyz") + b"\0", PADDED | END_STREAM, 1)
            for byte in frame(PING, bytes(8)) + whole:
                peer.send(bytes((byte,)))
                await asyncio.sleep(0)
            assert (await peer.answered(1))[1] == message(b"xyz")

    run(scenario())


def test_a_client_that_leaves_is_answered_to_the_end():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, b"x", calling("Hold"))
            await served.until(held=1)
            peer.send(frames.goaway(0, Code.NO_ERROR))
            served.release.set()
            assert (await peer.answered(1))[1] == message(b"x")
            await peer.ended()

    run(scenario())


def test_a_gateway_that_leaves_looks_at_no_more_streams_and_says_so():
    async def scenario():
        async with echo() as served, client(served) as peer:
            peer.call(1, b"x", calling("Hold"))
            await served.until(held=1)
            leaving = asyncio.ensure_future(served.close(600.0))
            told = await peer.next(GOAWAY)
            assert frames.goaway_in(told.payload)[0] == 1
            peer.call(3, b"late", calling("Hold"))
            peer.data(3, b"more")
            assert await peer.reset_of(3) == Code.REFUSED_STREAM
            assert served.held == 1
            served.release.set()
            assert (await peer.answered(1))[1] == message(b"x")
            await peer.ended()
            await peer.close()
            await leaving

    run(scenario())


def test_the_last_answer_of_a_gateway_that_leaves_is_read_by_a_client_that_says_something():
    """It is still on its way when the gateway has written all of it."""

    async def scenario():
        hello = frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 24})
        async with echo() as served:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_connect(slow, (HOST, served.port))
            peer = Peer(*await asyncio.open_connection(sock=slow, limit=16_384))
            peer.send(frames.PREFACE + hello + frames.window_update(0, 1 << 24))
            body = bytes(500_000)
            peer.call(1, body, calling("Hold"))
            await served.until(held=1)
            leaving = asyncio.ensure_future(served.close(600.0))
            await peer.next(GOAWAY)
            served.release.set()
            data, frame = b"", await peer.next(HEADERS)
            while not frame.last:
                frame = await peer.next(DATA, HEADERS)
                data += frame.payload if frame.kind == DATA else b""
                peer.send(frames.window_update(0, 1) + frames.ping(bytes(8)))
            assert data == message(body)
            await peer.close()
            await leaving

    run(scenario())


def test_the_first_header_block_says_that_no_table_is_used():
    """A client that wants none must be told so before the first field."""

    async def scenario():
        hello = frames.settings({Setting.HEADER_TABLE_SIZE: 0})
        async with echo() as served, client(served, hello) as peer:
            decoder = Decoder()
            decoder.max_allowed_table_size = 0
            for stream_id in (1, 3):
                peer.call(stream_id, b"x")
                for _ in range(2):
                    block = (await peer.next(HEADERS)).payload
                    assert decoder.decode(block)
                assert decoder.header_table_size == 0

    run(scenario())
