"""Runs a model server in this process until a signal ends it."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.engine.engine import Engine
from phalanx.plugin import ServingAdapter
from phalanx.schema.server_config import ServerConfig


def run_server(
    engine_factory: Callable[[], Engine],
    serving: ServingAdapter | None,
    config: ServerConfig,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, then drain, close the engine and return the exit status.

    The port answers at once (`/health` is 503) while `engine_factory` loads. `on_ready` gets the
    base URL when requests are served (default: one line on stdout). What `engine_factory` raises
    is raised here, after the port is closed.
    """
    raise NotImplementedError
