"""Public fakes and conformance checks, for tests of this package and of third-party plugins."""

from __future__ import annotations

from phalanx.testing.batching_conformance import ConformanceError, check_batching_entry
from phalanx.testing.clock import ManualClock
from phalanx.testing.counting import (
    CountDelta,
    Counting,
    CountingArgs,
    CountingError,
    CountOutput,
    CountRequest,
    Fault,
)
from phalanx.testing.echo import Echo, EchoArgs, EchoOutput, EchoRequest

__all__ = [
    "ConformanceError",
    "CountDelta",
    "CountOutput",
    "CountRequest",
    "Counting",
    "CountingArgs",
    "CountingError",
    "Echo",
    "EchoArgs",
    "EchoOutput",
    "EchoRequest",
    "Fault",
    "ManualClock",
    "check_batching_entry",
]
