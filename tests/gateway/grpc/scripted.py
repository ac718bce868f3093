"""Servers of which a test says frame by frame what they do, and calls at them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.rpc_error import RpcError
from phalanx.gateway.http2 import frames
from phalanx.gateway.http2.frames import Setting
from phalanx.routing.endpoint import Endpoint
from tests.gateway.http2.peer import Peer
from tests.gateway.policy_servers import HOST, request


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ask(channels: Channels, endpoint: Endpoint, within_s: float = 30.0) -> bytes:
    return (await channels.infer(endpoint, (request(),), now_s() + within_s))[0]


@contextmanager
def silent() -> Iterator[tuple[socket.socket, Endpoint]]:
    """An address that takes connections and says nothing."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        yield listening, Endpoint.parse(f"{HOST}:{listening.getsockname()[1]}")


@asynccontextmanager
async def scripted(**settings: int) -> AsyncIterator[tuple[Channels, Endpoint, asyncio.Queue]]:
    """A server that does what the test does with the `Peer` of each of its connections."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()
    made: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        made.append(peer)
        assert await peer.preface() == frames.PREFACE
        peer.send(frames.settings({Setting[name]: value for name, value in settings.items()}))
        await peers.put(peer)

    listener = await asyncio.start_server(serve, HOST, 0)
    endpoint = Endpoint.parse(f"{HOST}:{listener.sockets[0].getsockname()[1]}")
    channels = Channels(lambda: frozenset({endpoint}))
    try:
        yield channels, endpoint, peers
    finally:
        await channels.close()
        listener.close()
        for peer in made:
            await peer.close()


async def failed(asking: asyncio.Future[bytes]) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await asking
    return caught.value
