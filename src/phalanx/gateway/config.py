"""The configuration of a gateway, checked as a whole; refusals name the flag of `phalanx gateway`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.gateway.certificate import server_context
from phalanx.gateway.gateway_url import GatewayUrl
from phalanx.routing.endpoint import MAX_PORT, Endpoint, parse_listener
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import check_model_name

DEFAULT_GRPC = "127.0.0.1:50111"
DEFAULT_HTTP_PORT = 30000
DEFAULT_RELAYED = ("/v1/", "/generate")
MIB = 1024 * 1024
MIN_FPS, MAX_FPS = 0.001, 10_000
LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Backend:
    """One server that is known from the start."""

    model_name: str
    endpoint: Endpoint

    @classmethod
    def parse(cls, model_name: str, endpoint: str) -> Backend:
        try:
            check_model_name(model_name)
            return cls(model_name, Endpoint.parse(endpoint))
        except ConfigurationError as error:
            raise ConfigurationError(f"--backend {model_name} {endpoint}: {error}") from None


@dataclass(frozen=True)
class LeRobotPort:
    """A further port for LeRobot's clients, 0 being any free one. Its robots take `fps` actions a
    second, where that is not the gateway's `lerobot_fps`.
    """

    port: int
    fps: float | None = None

    @classmethod
    def parse(cls, text: str) -> LeRobotPort:
        """`PORT` or `PORT@FPS`."""
        port, separator, fps = text.partition("@")
        try:
            return cls(int(port), float(fps) if separator else None)
        except ValueError:
            raise ConfigurationError(
                f"--lerobot-port {text!r} must be PORT or PORT@FPS, for example 50121@15"
            ) from None

    def __str__(self) -> str:
        return str(self.port) if self.fps is None else f"{self.port} at {self.fps:g}"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Where a gateway listens (port 0: any free one), whom it lets in, and what it sends where.

    `http_model` and `robot_model` are for HTTP requests and robots' streams that name no model.
    `lerobot` serves LeRobot's asynchronous clients on the gRPC port and on `lerobot_ports`, with
    actions `1 / lerobot_fps` seconds apart, and no longer than `lerobot_timeout_s` for an inference.
    `api_key` opens inference, `admin_key` administration too; where only one of them is given, it is
    for both. `backend_key` is sent to gRPC servers that ask for one. HTTP requests whose path begins as
    one of `relay_prefixes` go to HTTP servers. `state_file` keeps the servers over a restart;
    `follow` is the HTTP address of another gateway whose servers this one has. `roles` is that of the
    control process of a job, whose roles are served under their names, and `roles_key` its key. A gRPC server that is
    not heard of for `keepalive_s` while it has a request has lost it. `threads` decode observations.
    """

    grpc_address: str = DEFAULT_GRPC
    http_host: str = "127.0.0.1"
    http_port: int = DEFAULT_HTTP_PORT
    threads: int = 32
    backends: tuple[Backend, ...] = ()
    http_model: str | None = None
    robot_model: str | None = None
    lerobot: bool = False
    lerobot_fps: float = 30.0
    lerobot_timeout_s: float = 30.0
    lerobot_ports: tuple[LeRobotPort, ...] = ()
    api_key: str | None = None
    admin_key: str | None = None
    backend_key: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    state_file: Path | None = None
    follow: str | None = None
    roles: str | None = None
    roles_key: str | None = None
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    keepalive_s: float = 10.0
    max_message_bytes: int = 100 * MIB
    http_health_path: str = "/health"
    relay_prefixes: tuple[str, ...] = DEFAULT_RELAYED
    access_log: bool = False
    pool: PoolPolicy = field(default_factory=PoolPolicy)

    def __post_init__(self) -> None:
        parse_listener(self.grpc_address, "--gateway")
        if not self.http_host:
            raise ConfigurationError("--http-host is empty; give an address such as 127.0.0.1")
        _check_port("--http-port", self.http_port)
        self._check_lerobot()
        _check_range("--threads", self.threads, 1, 1024)
        _check_range("--request-timeout-s", self.request_timeout_s, 0.001, 86_400)
        _check_range("--drain-timeout-s", self.drain_timeout_s, 0.0, 86_400)
        _check_range("--keepalive-s", self.keepalive_s, 0.1, 86_400)
        _check_range("--max-message-mib", self.max_message_bytes / MIB, 1 / 1024, 2047)
        for flag, name in (("--http-model", self.http_model), ("--robot-model", self.robot_model)):
            if name is not None:
                _named(flag, name)
        for flag, key in (
            ("--api-key", self.api_key),
            ("--admin-key", self.admin_key),
            ("--backend-key", self.backend_key),
            ("--roles-key", self.roles_key),
        ):
            if key is not None and not (key and key.isascii() and key.isprintable()):
                raise ConfigurationError(f"{flag} must be printable ASCII, and not empty")
        self._check_tls()
        self._check_follow()
        _check_path("--http-health-path", self.http_health_path)
        for prefix in self.relay_prefixes:
            _check_path("--relay", prefix)

    @property
    def grpc_listener(self) -> tuple[str, int]:
        return parse_listener(self.grpc_address, "--gateway")

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for. A key of the gateway's is not for its servers; without one
        the caller's is for them.
        """
        return self.api_key is None and self.admin_key is None

    @property
    def open_listeners(self) -> tuple[str, ...]:
        """The hosts that more than this machine can reach."""
        hosts = {self.grpc_listener[0], self.http_host}
        return tuple(sorted(host for host in hosts if not host.startswith(LOOPBACK)))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and seldom meant."""
        found = []
        if self.open_listeners and self.is_open:
            found.append(
                f"listening on {', '.join(self.open_listeners)} without a key: whoever reaches it can"
                " use the models and change the pool; give --api-key and --admin-key"
            )
        if self.lerobot and not self.is_open:
            found.append(
                "--lerobot with a key: LeRobot's own clients send none, and are refused; give the"
                " robots a gateway without --api-key and --admin-key"
            )
        if self.lerobot and self.tls_cert is not None:
            found.append(
                "--lerobot with --tls-cert: LeRobot's own clients speak no TLS, and find no server;"
                " give the robots a gateway without it"
            )
        return tuple(found)

    @property
    def description(self) -> str:
        """What would run, a line each."""
        lines = [f"gRPC on {self.grpc_address}", f"HTTP on {self.http_host}:{self.http_port}"]
        lines += [f"{each.model_name} at {each.endpoint}" for each in self.backends]
        if self.lerobot:
            ports = "".join(f", {port}" for port in self.lerobot_ports)
            lines.append(f"LeRobot at {self.lerobot_fps:g} actions a second{ports}")
        if self.state_file is not None:
            lines.append(f"servers kept in {self.state_file}")
        if self.follow is not None:
            lines.append(f"servers of {self.follow}")
        if self.roles is not None:
            lines.append(f"roles of {self.roles}")
        keys = [name for name, key in (("API", self.api_key), ("admin", self.admin_key)) if key]
        lines.append(f"{' and '.join(keys)} key" if keys else "no key: open to whoever reaches it")
        return "\n".join(lines)

    def _check_lerobot(self) -> None:
        _check_range("--lerobot-fps", self.lerobot_fps, MIN_FPS, MAX_FPS)
        _check_range("--lerobot-timeout-s", self.lerobot_timeout_s, 0.001, 86_400)
        for each in self.lerobot_ports:
            _check_port("--lerobot-port", each.port)
            if each.fps is not None:
                _check_range(f"--lerobot-port {each.port}@FPS: FPS", each.fps, MIN_FPS, MAX_FPS)
        given = [each.port for each in self.lerobot_ports if each.port]
        if len(set(given)) < len(given):
            raise ConfigurationError(f"--lerobot-port {given}: give each port once")
        if self.lerobot_ports and not self.lerobot:
            raise ConfigurationError("--lerobot-port needs --lerobot")

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key")
            if self.tls_cert is None:
                given, missing = missing, given
            raise ConfigurationError(f"{given} needs {missing}")
        for flag, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)):
            if path is not None and not path.is_file():
                raise ConfigurationError(f"{flag} {path} is not a file")
        if self.tls_cert is not None and self.tls_key is not None:
            server_context(self.tls_cert, self.tls_key)

    @property
    def control(self) -> GatewayUrl | None:
        """Where the control process of the job is whose roles are served."""
        if self.roles is None:
            return None
        return GatewayUrl.parse(self.roles, "--roles", "a job's control process")

    def _check_follow(self) -> None:
        if self.control is None and self.roles_key is not None:
            raise ConfigurationError("--roles-key needs --roles")
        if self.follow is not None:
            GatewayUrl.parse(self.follow)
        if self.follow is not None and self.backends:
            raise ConfigurationError(
                "--follow takes its servers from the other gateway; give --backend to that one"
            )


def _named(flag: str, name: str) -> None:
    try:
        check_model_name(name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag}: {error}") from None


def _check_path(flag: str, path: str) -> None:
    if not (path.startswith("/") and path.isascii() and path.isprintable() and " " not in path):
        raise ConfigurationError(f"{flag} {path!r} must be a path, and begin with '/'")


def _check_port(flag: str, port: int) -> None:
    if isinstance(port, bool) or not 0 <= port <= MAX_PORT:
        raise ConfigurationError(f"{flag} {port} must be from 0 (any free) to {MAX_PORT}")


def _check_range(flag: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ConfigurationError(f"{flag} {value:g} must be from {least:g} to {most:g}")
