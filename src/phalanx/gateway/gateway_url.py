"""The HTTP address of another gateway."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from phalanx.errors import ConfigurationError
from phalanx.routing.endpoint import Endpoint


@dataclass(frozen=True)
class GatewayUrl:
    """Where another gateway's HTTP side is."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, text: str) -> GatewayUrl:
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
            raise ConfigurationError(
                f"--follow {text!r} must be http://HOST:PORT or https://HOST:PORT, the HTTP address"
                " of another gateway"
            )
        endpoint = Endpoint.parse("http://" + parts.netloc)
        return cls(endpoint.host, endpoint.port, parts.scheme == "https")
