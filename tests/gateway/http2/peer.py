"""The other side of an HTTP/2 connection, frame by frame, as a test wants it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import DATA, GOAWAY, HEADERS, RST_STREAM, SETTINGS
from phalanx.gateway.http2.header_blocks import HeaderReader, Headers, written

PATH = b"/test.Echo/Say"
FIELDS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", PATH),
    (b":authority", b"gateway"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def last(self) -> bool:
        return bool(self.flags & frames.END_STREAM)


class Goodbye(NamedTuple):
    last_id: int
    code: int
    words: str


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


class Peer:
    """Sends what it is told and reads frame by frame; answers nothing by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers = HeaderReader(1 << 20)

    @classmethod
    async def client(cls, port: int, settings: bytes = frames.settings({})) -> Peer:
        """A client that has said hello."""
        peer = cls(*await asyncio.open_connection("127.0.0.1", port))
        peer.send(frames.PREFACE + settings)
        return peer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def call(
        self,
        stream_id: int,
        data: bytes | None = None,
        fields: Headers = FIELDS,
    ) -> None:
        """A call's head, and its message where there is one."""
        self.send(frames.headers(stream_id, written(fields), 16384))
        if data is not None:
            self.data(stream_id, message(data), last=True)

    def data(self, stream_id: int, data: bytes, *, last: bool = False, size: int = 16384) -> None:
        parts = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
        for number, part in enumerate(parts, 1):
            flags = frames.END_STREAM if last and number == len(parts) else 0
            self.send(frames.head(DATA, flags, stream_id, len(part)) + part)

    def answer(self, stream_id: int, data: bytes) -> None:
        """As a server: a message and success."""
        head = written(((b":status", b"200"), (b"content-type", b"application/grpc")))
        self.send(frames.headers(stream_id, head, 16384))
        self.data(stream_id, message(data))
        trailers = written(((b"grpc-status", b"0"),))
        self.send(frames.headers(stream_id, trailers, 16384, last=True))

    async def preface(self) -> bytes:
        """As a server: what a client begins with."""
        return await self._reader.readexactly(len(frames.PREFACE))

    async def frame(self) -> Frame:
        """The next one."""
        head = await self._reader.readexactly(frames.HEAD_BYTES)
        num_bytes, kind, flags, stream_id = frames.head_fields(head, 0)
        return Frame(kind, flags, stream_id, await self._reader.readexactly(num_bytes))

    async def next(self, *kinds: int) -> Frame:
        """The next one of these kinds; acknowledges settings that come before."""
        while True:
            frame = await self.frame()
            if frame.kind == SETTINGS and not frame.flags:
                self.send(frames.SETTINGS_ACK)
            if frame.kind in kinds:
                return frame

    async def request(self, *, whole: bool = True) -> int:
        """As a server: wait for a request, and return its stream."""
        frame = await self.next(HEADERS)
        while whole and not frame.last:
            frame = await self.next(DATA)
        return frame.stream_id

    async def answered(self, stream_id: int) -> tuple[dict[bytes, bytes], bytes]:
        """As a client: the fields, trailers among them, and the data of an answer."""
        fields: dict[bytes, bytes] = {}
        data = b""
        while True:
            frame = await self.next(HEADERS, DATA)
            if frame.kind == HEADERS:
                found = self._headers.read(frame.payload)
                if frame.stream_id == stream_id:
                    fields |= dict(found)
            elif frame.stream_id == stream_id:
                data += frame.payload
            if frame.stream_id == stream_id and frame.last:
                return fields, data

    async def reset_of(self, stream_id: int) -> int:
        """The code with which that stream is reset."""
        while (frame := await self.next(RST_STREAM)).stream_id != stream_id:
            pass
        return int.from_bytes(frame.payload, "big")

    async def goodbye(self) -> Goodbye:
        """How the other side leaves; afterwards it has closed the connection."""
        said = Goodbye(*frames.goaway_in((await self.next(GOAWAY)).payload))
        await self.ended()
        return said

    async def ended(self) -> None:
        """Wait until the other side has closed the connection."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass

    async def close(self) -> None:
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
