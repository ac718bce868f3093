"""How a role's client talks to the gateway and to engines."""

from __future__ import annotations

import math
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from phalanx.errors import ConfigurationError

Mode = Literal["direct", "gateway", "auto"]
"""Where requests go: to engines, to the gateway, or to the gateway where no engine can be had."""


@dataclass(frozen=True)
class RoleClientSettings:
    """`timeout_s` is the longest that a request may take, with its stream, where a call does not say.

    A connection that is not there after `connect_timeout_s` counts as refused. Discovery is asked to
    answer after `poll_s` where nothing has changed, and again after `retry_s` (up to ten times that)
    where it has not answered. `engine_api_key` goes to engines that discovery
    names, which never get the gateway's key. `tls_root` is a file (PEM) with the certificate to
    trust, where the system does not.
    """

    timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    poll_s: float = 20.0
    retry_s: float = 0.5
    engine_api_key: str | None = None
    tls_root: Path | None = None

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "poll_s", "retry_s"):
            check_positive(name, getattr(self, name))
        check_key("engine_api_key", self.engine_api_key)

    def tls(self) -> ssl.SSLContext:
        """What servers have to show. Raises `ConfigurationError` where `tls_root` is no such file."""
        try:
            return ssl.create_default_context(
                cafile=None if self.tls_root is None else str(self.tls_root)
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"tls_root={str(self.tls_root)!r} cannot be used: {error}"
            ) from error


def check_mode(mode: str) -> None:
    """Raise `ConfigurationError` for what is no mode."""
    if mode not in get_args(Mode):
        raise ConfigurationError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")


def check_positive(name: str, value: float) -> None:
    """Raise `ConfigurationError` for what is no time."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name}={value} must be a finite number above 0")


def check_key(name: str, key: str | None) -> None:
    """Raise `ConfigurationError` for a key that cannot be sent in a header."""
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ConfigurationError(f"{name} must be printable ASCII, and not empty")


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows `key`."""
    return {} if key is None else {"authorization": f"Bearer {key}"}
