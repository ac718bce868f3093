"""A robot policy for Phalanx: moves joints towards a target, by a bounded step at a time."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from phalanx import Entry, EntryArgs, InvalidRequestError
from phalanx.schema.limits import Limits


@dataclass(frozen=True)
class ReachArgs(EntryArgs):
    """What `plugin_args` may hold: the share of the error that a step takes away, and its bound."""

    gain: float = 0.5
    max_step: float = 0.1


class ReachRequest(msgspec.Struct, frozen=True):
    """Joint angles as they are and as they should be, in radians."""

    position: list[float]
    target: list[float]


class ReachOutput(msgspec.Struct, frozen=True):
    """The change of each joint angle, and the largest error that was left before it."""

    action: list[float]
    error: float


class Reach(Entry):
    """One controller; a learned policy would load its weights in `setup`."""

    name = "reach"
    args_cls = ReachArgs
    request_cls = ReachRequest
    output_cls = ReachOutput

    @staticmethod
    def validate(request: ReachRequest, limits: Limits) -> None:
        if not request.position or len(request.position) != len(request.target):
            raise InvalidRequestError(
                f"target has {len(request.target)} joints and position {len(request.position)};"
                " give as many of both, at least one",
                field="target",
            )

    def setup(self, args: ReachArgs) -> None:
        self._args = args

    def step(self, request: ReachRequest) -> ReachOutput:
        error = torch.tensor(request.target) - torch.tensor(request.position)
        action = (self._args.gain * error).clamp(-self._args.max_step, self._args.max_step)
        return ReachOutput(action.tolist(), float(error.abs().max()))
