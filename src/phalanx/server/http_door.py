"""A listening HTTP port, behind which the application can be exchanged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.errors import ConfigurationError
from phalanx.server.protocol import AbortableProtocol
from phalanx.server.tls import Tls

BACKLOG = 2048


class HttpDoor:
    """Listens when built, answers inside `async with`.

    WebSocket connections are taken where `websocket_bytes`, the largest message, is given. With
    `tls` the port speaks TLS alone.
    """

    def __init__(
        self,
        host: str,
        port: int,
        app: ASGIApp,
        *,
        key: str = "port",
        websocket_bytes: int | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Raises `ConfigurationError`, which calls the port `key`, where it cannot listen."""
        self._app = app
        self._listener = _bind(host, port, key)
        bound: int = self._listener.getsockname()[1]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://[{host}]:{bound}" if ":" in host else f"{scheme}://{host}:{bound}"
        self._server = _Server(
            uvicorn.Config(
                self._dispatch,
                interface="asgi3",
                proxy_headers=False,
                http=AbortableProtocol,
                ws="none" if websocket_bytes is None else "wsproto",
                ws_max_size=websocket_bytes or 0,
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
                ssl_certfile=None if tls is None else tls.cert_path,
                ssl_keyfile=None if tls is None else tls.key_path,
            )
        )

    def lead_to(self, app: ASGIApp) -> None:
        """Let `app` answer from now on."""
        self._app = app

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        await self._serving

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int, key: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves connections to wait 40 ms for the second part of an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on host={host!r} {key}={port}: {error.strerror or error}; "
            "choose another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener
