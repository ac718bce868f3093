"""A whole gateway in this process, policy servers that answer probes, and what asks over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio

from phalanx.gateway.config import Backend, GatewayConfig
from phalanx.gateway.gateway import Gateway
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.snapshot import ServerState
from phalanx.wire import robot_inference as wire
from tests.gateway.http.running import Answer, Client
from tests.gateway.policy_servers import HOST, Behaviour, FakePolicyServer

QUICK = PoolPolicy(probe_interval_s=0.05, down_interval_s=0.02, probe_timeout_s=5.0)
ANY_PORTS = GatewayConfig(grpc_address=f"{HOST}:0", http_port=0, pool=QUICK, drain_timeout_s=10.0)


class ProbedServer(FakePolicyServer):
    """Says of itself whether it is `healthy`, and counts who asked."""

    def __init__(self, behave: Behaviour | None = None, port: int = 0) -> None:
        super().__init__(behave, port)
        self.healthy = True
        self.asked: list[str] = []
        self._was_asked = asyncio.Event()
        methods = {"CheckHealth": grpc.unary_unary_rpc_method_handler(self._check_health)}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.MODEL_INFERENCE, methods),)
        )

    async def probed(self, more: int = 1) -> None:
        """Wait until it was asked so many times more."""
        wanted = len(self.asked) + more
        while len(self.asked) < wanted:
            self._was_asked.clear()
            await self._was_asked.wait()

    async def _check_health(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.asked.append(wire.decode_health_request(data))
        self._was_asked.set()
        return wire.encode_health_response(self.healthy)


@asynccontextmanager
async def running(*servers: FakePolicyServer, **changes: object) -> AsyncIterator[Gateway]:
    """A started gateway; `servers`, which are started too, are its backends of model pi05."""
    backends = tuple([Backend("pi05", await server.start()) for server in servers])
    config = replace(ANY_PORTS, **{"backends": backends, **changes})  # type: ignore[arg-type]
    gateway = Gateway(config)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.close(drain_s=0.0)
        for server in servers:
            await server.stop()


async def until(gateway: Gateway, state: ServerState | None, *server_ids: str) -> None:
    """Wait until all servers, or those named, are in that state; None: until they are gone."""
    while True:
        snapshot = gateway.pool.snapshot
        if state is None:
            if not set(server_ids) & snapshot.by_id.keys():
                return
        else:
            wanted = server_ids or tuple(snapshot.by_id)
            if wanted and all(
                each in snapshot.by_id and snapshot.by_id[each].state is state for each in wanted
            ):
                return
        await gateway.pool.watch(snapshot.revision, 30.0)


async def ready(gateway: Gateway, count: int) -> None:
    """Wait until so many servers get requests."""
    while True:
        snapshot = gateway.pool.snapshot
        if sum(each.state is ServerState.READY for each in snapshot.servers) == count:
            return
        await gateway.pool.watch(snapshot.revision, 30.0)


def channel(gateway: Gateway) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        f"{HOST}:{gateway.grpc_port}", options=(("grpc.use_local_subchannel_pool", 1),)
    )


async def ask(
    gateway: Gateway,
    method: str,
    target: str,
    body: object = None,
    *,
    key: str | None = None,
    fields: tuple[str, ...] = ("content-type: application/json",),
) -> Answer:
    """One HTTP request; `body` is sent as JSON unless it is bytes."""
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/1.1", "host: gateway", f"content-length: {len(data)}"]
    lines += fields
    if key is not None:
        lines.append(f"authorization: Bearer {key}")
    client = Client(*await asyncio.open_connection(HOST, gateway.http_port, limit=2**22))
    try:
        client.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return await client.answer()
    finally:
        client.close()


async def asked(gateway: Gateway, method: str, target: str, body: object = None) -> object:
    """The JSON that is answered with success."""
    answer = await ask(gateway, method, target, body)
    assert 200 <= answer.status < 300, answer
    return json.loads(answer.body)
