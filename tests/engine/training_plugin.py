"""A policy of one weight, in whose loop a test can stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from phalanx import EntryArgs
from phalanx.errors import InvalidRequestError
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import ControlOp, ReplaceWeights
from phalanx.schema.events import Event, Final


@dataclass(frozen=True)
class ScalingArgs(EntryArgs):
    """`breaks`: putting weights in fails."""

    breaks: bool = False


@dataclass(frozen=True)
class Scale:
    x: float


@dataclass(frozen=True)
class ScaleRollout(Scale):
    sigma: float = 0.0


@dataclass
class Scaling(BatchingEntry):
    """x -> x * scale; a rollout gives x * scale + sigma."""

    name: ClassVar[str] = "scaling"
    args_cls: ClassVar[type[EntryArgs]] = ScalingArgs
    request_cls: ClassVar[type] = Scale
    rollout_cls: ClassVar[type] = ScaleRollout
    output_cls: ClassVar[type] = float
    scale: Tensor = field(default_factory=lambda: torch.ones(1))
    waiting: list[tuple[str, Scale]] = field(default_factory=list)

    def setup(self, args: ScalingArgs) -> None:
        self.breaks = args.breaks

    @property
    def weights(self) -> Scaling:
        return self

    def check_weight(self, name: str, tensor: Tensor) -> None:
        if name != "scale" or tensor.shape != (1,):
            raise InvalidRequestError(
                f"weight {name!r} of shape {tuple(tensor.shape)}; the model has scale, of (1,)",
                field=name,
            )

    def start(self, rid: str, request: Scale) -> None:
        self.waiting.append((rid, request))

    def cancel(self, rid: str) -> None:
        pass

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def tick(self) -> Sequence[Event]:
        taken, self.waiting = self.waiting, []
        return [Final(rid, self._scaled(request)) for rid, request in taken]

    def control(self, op: ControlOp) -> bool:
        if not isinstance(op, ReplaceWeights):
            return super().control(op)
        if self.breaks:
            raise MemoryError("no room for the new weights")
        self.scale = op.tensors["scale"]
        return True

    def _scaled(self, request: Scale) -> float:
        sigma = request.sigma if isinstance(request, ScaleRollout) else 0.0
        return float(request.x * self.scale) + sigma
