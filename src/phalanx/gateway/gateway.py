"""The gateway: its pool, its two doors, what stands between them, and how all of it starts and ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Coroutine

from phalanx.clock import Clock, SystemClock
from phalanx.errors import ConfigurationError
from phalanx.gateway.actions import ActionsAdapter
from phalanx.gateway.admin import AdminApi, Standing
from phalanx.gateway.certificate import server_context
from phalanx.gateway.config import GatewayConfig
from phalanx.gateway.event_loop import check_event_loop
from phalanx.gateway.following import Follower
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.gateway.grpc.channels import Channels
from phalanx.gateway.grpc.front import GrpcFront, GrpcLimits, Tls
from phalanx.gateway.grpc.model_inference import ModelInference
from phalanx.gateway.grpc.model_registry import ModelRegistry
from phalanx.gateway.grpc.robot_stream import RobotStream
from phalanx.gateway.grpc.service import Service
from phalanx.gateway.health_check import GrpcHealthCheck, HealthCheck, HttpHealthCheck
from phalanx.gateway.http.front import Relaying
from phalanx.gateway.http.keys import Keys
from phalanx.gateway.http.limits import HttpLimits
from phalanx.gateway.http.relay import Relay
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.http.router import POOL, Router
from phalanx.gateway.http.server import HttpServer, HttpServerConfig
from phalanx.gateway.inference import PolicyCaller
from phalanx.gateway.leases import LeaseTimer
from phalanx.gateway.lerobot import (
    LeRobotDoor,
    LeRobotService,
    LeRobotSettings,
    Listener,
    RobotsFile,
)
from phalanx.gateway.openpi import OpenpiAdapter
from phalanx.gateway.pool import Pool
from phalanx.gateway.probing import Prober
from phalanx.gateway.roles.inference_gateway import RoleGatewaySettings
from phalanx.gateway.roles.roles import Roles
from phalanx.gateway.state_file import StateFile, StateKeeper
from phalanx.gateway.workers import Workers
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher

logger = logging.getLogger(__name__)


class Gateway:
    """One gateway, made inside a running event loop. `start`, then `close`, which drains.

    Raises `ConfigurationError` where a file of the configuration cannot be used, and from `start`
    where an address cannot be.
    """

    def __init__(self, config: GatewayConfig, *, clock: Clock | None = None) -> None:
        clock = clock or SystemClock()
        self.config = config
        self.http_port = config.http_port
        self.grpc_port = config.grpc_listener[1]
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        registry = PoolRegistry(
            Publisher(secrets.token_hex(8)), clock, config.pool, mirrors=config.follow
        )
        self.pool = Pool(registry, clock)
        checks: dict[Scheme, HealthCheck] = {
            Scheme.GRPC: GrpcHealthCheck(config.backend_key),
            Scheme.HTTP: HttpHealthCheck(config.http_health_path),
        }
        self._prober = Prober(registry, clock, checks)
        self._leases = LeaseTimer(registry, clock)
        self._follower = (
            None
            if config.follow is None
            else Follower(
                registry, clock, GatewayUrl.parse(config.follow), config.admin_key or config.api_key
            )
        )
        self._channels = Channels(
            self._grpc_endpoints,
            max_message_bytes=config.max_message_bytes,
            keepalive_s=config.keepalive_s,
            backend_key=config.backend_key,
        )
        self.caller = PolicyCaller(
            self.pool, self._channels, max_timeout_s=config.request_timeout_s
        )
        self.router = Router()
        relays: dict[str, Relaying] = {}
        self.roles = _roles(config, relays, clock)
        self._http = _http_server(config, self.router, relays, self.pool, self.roles, clock)
        self.roles.add_to(self.router)
        AdminApi(
            self.pool,
            clock,
            self._http.statistics,
            standing=self._standing,
            saved=self._saved,
            roles=self.roles,
        ).add_to(self.router)
        self._workers = Workers(config.threads)
        OpenpiAdapter(
            self.caller,
            self._workers,
            RequestIds(),
            clock,
            default_model=config.robot_model or config.http_model,
        ).add_to(self.router)
        ActionsAdapter(self.caller, self._workers, default_model=config.http_model).add_to(
            self.router
        )
        self._grpc = self._front(*config.grpc_listener)
        for service in self._services():
            self._grpc.add(service)
        self._robots = self._door(clock) if config.lerobot else None
        if self._robots is not None:
            self._robots.add_to(self._grpc, self.router)

        # Last, since nothing would let go of its lock if something after it were refused.
        self._file = None if config.state_file is None else StateFile(config.state_file)
        self._keeper = None if self._file is None else StateKeeper(registry, self._file)
        for backend in config.backends:
            registry.register_managed(backend.model_name, backend.endpoint)

    @property
    def announcement(self) -> str:
        """Where it listens, on one line."""
        scheme = "http" if self.config.tls_cert is None else "https"
        http = _authority(self.config.http_host, self.http_port)
        grpc = _authority(self.config.grpc_listener[0], self.grpc_port)
        robots = "".join(
            f", LeRobot at {_authority(self.config.grpc_listener[0], port)}"
            for port in (self._robots.ports if self._robots is not None else ())
        )
        return f"phalanx gateway: {scheme}://{http} and gRPC at {grpc}{robots}"

    async def start(self) -> None:
        """Listen, and probe the servers that are known; what cannot be listened on is raised."""
        try:
            self.grpc_port = await self._grpc.start()
            if self._robots is not None:
                await self._robots.start()
            self.http_port = await self._listen_http()
        except ConfigurationError:
            await self.close(drain_s=0.0)
            raise
        self._run("prober", self._prober.run())
        self._run("leases", self._leases.run())
        if self._keeper is not None:
            self._run("state file", self._keeper.run())
        if self._follower is not None:
            self._run("follower", self._follower.run())
        if self.config.roles is not None:
            self._run("roles", self.roles.follow())

    def stop(self) -> None:
        """Let `wait` return."""
        if not self._end.done():
            self._end.set_result(None)

    async def wait(self) -> None:
        """Until `stop` is called. Raises where a part of the gateway has failed; none should."""
        await asyncio.shield(self._end)

    async def close(self, drain_s: float | None = None) -> None:
        """Take no more requests, let those that run end, and close.

        `drain_s` is how long they may take (None: as configured). Calling it again with less cuts
        them off earlier.
        """
        drain_s = self.config.drain_timeout_s if drain_s is None else drain_s
        self._draining = True
        self.pool.close()
        self.roles.close()
        await asyncio.gather(
            self._http.close(drain_s),
            self._grpc.close(drain_s),
            *(() if self._robots is None else (self._robots.close(drain_s),)),
        )
        if self._robots is not None:
            await self._robots.forget()
        if self._keeper is not None and any(not task.done() for task in self._tasks):
            await self._keeper.saved()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channels.close()
        self._workers.close()
        if self._file is not None:
            self._file.close()

    def _services(self) -> list[Service]:
        """What the gRPC port serves."""
        services = [
            ModelInference(self.pool, self.caller).service(),
            ModelRegistry(self.pool).service(),
        ]
        if self.config.robot_model is not None:
            stream = RobotStream(self.caller, self._workers, self.config.robot_model, RequestIds())
            services.append(stream.service())
        return services

    def _door(self, clock: Clock) -> LeRobotDoor:
        config = self.config
        settings = LeRobotSettings(
            fps=config.lerobot_fps,
            infer_timeout_s=min(config.lerobot_timeout_s, config.request_timeout_s),
            max_upload_bytes=config.max_message_bytes,
        )
        path = config.state_file
        file = None if path is None else RobotsFile(path.with_name(path.name + ".robots"))
        robots = LeRobotService(self.caller, self._workers, clock, settings, file)
        host, _ = config.grpc_listener
        keys, limits, tls = self._keys, self._grpc_limits, _grpc_tls(config)
        listeners = [
            Listener(host, each.port, keys, limits, tls, each.fps) for each in config.lerobot_ports
        ]
        return LeRobotDoor(robots, listeners)

    @property
    def _keys(self) -> Keys:
        return Keys(self.config.api_key, self.config.admin_key)

    @property
    def _grpc_limits(self) -> GrpcLimits:
        return GrpcLimits(max_message_bytes=self.config.max_message_bytes)

    def _front(self, host: str, port: int) -> GrpcFront:
        return GrpcFront(
            host,
            port,
            keys=self._keys,
            limits=self._grpc_limits,
            tls=_grpc_tls(self.config),
            access_log=self.config.access_log,
        )

    async def _listen_http(self) -> int:
        try:
            return await self._http.start()
        except OSError as error:
            address = f"{self.config.http_host}:{self.config.http_port}"
            raise ConfigurationError(
                f"cannot listen on {address} for HTTP: {error.strerror or error}; choose another"
                " --http-host or --http-port"
            ) from None

    def _run(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._end.done():
            return
        error = task.exception()
        assert error is not None, "these run until they are cancelled"
        logger.error("the gateway's %s failed", task.get_name(), exc_info=error)
        self._end.set_exception(error)

    def _standing(self) -> Standing:
        fault = "" if self._follower is None else self._follower.lost
        return Standing(self._draining, fault, self.config.lerobot, self.roles.known)

    async def _saved(self) -> str:
        return "" if self._keeper is None else await self._keeper.saved()

    def _grpc_endpoints(self) -> frozenset[Endpoint]:
        return frozenset(
            server.endpoint
            for server in self.pool.snapshot.servers
            if server.endpoint.scheme is Scheme.GRPC
        )


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _http_limits(config: GatewayConfig) -> HttpLimits:
    return HttpLimits(
        max_body_bytes=config.max_message_bytes, response_timeout_s=config.request_timeout_s
    )


def _http_server(
    config: GatewayConfig,
    router: Router,
    relays: dict[str, Relaying],
    pool: Pool,
    roles: Roles,
    clock: Clock,
) -> HttpServer:
    limits = _http_limits(config)

    def elsewhere() -> str:
        served = any(server.endpoint.scheme is Scheme.HTTP for server in pool.snapshot.servers)
        return "" if served else roles.addresses()

    relays[POOL] = Relay(
        pool,
        default_model=config.http_model,
        passes_authorization=config.is_open,
        limits=limits,
        elsewhere=elsewhere,
    )
    router.relay(*config.relay_prefixes)
    served = HttpServerConfig(
        config.http_host,
        config.http_port,
        api_key=config.api_key,
        admin_key=config.admin_key,
        access_log=config.access_log,
        limits=limits,
    )
    return HttpServer(router, relays, config=served, tls=_http_tls(config), clock=clock)


def _roles(config: GatewayConfig, relays: dict[str, Relaying], clock: Clock) -> Roles:
    settings = RoleGatewaySettings(config.is_open, _http_limits(config))
    follow = None if config.control is None else (config.control, config.roles_key)
    return Roles(follow, clock, settings, relays)


def _http_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    check_event_loop()
    return server_context(config.tls_cert, config.tls_key)


def _grpc_tls(config: GatewayConfig) -> Tls | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(config.tls_cert.read_bytes(), config.tls_key.read_bytes())
