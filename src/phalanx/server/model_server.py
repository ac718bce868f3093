"""One model server: the port opens, the engine loads, requests are answered, a stop drains.

Everything here belongs to one event loop; only loading the engine and closing it use threads.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.clock import Clock, SystemClock
from phalanx.engine.engine import Engine
from phalanx.errors import ConfigurationError
from phalanx.plugin import ServingAdapter
from phalanx.schema.server_config import ServerConfig
from phalanx.server.app import ServerParts, create_app, create_starting_app
from phalanx.server.handover.base import Role
from phalanx.server.handover.opening import open_role
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.protocol import AbortableProtocol

logger = logging.getLogger(__name__)

BACKLOG = 2048
ABORTED_GRACE_S = 5.0
"""How long aborted requests may take to send their last words."""


class ModelServer:
    """Serves one engine, which `engine_factory` loads; `run` it once."""

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        serving: ServingAdapter | None,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._engine_factory = engine_factory
        self._serving = serving
        self._config = config
        self._clock = clock if clock is not None else SystemClock()
        self._lifecycle = Lifecycle()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._app: ASGIApp = create_starting_app(config, self._lifecycle, self._clock)

    def stop(self) -> None:
        """Drain and end; a second call does not wait for running requests."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(
        self,
        *,
        on_bound: Callable[[str], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Serve until `stop`. The callbacks get the base URL: when the port answers, and when
        requests are served. Raises what `engine_factory` raised."""
        listener = _bind(self._config)
        url = _url(self._config.host, listener)
        server = _Server(
            uvicorn.Config(
                self._dispatch,
                interface="asgi3",
                proxy_headers=False,
                http=AbortableProtocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
            )
        )
        serving = asyncio.create_task(server.serve([listener]))
        try:
            if on_bound is not None:
                on_bound(url)
            role = await open_role(self._config)
            try:
                logger.info("listening on %s, loading", url)
                await self._load_and_serve(url, on_ready, role)
            finally:
                await role.aclose()
        finally:
            server.should_exit = True
            await serving

    async def _load_and_serve(
        self, url: str, on_ready: Callable[[str], None] | None, role: Role
    ) -> None:
        loading = _in_thread(self._engine_factory)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            loaded = asyncio.wrap_future(loading)
            await asyncio.wait((loaded, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                loaded.cancel()
                self._lifecycle.move(Phase.DRAINING)
                logger.info("stopped while loading")
                return
            engine = loaded.result()
            try:
                await self._serve(engine, role, url, on_ready, stopped)
            finally:
                await asyncio.to_thread(engine.close)
        finally:
            stopped.cancel()

    async def _serve(
        self,
        engine: Engine,
        role: Role,
        url: str,
        on_ready: Callable[[str], None] | None,
        stopped: asyncio.Task[bool],
    ) -> None:
        live = LiveRequests(engine.cancel)
        parts = ServerParts(self._lifecycle, live, self._clock, role)
        self._app = create_app(engine, self._serving, self._config, parts)
        self._lifecycle.move(Phase.READY)
        logger.info("serving on %s", url)
        if on_ready is not None:
            on_ready(url)
        await stopped
        await self._drain(live)

    async def _drain(self, live: LiveRequests) -> None:
        """Take nothing new, let what runs finish, and abort what takes too long."""
        lifecycle, timeout_s = self._lifecycle, self._config.drain_timeout_s
        lifecycle.move(Phase.DRAINING)
        logger.info("draining %d requests, for at most %.1f s", lifecycle.num_in_flight, timeout_s)
        idle = asyncio.create_task(lifecycle.idle(timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        idle.cancel()
        if lifecycle.num_in_flight:
            logger.warning("aborting %d requests that did not end in time", live.abort(""))
            await lifecycle.idle(ABORTED_GRACE_S)
        logger.info("drained")

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on host={config.host!r} port={config.port}: {error.strerror or error}; "
            "choose another port, or 0 for a free one"
        ) from error
    listener.setblocking(False)
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port: int = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _in_thread(load: Callable[[], Engine]) -> Future[Engine]:
    """Load in a thread that does not keep the process from ending.

    An engine that nobody takes any more is closed.
    """
    loading: Future[Engine] = Future()

    def run() -> None:
        try:
            engine = load()
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            if loading.set_running_or_notify_cancel():
                loading.set_exception(error)
            return
        if loading.set_running_or_notify_cancel():
            loading.set_result(engine)
        else:
            engine.close()

    threading.Thread(target=run, name="phalanx-load", daemon=True).start()
    return loading
