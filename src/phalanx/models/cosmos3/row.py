"""A request on its way through the nodes: its texts are read, its latents denoised step by step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from phalanx.layers.unipc import FlowSchedule, UniPCSolver, UniPCState
from phalanx.loop.request import Work
from phalanx.models.cosmos3.geometry import MediaShape
from phalanx.models.cosmos3.guidance import AWAY, TOWARDS, Guidance
from phalanx.models.cosmos3.media import MediaRow
from phalanx.models.cosmos3.request import DenoiseProgress
from phalanx.step.resources.base import ResourceConfig
from phalanx.step.resources.kv_cache import KVRequestConfig

ENCODE_NODE, TEXT_NODE, DENOISE_NODE, DECODE_NODE = "encode", "text", "denoise", "decode"
KV = "kv"
VISION, SOUND, ACTIONS = "vision", "sound", "actions"


class Walk(enum.Enum):
    """What a request goes through. `ENCODE` only with pixels that it is given, `DECODE` only where
    pixels are asked for.
    """

    ENCODE = "encode"
    READ = "read"
    DENOISE = "denoise"
    DECODE = "decode"


_NODES = {
    Walk.ENCODE: ENCODE_NODE,
    Walk.READ: TEXT_NODE,
    Walk.DENOISE: DENOISE_NODE,
    Walk.DECODE: DECODE_NODE,
}


@dataclass(frozen=True, eq=False)
class RowInputs:
    """A request as it is to be computed on `device`; tensors float32, wherever they are: one that waits
    takes no memory there.

    `noise` is what every modality begins with, of the shape of its latents. `known` [channels, T',
    H, W] holds the clean frames of the video, `known_actions` [rows, action_dim] the clean rows;
    `pixels` [3, F, height, width] in [-1, 1] are encoded to `known`. Actions have `action_dim`
    numbers, of which those from `raw_action_dim` on are always 0. `negative` is None where nothing
    is guided.
    """

    prompt: tuple[int, ...]
    negative: tuple[int, ...] | None
    shape: MediaShape
    schedule: FlowSchedule
    guidance: Guidance
    noise: MediaRow
    raw_action_dim: int = 0
    known: Tensor | None = None
    known_actions: Tensor | None = None
    pixels: Tensor | None = None
    decodes: bool = False
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        assert (self.negative is not None) == self.guidance.guides

    @property
    def texts(self) -> Mapping[str, tuple[int, ...]]:
        """The tokens of each branch, by its label."""
        return {TOWARDS: self.prompt} | ({} if self.negative is None else {AWAY: self.negative})

    @property
    def longest_text(self) -> int:
        return max(map(len, self.texts.values()))


@dataclass(frozen=True, eq=False)
class DenoiseTurn:
    """One step of a row: its latents as `media`, and the states of its solvers by modality, of those
    that are drawn at all.
    """

    inputs: RowInputs
    at: int
    media: MediaRow
    states: Mapping[str, UniPCState]
    solver: UniPCSolver
    traced: bool

    @property
    def labels(self) -> tuple[str, ...]:
        """The branches that this step needs."""
        guides = self.inputs.guidance.guides_at(self.media.timestep)
        return (TOWARDS, AWAY) if guides else (TOWARDS,)

    def context(self, label: str) -> int:
        """Tokens of the text of a branch."""
        return len(self.inputs.texts[label])


@dataclass
class _Flow:
    """The latents while they are noisy, and what each solver remembers."""

    media: MediaRow
    states: dict[str, UniPCState] = field(default_factory=dict)


class MediaRequest:
    """A `RequestState`. `num_branches`: how many branches of a guided step one rank computes.

    With `traced` it keeps what each step gives, in order, by name.
    """

    def __init__(self, inputs: RowInputs, num_branches: int = 2, *, traced: bool = False) -> None:
        self.inputs = inputs
        self.pixels: Tensor | None = None
        """The decoded video [3, F, height, width] in [0, 1]."""
        self.trace: list[dict[str, Tensor]] = []
        self._traced = traced
        self._num_branches = num_branches
        self._solver = UniPCSolver(inputs.schedule)
        self._walks = self._route()
        self._at = 0
        self._known = inputs.known
        self._flow: _Flow | None = None
        self._progress: DenoiseProgress | None = None

    def _route(self) -> list[Walk]:
        """The walks of the whole row, in order."""
        inputs = self.inputs
        encoded = [] if inputs.pixels is None else [Walk.ENCODE]
        decoded = [Walk.DECODE] if inputs.decodes else []
        return [*encoded, Walk.READ, *[Walk.DENOISE] * inputs.schedule.num_steps, *decoded]

    @property
    def latents(self) -> MediaRow:
        """As they are now; noise before the first step."""
        return self.inputs.noise if self._flow is None else self._flow.media

    @property
    def _step(self) -> int:
        """How many steps are done."""
        return max(0, self._at - self._walks.index(Walk.DENOISE))

    def next_work(self) -> Work | None:
        if self._at == len(self._walks):
            return None
        walk, shape = self._walks[self._at], self.inputs.shape
        held = self.inputs.longest_text
        match walk:
            case Walk.READ:
                span = held
            case Walk.DENOISE:
                branches = self._num_branches if self.inputs.guidance.guides else 1
                span = branches * shape.num_tokens
            case _:
                span = shape.num_vision_tokens
        kept = walk is Walk.READ
        return Work(_NODES[walk], walk.value, span, held, divisible=False, kept=kept)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        texts = self.inputs.texts
        others = {label: ids for label, ids in texts.items() if label != TOWARDS}
        return {KV: KVRequestConfig(texts[TOWARDS], labels=tuple(texts), others=others)}

    def advance(self, span: int) -> None:
        if self._walks[self._at] is Walk.DENOISE:
            schedule = self.inputs.schedule
            self._at += 1
            done = self._step
            timestep = int(schedule.timesteps[done - 1])
            self._progress = DenoiseProgress(done, schedule.num_steps, timestep)
        else:
            self._at += 1

    def adopt(self, num_tokens: int) -> None:
        """What was found is not computed; the step that reads is still due, and sees for itself."""

    def push_back(self) -> None:
        self._at = 0
        self._known = self.inputs.known
        self._flow = self._progress = self.pixels = None
        self.trace.clear()

    def take_delta(self) -> DenoiseProgress | None:
        progress, self._progress = self._progress, None
        return progress

    @property
    def is_denoised(self) -> bool:
        """Whether all steps are done."""
        return self._step >= self.inputs.schedule.num_steps

    def output(self, *, cancelled: bool) -> MediaRequest:
        """Itself: whoever asked makes the answer of it."""
        return self

    def turn(self) -> DenoiseTurn:
        """The step that is due."""
        flow = self._flowing()
        return DenoiseTurn(
            self.inputs, self._step, flow.media, flow.states, self._solver, self._traced
        )

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep what a step has given, without looking at values.

        `known` of the encoder, `pixels` of the decoder; of a step the new latents by modality, and
        what their solvers remember, `begun` and `data` of each.
        """
        if "known" in outputs:
            self._known = outputs["known"]
        if "pixels" in outputs:
            self.pixels = outputs["pixels"]
        stepped = [name for name in (VISION, SOUND, ACTIONS) if name in outputs]
        if stepped:
            flow = self._flowing()
            for name in stepped:
                old = flow.states[name]
                order = self._solver.order(self._step)
                data = outputs[f"{name}.data"]
                flow.states[name] = UniPCState(outputs[f"{name}.begun"], data, old.data, order)
            flow.media = self._with(flow.media, {name: outputs[name] for name in stepped})
        if self._traced and stepped:
            self.trace.append(dict(outputs))

    def _flowing(self) -> _Flow:
        """The flow, begun where it has not: from noise, and clean where something is known."""
        if self._flow is None:
            inputs = self.inputs
            noise, shape, device = inputs.noise, inputs.shape, inputs.device
            media = replace(
                noise,
                timestep=int(inputs.schedule.timesteps[0]),
                vision=_mixed(noise.vision.to(device), self._known, shape.clean_frames, 1),
                sound=None if noise.sound is None else noise.sound.to(device),
            )
            if noise.actions is not None:
                actions = _mixed(
                    noise.actions.to(device), inputs.known_actions, shape.clean_rows, 0
                )
                actions[:, inputs.raw_action_dim :] = 0
                media = replace(media, actions=actions)
            self._flow = _Flow(media, {name: UniPCState() for name in _drawn(shape)})
        return self._flow

    def _with(self, media: MediaRow, latents: Mapping[str, Tensor]) -> MediaRow:
        """The latents behind the step that is being accounted for."""
        timesteps = self.inputs.schedule.timesteps
        following = min(self._step + 1, len(timesteps) - 1)
        return MediaRow(
            media.shape,
            int(timesteps[following]),
            latents.get(VISION, media.vision),
            latents.get(SOUND, media.sound),
            latents.get(ACTIONS, media.actions),
            media.domain,
        )


def _drawn(shape: MediaShape) -> list[str]:
    """The modalities of which anything is drawn."""
    names = [VISION] if shape.noisy_frames else []
    names += [SOUND] if shape.sound_frames else []
    return names + ([ACTIONS] if shape.noisy_rows else [])


def _mixed(noise: Tensor, known: Tensor | None, clean: frozenset[int], dim: int) -> Tensor:
    """A copy of `noise` with the items `clean` along `dim` as they are in `known`."""
    mixed = noise.clone()
    for at in sorted(clean):
        assert known is not None, "what is clean must be known"
        mixed.select(dim, at).copy_(known.select(dim, at))
    return mixed
