"""Configuration of a model server: where it listens, whom it lets in, how it ends."""

from __future__ import annotations

import ipaddress
import math
from typing import Any

import msgspec

from phalanx.errors import ConfigurationError

MAX_PORT = 65535
HTTP_PORT = 30000
POLICY_PORT = 50063
ROLES = ("both", "prefill", "decode")
WEIGHT_SOURCES = ("static", "dynamic")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one model server answers: a language model over HTTP at `port`, a robot policy over gRPC
    at `port` and, where `http_port` is given, over HTTP and WebSocket there.

    A port of 0 takes a free one; without `port` it is 30000, for a robot policy 50063. With `api_key` every route but `/health` and `/ready` wants it as a
    bearer token. `served_model_name`, or `model_name` as robot policies call it: the model's name to
    clients (None: the name of the checkpoint's directory, or of the plugin). A body larger than `max_request_bytes` is refused (413). A stop waits
    `drain_timeout_s` for running requests, then aborts them. `incremental_streaming_output`:
    chunks of `/generate` streams hold what is new instead of everything so far. `log_json`: access
    log lines are JSON objects.

    `weight_source`: a `static` server serves the weights of its checkpoint and refuses all others, a
    `dynamic` one takes new ones from a trainer; a body that brings weights may have
    `max_weights_bytes`. An update in several parts is given up where its trainer is not heard of for
    `weight_update_timeout_s`. With `tls_cert` and `tls_key` (PEM files) every port speaks TLS.

    `role`: `both` answers alone; `prefill` and `decode` servers share the work of requests that a
    router pairs. A prefill server is asked for what it computed at `bootstrap_port` (0: a free one);
    either side gives up on the other after `handoff_timeout_s`.

    The rest is for robot policies. A message larger than `max_message_bytes` is refused. A stop
    waits `grace_seconds` for running requests. `workers` threads prepare observations and finish
    actions. `exclusive`: one whole request at a time. The server registers itself at `gateway`
    (HOST:PORT), which asks for `gateway_key` if it has one, as `advertise` (None: the address that
    it listens on).
    """

    host: str = "127.0.0.1"
    port: int | None = None
    http_port: int | None = None
    api_key: str | None = None
    served_model_name: str | None = None
    model_name: str | None = None
    max_request_bytes: int = 32 * 1024 * 1024
    drain_timeout_s: float = 30.0
    retry_after_s: int = 1
    health_generate_timeout_s: float = 20.0
    incremental_streaming_output: bool = False
    access_log: bool = True
    log_json: bool = False
    weight_source: str = "dynamic"
    max_weights_bytes: int = 4 * 1024 * 1024 * 1024
    weight_update_timeout_s: float = 600.0
    tls_cert: str | None = None
    tls_key: str | None = None
    role: str = "both"
    bootstrap_port: int = 8998
    handoff_timeout_s: float = 300.0
    max_message_bytes: int = 100 * 1024 * 1024
    grace_seconds: float = 5.0
    workers: int = 2
    exclusive: bool = False
    gateway: str | None = None
    gateway_key: str | None = None
    advertise: str | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigurationError("host is empty; give an address such as 127.0.0.1")
        if self.role not in ROLES:
            raise ConfigurationError(f"role={self.role!r}; allowed: {', '.join(ROLES)}")
        if self.weight_source not in WEIGHT_SOURCES:
            raise ConfigurationError(
                f"weight_source={self.weight_source!r}; allowed: {', '.join(WEIGHT_SOURCES)}"
            )
        _check_tls(self.tls_cert, self.tls_key)
        _check_port("port", self.port)
        _check_port("http_port", self.http_port)
        _check_port("bootstrap_port", self.bootstrap_port)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigurationError("api_key is empty; give a key or leave it out")
        _check_names(self.served_model_name, self.model_name)
        self._check_gateway()
        for name, value in (
            ("max_request_bytes", self.max_request_bytes),
            ("max_weights_bytes", self.max_weights_bytes),
            ("retry_after_s", self.retry_after_s),
            ("max_message_bytes", self.max_message_bytes),
            ("workers", self.workers),
        ):
            if value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1")
        for name, seconds in (
            ("drain_timeout_s", self.drain_timeout_s),
            ("health_generate_timeout_s", self.health_generate_timeout_s),
            ("handoff_timeout_s", self.handoff_timeout_s),
            ("weight_update_timeout_s", self.weight_update_timeout_s),
            ("grace_seconds", self.grace_seconds),
        ):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigurationError(f"{name}={seconds} must be a finite number, at least 0")

    def _check_gateway(self) -> None:
        for name, told in (("advertise", self.advertise), ("gateway_key", self.gateway_key)):
            if told is not None and self.gateway is None:
                raise ConfigurationError(
                    f"{name} is told to a gateway; give gateway too, or leave it out"
                )
        if self.gateway is not None and self.tls_cert is not None:
            raise ConfigurationError(
                "a gateway calls the servers that register at it without TLS; leave tls_cert and "
                "tls_key out, or gateway"
            )
        if self.gateway is not None and self.advertise is None and _is_any(self.host):
            raise ConfigurationError(
                f"host={self.host} stands for every address of this machine, and is none that a "
                "gateway could call; give advertise=HOST:PORT"
            )

    @property
    def takes_weights(self) -> bool:
        """Whether others than the checkpoint's weights may be put in."""
        return self.weight_source == "dynamic"

    @property
    def public_name(self) -> str | None:
        """The model's name to clients, where one is given."""
        return self.served_model_name or self.model_name

    def shown(self) -> dict[str, Any]:
        """The fields by name, without secrets."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("api_key", "gateway_key"):
            fields[name] = None if fields[name] is None else "(set)"
        return fields


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _check_port(name: str, port: int | None) -> None:
    if port is None:
        return
    if isinstance(port, bool) or not 0 <= port <= MAX_PORT:
        raise ConfigurationError(f"{name}={port} must be from 0 (any free) to {MAX_PORT}")


def _check_tls(cert: str | None, key: str | None) -> None:
    if (cert is None) != (key is None):
        given, missing = ("tls_key", "tls_cert") if cert is None else ("tls_cert", "tls_key")
        raise ConfigurationError(f"{given} needs {missing} too; give both, or neither")
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        if path is not None and not path.strip():
            raise ConfigurationError(f"{name} is empty; give a PEM file or leave it out")


def _check_names(served_model_name: str | None, model_name: str | None) -> None:
    for key, name in (("served_model_name", served_model_name), ("model_name", model_name)):
        if name is not None and not name:
            raise ConfigurationError(f"{key} is empty; give a name or leave it out")
    if None not in (served_model_name, model_name) and served_model_name != model_name:
        raise ConfigurationError(
            f"served_model_name={served_model_name!r} and model_name={model_name!r} mean the same; "
            "give one of them"
        )
