"""What one client, or one backend, may make the gateway hold or wait for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from phalanx.errors import ConfigurationError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes and times of one HTTP server and its relay.

    `body_timeout_s` and `stall_timeout_s` are between two pieces: of a body that arrives, and of a
    response that the client takes. `response_timeout_s` is for a backend's first byte, and between
    two of its pieces. `upstream_idle_s` is how long an unused connection to a backend is kept; it
    is shorter than servers keep theirs, so that a request seldom meets one that is being closed.
    A connection that has rested for `upstream_fresh_s` is looked at before it is used again.
    """

    max_head_bytes: int = 64 * 1024
    max_fields: int = 128
    max_body_bytes: int = 100 * MIB
    max_pipelined: int = 16
    max_upstream_idle: int = 256
    head_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    connect_timeout_s: float = 2.0
    response_timeout_s: float = 600.0
    upstream_idle_s: float = 4.0
    upstream_fresh_s: float = 0.05
    linger_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigurationError(f"HttpLimits.{name}={value} must be above 0")


HELD_BYTES = 256 * 1024
"""What waits in memory for a slower side before the faster one is not read from."""
