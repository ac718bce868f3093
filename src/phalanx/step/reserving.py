"""Declares the step of a unit and reserves what it needs; the same for a step in its turn and ahead."""

from __future__ import annotations

from collections.abc import Collection

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.outcomes import StepOutcome
from phalanx.step.runner import StepRunner
from phalanx.step.submodule import NodeSubmodule
from phalanx.step.unit import StepUnit


class Reserving:
    """Of one node, which may name the resources `keys`."""

    def __init__(
        self,
        node: str,
        submodule: NodeSubmodule,
        keys: Collection[str],
        runner: StepRunner,
        backend: DeviceBackend,
    ) -> None:
        self._node = node
        self._submodule = submodule
        self._keys = keys
        self._runner = runner
        self._range = backend.range

    def reserve(self, unit: StepUnit) -> StepOutcome:
        """Declare the unit's step and admit it; a refusal leaves nothing reserved."""
        with self._range("step.declare"):
            step = self._submodule.declare_step(unit.context.walk, unit.rows, unit.inputs)
        if step is None:
            return StepOutcome()
        unknown = step.resources.keys() - self._keys
        if unknown:
            raise ConfigurationError(
                f"node {self._node!r} declares a step on resources {sorted(unknown)}; "
                f"it has {sorted(self._keys)}"
            )
        unit.step = step
        with self._range("step.admit"):
            return self._runner.admit(step, unit.context)

    def unadmit(self, unit: StepUnit) -> None:
        """Give back what was reserved, if anything was."""
        if unit.step is not None:
            self._runner.unadmit(unit.step, unit.context)
