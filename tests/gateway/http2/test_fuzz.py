"""Connections that are almost right, seen from either side: nothing breaks, leaks, or is left
running. `make test-long` tries for longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import psutil
import pytest

from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.rpc_error import RpcError
from phalanx.gateway.grpc.upstream import NotConnectedError
from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frame_reader import FrameReader
from phalanx.gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    ConnectionFault,
    Setting,
)
from phalanx.gateway.http2.header_blocks import written
from phalanx.routing.endpoint import Endpoint
from tests.gateway.http2.echo import Echo, calling, client, echo
from tests.gateway.http2.peer import message
from tests.gateway.policy_servers import HOST, answer_to, request, run
from tests.wire.fuzzing import LONG_S, spoilt


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    return frames.head(kind, flags, stream_id, len(payload)) + payload


def dialogue(source: random.Random) -> list[bytes]:
    """What an honest client sends, frame by frame."""
    sent = [
        frames.settings({Setting.INITIAL_WINDOW_SIZE: source.choice((0, 10, 65_535, 1 << 20))}),
        frames.SETTINGS_ACK,
        frames.window_update(0, source.randrange(1, 1 << 20)),
    ]
    for stream_id in range(1, 2 * source.randint(1, 5), 2):
        name = source.choice(("Say", "Hold", "Sizes", "Slow", "Talk", "Nothing"))
        block = written(calling(name, (b"grpc-timeout", b"50m")))
        cut = source.randrange(len(block))
        sent.append(frame(HEADERS, block[:cut], 0, stream_id))
        sent.append(frame(CONTINUATION, block[cut:], END_HEADERS, stream_id))
        for _ in range(source.randint(0, 3)):
            data = message(source.randbytes(source.choice((0, 3, 300))), source.choice((0, 0, 1)))
            sent.append(frame(DATA, b"\x02" + data + b"\0\0", PADDED, stream_id))
            sent.append(frames.window_update(stream_id, source.randrange(1, 1000)))
        sent.append(
            source.choice(
                (
                    frame(DATA, message(b"x"), END_STREAM, stream_id),
                    frames.rst_stream(stream_id, frames.ErrorCode.CANCEL),
                    frame(PING, bytes(8)),
                )
            )
        )
    return sent


def spoilt_dialogue(source: random.Random) -> bytes:
    sent = dialogue(source)
    for _ in range(source.randint(0, 4)):
        where = source.randrange(len(sent))
        change = source.randrange(4)
        if change == 0:
            sent[where] = spoilt(sent[where], source)
        elif change == 1:
            del sent[where]
            sent = sent or [b""]
        elif change == 2:
            sent.insert(where, source.choice(sent))
        else:
            sent.insert(
                where, frame(source.randrange(12), source.randbytes(4), source.randrange(64))
            )
    data = b"".join(sent)
    return spoilt(data, source) if source.random() < 0.3 else data


def pieces(data: bytes, source: random.Random) -> list[bytes]:
    """Cut anywhere."""
    cuts = sorted(source.randrange(len(data) + 1) for _ in range(source.randint(0, 6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


class Recorder:
    """Writes down what a frame reader says, independent of how data was cut."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def data_begins(self, stream_id: int, num_bytes: int) -> None:
        self.said.append(("data", stream_id, num_bytes))
        self._data = b""

    def data(self, piece: memoryview) -> None:
        self._data += piece

    def data_ends(self, *, last: bool) -> None:
        self.said.append((self._data, last))

    def frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self.said.append((kind, flags, stream_id, payload))


def heard(parts: list[bytes]) -> list[tuple[object, ...]]:
    recorder = Recorder()
    reader = FrameReader(recorder, max_data_bytes=1 << 20, max_other_bytes=1 << 15)
    try:
        for part in parts:
            reader.feed(memoryview(part))
    except ConnectionFault as fault:
        recorder.said.append((fault.code, str(fault)))
    return recorder.said


@pytest.mark.parametrize("seed", range(30))
def test_frames_are_the_same_however_they_are_cut(seed):
    source = random.Random(seed)
    for _ in range(20):
        data = spoilt_dialogue(source)
        whole = heard([data])
        assert heard(pieces(data, source)) == whole
        assert heard([data[index : index + 1] for index in range(len(data))]) == whole


async def talk_to(served: Echo, source: random.Random) -> None:
    """As a client, until the gateway has said everything or turned it away."""
    reader, writer = await asyncio.open_connection(HOST, served.port)
    for part in (*pieces(PREFACE + spoilt_dialogue(source), source), frame(PING, b"the end.")):
        if not writer.transport.is_closing():
            writer.write(part)
        await asyncio.sleep(0)
    if source.random() < 0.5 and not writer.transport.is_closing():
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read(1 << 16)
    writer.transport.abort()


async def hear_from(source: random.Random) -> None:
    """As a server: whatever it says ends a call one way or another."""
    head = written(((b":status", b"200"), (b"content-type", b"application/grpc")))
    answer = answer_to(request())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = [
            frames.settings({Setting.MAX_CONCURRENT_STREAMS: 100}),
            frames.SETTINGS_ACK,
            frames.headers(1, head, 16384),
            frame(DATA, message(answer), 0, 1),
            frames.headers(
                1, written(((b"grpc-status", b"0"), (b"a-bin", b"AA"))), 16384, last=True
            ),
            frames.goaway(1, frames.ErrorCode.NO_ERROR, "bye"),
        ]
        writer.write(said[0])
        await reader.read(1 << 16)
        for _ in range(source.randint(0, 3)):
            where = source.randrange(len(said))
            said[where] = spoilt(said[where], source)
        for part in pieces(b"".join(said[1:]), source):
            if not writer.transport.is_closing():
                writer.write(part)
            await asyncio.sleep(0)
        writer.transport.abort()

    listener = await asyncio.start_server(serve, HOST, 0)
    endpoint = Endpoint.parse(f"{HOST}:{listener.sockets[0].getsockname()[1]}")
    channels = Channels(lambda: frozenset({endpoint}))
    end_s = asyncio.get_running_loop().time() + 60.0
    try:
        payload, _ = await channels.infer(endpoint, (request(),), end_s)
        assert isinstance(payload, bytes)
    except (RpcError, NotConnectedError):
        pass
    await channels.close()
    listener.close()


def fuzz(seconds: float, seed: int, rounds: int) -> None:
    async def scenario():
        source = random.Random(seed)
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
        async with echo(max_calls=50) as served:
            memory = psutil.Process().memory_info
            before, end = memory().rss, time.monotonic() + seconds
            while True:
                await asyncio.gather(*(talk_to(served, source) for _ in range(rounds)))
                await asyncio.gather(*(hear_from(source) for _ in range(rounds)))
                if time.monotonic() >= end:
                    break
            assert memory().rss - before < 100 << 20
            async with client(served) as peer:
                peer.call(1, b"still here")
                assert (await peer.answered(1))[1] == message(b"still here")
            while served.left < served.held:
                await served.until(left=served.left + 1)
        assert not faults

    run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_a_few_spoilt_connections(seed):
    fuzz(0.0, seed, 12)


@pytest.mark.long
def test_spoilt_connections_for_long():
    fuzz(LONG_S, 99, 20)
