"""The HTTP address of another gateway, or of a job's control process."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from phalanx.errors import ConfigurationError
from phalanx.routing.endpoint import Endpoint


@dataclass(frozen=True)
class GatewayUrl:
    """Where its HTTP side is."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, text: str, flag: str = "--follow", of: str = "another gateway") -> GatewayUrl:
        """Raises `ConfigurationError`, in words of `flag`, whose value is the address `of` that."""
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
            raise ConfigurationError(
                f"{flag} {text!r} must be http://HOST:PORT or https://HOST:PORT, the HTTP address"
                f" of {of}"
            )
        endpoint = Endpoint.parse("http://" + parts.netloc)
        return cls(endpoint.host, endpoint.port, parts.scheme == "https")
