"""One policy server: the ports open, the engine loads and is warmed up, robots are answered, a stop
drains. Everything here belongs to one event loop, but for the gRPC port's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

import numpy as np

from phalanx.clock import Clock, SystemClock
from phalanx.engine.engine import Engine
from phalanx.errors import InvalidRequestError
from phalanx.plugin import PolicyAdapter
from phalanx.schema.observation import Observation, PolicyInfo
from phalanx.schema.server_config import ServerConfig
from phalanx.server.app import ServerParts, create_app, create_starting_app
from phalanx.server.draining import drain
from phalanx.server.http_door import HttpDoor
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.loading import loaded_engine
from phalanx.server.metrics import ServerMetrics
from phalanx.server.policy.backend import PolicyBackend, StartingBackend
from phalanx.server.policy.grpc_door import GrpcDoor
from phalanx.server.policy.http_routes import policy_routes
from phalanx.server.policy.registration import SelfRegistration
from phalanx.server.policy.service import PolicyService, ServiceParts
from phalanx.server.policy.summary import ServedPolicy
from phalanx.server.stop import Stop
from phalanx.server.tls import Tls, load_tls
from phalanx.wire.robot_inference import Registration

logger = logging.getLogger(__name__)

WARM_UP_IMAGE = (224, 224, 3)


class PolicyServer:
    """Serves the policy `adapter` on the engine that `engine_factory` loads; `run` it once."""

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        adapter: PolicyAdapter,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._engine_factory = engine_factory
        self._adapter = adapter
        self._config = config
        self._name = config.public_name or adapter.info.policy
        self._clock = clock if clock is not None else SystemClock()
        self._lifecycle = Lifecycle()
        self._stop = Stop()

    def stop(self) -> None:
        """Drain and end; a second call does not wait for running requests."""
        self._stop.ask()

    async def run(
        self,
        *,
        on_bound: Callable[[ServedPolicy], None] | None = None,
        on_ready: Callable[[ServedPolicy], None] | None = None,
    ) -> None:
        """Serve until `stop`. The callbacks are told when the ports answer, and when requests are
        served. Raises what `engine_factory` raised."""
        tls = load_tls(self._config)
        async with AsyncExitStack() as doors:
            grpc_door = GrpcDoor(self._config, StartingBackend(), self._clock, tls)
            await doors.enter_async_context(grpc_door)
            http_door = await self._open_http(doors, tls)
            url = None if http_door is None else http_door.url
            served = ServedPolicy(self._name, self._adapter.info, grpc_door.address, url)
            if on_bound is not None:
                on_bound(served)
            logger.info("listening on %s, loading", grpc_door.address)
            async with loaded_engine(self._engine_factory, self._stop, self._lifecycle) as engine:
                if engine is not None:
                    await self._serve(engine, grpc_door, http_door, served, on_ready)

    async def _open_http(self, doors: AsyncExitStack, tls: Tls | None) -> HttpDoor | None:
        config = self._config
        if config.http_port is None:
            return None
        door = HttpDoor(
            config.host,
            config.http_port,
            create_starting_app(config, self._lifecycle, self._clock),
            key="http_port",
            websocket_bytes=config.max_message_bytes,
            tls=tls,
        )
        return await doors.enter_async_context(door)

    async def _serve(
        self,
        engine: Engine,
        grpc_door: GrpcDoor,
        http_door: HttpDoor | None,
        served: ServedPolicy,
        on_ready: Callable[[ServedPolicy], None] | None,
    ) -> None:
        config, live = self._config, LiveRequests(engine.cancel)
        metrics = ServerMetrics(engine.statistics)
        parts = ServiceParts(self._lifecycle, live, metrics, self._clock)
        service = PolicyService(engine, self._adapter, self._name, config, parts)
        try:
            await self._warm_up(service)
            grpc_door.lead_to(PolicyBackend(service))
            if http_door is not None:
                shared = ServerParts(self._lifecycle, live, self._clock, metrics=metrics)
                routes = policy_routes(service, config)
                http_door.lead_to(create_app(engine, None, config, shared, routes))
            self._lifecycle.move(Phase.READY)
            logger.info("%s", served)
            if on_ready is not None:
                on_ready(served)
            registering = self._registering(grpc_door.address)
            await self._stop.asked.wait()
            for task in registering:
                task.cancel()
            await drain(self._lifecycle, live, config.grace_seconds, self._stop.hurried)
            await asyncio.gather(*registering, return_exceptions=True)
        finally:
            service.close()

    async def _warm_up(self, service: PolicyService) -> None:
        try:
            await service.warm_up(_blank(self._adapter.info))
        except InvalidRequestError as error:
            logger.warning("not warmed up, the first request may be slow: %s", error)

    def _registering(self, address: str) -> list[asyncio.Task[None]]:
        """The task that registers the server, where it has a gateway."""
        gateway = self._config.gateway
        if gateway is None:
            return []
        offer = Registration(self._config.advertise or address, self._name)
        registering = SelfRegistration(gateway, offer, key=self._config.gateway_key)
        return [asyncio.create_task(registering.run())]


def _blank(info: PolicyInfo) -> Observation:
    """An observation of nothing."""
    state = None if info.state_dim is None else np.zeros(info.state_dim, np.float32)
    return Observation(
        images={name: np.zeros(WARM_UP_IMAGE, np.uint8) for name in info.cameras}, state=state
    )
