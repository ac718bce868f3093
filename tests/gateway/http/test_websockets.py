"""WebSockets of the gateway's own handlers, and those that are joined to a backend."""

from __future__ import annotations

import asyncio

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    Pong,
    Request,
    TextMessage,
)

from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.router import Router
from tests.gateway.http.running import (
    Servers,
    ask,
    gateway,
    relayed,
    run,
)


class Socket:
    """A WebSocket client."""

    def __init__(self, client, path, **headers):
        self.client = client
        self.frames = WSConnection(ConnectionType.CLIENT)
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        client.write(self.frames.send(Request(host="gateway", target=path, extra_headers=pairs)))

    async def event(self):
        while True:
            for event in self.frames.events():
                return event
            data = await self.client.reader.read(65536)
            self.frames.receive_data(data or None)

    async def message(self):
        whole = None
        while True:
            event = await self.event()
            if not isinstance(event, (TextMessage, BytesMessage)):
                return event
            whole = event.data if whole is None else whole + event.data
            if event.message_finished:
                return whole

    def send(self, event):
        self.client.write(self.frames.send(event))


def test_a_websocket_handler_talks_both_ways():
    left = asyncio.Event()

    async def handler(given, socket):
        assert given.params == {"room": "7"}
        try:
            while (message := await socket.receive()) is not None:
                await socket.send(message)
        finally:
            left.set()

    async def scenario():
        router = Router()
        router.websocket("/ws/{room}", handler)
        limits = HttpLimits(max_body_bytes=700_000)
        async with gateway(Servers(), router, limits=limits) as front:
            socket = Socket(await front.connect(), "/ws/7")
            assert isinstance(await socket.event(), AcceptConnection)
            large = bytes(range(256)) * 2400
            for message in ("text", b"", large):
                kind = TextMessage if isinstance(message, str) else BytesMessage
                socket.send(kind(data=message))
                assert await socket.message() == message
            socket.send(Ping(b"p"))
            assert await socket.event() == Pong(b"p")
            socket.send(BytesMessage(data=large + large))
            assert (await socket.message()).code == 1009
            await left.wait()

            leaving = Socket(await front.connect(), "/ws/7")
            await leaving.event()
            left.clear()
            closing = asyncio.ensure_future(front.server.close(drain_s=30.0))
            event = await leaving.event()
            assert isinstance(event, CloseConnection) and event.code == 1001
            await closing

    run(scenario())


def test_a_websocket_to_a_backend_is_joined_and_counted():
    async def script(reader, writer):
        frames = WSConnection(ConnectionType.SERVER)
        while data := await reader.read(65536):
            frames.receive_data(data)
            for event in frames.events():
                if isinstance(event, Request):
                    writer.write(frames.send(AcceptConnection()))
                elif isinstance(event, BytesMessage):
                    writer.write(frames.send(BytesMessage(data=event.data)))
                elif isinstance(event, CloseConnection):
                    writer.write(frames.send(event.response()))
                    return

    async def scenario():
        async with relayed(script) as (front, one):
            socket = Socket(await front.connect(), "/v1/realtime")
            assert isinstance(await socket.event(), AcceptConnection)
            for size in (1, 70_000):
                socket.send(BytesMessage(data=b"x" * size))
                got = b""
                while len(got) < size:
                    got += (await socket.event()).data
                assert got == b"x" * size
            assert front.servers.in_flight == 1
            socket.send(CloseConnection(code=1000))
            assert isinstance(await socket.event(), CloseConnection)
            await front.servers.left(1)
            await front.server.close(drain_s=30.0)
            assert front.server.statistics.counts()["relay"].by_status == {101: 1}

    run(scenario())


def test_an_upgrade_that_the_backend_refuses_is_an_answer():
    refused, fallback = ask(
        b"GET /v1/x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\ncontent-length: 1\r\n\r\nx",
    )
    assert refused.status == 200 and refused.body == b"ok"
    assert fallback.status == 200 and fallback.body == b"ok"


@pytest.mark.parametrize("accepted", [True, False])
def test_what_a_client_sends_before_the_switch_is_held_in_part(accepted):
    sent = b"x" * (2 << 20)
    answer, echoed = asyncio.Event(), asyncio.Event()

    async def script(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await answer.wait()
        if not accepted:
            writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert await reader.readexactly(len(sent)) == sent
        echoed.set()

    async def scenario():
        async with relayed(script) as (front, _):
            client = await front.connect()
            client.write(b"GET /v1/x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\n")
            client.write(b"upgrade: websocket\r\n\r\n")
            client.write(sent)
            [connection] = front.server._connections
            reader = connection._reader
            while connection.transport.is_reading() and len(reader.tail) < len(sent):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert 0 < len(reader.tail) < len(sent)
            answer.set()
            got = await client.answer(without_body=True)
            assert got.status == (101 if accepted else 404)
            if accepted:
                await echoed.wait()
            client.close()

    run(scenario())


def test_a_client_that_takes_no_answers_to_its_pings_is_not_read_from_and_then_cut_off():
    left = asyncio.Event()

    async def handler(given, socket):
        try:
            await socket.receive()
        finally:
            left.set()

    async def scenario():
        router = Router()
        router.websocket("/ws", handler)
        limits = HttpLimits(stall_timeout_s=0.2)
        async with gateway(Servers(), router, limits=limits) as front:
            client = await front.connect()
            socket = Socket(client, "/ws")
            await socket.event()
            client.writer.transport.pause_reading()
            [connection] = front.server._connections
            pings = b"\x89\xfd\0\0\0\0" + b"p" * 125
            owed = []
            for _ in range(64):
                client.write(pings * 8000)
                drained = asyncio.ensure_future(client.writer.drain())
                ended = asyncio.ensure_future(left.wait())
                await asyncio.wait((drained, ended), return_when=asyncio.FIRST_COMPLETED)
                owed.append(connection.transport.get_write_buffer_size())
                if left.is_set():
                    break
            await asyncio.gather(drained, return_exceptions=True)
            assert left.is_set()
            assert max(owed) < 1 << 20
            client.writer.transport.abort()

    run(scenario())
