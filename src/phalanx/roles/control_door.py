"""The port of this machine alone at which a control process answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from phalanx.errors import ConfigurationError

HOST = "127.0.0.1"
_BACKLOG = 512


class ControlDoor:
    """Listens when built, so that its address is known; `open` answers, `close` ends that."""

    def __init__(self, port: int) -> None:
        """Port 0 takes a free one. Raises `ConfigurationError` where it cannot listen."""
        # Named as TCP, or asyncio leaves connections to wait 40 ms for the second part of an answer.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((HOST, port))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ConfigurationError(
                f"cannot listen on {HOST}:{port} for control: {error.strerror or error}; choose"
                " another control.port, or 0 for a free one"
            ) from None
        self._listener.setblocking(False)
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def open(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._listener]))

    def abandon(self) -> None:
        """Listen no longer, where it was never opened."""
        self._listener.close()

    async def close(self) -> None:
        """Take no more requests, and let those that run have a second. Any number of times."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.shield(self._serving)
        self._listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
