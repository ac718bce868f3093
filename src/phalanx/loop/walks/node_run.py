"""One run of a node for one request: what it computes on and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phalanx.loop.walks.model import Values
from phalanx.loop.walks.stream_buffer import Chunk


@dataclass(frozen=True)
class WalkInputs:
    """A row's inputs at a node.

    `request` is the plugin's own. `tensors` holds every input by name, a stream's chunk among them;
    `chunks` says more of those. `start` is the number of tokens of this run that earlier steps have
    computed. `iterations` are those of the loops around the node, outermost first, from 0.
    """

    request: Any
    tensors: Mapping[str, Values]
    chunks: Mapping[str, Chunk[Tensor]] = field(default_factory=dict)
    iterations: Mapping[str, int] = field(default_factory=dict)
    start: int = 0

    def one(self, name: str) -> Tensor:
        """The tensor of an input that holds exactly one."""
        (tensor,) = self.tensors[name]
        return tensor


@dataclass
class NodeRun:
    """A node that is due in `partition`, bound to its inputs, with `span` tokens to compute."""

    partition: str
    walk: str
    node: str
    divisible: bool
    inputs: WalkInputs
    span: int
    done: int = 0
    outputs: dict[str, Tensor] = field(default_factory=dict)
