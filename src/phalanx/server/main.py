"""Runs a model server in this process until a signal ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from phalanx.engine.engine import Engine
from phalanx.errors import MissingDependencyError
from phalanx.plugin import ServingAdapter, VideoAdapter
from phalanx.schema.server_config import ServerConfig

try:
    import uvloop

    from phalanx.server.model_server import ModelServer
    from phalanx.server.signals import stopped_by_signals
except ImportError as error:
    raise MissingDependencyError(
        f"the model server needs {error.name}; install it with `pip install phalanx[serve]`"
    ) from error


def run_server(
    engine_factory: Callable[[], Engine],
    serving: ServingAdapter | None,
    config: ServerConfig,
    *,
    videos: VideoAdapter | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain, close the engine and return the exit status.

    The port answers at once (`/health` is 503) while `engine_factory` loads. `on_ready` gets the
    base URL when requests are served (default: one line on stdout). A second signal does not wait
    for running requests. What `engine_factory` raises is raised here, after the port is closed.
    """
    server = partial(ModelServer, engine_factory, serving, config, videos=videos)
    return uvloop.run(_serve(server, on_ready or _announce))


async def _serve(make_server: Callable[[], ModelServer], on_ready: Callable[[str], None]) -> int:
    server = make_server()
    with stopped_by_signals(server.stop):
        await server.run(on_ready=on_ready)
    return 0


def _announce(url: str) -> None:
    sys.stdout.write(f"Phalanx is ready on {url}\n")
    sys.stdout.flush()
