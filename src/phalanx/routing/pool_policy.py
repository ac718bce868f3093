"""The times and thresholds by which a pool decides who is healthy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from phalanx.errors import ConfigurationError


@dataclass(frozen=True)
class PoolPolicy:
    """A healthy server is probed every `probe_interval_s`, one that is not every `down_interval_s`,
    and a probe may take `probe_timeout_s`. One success makes a server ready, `max_failures` in a row
    make it unhealthy.

    A server that registered itself holds a lease of `lease_s`, which it renews every `heartbeat_s`.
    `forget_s` after the lease has run out it is removed; until then callers are told to come back.
    """

    probe_interval_s: float = 5.0
    down_interval_s: float = 0.5
    probe_timeout_s: float = 2.0
    max_failures: int = 3
    lease_s: float = 15.0
    heartbeat_s: float = 5.0
    forget_s: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{field.name}={value} must be a finite number above 0")
        if self.max_failures != int(self.max_failures):
            raise ConfigurationError(f"max_failures={self.max_failures} must be a whole number")
        if self.heartbeat_s >= self.lease_s:
            raise ConfigurationError(
                f"heartbeat_s={self.heartbeat_s} must be less than lease_s={self.lease_s}"
            )
