"""Runs a policy server in this process until a signal ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.engine.engine import Engine
from phalanx.errors import MissingDependencyError
from phalanx.plugin import PolicyAdapter
from phalanx.schema.server_config import ServerConfig

try:
    import uvloop

    from phalanx.server.policy.server import PolicyServer
    from phalanx.server.policy.summary import ServedPolicy
    from phalanx.server.signals import stopped_by_signals
except ImportError as error:
    raise MissingDependencyError(
        f"the policy server needs {error.name}; install it with `pip install phalanx[serve]`"
    ) from error


GRPC_LOG = "grpc._cython.cygrpc"


def run_policy_server(
    engine_factory: Callable[[], Engine],
    adapter: PolicyAdapter,
    config: ServerConfig,
    *,
    on_ready: Callable[[ServedPolicy], None],
) -> int:
    """Serve until SIGINT or SIGTERM, then drain, close the engine and return the exit status.

    The ports answer at once (health is false) while `engine_factory` loads. A second signal does
    not wait for running requests. What `engine_factory` raises is raised here, after the ports are
    closed.
    """
    return uvloop.run(_serve(engine_factory, adapter, config, on_ready))


async def _serve(
    engine_factory: Callable[[], Engine],
    adapter: PolicyAdapter,
    config: ServerConfig,
    on_ready: Callable[[ServedPolicy], None],
) -> int:
    server = PolicyServer(engine_factory, adapter, config)
    with stopped_by_signals(server.stop), robots_may_leave():
        await server.run(on_ready=on_ready)
    return 0


@contextmanager
def robots_may_leave() -> Iterator[None]:
    """Keep gRPC from logging a traceback for an answer whose robot has left meanwhile."""
    log = logging.getLogger(GRPC_LOG)
    log.addFilter(_is_fault)
    try:
        yield
    finally:
        log.removeFilter(_is_fault)


def _is_fault(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("ExecuteBatchError raised in core")
