"""One row of a request on its way through the nodes: it sees, reads, and denoises step by step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.layers.flow_matching import flow_advance, flow_time
from phalanx.layers.real_time_chunking import guidance_weight
from phalanx.loop.request import Work
from phalanx.models.pi.rollout import Draw, RowOutcome, RowRollout
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.slot_state import SlotStateConfig

VISION_NODE, PREFIX_NODE, EXPERT_NODE = "vision", "prefix", "expert"
LATENTS = "latents"
"""The slot state that holds the actions of a row while they are noisy, as its tensor `x`."""


class Walk(enum.Enum):
    """What a row goes through. It reads images and text; `SENSE` reads a state, where the expert has
    one of its own.
    """

    SEE = "see"
    READ = "read"
    SENSE = "sense"
    DENOISE = "denoise"


@dataclass(frozen=True, eq=False)
class OldChunk:
    """What a row's new actions are bound to: `actions` [chunk, size], float32.

    The first `num_frozen` are kept as they are; the others are drawn to the old ones by `weights`
    [chunk], at most `max_weight` strong.
    """

    actions: Tensor
    weights: Tensor
    max_weight: float
    num_frozen: int


@dataclass(frozen=True, eq=False)
class RowInputs:
    """A row's own part of a request; tensors where they are computed with.

    `images` [cameras, C, S, S], only those that are there; `token_ids` int64 without padding.
    `state` of a policy whose expert reads it.
    """

    images: Tensor
    token_ids: Tensor
    noise: Tensor
    num_steps: int
    state: Tensor | None = None
    old_chunk: OldChunk | None = None
    rollout: RowRollout | None = None

    @property
    def num_frozen(self) -> int:
        """Actions that are kept as they are."""
        return 0 if self.old_chunk is None else self.old_chunk.num_frozen


@dataclass(frozen=True)
class DenoiseTurn:
    """One Euler step of a row, whose actions stand at positions from `start` on."""

    start: int
    time: float
    advance: float
    guidance: float
    old_chunk: OldChunk | None
    ends: bool
    traced: bool
    draw: Draw | None = None


class PolicyRow:
    """A `RequestState`. With `traced`, it keeps what each step gives: `velocities`, in order."""

    def __init__(self, inputs: RowInputs, image_tokens: int, *, traced: bool = False) -> None:
        self.inputs = inputs
        self.features: Tensor | None = None
        """Tokens of its images, once they are seen."""
        self.actions: Tensor | None = None
        self.velocities: list[Tensor] = []
        self._chain: list[Tensor] = [inputs.noise]
        self._log_probs: list[Tensor] = []
        self._values: list[Tensor] = []
        self._traced = traced
        self._num_image_tokens = len(inputs.images) * image_tokens
        self.num_prefix = self._num_image_tokens + len(inputs.token_ids)
        self._chunk = len(inputs.noise)
        self._walks = self._route()
        self._at = 0

    @property
    def _num_behind(self) -> int:
        """Tokens before the actions."""
        return self.num_prefix + (self.inputs.state is not None)

    def _route(self) -> list[Walk]:
        """The walks of the whole row, in order."""
        seen = [Walk.SEE] if len(self.inputs.images) else []
        sensed = [] if self.inputs.state is None else [Walk.SENSE]
        return [*seen, Walk.READ, *sensed, *([Walk.DENOISE] * self.inputs.num_steps)]

    def next_work(self) -> Work | None:
        if self._at == len(self._walks):
            return None
        held = self._num_behind + self._chunk
        match self._walks[self._at]:
            case Walk.SEE:
                node, span = VISION_NODE, self._num_image_tokens
            case Walk.READ:
                node, span = PREFIX_NODE, self.num_prefix
            case Walk.SENSE:
                node, span = EXPERT_NODE, 1
            case Walk.DENOISE:
                node, span = EXPERT_NODE, self._chunk
        return Work(node, self._walks[self._at].value, span, held, divisible=False)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {LATENTS: SlotStateConfig({"x": self.inputs.noise})}

    def advance(self, span: int) -> None:
        if self._walks[self._at] is Walk.READ:
            self.features = None
        self._at += 1

    def adopt(self, num_tokens: int) -> None:
        raise AssertionError("a prefix that is read in both directions is not shared")

    def push_back(self) -> None:
        self._at = 0
        self.features = None
        self.velocities.clear()
        self._log_probs.clear()
        self._values.clear()
        del self._chain[1:]

    def take_delta(self) -> None:
        return None

    def output(self, *, cancelled: bool) -> Tensor | RowOutcome:
        """Actions [chunk, size], float32; not numbers where the row was cancelled."""
        if self.inputs.rollout is not None and self.actions is not None:
            values = torch.cat(self._values) if self._values else None
            return RowOutcome(torch.stack(self._chain), torch.stack(self._log_probs), values)
        if self.actions is None:
            return torch.full_like(self.inputs.noise, torch.nan)
        return self.actions

    def turn(self) -> DenoiseTurn:
        """The Euler step that is due."""
        num_steps = self.inputs.num_steps
        step = self._at - (len(self._walks) - num_steps)
        time, old = flow_time(step, num_steps), self.inputs.old_chunk
        return DenoiseTurn(
            start=self._num_behind,
            time=time,
            advance=flow_advance(num_steps),
            guidance=0.0 if old is None else guidance_weight(time, old.max_weight),
            old_chunk=old,
            ends=step == num_steps - 1,
            traced=self._traced,
            draw=self._draw(step),
        )

    @property
    def wants_values(self) -> bool:
        return self.inputs.rollout is not None and self.inputs.rollout.with_values

    def _draw(self, step: int) -> Draw | None:
        rollout = self.inputs.rollout
        if rollout is None:
            return None
        return Draw(rollout.noise[step], rollout.sigmas[step], rollout.with_values)

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep what a step has given, without looking at values."""
        if "features" in outputs:
            self.features = outputs["features"]
        if "velocity" in outputs:
            self.velocities.append(outputs["velocity"])
        if "drawn" in outputs:
            self._chain.append(outputs["drawn"])
            self._log_probs.append(outputs["log_probs"])
        if "value" in outputs:
            self._values.append(outputs["value"])
        if "actions" in outputs:
            self.actions = outputs["actions"]
