"""Where a role's engines and routers are, read from their URLs once each."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from phalanx.errors import NoServerError
from phalanx.gateway.http.way import Place

_MAX_PLACES = 4096


@dataclass(frozen=True)
class RolePlace(Place):
    """`prefix` is the URL's path, without a slash at its end; `host_line` is its `host` field."""

    prefix: bytes = b""
    host_line: bytes = b""


class RolePlaces:
    """By URL. Belongs to one event loop."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._places: dict[str, RolePlace] = {}
        self._tls: ssl.SSLContext | None = None

    def of(self, base_url: str) -> RolePlace:
        """Raises `NoServerError` for an URL that nothing can be sent to."""
        place = self._places.get(base_url)
        if place is None:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            place = self._places[base_url] = self._read(base_url)
        return place

    def _read(self, base_url: str) -> RolePlace:
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host:
            raise NoServerError(f"an engine of role {self._role!r} has an address that is no URL")
        secure = parts.scheme == "https"
        if secure and self._tls is None:
            self._tls = ssl.create_default_context()
        return RolePlace(
            key=base_url,
            host=host,
            port=port or (443 if secure else 80),
            title=f"the engine of role {self._role!r}",
            tls=self._tls if secure else None,
            prefix=parts.path.rstrip("/").encode(),
            host_line=b"host: %b\r\n" % parts.netloc.rpartition("@")[2].encode(),
        )
