"""A node that computes for requests in walks: it takes what edges bring, and gives what they carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.loop.walks.node_run import WalkInputs
from phalanx.loop.walks.request import WalkRequest
from phalanx.step.outputs import HostRow, NodeOutputs
from phalanx.step.submodule import NodeSubmodule, StepRow

_NONE: frozenset[str] = frozenset()


class WalkNode(NodeSubmodule):
    """As `NodeSubmodule`; `prepare_inputs` gives a row's `WalkInputs`, which reach `declare_step`,
    `preprocess` and the rest as its inputs.

    The forward gives one output for each edge of the node, by the edge's name: a column with a row
    for every row of the step, or a ragged tensor. Only an output for a client, for a stream or to be
    kept may be missing.
    """

    read_on_host = frozenset()
    """The outputs that `ended_loops` looks at; no other is copied to the host."""

    def prepare_inputs(self, walk: str, row: StepRow) -> WalkInputs | None:
        return walk_request(row).inputs()

    def postprocess(self, row: StepRow, outputs: Sequence[NodeOutputs]) -> None:
        walk_request(row).take(row.request_id, outputs)

    def check_stop(self, row: StepRow, outputs: HostRow) -> frozenset[str]:
        request = walk_request(row)
        inputs = request.completed()
        stopped = _NONE if inputs is None else self.ended_loops(inputs, outputs)
        request.finish(stopped)
        return stopped

    def ended_loops(self, inputs: WalkInputs, outputs: HostRow) -> frozenset[str]:
        """The names of the loops around the node that end with the present iteration, given the
        values of `read_on_host`.
        """
        return _NONE


def walk_request(row: StepRow) -> WalkRequest:
    """The request of a row; of one that goes through walks."""
    state: Any = row.info.state
    assert isinstance(state, WalkRequest), f"{row.request_id} does not go through walks"
    return state
