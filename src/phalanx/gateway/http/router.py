"""Which handler answers a path, which paths are relayed to HTTP backends, and who may ask.

Exact paths come first, then what is mounted, then patterns in the order they were added, then the
relayed prefixes. A WebSocket's route is asked for upgrades alone, so that a path may have both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol
from urllib.parse import unquote

from phalanx.errors import ConfigurationError
from phalanx.gateway.http.message import Handler, HttpRequest
from phalanx.gateway.http.refusal import Refusal
from phalanx.gateway.http.websocket import WebSocket

WebSocketHandler = Callable[[HttpRequest, WebSocket], Awaitable[None]]

REFUSED = "refused"
POOL = ""
"""The relay to the servers of the pool."""


class Access(StrEnum):
    """The key that a route asks for."""

    OPEN = "open"
    INFERENCE = "inference"
    ADMIN = "admin"


@dataclass(frozen=True)
class HandlerRoute:
    """A handler, and what the pattern's named parts stood for; `kind`: as the statistics call it."""

    kind: ClassVar[str] = "handler"

    handler: Handler
    access: Access
    params: Mapping[str, str]


@dataclass(frozen=True)
class WebSocketRoute:
    kind: ClassVar[str] = "websocket"
    handler: WebSocketHandler
    access: Access
    params: Mapping[str, str]


@dataclass(frozen=True)
class RelayRoute:
    """The request goes to an HTTP backend, by the relay of that name."""

    kind: ClassVar[str] = "relay"
    access: Access
    to: str = POOL


@dataclass(frozen=True)
class NoRoute:
    """Nothing answers; `allowed` are the methods that the path has. `now`: what to say instead, for
    a path that may have an answer later.
    """

    kind: ClassVar[str] = REFUSED
    allowed: tuple[str, ...] = ()
    now: Refusal | None = None


Route = HandlerRoute | WebSocketRoute | RelayRoute | NoRoute


class Mount(Protocol):
    """Has paths of its own, which may change while the gateway runs."""

    def find(self, method: str, path: str) -> Route | None:
        """None where the path is not one of its own; what it has answered with a route stays so."""
        ...


class Router:
    """Filled while the gateway is built; the server only asks it."""

    def __init__(self) -> None:
        self._exact: dict[tuple[str, str], HandlerRoute] = {}
        self._patterns: list[tuple[str, _Pattern, Handler, Access]] = []
        self._sockets: list[tuple[_Pattern, WebSocketHandler, Access]] = []
        self._mounts: tuple[Mount, ...] = ()
        self._relayed: tuple[str, ...] = ()
        self._relay = RelayRoute(Access.INFERENCE)

    def add(
        self, method: str, pattern: str, handler: Handler, *, access: Access = Access.INFERENCE
    ) -> None:
        """`pattern` is a path of which a whole part may be `{name}`; `GET` also answers `HEAD`."""
        parts = _Pattern(pattern)
        if not parts.named:
            key = (method, pattern)
            if key in self._exact:
                raise ConfigurationError(f"the route {method} {pattern} was added twice")
            self._exact[key] = HandlerRoute(handler, access, {})
        else:
            self._patterns.append((method, parts, handler, access))

    def websocket(
        self, pattern: str, handler: WebSocketHandler, *, access: Access = Access.INFERENCE
    ) -> None:
        """`handler` gets the request and an accepted connection, which is closed when it returns."""
        self._sockets.append((_Pattern(pattern), handler, access))

    def relay(self, *prefixes: str) -> None:
        """Paths that begin so, and that no handler has, go to HTTP backends."""
        for prefix in prefixes:
            if not prefix.startswith("/"):
                raise ConfigurationError(f"relay prefix {prefix!r} must begin with '/'")
        self._relayed = (*self._relayed, *prefixes)

    def mount(self, mount: Mount) -> None:
        self._mounts = (*self._mounts, mount)

    def find(self, method: str, path: str, *, upgrade: bool = False) -> Route:
        """The route of `path`, whose percent signs are still as they were sent."""
        if upgrade:
            for parts, handler, access in self._sockets:
                params = parts.match(path)
                if params is not None:
                    return WebSocketRoute(handler, access, params)
        else:
            found = self._handler(method, path)
            if found is not None:
                return found
        if path.startswith(self._relayed):
            return self._relay
        return NoRoute(self._allowed(path))

    def _handler(self, method: str, path: str) -> Route | None:
        asked = "GET" if method == "HEAD" else method
        exact = self._exact.get((asked, path))
        if exact is not None:
            return exact
        for mount in self._mounts:
            route = mount.find(asked, path)
            if route is not None:
                return route
        for each, parts, handler, access in self._patterns:
            if each == asked:
                params = parts.match(path)
                if params is not None:
                    return HandlerRoute(handler, access, params)
        return None

    def _allowed(self, path: str) -> tuple[str, ...]:
        exact = {method for method, each in self._exact if each == path}
        matching = {each for each, parts, _, _ in self._patterns if parts.match(path) is not None}
        return tuple(sorted(exact | matching))


class _Pattern:
    """A path in parts, some of which are named and match anything but nothing."""

    def __init__(self, pattern: str) -> None:
        if not pattern.startswith("/"):
            raise ConfigurationError(f"route {pattern!r} must begin with '/'")
        self._parts = pattern.split("/")
        self.named = any(_is_named(part) for part in self._parts)

    def match(self, path: str) -> Mapping[str, str] | None:
        given = path.split("/")
        if len(given) != len(self._parts):
            return None
        params = {}
        for part, value in zip(self._parts, given, strict=True):
            if _is_named(part):
                if not value:
                    return None
                params[part[1:-1]] = unquote(value)
            elif part != value:
                return None
        return params


def _is_named(part: str) -> bool:
    return part.startswith("{") and part.endswith("}")
