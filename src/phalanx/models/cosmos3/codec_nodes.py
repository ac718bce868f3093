"""The nodes between pixels and latents, at both ends of a request's way.

A request's video is computed alone: it fills a device, and steps of other requests run in between.
What breaks it on one rank ends the replica, whose other ranks would wait for that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from phalanx.models.cosmos3.conditioning import clean_latents
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.row import MediaRequest, RowInputs
from phalanx.models.cosmos3.text_node import MediaNode
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.step.outputs import NodeOutputs
from phalanx.step.submodule import EngineInputs


class VideoDecoder(Protocol):
    """`WanVae`, or a `TiledDecoder`, which all ranks of its group call together."""

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents [z, T, h, w] to pixels [3, F, height, width] in [-1, 1]."""
        ...


@dataclass(frozen=True, eq=False)
class _Alone:
    request_id: str
    state: MediaRequest


class _CodecNode(MediaNode):
    """One request a step."""

    def max_batch_size(self, walk: str) -> int:
        return 1

    def preprocess(self, engine: EngineInputs, inputs: Sequence[MediaRequest]) -> _Alone:
        return _Alone(engine.rows[0].request_id, inputs[0])


class EncodeNode(_CodecNode):
    """A request's `pixels`, as far as its clean frames depend on them, to `known`: their latents."""

    def __init__(self, vae: WanVae, lockstep: Lockstep) -> None:
        super().__init__()
        self._vae, self._lockstep = vae, lockstep

    def forward(self, prepared: _Alone) -> NodeOutputs:
        known = self._lockstep.run(partial(self._known, prepared.state.inputs))
        return NodeOutputs(ragged={prepared.request_id: {"known": known}})

    def _known(self, inputs: RowInputs) -> Tensor:
        assert inputs.pixels is not None
        _, height, width = inputs.shape.video
        return clean_latents(self._vae, inputs.pixels, inputs.shape.clean_frames, (height, width))


class DecodeNode(_CodecNode):
    """A request's final latents to `pixels` [3, F, height, width] in [0, 1].

    `decoder` None: other ranks decode, and one of them answers.
    """

    def __init__(self, decoder: VideoDecoder | None, lockstep: Lockstep) -> None:
        super().__init__()
        self._decoder, self._lockstep = decoder, lockstep

    def forward(self, prepared: _Alone) -> NodeOutputs:
        if self._decoder is None:
            return NodeOutputs()
        latents = prepared.state.latents.vision
        signed = self._lockstep.run(partial(self._decoder.decode, latents))
        return NodeOutputs(ragged={prepared.request_id: {"pixels": signed / 2 + 0.5}})
