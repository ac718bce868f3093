"""A part of an otherwise eager forward that is captured on its own, with a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.step.declaration import SubmoduleStep
from phalanx.step.graphs.shapes import Shapes
from phalanx.step.lease import BucketKey

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class RegionConfig:
    """See the module. `compute` maps the region's inputs to its outputs, tensors by name.

    `static_inputs(rows, tokens)` are inputs of one shape, valid as they are. Outputs have one entry
    a row, those named in `token_outputs` one a token. `declare_step(request_ids, spans)` says what the
    region needs of the node's resources; without rows it is asked for the capture. The engine takes
    the lease and reserves capacity together with the step around the region; with
    `lease_before_step` that step is declared by `declare_around`, which is told of the lease.
    """

    label: str
    compute: Callable[[Tensors], Tensors]
    static_inputs: Callable[[int, int], Tensors]
    declare_step: Callable[[Sequence[str], Sequence[int]], SubmoduleStep | None]
    shapes: Shapes
    token_outputs: frozenset[str] = frozenset()
    lease_before_step: bool = False

    def buckets(self) -> tuple[BucketKey, ...]:
        """The shapes, largest first."""
        return tuple(
            BucketKey("", rows, tokens, packed=self.shapes.packed, region=self.label)
            for rows, tokens in self.shapes.sizes()
        )
