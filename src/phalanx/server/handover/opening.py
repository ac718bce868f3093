"""The role that a configuration asks for."""

from __future__ import annotations

from phalanx.schema.server_config import ServerConfig
from phalanx.server.handover.base import Both, Role
from phalanx.server.handover.decode import Decode
from phalanx.server.handover.prefill import Prefill


async def open_role(config: ServerConfig) -> Role:
    """Of a server that ends it with `aclose`; raises `ConfigurationError` for a port in use."""
    if config.role == "prefill":
        return await Prefill.listening(config)
    if config.role == "decode":
        return Decode(config)
    return Both()
