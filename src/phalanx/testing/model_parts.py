"""What an engine is loaded with: nodes by name and the resources that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.device.base import DeviceBackend
from phalanx.device.cpu import CpuBackend
from phalanx.step.engine import StepEngine
from phalanx.step.resources.base import ResourceSpec
from phalanx.step.submodule import NodeSubmodule


@dataclass(frozen=True)
class ModelParts:
    """See the module."""

    submodules: Mapping[str, NodeSubmodule]
    specs: Sequence[ResourceSpec]

    def engine(self, backend: DeviceBackend | None = None) -> StepEngine:
        """An engine of this model, on the CPU unless told otherwise."""
        made = StepEngine(backend or CpuBackend())
        made.load_model(self.submodules, self.specs)
        return made
