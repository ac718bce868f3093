"""A role of fake engines behind a fake gateway, for tests of mode `direct`."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager

from phalanx.client import AsyncRoleClient
from tests.client.roles.servers import (
    HOST,
    FakeEngine,
    FakeGateway,
    model,
)

PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"temperature": 0}, "custom": {"kept": [None]}}


@asynccontextmanager
async def role(*engines: FakeEngine, key: str | None = None):
    """Engines of model `math`, published by a gateway; all run."""
    gateway = FakeGateway(key=key)
    for server in (*engines, gateway):
        await server.start()
    gateway.show(model("math", *(engine.replica() for engine in engines)))
    try:
        yield gateway
    finally:
        for server in (*engines, gateway):
            await server.stop()


async def heard(client: AsyncRoleClient, gateway: FakeGateway) -> None:
    """Until the client knows what is published now."""
    mirror, wanted = client._calls.follower.mirror, gateway.registry.snapshot
    while (mirror.snapshot.epoch, mirror.snapshot.revision) != (wanted.epoch, wanted.revision):
        await mirror.wait(mirror.snapshot.revision, None, mirror.snapshot.epoch)


def closed_port() -> str:
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return f"http://{HOST}:{taken.getsockname()[1]}"
