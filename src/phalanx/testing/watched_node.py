"""A node around another: it passes everything on, looks at what is answered, and fails where asked to."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.step.declaration import SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.region_config import RegionConfig
from phalanx.step.lease import SlotLease
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.base import Resource
from phalanx.step.submodule import EngineInputs, NodeSubmodule, StepRow
from phalanx.testing.conformance import require


class FaultStage(enum.Enum):
    """The hook after which a fault strikes, when it has done its work."""

    PREPARE = "prepare_inputs"
    DECLARE = "declare_step"
    PREPROCESS = "preprocess"
    FORWARD = "forward"
    POSTPROCESS = "postprocess"
    CHECK_STOP = "check_stop"


class StruckError(RuntimeError):
    """What a fault raises."""


@dataclass(frozen=True)
class NodeFault:
    """Strike in every step of this request behind its first `after` ones."""

    request_id: str
    stage: FaultStage
    after: int = 0


class WatchedNode(NodeSubmodule):
    """See the module. `batched=False` computes every row by a forward of its own. `num_forwards` and
    `num_shared` count forwards, and those of several rows.
    """

    def __init__(
        self, node: NodeSubmodule, *, batched: bool = True, fault: NodeFault | None = None
    ) -> None:
        super().__init__()
        self._node = node
        self._batched = batched
        self._fault = fault
        self._num_steps: dict[str, int] = {}
        self._rows: tuple[StepRow, ...] = ()
        self.num_forwards = 0
        self.num_shared = 0

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        self._node.bind_node_resources(resources)

    def prepare_inputs(self, walk: str, row: StepRow) -> Any:  # noqa: ANN401
        made = self._node.prepare_inputs(walk, row)
        self._num_steps[row.request_id] = self._num_steps.get(row.request_id, 0) + 1
        self._strike(FaultStage.PREPARE, (row,))
        return made

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        return self._node.thread_outputs(walk, rows, inputs, before)

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        return self._batched and self._node.can_batch(walk, rows, inputs)

    def max_batch_size(self, walk: str) -> int | None:
        return self._node.max_batch_size(walk)

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep | None:
        step = self._node.declare_step(walk, rows, inputs)
        if step is not None:
            named = {segment.request_id for segment in step.segments}
            _require_among(named, rows, "declare_step: a segment names")
        self._strike(FaultStage.DECLARE, rows)
        return step

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        made = self._node.preprocess(engine, inputs)
        self._rows = engine.rows
        self._strike(FaultStage.PREPROCESS, engine.rows)
        return made

    def forward_batched(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        return self._computed(self._node.forward_batched(prepared))

    def forward(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        return self._computed(self._node.forward(prepared))

    def capture_configs(self) -> Sequence[CaptureConfig]:
        return self._node.capture_configs()

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        return self._node.capture_key(walk, rows)

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep | None:
        return self._node.declare_capture(walk, key)

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        return self._node.static_inputs(walk, rows, tokens, key)

    def regions(self) -> Sequence[RegionConfig]:
        return self._node.regions()

    def declare_around(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        leased: Mapping[str, SlotLease],
    ) -> SubmoduleStep | None:
        return self._node.declare_around(walk, rows, inputs, leased)

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        self._node.postprocess(row, outputs)
        self._strike(FaultStage.POSTPROCESS, (row,))

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        stopped = self._node.check_stop(row, outputs)
        self._strike(FaultStage.CHECK_STOP, (row,))
        return stopped

    def cleanup_request(self, request_id: str) -> None:
        self._node.cleanup_request(request_id)
        self._num_steps.pop(request_id, None)

    def _computed(self, outputs: NodeOutputs) -> NodeOutputs:
        rows, self._rows = self._rows, ()
        if not rows:
            # A capture, whose columns name nobody.
            return outputs
        self.num_forwards += 1
        self.num_shared += len(rows) > 1
        self._strike(FaultStage.FORWARD, rows)
        if isinstance(outputs, NodeOutputs):
            for name, column in outputs.columns.items():
                _require_among(set(column.request_ids), rows, f"outputs: {name!r} is given to")
            _require_among(set(outputs.ragged), rows, "outputs: ragged tensors are given to")
        return outputs

    def _strike(self, stage: FaultStage, rows: Sequence[StepRow]) -> None:
        fault = self._fault
        if fault is None or fault.stage is not stage:
            return
        named = fault.request_id in {row.request_id for row in rows}
        if named and self._num_steps.get(fault.request_id, 0) > fault.after:
            raise StruckError(stage.value)


def watched(
    node: NodeSubmodule, *, batched: bool = True, fault: NodeFault | None = None
) -> WatchedNode:
    """A watched node with the class attributes of the one inside."""
    attributes = {
        "autocast_dtype": node.autocast_dtype,
        "compiles": node.compiles,
        "read_on_host": node.read_on_host,
        "speculates": node.speculates,
        "publishes": node.publishes,
    }
    cls: type[WatchedNode] = type(f"Watched{type(node).__name__}", (WatchedNode,), attributes)
    return cls(node, batched=batched, fault=fault)


def _require_among(named: set[str], rows: Sequence[StepRow], what: str) -> None:
    strangers = sorted(named - {row.request_id for row in rows})
    require(
        not strangers,
        f"{what} {strangers}, and the step has {[row.request_id for row in rows]}",
    )
