"""What a model author implements for one node: how a batch of rows becomes one forward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import SubmoduleStep
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.region_config import RegionConfig
from phalanx.step.graphs.regions import RegionRun
from phalanx.step.lease import SlotLease
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.resources.base import Resource


@dataclass
class RequestInfo:
    """What the engine knows of a live request.

    `state` is the plugin's own object. `published` is what resources said of the request after its
    newest step, by resource key.
    """

    request_id: str
    state: Any
    published: dict[str, object] = field(default_factory=dict)


class StepRow:
    """One request in a step, which advances it by `span` tokens.

    `ahead` is above 0 where the step is prepared while another of the request is computed: the
    tokens by which that one advances the request, of which its state knows nothing yet.
    """

    __slots__ = ("ahead", "info", "request_id", "span")

    def __init__(self, info: RequestInfo, span: int, ahead: int = 0) -> None:
        self.info = info
        self.span = span
        self.ahead = ahead
        self.request_id = info.request_id


@dataclass(frozen=True)
class EngineInputs:
    """What the engine hands to `preprocess` beside the rows' own inputs."""

    walk: str
    rows: tuple[StepRow, ...]
    step: SubmoduleStep | None
    plans: Mapping[str, Any]
    """Each resource's plan of this step, by key."""
    lease: SlotLease | None = None
    """The captured shape that the step replays; None where the forward is called."""
    regions: Mapping[str, RegionRun] = field(default_factory=dict)
    """The captured parts that the forward may run in this step, by label."""


class NodeSubmodule(nn.Module):
    """One compute node, shared by all walks that name it.

    For each step the engine calls, in this order: `prepare_inputs` a row, `can_batch`,
    `thread_outputs` where rows were prepared ahead, `declare_step`, `preprocess`, `forward_batched` (or `forward` for a single row that cannot be
    batched), `postprocess` a row, `check_stop` a row.

    A step that fits a capture replays it: `preprocess` then returns tensors by name, as
    `static_inputs` does, and the forward is not called. While captured, it is called with the
    static inputs; it may look at nothing else on the host, and its columns have one row a row of
    the bucket. A key that no capture has is computed eagerly.
    """

    autocast_dtype: torch.dtype | None = None
    """Run the forward under autocast to this dtype; None for not at all."""
    compiles: bool = False
    """Compile the eager forward once captures are made (never on a CPU)."""

    read_on_host: ClassVar[frozenset[str] | None] = None
    """The outputs whose values `check_stop` gets, None for all; others are not copied to the host."""

    speculates: ClassVar[bool] = False
    """Whether rows may be prepared ahead of the outcome of the step before them, see `StepRow`.

    All but `prepare_inputs` and `check_stop` must then leave the states of requests alone, which
    go on while the step is computed; `prepare_inputs` takes from them what the step needs.
    """

    publishes: ClassVar[bool] = True
    """Whether resources publish what became of the rows, for other engines to go on with."""

    def bind_node_resources(self, resources: Mapping[str, Resource]) -> None:
        """Keep the node's resources; called once, before any step."""

    def prepare_inputs(self, walk: str, row: StepRow) -> Any:  # noqa: ANN401
        """One row's host-side inputs; None leaves the row out of this step without an error.

        It then waits, with all it holds, and is asked again when the engine's `waker` is woken (by
        whatever the row waits for, on any thread) or another request has left. A row `ahead` only
        stays out of the step that is prepared ahead, and is asked again for the next.
        """
        return row

    def thread_outputs(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        before: Sequence[NodeOutputs],
    ) -> Sequence[Any]:
        """The inputs again, those of rows `ahead` completed by the outputs of the step before them.

        None for a row that it gave nothing. Outputs stay on the device: no value may be read.
        """
        return inputs

    def can_batch(self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]) -> bool:
        """Whether these rows can share one forward."""
        return False

    def max_batch_size(self, walk: str) -> int | None:
        """The most rows in one step; None for no limit."""
        return None

    def declare_step(
        self, walk: str, rows: Sequence[StepRow], inputs: Sequence[Any]
    ) -> SubmoduleStep | None:
        """What the step needs of the resources; None if it needs none. Host work only."""
        return None

    def preprocess(self, engine: EngineInputs, inputs: Sequence[Any]) -> Any:  # noqa: ANN401
        """Collate the rows' inputs into the argument of the forward."""
        return inputs[0]

    def forward_batched(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        """Compute all rows at once."""
        return self.forward(prepared)

    def forward(self, prepared: Any) -> NodeOutputs:  # noqa: ANN401
        """Compute a single row."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing")

    def capture_configs(self) -> Sequence[CaptureConfig]:
        """The shapes in which whole forwards are captured, where the device captures at all."""
        return ()

    def capture_key(self, walk: str, rows: Sequence[StepRow]) -> Hashable:
        """Which of a walk's captures computes these rows.

        By what never changes of the requests: it is also asked ahead of a step, and before
        `prepare_inputs`.
        """
        return None

    def declare_capture(self, walk: str, key: Hashable) -> SubmoduleStep | None:
        """The step of a capture: without rows, and with this `key`."""
        return self.declare_step(walk, (), ())

    def static_inputs(self, walk: str, rows: int, tokens: int, key: Hashable) -> dict[str, Tensor]:
        """Inputs of one captured shape, on the device and valid as they are: what a step does not
        fill keeps these values and is computed as padding.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has capture_configs and no static_inputs; define static_inputs"
        )

    def regions(self) -> Sequence[RegionConfig]:
        """Parts of the forward that are captured on their own.

        A forward runs a region by `EngineInputs.regions`, and computes the part itself where it is
        not there: rows fit no shape, or the whole forward is captured.
        """
        return ()

    def declare_around(
        self,
        walk: str,
        rows: Sequence[StepRow],
        inputs: Sequence[Any],
        leased: Mapping[str, SlotLease],
    ) -> SubmoduleStep | None:
        """`declare_step` where regions have taken leases before it, by label."""
        return self.declare_step(walk, rows, inputs)

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        """Adjust a row's metadata after the forward; must not read values."""

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        """Take the row's values and name the loops that end with them."""
        return frozenset()

    def cleanup_request(self, request_id: str) -> None:
        """Forget a request."""
