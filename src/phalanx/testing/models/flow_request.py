"""A request for the guided flow: a prompt, maybe one to be guided away from, and noise to refine."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import torch

from phalanx.loop.request import Work
from phalanx.step.outputs import HostRow
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.slot_state import SlotStateConfig
from phalanx.testing.models.parts import SmallRequest

FLOW_NODE = "flow"
NUM_LATENTS, LATENT_WIDTH = 4, 6


class FlowWalk(enum.Enum):
    """What a request goes through: a beginning that both branches share, each branch's own part of
    the prompt, and the steps that refine the latents.
    """

    PREFIX = "prefix"
    PROMPT = "prompt"
    DENOISE = "denoise"


class FlowRequest(SmallRequest):
    """See the module. With `negative` (which may be empty) the velocity is guided by `scale`; the
    output is the latents, as rows of numbers.
    """

    def __init__(
        self,
        prefix: Sequence[int],
        prompt: Sequence[int],
        num_steps: int,
        *,
        negative: Sequence[int] | None = None,
        scale: float = 2.0,
        seed: int = 0,
    ) -> None:
        self.prefix = tuple(prefix)
        self.prompt = tuple(prompt)
        self.negative = None if negative is None else tuple(negative)
        self.scale = scale
        self.num_steps = num_steps
        self.latents: Sequence[Sequence[float]] = ()
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn((NUM_LATENTS, LATENT_WIDTH), generator=generator)
        self._computed = 0
        self.denoised = 0

    @property
    def guided(self) -> bool:
        return self.negative is not None

    @property
    def num_branch_tokens(self) -> tuple[int, int]:
        """How long the two branches are when the latents come: guided to, and away from."""
        shared = len(self.prefix)
        return shared + len(self.prompt), shared + len(self.negative or ())

    def next_work(self) -> Work | None:
        shared, held = len(self.prefix), sum(self.num_branch_tokens)
        if self._computed < shared:
            left = shared - self._computed
            return Work(FLOW_NODE, FlowWalk.PREFIX.value, left, shared)
        if self._computed < shared + len(self.prompt):
            span = len(self.prompt)
            return Work(FLOW_NODE, FlowWalk.PROMPT.value, span, held, divisible=False)
        if self.denoised < self.num_steps:
            total = held + 2 * NUM_LATENTS
            return Work(FLOW_NODE, FlowWalk.DENOISE.value, NUM_LATENTS, total, divisible=False)
        return None

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {"latents": SlotStateConfig({"x": self._noise})}

    def tokens(self, span: int) -> tuple[int, ...]:
        """The next tokens of the branch that is guided to."""
        return (self.prefix + self.prompt)[self._computed : self._computed + span]

    def ends_prefix(self, span: int) -> bool:
        return self._computed + span == len(self.prefix)

    @property
    def ends_with_this_step(self) -> bool:
        """Whether one more refinement is the last."""
        return self.denoised + 1 == self.num_steps

    def advance(self, span: int) -> None:
        if self._computed < len(self.prefix) + len(self.prompt):
            self._computed += span
        else:
            self.denoised += 1

    def push_back(self) -> None:
        self._computed = self.denoised = 0

    def accept(self, outputs: HostRow) -> None:
        if "latents" in outputs:
            self.latents = outputs["latents"]

    def output(self, *, cancelled: bool) -> Sequence[Sequence[float]]:
        return self.latents
