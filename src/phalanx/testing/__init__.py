"""Public fakes and conformance checks, for tests of this package and of third-party plugins.

The checks of resources and nodes load torch, and the policies numpy, so their names are resolved on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from phalanx.testing.model_parts import ModelParts
    from phalanx.testing.policy import FakePolicy, FakePolicyArgs, FakePolicyEntry
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
    "FakePolicy",
    "FakePolicyArgs",
    "FakePolicyEntry",
    "Fault",
    "ManualClock",
    "ModelParts",
    "ResourceCase",
    "SubmoduleCase",
    "check_batching_entry",
    "check_resource",
    "check_submodule",
]

_HOMES = {
    "FakePolicy": "policy",
    "FakePolicyArgs": "policy",
    "FakePolicyEntry": "policy",
    "ModelParts": "model_parts",
    "ResourceCase": "resource_case",
    "SubmoduleCase": "submodule_conformance",
    "check_resource": "resource_conformance",
    "check_submodule": "submodule_conformance",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    return value
