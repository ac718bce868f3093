"""Our whole gateway in this process: key, pool, probes, request ids, exact counts and statistics."""

from __future__ import annotations

import asyncio
import os

from background_loop import BackgroundLoop  # type: ignore[import-not-found]
from command_loop import Message  # type: ignore[import-not-found]
from gateway_grpc import POLICY  # type: ignore[import-not-found]
from gateway_proxy_process import HOST, Proxy, serve  # type: ignore[import-not-found]
from gateway_traffic import KEY, MODEL, ROLE  # type: ignore[import-not-found]

from phalanx import __version__
from phalanx.gateway.config import Backend, GatewayConfig
from phalanx.gateway.gateway import Gateway
from phalanx.heap import keep_freed_memory
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.routing.roles.snapshot import ReplicaState, RoleContent, RoleModel, RoleReplica
from phalanx.routing.snapshot import ServerState
from phalanx.schema.roles import RoutingSpec, WorkloadType

READY_S = 30.0
SERVED = "served"
"""What the engines call the model, so that its name is rewritten."""


class OwnProxy:
    """The gateway, running in the background while this thread answers commands."""

    def __init__(self, message: Message) -> None:
        keep_freed_memory()
        self._loop = BackgroundLoop()
        self._loop.run(self._start(message))

    def pids(self) -> list[int]:
        return [os.getpid()]

    def describe(self) -> str:
        return f"phalanx {__version__}: key, probes, request ids, counts and statistics on"

    def close(self) -> None:
        self._loop.run(self._gateway.close(drain_s=0.0))
        self._loop.close()

    async def _start(self, message: Message) -> None:
        backends = [Backend.parse(MODEL, f"http://{HOST}:{port}") for port in message["ports"]]
        backends += [Backend.parse(POLICY, f"{HOST}:{port}") for port in message["grpc_ports"]]
        config = GatewayConfig(
            grpc_address=f"{HOST}:0",
            http_port=0,
            backends=tuple(backends),
            api_key=KEY,
        )
        self._gateway = gateway = Gateway(config)
        await gateway.start()
        gateway.roles.serve(ROLE, RoleRegistry(ROLE, "benchmark", _role(message["ports"])))
        self.port, self.grpc_port = gateway.http_port, gateway.grpc_port
        async with asyncio.timeout(READY_S):
            snapshot = gateway.pool.snapshot
            while any(server.state is not ServerState.READY for server in snapshot.servers):
                snapshot = await gateway.pool.watch(snapshot.revision, READY_S)


def _role(ports: list[int]) -> RoleContent:
    """One model with a replica a port."""
    ready = ReplicaState.READY
    replicas = tuple(
        RoleReplica(f"{MODEL}/{ordinal}", f"http://{HOST}:{port}", ready)
        for ordinal, port in enumerate(ports)
    )
    model = RoleModel(MODEL, ready, replicas=replicas, served_model_name=SERVED)
    return RoleContent(WorkloadType.ROLLOUT, RoutingSpec(), (model,))


def start(message: Message) -> Proxy:
    return OwnProxy(message)


if __name__ == "__main__":
    serve(start)
