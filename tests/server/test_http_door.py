"""The listening port itself, whatever answers behind it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
import uvloop

from phalanx.server.http_door import HttpDoor

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def accepted(client: socket.socket) -> socket.socket:
    """This process's own end of `client`'s connection."""
    for name in Path("/proc/self/fd").iterdir():
        try:
            end = socket.socket(fileno=os.dup(int(name.name)))
        except OSError:
            continue  # no socket, or the folder's own listing
        try:
            if end.family == client.family and end.getpeername() == client.getsockname():
                return end
        except OSError:
            pass  # not connected
        end.close()
    raise AssertionError("nobody has accepted it")


async def options_of_a_connection(host: str) -> tuple[int, bytes]:
    """Whether Nagle's algorithm is off where it was accepted, and the beginning of an answer."""

    async def answer(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with HttpDoor(host, 0, answer) as door:
        port = int(door.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(REQUEST)
        line = await reader.readline()
        client = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        with client, accepted(client) as end:
            no_delay = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()
        return no_delay, line


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_second_part_of_an_answer_waits_for_no_acknowledgement(host, new_loop):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        no_delay, line = runner.run(options_of_a_connection(host))
    assert line.startswith(b"HTTP/1.1 204")
    assert no_delay
