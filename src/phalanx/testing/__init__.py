"""Public fakes and conformance checks, for tests of this package and of third-party plugins."""

from __future__ import annotations

from phalanx.testing.batching_conformance import check_batching_entry
from phalanx.testing.clock import ManualClock
from phalanx.testing.conformance import ConformanceError
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
from phalanx.testing.model_parts import ModelParts
from phalanx.testing.resource_case import ResourceCase
from phalanx.testing.resource_conformance import check_resource
from phalanx.testing.submodule_conformance import SubmoduleCase, check_submodule

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
    "ModelParts",
    "ResourceCase",
    "SubmoduleCase",
    "check_batching_entry",
    "check_resource",
    "check_submodule",
]
