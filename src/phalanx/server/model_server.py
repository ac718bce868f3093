"""One model server: the port opens, the engine loads, requests are answered, a stop drains.

Everything here belongs to one event loop; only loading the engine and closing it use threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from phalanx.clock import Clock, SystemClock
from phalanx.engine.engine import Engine
from phalanx.plugin import ServingAdapter, VideoAdapter
from phalanx.schema.server_config import HTTP_PORT, ServerConfig
from phalanx.server.app import ServerParts, create_app, create_starting_app
from phalanx.server.draining import drain
from phalanx.server.handover.base import Role
from phalanx.server.handover.opening import open_role
from phalanx.server.http_door import HttpDoor
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.live import LiveRequests
from phalanx.server.loading import loaded_engine
from phalanx.server.stop import Stop
from phalanx.server.tls import load_tls

logger = logging.getLogger(__name__)


class ModelServer:
    """Serves one engine, which `engine_factory` loads; `run` it once."""

    def __init__(
        self,
        engine_factory: Callable[[], Engine],
        serving: ServingAdapter | None,
        config: ServerConfig,
        *,
        videos: VideoAdapter | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._engine_factory = engine_factory
        self._serving = serving
        self._videos = videos
        self._config = config
        self._clock = clock if clock is not None else SystemClock()
        self._lifecycle = Lifecycle()
        self._stop = Stop()

    def stop(self) -> None:
        """Drain and end; a second call does not wait for running requests."""
        self._stop.ask()

    async def run(
        self,
        *,
        on_bound: Callable[[str], None] | None = None,
        on_ready: Callable[[str], None] | None = None,
    ) -> None:
        """Serve until `stop`. The callbacks get the base URL: when the port answers, and when
        requests are served. Raises what `engine_factory` raised."""
        config = self._config
        tls = load_tls(config)
        starting = create_starting_app(config, self._lifecycle, self._clock)
        port = HTTP_PORT if config.port is None else config.port
        async with HttpDoor(config.host, port, starting, tls=tls) as door:
            if on_bound is not None:
                on_bound(door.url)
            role = await open_role(config)
            try:
                logger.info("listening on %s, loading", door.url)
                await self._load_and_serve(door, on_ready, role)
            finally:
                await role.aclose()

    async def _load_and_serve(
        self, door: HttpDoor, on_ready: Callable[[str], None] | None, role: Role
    ) -> None:
        async with loaded_engine(self._engine_factory, self._stop, self._lifecycle) as engine:
            if engine is not None:
                await self._serve(engine, role, door, on_ready)

    async def _serve(
        self,
        engine: Engine,
        role: Role,
        door: HttpDoor,
        on_ready: Callable[[str], None] | None,
    ) -> None:
        live = LiveRequests(engine.cancel)
        parts = ServerParts(self._lifecycle, live, self._clock, role)
        app = create_app(engine, self._serving, self._config, parts, videos=self._videos)
        door.lead_to(app)
        self._lifecycle.move(Phase.READY)
        logger.info("serving on %s", door.url)
        if on_ready is not None:
            on_ready(door.url)
        await self._stop.asked.wait()
        await drain(self._lifecycle, live, self._config.drain_timeout_s, self._stop.hurried)
