"""Which event loop a gateway can speak TLS on."""

from __future__ import annotations

import asyncio

import uvloop

from phalanx.errors import ConfigurationError


def check_event_loop() -> None:
    """Refuse TLS on the event loop that would lose answers by it. Raises `ConfigurationError`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, uvloop.Loop):
        # Asyncio's own breaks a TLS connection off, and drops what it has not sent yet, where its
        # client sends anything while it is being closed.
        raise ConfigurationError(
            f"a gateway with --tls-cert needs uvloop's event loop, and runs on {type(loop).__name__},"
            " which loses the last answers of a stop; run it with uvloop.run, or leave TLS out"
        )
