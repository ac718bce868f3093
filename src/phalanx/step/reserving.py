"""Declares the step of a unit and reserves what it needs; the same for a step in its turn and ahead."""

from __future__ import annotations

from collections.abc import Collection

from phalanx.device.base import DeviceBackend
from phalanx.errors import CaptureMismatchError, ConfigurationError
from phalanx.step.declaration import SubmoduleStep
from phalanx.step.graphs.node_graphs import NodeGraphs
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
        graphs: NodeGraphs,
    ) -> None:
        self._node = node
        self._submodule = submodule
        self._keys = keys
        self._runner = runner
        self._range = backend.range
        self._graphs = graphs

    def reserve(self, unit: StepUnit) -> StepOutcome:
        """Declare the unit's step and admit it, with its regions; a refusal leaves nothing reserved.

        Raises `CaptureMismatchError` where the step is not the one that the lease's shape computes.
        """
        with self._range("step.declare"):
            step = self._declared(unit)
        lease = unit.context.lease
        key = None if step is None else step.key
        if lease is not None and key != lease.bucket.key:
            raise CaptureMismatchError(
                f"node {self._node!r} answered capture_key with {lease.bucket.key!r} (bucket "
                f"{lease.bucket}) and declares a step with key {key!r}; both must come from the "
                "same rows"
            )
        outcome = StepOutcome() if step is None else self._admitted(unit, step)
        around = () if step is None else step.resources.keys()
        for region in unit.regions.values() if outcome.ok else ():
            outcome = region.admit(around)
            if not outcome.ok:
                self.unadmit(unit)
                break
        return outcome

    def _declared(self, unit: StepUnit) -> SubmoduleStep | None:
        """The step; regions take their leases first, unless the whole forward is captured."""
        context = unit.context
        if context.lease is None and self._graphs.has_regions:
            unit.regions = self._graphs.lease_regions(context.walk, unit.layout)
            leased = self._graphs.leased_before_step(unit.regions)
            return self._submodule.declare_around(context.walk, unit.rows, unit.inputs, leased)
        return self._submodule.declare_step(context.walk, unit.rows, unit.inputs)

    def _admitted(self, unit: StepUnit, step: SubmoduleStep) -> StepOutcome:
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
        for region in unit.regions.values():
            region.unadmit()
        if unit.step is not None:
            self._runner.unadmit(unit.step, unit.context)
