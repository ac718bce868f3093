"""How a policy client talks to its server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigurationError
from phalanx.routing.endpoint import Endpoint, Scheme

MIB = 1024 * 1024


@dataclass(frozen=True)
class PolicySettings:
    """`timeout_s` is the longest that a request may take, where a call does not say.

    `jpeg_quality` (1 to 95) sends single images as JPEG, a tenth of the bytes or less and not
    exactly what the camera saw; None sends them as they are. `api_key` goes with every request.
    `tls` encrypts; `tls_root` is a file (PEM) with the certificate to trust, where the system does
    not. A larger message than `max_message_bytes` is neither sent nor taken.
    """

    timeout_s: float = 60.0
    jpeg_quality: int | None = None
    api_key: str | None = None
    tls: bool = False
    tls_root: Path | None = None
    max_message_bytes: int = 100 * MIB

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        quality = self.jpeg_quality
        if quality is not None and not 1 <= quality <= 95:
            raise ConfigurationError(
                f"jpeg_quality={quality} must be from 1 to 95, or None to send images as they are"
            )
        if self.api_key is not None and not (
            self.api_key and self.api_key.isascii() and self.api_key.isprintable()
        ):
            raise ConfigurationError("api_key must be printable ASCII, and not empty")
        if self.tls_root is not None and not self.tls:
            raise ConfigurationError(f"tls_root={str(self.tls_root)!r} needs tls=True")
        if self.max_message_bytes < 1:
            raise ConfigurationError(
                f"max_message_bytes={self.max_message_bytes} must be at least 1"
            )


def check_timeout(timeout_s: float) -> None:
    """Raise `ConfigurationError` for a time that no request can take."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigurationError(f"timeout_s={timeout_s} must be a finite number above 0")


def parse_address(address: str) -> Endpoint:
    """A gateway's or policy server's gRPC address."""
    endpoint = Endpoint.parse(address)
    if endpoint.scheme is not Scheme.GRPC:
        raise ConfigurationError(
            f"address {address!r} is an HTTP address; give the gRPC address as HOST:PORT"
        )
    return endpoint
