"""A request for the guided flow: a prompt, maybe one to be guided away from, and noise to refine."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.loop.outlook import Foreseeing, Outlook
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


@dataclass(frozen=True)
class FlowTurn:
    """What one step takes from a request.

    `tokens` are those of the branch that is guided to, `away` those of the other one, None where
    there is no other. `places` are the positions behind both branches' prompts. The rest is of
    steps that refine: `time` from 0 to 1, of which this one takes `advance`.
    """

    tokens: tuple[int, ...]
    away: tuple[int, ...] | None
    forks: bool
    places: tuple[int, int]
    scale: float
    time: float
    advance: float
    ends: bool


class FlowRequest(SmallRequest, Foreseeing):
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
        if negative and not prompt:
            raise ValueError("a negative prompt needs a prompt, with which it is computed")
        self._prefix = tuple(prefix)
        self._tokens = (*prefix, *prompt)
        self._negative = None if negative is None else tuple(negative)
        self._scale = scale
        self._num_steps = num_steps
        self._latents: Sequence[Sequence[float]] = ()
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn((NUM_LATENTS, LATENT_WIDTH), generator=generator)
        self._at = (0, 0)

    @property
    def guided(self) -> bool:
        return self._negative is not None

    @property
    def _places(self) -> tuple[int, int]:
        return len(self._tokens), len(self._prefix) + len(self._negative or ())

    def next_work(self) -> Work | None:
        return self._work(*self._at)

    def work_after(self, span: int) -> Work | Outlook:
        return self._work(*self._after(span)) or Outlook.ENDS

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return {"latents": SlotStateConfig({"x": self._noise})}

    def take(self, span: int, ahead: int) -> FlowTurn:
        """What a step of `span` tokens needs, behind one of `ahead` that is being computed."""
        computed, denoised = self._after(ahead) if ahead else self._at
        return FlowTurn(
            tokens=self._tokens[computed : computed + span],
            away=self._negative,
            forks=self.guided and computed + span == len(self._prefix),
            places=self._places,
            scale=self._scale,
            time=denoised / self._num_steps,
            advance=1 / self._num_steps,
            ends=denoised + 1 == self._num_steps,
        )

    def advance(self, span: int) -> None:
        self._at = self._after(span)

    def push_back(self) -> None:
        self._at = (0, 0)

    def accept(self, outputs: HostRow) -> None:
        if "latents" in outputs:
            self._latents = outputs["latents"]

    def output(self, *, cancelled: bool) -> Sequence[Sequence[float]]:
        return self._latents

    def _after(self, span: int) -> tuple[int, int]:
        """Tokens and refinements that are computed when a step of `span` tokens is."""
        computed, denoised = self._at
        refining = computed == len(self._tokens)
        return (computed, denoised + 1) if refining else (computed + span, denoised)

    def _work(self, computed: int, denoised: int) -> Work | None:
        shared, held = len(self._prefix), sum(self._places)
        if computed < shared:
            return Work(FLOW_NODE, FlowWalk.PREFIX.value, shared - computed, shared)
        if computed < len(self._tokens):
            left = len(self._tokens) - computed
            return Work(FLOW_NODE, FlowWalk.PROMPT.value, left, held, divisible=False)
        if denoised < self._num_steps:
            total = held + 2 * NUM_LATENTS
            return Work(FLOW_NODE, FlowWalk.DENOISE.value, NUM_LATENTS, total, divisible=False)
        return None
