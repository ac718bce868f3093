"""Configuration of a model server: where it listens, whom it lets in, how it ends."""

from __future__ import annotations

import math

import msgspec

from phalanx.errors import ConfigurationError

MAX_PORT = 65535
ROLES = ("both", "prefill", "decode")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one model server answers HTTP.

    `port` 0 takes a free one. With `api_key` every route but `/health` and `/ready` wants it as a
    bearer token. `served_model_name`: the model's name on the OpenAI routes (None: the name of the
    checkpoint's directory). A body larger than `max_request_bytes` is refused (413). A stop waits
    `drain_timeout_s` for running requests, then aborts them. `incremental_streaming_output`:
    chunks of `/generate` streams hold what is new instead of everything so far. `log_json`: access
    log lines are JSON objects.

    `role`: `both` answers alone; `prefill` and `decode` servers share the work of requests that a
    router pairs. A prefill server is asked for what it computed at `bootstrap_port` (0: a free one);
    either side gives up on the other after `handoff_timeout_s`.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    served_model_name: str | None = None
    max_request_bytes: int = 32 * 1024 * 1024
    drain_timeout_s: float = 30.0
    retry_after_s: int = 1
    health_generate_timeout_s: float = 20.0
    incremental_streaming_output: bool = False
    access_log: bool = True
    log_json: bool = False
    role: str = "both"
    bootstrap_port: int = 8998
    handoff_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigurationError("host is empty; give an address such as 127.0.0.1")
        if self.role not in ROLES:
            raise ConfigurationError(f"role={self.role!r}; allowed: {', '.join(ROLES)}")
        _check_port("port", self.port)
        _check_port("bootstrap_port", self.bootstrap_port)
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigurationError("api_key is empty; give a key or leave it out")
        if self.served_model_name is not None and not self.served_model_name:
            raise ConfigurationError("served_model_name is empty; give a name or leave it out")
        for name, value in (
            ("max_request_bytes", self.max_request_bytes),
            ("retry_after_s", self.retry_after_s),
        ):
            if value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1")
        for name, seconds in (
            ("drain_timeout_s", self.drain_timeout_s),
            ("health_generate_timeout_s", self.health_generate_timeout_s),
            ("handoff_timeout_s", self.handoff_timeout_s),
        ):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigurationError(f"{name}={seconds} must be a finite number, at least 0")


def _check_port(name: str, port: int) -> None:
    if isinstance(port, bool) or not 0 <= port <= MAX_PORT:
        raise ConfigurationError(f"{name}={port} must be from 0 (any free) to {MAX_PORT}")
