"""Where a server listens: `HOST:PORT` and `[IPv6]:PORT` for gRPC, `http://HOST:PORT` for HTTP."""

from __future__ import annotations

import enum
import ipaddress
import re
from dataclasses import dataclass

from phalanx.errors import ConfigurationError

MAX_PORT = 65535
MAX_LENGTH = 300
ANY_HOST = ("0.0.0.0", "::")
"""What only a listener can have."""
FORMS = "HOST:PORT, [IPv6]:PORT or grpc://HOST:PORT for gRPC, http://HOST:PORT for HTTP"
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")


class Scheme(enum.StrEnum):
    """What a server speaks: `robot.inference.v1` over gRPC, or HTTP with its streams."""

    GRPC = "grpc"
    HTTP = "http"

    # Every request looks servers up by it, and an enum's own hash is a call of Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, order=True)
class Endpoint:
    """One address of one server. Two spellings of the same address are equal once parsed."""

    scheme: Scheme
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Raise `ConfigurationError` saying what is wrong with `text`."""
        if len(text) > MAX_LENGTH:
            raise _refusal(text[:40] + "...", f"is longer than {MAX_LENGTH} characters")
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls(Scheme.GRPC, *_address(text, text))
        if scheme == "https":
            raise _refusal(text, "asks for TLS, which the gateway speaks to its callers only")
        if scheme not in tuple(Scheme):
            raise _refusal(text, f"has the scheme {scheme!r}")
        if scheme == Scheme.HTTP:
            rest = rest.removesuffix("/")
        return cls(Scheme(scheme), *_address(rest, text))

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.authority if self.scheme is Scheme.GRPC else f"http://{self.authority}"


def parse_listener(text: str, name: str) -> tuple[str, int]:
    """The host and port of `HOST:PORT` to listen on; port 0 takes a free one.

    `name` is how the setting is called where it is refused.
    """
    host, separator, port = text.rpartition(":")
    if not separator:
        raise ConfigurationError(f"{name} {text!r} must be HOST:PORT or [IPv6]:PORT")
    if not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise ConfigurationError(
            f"{name} {text!r} has port {port!r}; allowed: 0 (any free) to {MAX_PORT}"
        )
    return _host(host, text), int(port)


def _address(rest: str, text: str) -> tuple[str, int]:
    if "@" in rest:
        raise _refusal(text, "holds credentials, which an endpoint cannot")
    if re.search(r"[/?#]", rest):
        raise _refusal(text, "has a path or a query")
    host, separator, port = rest.rpartition(":")
    if not separator or rest.endswith("]"):
        raise _refusal(text, "has no port")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= MAX_PORT):
        raise _refusal(text, f"has port {port!r}, which must be from 1 to {MAX_PORT}")
    host = _host(host, text)
    if host in ANY_HOST:
        raise _refusal(
            text, "stands for every address of a machine, so that nothing can be sent to it"
        )
    return host, int(port)


def _host(host: str, text: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            return ipaddress.IPv6Address(host[1:-1]).compressed
        except ValueError:
            raise _refusal(text, f"has {host!r}, which is not an IPv6 address") from None
    if ":" in host:
        raise _refusal(text, "has an IPv6 address without brackets")
    if not _HOST.fullmatch(host):
        raise _refusal(text, f"has no valid host: {host!r}")
    if host.rstrip(".").rpartition(".")[2].isdecimal():  # as a name it could not be resolved
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise _refusal(text, f"has {host!r}, which is not an IPv4 address") from None
    return host.lower()


def _refusal(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"endpoint {text!r} {why}; allowed: {FORMS}")
